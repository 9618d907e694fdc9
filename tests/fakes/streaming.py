"""Doubles of the streaming ports, each named for how it behaves."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from app.domain.errors import BadRequest, OwnFault, Unavailable
from app.domain.learning.batches import TurnPayload
from app.domain.telemetry.streams import Ack, Delivery, EffectBatch, OutgoingEvent, Sent, TopicPartition, Unsendable
from app.domain.telemetry.turns import PayloadClaim


class MemorySegments:
    """Segments in a dict; what was written last under a name counts."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, TurnPayload]] = {}

    def write(self, name: str, payloads: Sequence[TurnPayload]) -> str:
        """Keep a segment."""
        self.written[name] = {payload.inference_id: payload for payload in payloads}
        return name

    def write_sized(self, name: str, payloads: Sequence[TurnPayload]) -> int:
        """Keep a segment, a hundred bytes a turn."""
        return 100 * len(self.written[self.write(name, payloads)])

    def read(self, locations: Iterable[tuple[str, str]]) -> dict[str, TurnPayload]:
        """What is there."""
        return {id_: self.written[name][id_] for name, id_ in locations if id_ in self.written.get(name, {})}

    def copy(self, name: str, to: str, *, without: Collection[str]) -> int:
        """Under another name, without some."""
        kept = [payload for id_, payload in self.written.get(name, {}).items() if id_ not in without]
        return self.write_sized(to, kept) if kept else 0

    def turns(self, name: str) -> list[str]:
        """Whose words it holds."""
        return list(self.written.get(name, {}))

    def size(self, name: str) -> int:
        """A hundred bytes a turn."""
        return 100 * len(self.written.get(name, {}))

    def drop(self, name: str) -> None:
        """Forget a segment."""
        self.written.pop(name, None)


def acting(segments: Any, **acts: Any) -> Any:
    """Segments of which some acts are others: `acting(segments, drop=die)`."""
    return _Acting(segments, **acts)


class _Acting:
    def __init__(self, segments: Any, **acts: Any) -> None:
        self._segments, self._acts = segments, acts

    def __getattr__(self, name: str) -> Any:
        return self._acts[name] if name in self._acts else getattr(self._segments, name)


class MemoryClaims:
    """Claims in a dict; `full` makes it refuse."""

    def __init__(self) -> None:
        self.payloads: dict[str, TurnPayload] = {}
        self.full = False

    def deposit(self, payload: TurnPayload) -> PayloadClaim:
        """Keep it."""
        if self.full:
            raise Unavailable("the trajectory store does not take a payload: check its space")
        self.payloads[payload.inference_id] = payload
        return PayloadClaim(segment=f"claim-{payload.inference_id}", digest="d", bytes=1, has_logprobs=payload.logprobs is not None)


class ScriptedSource:
    """Hands out the given polls one after the other; remembers what was committed."""

    def __init__(self, *polls: Sequence[Delivery] | Exception) -> None:
        self.polls = list(polls)
        self.committed: list[Mapping[TopicPartition, int]] = []

    def poll(self, timeout_s: float) -> list[Delivery]:
        """The next script entry."""
        entry = self.polls.pop(0) if self.polls else []
        if isinstance(entry, Exception):
            raise entry
        return list(entry)

    def commit(self, next_offsets: Mapping[TopicPartition, int]) -> None:
        """Remember."""
        self.committed.append(next_offsets)

    def high_waters(self) -> Mapping[TopicPartition, int]:
        """Nothing is known."""
        return {}

    def incarnations(self) -> Mapping[str, str]:
        """There is one topic only."""
        return {}

    def close(self) -> None:
        """Nothing to hand over."""


class PickyStore:
    """Applies batches to a list, but refuses or breaks on every batch with one of the given event ids, and fails as often as told."""

    def __init__(self, *, refuses: Sequence[str] = (), breaks_on: Sequence[str] = (), failures: int = 0) -> None:
        self.breaks_on = set(breaks_on)
        self.own_fault = False
        self.on_failure: Callable[[], object] = lambda: None
        self.refuses = set(refuses)
        self.failures = failures
        self.batches: list[EffectBatch] = []

    @property
    def applied(self) -> list[str]:
        """Ids in the order in which they were applied."""
        return [event.id for batch in self.batches for event in batch.events]

    def apply(self, batch: EffectBatch, *, now: datetime) -> int:
        """Apply, refuse or fail."""
        if self.failures:
            self.failures -= 1
            self.on_failure()
            raise Unavailable("the database is busy: it is tried again")
        if self.own_fault:
            raise OwnFault("the database's schema is not the one of this version")
        if self.breaks_on & {event.id for event in batch.events}:
            raise OverflowError("date value out of range")
        if bad := self.refuses & {event.id for event in batch.events}:
            raise BadRequest(f"the database refuses a record: {sorted(bad)}")
        self.batches.append(batch)
        return len(batch.events)

    def expire_parked(self, *, now: datetime) -> int:
        """Nothing is parked."""
        return 0


class MemoryBroker:
    """A sink that acknowledges everything but what it is told to drop; `lose_everything` is an empty restart."""

    def __init__(self) -> None:
        self.sent: list[OutgoingEvent] = []
        self.dropping: set[str] = set()
        self.spoiling: set[str] = set()
        """Ids that make a send fail as a whole, as a record does at which a broker closes the connection."""
        self.largest = 1 << 40
        self.epoch = 1
        self.down = False
        self.rotations: list[datetime] = []

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """Acknowledge in one partition."""
        if self.down:
            raise Unavailable("the broker does not answer: is it running?")
        if self.spoiling & {event.event.id for event in events}:
            return [None for _ in events]
        acks: list[Sent] = []
        for event in events:
            if len(event.event.data) > self.largest:
                acks.append(Unsendable(reason=f"the broker does not take a record of {len(event.event.data)} bytes"))
                continue
            if event.event.id in self.dropping:
                acks.append(None)
                continue
            self.sent.append(event)
            acks.append(Ack(topic=f"ratchet.events.{self.epoch}", partition=0, offset=len(self.sent) - 1))
        return acks

    def lose_everything(self) -> None:
        """Restart empty; the next check notices."""
        self.sent, self.epoch = [], self.epoch + 1

    def check_topics(self) -> None:
        """All is well, or nobody answers."""
        if self.down:
            raise Unavailable("the broker does not answer: is it running?")

    def live_topics(self) -> frozenset[str]:
        """The current epoch's topic."""
        return frozenset({f"ratchet.events.{self.epoch}"})

    def rotate(self, *, applied_before: datetime) -> None:
        """Remember."""
        self.rotations.append(applied_before)

    def close(self) -> None:
        """Nothing to throw away."""
