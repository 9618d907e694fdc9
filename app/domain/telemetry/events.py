"""What travels on Kafka: CloudEvents 1.0 in binary mode around the wire types below.

Wire types are frozen msgspec structs: the Kafka value and what labelling reads are the same type. Whoever reads them passes over fields
that it does not know (a newer version wrote them), so a field may be added when it has a default and changes no meaning; what changes one
is a new version of the type. The door is strict: what a client sends and nobody knows is a mistake. `(source, id)` of the envelope is the
deduplication key, for as long as `[retention]` says.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from app.domain.telemetry.traceparent import HEADER, traceparent_in


class Topic(StrEnum):
    """The topics; the embedded broker appends a rotation epoch (`ratchet.events.7`)."""

    EVENTS = "ratchet.events"
    DEAD_LETTERS = "ratchet.events.dlq"
    LABELS = "ratchet.labels"
    RELEASES = "ratchet.releases"


class EventType(StrEnum):
    """Types of records on `ratchet.events`; a new major version is a new member, old ones stay readable."""

    TURN = "ratchet.turn.v1"
    OBSERVATION = "ratchet.observation.v1"
    RETRACTION = "ratchet.retraction.v1"
    EXPOSURE = "ratchet.exposure.v1"
    ERASURE = "ratchet.erasure.v1"


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One record: envelope attributes as Kafka headers, `data` as the JSON value, `key` as the Kafka key."""

    id: str
    source: str
    type: str
    """An `EventType`, kept as text because unknown ones must reach the dead-letter queue, not raise."""
    time: datetime
    key: str
    """`episode_id`, else `inference_id`: a decision and its outcomes share a partition."""
    data: bytes
    """Encoded JSON of the wire type; empty for a tombstone."""


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


RECEIVED = "ce_ratchetreceived"
"""The header that says when the inbox committed an event, in microseconds since the epoch."""


def envelope(event: CloudEvent, received_at: datetime) -> dict[str, str]:
    """The attributes of an event as headers."""
    age = received_at - EPOCH
    traceparent = traceparent_in(event.data) if event.type == EventType.TURN else None
    return {
        "ce_specversion": "1.0",
        "ce_id": event.id,
        "ce_source": event.source,
        "ce_type": event.type,
        "ce_time": event.time.isoformat(),
        RECEIVED: str((age.days * 86_400 + age.seconds) * 1_000_000 + age.microseconds),
        "content-type": "application/json",
        **({} if traceparent is None else {HEADER: traceparent}),
    }


def payload_hash(event: CloudEvent) -> bytes:
    """16 bytes that tell whether two events of one identity say the same: BLAKE2b over type and data."""
    return hashlib.blake2b(event.type.encode() + b"\x1f" + event.data, digest_size=16).digest()


IMPORTED = "import:"
"""Sources that begin so tell history: what happened long before it is received."""


def is_imported(source: str) -> bool:
    """Whether this source tells history."""
    return source.startswith(IMPORTED)


GATEWAY = "gateway"
"""The source of turns that somebody was served."""
ROLLOUT = "rollout:"
"""Sources that begin so are agents at practice in a sandbox, and the rest names their tasks: nobody was served."""


def is_rollout(source: str) -> bool:
    """Whether this source is practice: labelled, and evidence about no version."""
    return source.startswith(ROLLOUT)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a turn or an episode afterwards.

    Made by the HTTP dialects, eaten by ingestion and labelling. Exactly one of `inference_id` and `episode_id` is set.
    """

    id: str
    policy: str | None = None
    """Known when the key that sent it is bound to a policy; the join does not need it."""
    inference_id: str | None = None
    episode_id: str | None = None
    name: str
    """A built-in name (`ObservationName`) or one declared in the policy's configuration."""
    value: Any
    """JSON value; its shape per name is in `app.domain.telemetry.signals`."""
    occurred_at: datetime
    source: str
    """Who says so: `api`, `sdk:<name>`, `gateway`, `collector`, `import:<name>`; part of the deduplication key."""
    actor: str | None = None
    """Hashed pseudonym, see `app.domain.ids.hash_actor`."""
    tags: dict[str, str] = {}


class Retraction(msgspec.Struct, frozen=True, kw_only=True):
    """Takes an observation back (a cleared thumb). Early retractions are parked like early observations."""

    observation_id: str
    source: str
    occurred_at: datetime


@dataclass(frozen=True, kw_only=True)
class Heard:
    """An accepted observation and what became of it."""

    observation: Observation
    status: str
    """`accepted` (not applied yet), `joined`, `parked` (its turn is not known yet), `late` or `orphan`."""
    retracted: bool


RETRACTED = ":retracted"
"""Behind an observation's id: the id of the event that takes it back."""


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """Who is about to be served by which version with which probability; durable *before* the first token."""

    id: str
    policy: str
    inference_id: str
    episode_id: str
    actor: str
    """The unit: hashed actor, or the episode id where the request names nobody."""
    release_id: str | None
    """The release whose canary or holdback this assignment belongs to; none outside an experiment."""
    stage: str
    """`champion`; `canary-0.<day>` … `canary-2.<day>`; `holdback.<day>`, or `holdback-0.<day>` … for its reference while a canary runs;
    `canary-0-lasting.<day>` and `holdback-0-lasting.<day>` … of the lasting cohort; `holdout` of the long-term
    holdout."""
    arm: str
    """`champion`, `candidate`, `previous` (the holdback serves the previous champion) or `held` (by the long-term holdout)."""
    probability: float
    """Probability with which this unit got this arm in this stage, in (0, 1]; see `app.domain.release.assignment`."""
    share: float = 0.0
    """Candidate's share among units outside the holdback when this was drawn; 0 without a canary."""
    holdback: float = 0.0
    """Share of the holdback when this was drawn; 0 without one."""
    digest: str
    occurred_at: datetime


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """Forget everything about an actor; recorded as an event so that replays forget as well."""

    id: str
    actor: str
    requested_by: str
    occurred_at: datetime

    def as_event(self) -> CloudEvent:
        """As it travels."""
        return CloudEvent(
            id=self.id, source="ratchet", type=EventType.ERASURE, time=self.occurred_at, key=self.actor, data=msgspec.json.encode(self)
        )  # fmt: skip
