"""What products said, as it lies in a `MemoryInbox`."""

from typing import Any

import msgspec

from app.domain.telemetry.events import EventType, Observation, Retraction
from tests.fakes.gateway import events_of
from tests.fakes.inbox import MemoryInbox


def observed(inbox: MemoryInbox) -> list[Observation]:
    """Observations that were not retracted, in order of arrival."""
    gone = {msgspec.json.decode(e.data, type=Retraction).observation_id for e in events_of(inbox, EventType.RETRACTION)}
    found = [msgspec.json.decode(e.data, type=Observation) for e in events_of(inbox, EventType.OBSERVATION)]
    return [observation for observation in found if observation.id not in gone]


def said(inbox: MemoryInbox) -> list[tuple[str | None, str, Any]]:
    """(inference id, name, value) of each."""
    return [(o.inference_id, o.name, o.value) for o in observed(inbox)]
