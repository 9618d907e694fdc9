"""Versions of the wire are a contract: what any released version wrote is read by this one, and what this one writes by the last."""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from app.domain.telemetry.decoding import sort_out, understand
from app.domain.telemetry.events import EventType
from app.domain.telemetry.streams import Delivery
from app.messaging.codec import decode
from tests.fakes.served import event_of, turn
from tests.recorded import FOLDER, samples

RECORDED = sorted(FOLDER.glob("*/*.json"))
OLDEST = "0.1.0"
"""Its consumers refuse fields that they do not know."""


def delivered(record: dict[str, Any]) -> Delivery:
    """The record as the consumer gets it from Kafka."""
    headers = [(name, text.encode()) for name, text in record["headers"].items()]
    value = json.dumps(record["value"]).encode()
    return decode(SimpleNamespace(topic="t", partition=0, offset=1, key=record["key"].encode(), value=value, headers=headers, timestamp=0))


def agrees(read: object, written: object) -> bool:
    """Whether everything that was written was read."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(name in read and agrees(read[name], value) for name, value in written.items())
    return read == written


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_what_a_released_version_wrote_is_read_whole(file: Path) -> None:
    record = json.loads(file.read_text())
    effect = understand(delivered(record)).effect
    assert agrees(json.loads(msgspec.json.encode(effect)), record["value"])


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_fields_of_a_version_to_come_are_passed_over_at_every_depth(file: Path) -> None:
    record = json.loads(file.read_text())
    known = understand(delivered(record)).effect

    def later(value: Any) -> Any:
        """The value with a field more in every object of ours; what the product says in its own words has none of ours."""
        if isinstance(value, list):
            return [later(member) for member in value]
        if not isinstance(value, dict):
            return value
        own = {"messages", "segment", "tags", "value"}
        return {name: member if name in own else later(member) for name, member in value.items()} | {"of_a_version_to_come": {"a": [1]}}

    events, dead = sort_out([delivered(record | {"value": later(record["value"])})])
    assert dead == []
    assert events[0].effect == known


def test_every_type_of_event_is_recorded_for_this_version() -> None:
    mine = FOLDER / version("ratchet")
    assert mine.is_dir(), f"{mine.name} is not recorded: run `python -m tests.recorded` before it is released"
    types = {json.loads(file.read_text())["headers"]["ce_type"] for file in mine.glob("*.json")}
    assert types == set(EventType)


@pytest.mark.parametrize("name", sorted(samples()))
def test_what_this_version_writes_has_no_field_that_strict_consumers_of_the_first_version_refuse(name: str) -> None:
    written = json.loads(samples()[name].data)
    recorded = json.loads((FOLDER / OLDEST / f"{name}.json").read_text())["value"]
    assert set(written) <= set(recorded)
    assert agrees(recorded, written), "what is left out means what it meant to the first version: no default of the wire ever changes"
    assert "payload" not in json.loads(event_of(turn("t")).data)
