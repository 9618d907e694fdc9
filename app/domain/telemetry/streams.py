"""What ingestion needs from the outside world: records, where they came from, and the ports of the streaming rooms.

inbox, outbox ──Relay──▶ EventSink ──▶ (Kafka) ──▶ EventSource ──ingest──▶ EffectStore ──▶ rows, segments, offsets
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

import msgspec

from app.domain.errors import BadConfig
from app.domain.learning.batches import TurnPayload
from app.domain.policies import PolicyConfig
from app.domain.telemetry.events import CloudEvent, Erasure, Exposure, Observation, Retraction
from app.domain.telemetry.turns import TurnServed

PARTITIONS = 6
"""Partitions of every topic of the embedded broker, and of a cluster's where `[kafka]` says nothing else."""

TopicPartition = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingEvent:
    """One row of the inbox or the outbox on its way to Kafka."""

    seq: int
    topic: str
    """Base name, see `app.domain.telemetry.events.Topic`; the embedded broker's epoch is added by the sink."""
    event: CloudEvent
    received_at: datetime
    """When the inbox committed it: lateness is judged by this, so that no fault on the way changes a label."""
    rounds: int = 0
    """How often it was sent again already."""
    relayed_at: datetime | None = None
    """When the broker acknowledged it; None where it did not yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """Where the broker put a record."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsendable:
    """The broker will never take this record, however often it is sent."""

    reason: str


Sent = Ack | Unsendable | None
"""What became of a record: it lies somewhere, it never will, or the broker did not say (then it is sent again)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One record as it came, before anybody decided whether its data makes sense."""

    topic: str
    partition: int
    offset: int
    headers: Mapping[str, str]
    value: bytes
    """As it came, for the dead-letter queue."""
    event: CloudEvent | None
    """None where the envelope is broken; then `problem` says how."""
    received_at: datetime
    problem: str | None = None


Effect = TurnServed | Observation | Retraction | Exposure | Erasure


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedEvent:
    """A record that makes sense: its identity and what it does."""

    source: str
    id: str
    payload_hash: bytes
    effect: Effect | None
    """None for a tombstone: remembered as seen, does nothing."""
    delivery: Delivery

    @property
    def received_at(self) -> datetime:
        """When the inbox committed it."""
        return self.delivery.received_at


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A record that does not: kept with the reason, never in the way of others."""

    topic: str
    partition: int
    offset: int
    headers: Mapping[str, str]
    payload: bytes
    reason: str


@dataclass(frozen=True, kw_only=True)
class StoredDeadLetter:
    """A dead letter with its history."""

    id: int
    letter: DeadLetter
    attempts: int
    first_seen_at: datetime
    last_seen_at: datetime
    replayed_at: datetime | None


class Position(NamedTuple):
    """How far a group is in a partition."""

    next_offset: int
    incarnation: str | None
    """Ids of the cluster and the topic that the offset counts in; None where they were not known."""


@dataclass(frozen=True, kw_only=True)
class EffectBatch:
    """Everything one transaction applies."""

    events: tuple[AppliedEvent, ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    next_offsets: Mapping[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    high_waters: Mapping[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    """Where the partitions end, as far as known; for the lag display."""
    incarnations: Mapping[str, str] = field(default_factory=dict[str, str])
    """Per topic, which one of that name the offsets count in."""
    group: str = "ratchet-ingest"
    replayed_dead_letters: tuple[int, ...] = ()
    """Ids of dead letters that these events came from, marked as replayed in the same transaction."""


@dataclass(frozen=True, kw_only=True)
class JoinRules:
    """When a turn is due and how late is too late, per policy."""

    policies: Mapping[str, PolicyConfig]
    label_wait_s: float = 1800.0
    """For turns of policies that are no longer declared."""
    lateness_s: float = 14_400.0

    def label_wait(self, policy: str | None) -> timedelta:
        """How long after its end a turn is labelled."""
        config = self.policies.get(policy) if policy is not None else None
        return timedelta(seconds=self.label_wait_s if config is None else config.label_wait_s)

    def lateness(self, policy: str | None) -> timedelta:
        """How long after the deadline an observation still corrects the label."""
        config = self.policies.get(policy) if policy is not None else None
        return timedelta(seconds=self.lateness_s if config is None else config.lateness_s)


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `[ingestion]` says about turns of policies that are no longer declared."""

    label_wait_s: float = JoinRules.label_wait_s
    lateness_s: float = JoinRules.lateness_s


def join_rules(policies: Mapping[str, PolicyConfig], toml: Mapping[str, Any]) -> JoinRules:
    """Of a deployment, by its configuration. Raises `BadConfig`."""
    try:
        others = msgspec.convert(toml.get("ingestion", {}), JoinConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"[ingestion] in the configuration: {error}") from error
    return JoinRules(policies=policies, label_wait_s=others.label_wait_s, lateness_s=others.lateness_s)


@dataclass(frozen=True, kw_only=True)
class ErasureReport:
    """What forgetting a person touched."""

    actor: str
    turns: int
    observations: int
    labels: int
    exposures: int
    inbox_payloads: int
    dead_letters: int
    segments: int
    trained_versions: tuple[str, ...]
    """Names (or digests) of versions whose batches held turns of this actor."""
    already_erased: bool
    """Whether an earlier request had done it; then the counts are what was left since."""


class SegmentFiles(Protocol):
    """Files with the words of turns. What is in a file never changes: to leave turns out, it is copied without them under a new name."""

    def write_sized(self, name: str, payloads: Sequence[TurnPayload]) -> int:
        """Write a segment durably; returns its size in bytes."""
        ...

    def copy(self, name: str, to: str, *, without: Collection[str]) -> int:
        """Write the turns of a segment, without these, durably into another; returns its size in bytes."""
        ...

    def turns(self, name: str) -> list[str]:
        """Ids of the turns whose words a segment holds; none where there is no such file."""
        ...

    def drop(self, name: str) -> None:
        """Remove a segment; one that is gone already is fine."""
        ...


class EventSink(Protocol):
    """The one producer."""

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """Send and wait; per event where it lies now, why it never will, or None where the broker did not acknowledge."""
        ...

    def check_topics(self) -> None:
        """Look whether the topics are still those the relay created; an empty restart opens a new epoch. Raises `Unavailable`."""
        ...

    def live_topics(self) -> frozenset[str]:
        """Names of the topics that the broker still holds; what was sent to any other is lost."""
        ...

    def rotate(self, *, applied_before: datetime) -> None:
        """Embedded only: open the next epoch of a topic that grew too big or too old, and delete closed epochs.

        Everything sent before `applied_before` is applied, so an epoch closed before then is no longer needed.
        """
        ...

    def close(self) -> None: ...


class EventSource(Protocol):
    """One member of the consumer group."""

    def poll(self, timeout_s: float) -> list[Delivery]:
        """What came, in order per partition; empty after the timeout. Raises `Unavailable` when the broker does not answer."""
        ...

    def commit(self, next_offsets: Mapping[TopicPartition, int]) -> None:
        """Tell the broker how far we are: a hint for onlookers, its failure is ignored."""
        ...

    def high_waters(self) -> Mapping[TopicPartition, int]:
        """Where the assigned partitions end, as far as known."""
        ...

    def incarnations(self) -> Mapping[str, str]:
        """Per topic, which one of that name was read: ids of cluster and topic. Empty where names alone say it."""
        ...

    def close(self) -> None: ...


class Positions(Protocol):
    """Where a group reads on, as the database knows it."""

    def read(self) -> Mapping[TopicPartition, Position]:
        """Every partition's. Raises `Unavailable`."""
        ...

    def forget(self, places: Collection[TopicPartition]) -> None:
        """These offsets count in topics that are no more: read from the beginning, and count the reset. Raises `Unavailable`."""
        ...


class EffectStore(Protocol):
    """Applies a batch: deduplication row, effect and offset in one transaction."""

    def apply(self, batch: EffectBatch, *, now: datetime) -> int:
        """Apply everything that was not applied before; returns how many events were new."""
        ...

    def expire_parked(self, *, now: datetime) -> int:
        """Ledger observations whose turn never came as orphans; returns how many."""
        ...


class RelayTerm(Protocol):
    """A leased term of office of the one relay; every write is checked against the fencing token (`LeaseLost`)."""

    def unsent_inbox(self, limit: int) -> list[OutgoingEvent]:
        """Inbox rows to send, in order."""
        ...

    def unsent_outbox(self, limit: int) -> list[OutgoingEvent]:
        """Outbox rows to send, in order."""
        ...

    def mark_inbox(self, seqs: Sequence[int], *, now: datetime) -> None:
        """These were acknowledged by the broker."""
        ...

    def mark_outbox(self, seqs: Sequence[int], *, now: datetime) -> None:
        """These were acknowledged by the broker."""
        ...

    def confirm_applied(self, *, relayed_before: datetime, limit: int, now: datetime) -> list[OutgoingEvent]:
        """Take what was applied off the list; returns what was relayed before that moment and is not applied."""
        ...

    def send_again(self, seqs: Sequence[int]) -> None:
        """Put these back among the unsent, one round older."""
        ...

    def applied_directly(self, seqs: Sequence[int], *, now: datetime) -> None:
        """These were applied from the inbox itself: count them as an alarm."""
        ...

    def applied_before(self, *, now: datetime) -> datetime:
        """Everything sent before this moment is applied."""
        ...

    def consumed(self) -> Mapping[TopicPartition, int]:
        """How far ingestion is: next offset per topic and partition."""
        ...

    def trim(self, *, applied_before: datetime) -> int:
        """Drop payloads of long-applied rows; their identities stay."""
        ...

    def renew(self, *, now: datetime) -> None:
        """Stay in office. Raises `LeaseLost`."""
        ...

    def leave(self, *, now: datetime) -> None:
        """Give the office back early."""
        ...


class RelayOffice(Protocol):
    """Where a relay takes office."""

    def take(self, owner: str, *, now: datetime) -> RelayTerm | None:
        """The office, or None while another relay holds it."""
        ...


class EpochBook(Protocol):
    """The embedded broker's topic epochs, kept in the database because the broker forgets them."""

    def current(self, topic: str) -> int | None:
        """The epoch being written; None before the first."""
        ...

    def open_next(self, topic: str, *, lost: bool, now: datetime) -> int:
        """Close the current epoch and open the next; `lost` says that the broker no longer has the old one."""
        ...

    def readable(self, topic: str) -> list[int]:
        """Epochs that the broker may still hold, oldest first; the last is the current one."""
        ...

    def closed(self, topic: str) -> list[tuple[int, datetime]]:
        """Epochs that are closed and not deleted yet, with when they were closed."""
        ...

    def deleted(self, topic: str, epoch: int, *, now: datetime) -> None:
        """The epoch's topic is gone from the broker."""
        ...
