"""What is on its way to ingestion, and what never gets there."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from app.domain.telemetry.streams import Ack, OutgoingEvent, Sent, TopicPartition, Unsendable


@dataclass(kw_only=True)
class Journey:
    """What is on its way: batches sent, with where their last records lie, until ingestion has passed them.

    Sending again what ingestion has simply not reached yet would bury it in repetitions: the prototype sent every event twice.
    """

    batches: deque[tuple[datetime, Mapping[TopicPartition, int]]] = field(
        default_factory=deque[tuple[datetime, Mapping[TopicPartition, int]]]
    )
    """When a batch was marked as sent, and the offsets after its last records."""
    consumed: Mapping[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    moved_at: datetime | None = None

    def sent(self, now: datetime, acks: Sequence[Ack]) -> None:
        """A batch was acknowledged and marked at `now`."""
        ends: dict[TopicPartition, int] = {}
        for ack in acks:
            ends[ack.topic, ack.partition] = max(ack.offset + 1, ends.get((ack.topic, ack.partition), 0))
        if ends:
            self.batches.append((now, ends))

    def arrived(self, consumed: Mapping[TopicPartition, int], now: datetime) -> None:
        """Ingestion is at these offsets."""
        if consumed != self.consumed:
            self.consumed, self.moved_at = consumed, now
        while self.batches and all(self.consumed.get(place, 0) >= end for place, end in self.batches[0][1].items()):
            self.batches.popleft()

    def forget_lost(self, live_topics: frozenset[str]) -> None:
        """What lies in a topic that the broker lost will never be read."""
        self.batches = deque(batch for batch in self.batches if all(topic in live_topics for topic, _ in batch[1]))

    def is_under_way(self, row: OutgoingEvent, now: datetime, *, stalled_after: timedelta) -> bool:
        """Whether ingestion moves and has not passed the batch that this row was sent with."""
        if not self.batches or row.relayed_at is None or self.moved_at is None:
            return False
        return row.relayed_at >= self.batches[0][0] and now - self.moved_at < stalled_after


BARREN_SENDS = 3
"""So many sends in a row without one acknowledgement, and the rows are sent one by one, to find the one that spoils the rest."""
ALONE = 5
"""Rows that are then sent one by one: each may cost a delivery timeout."""
TRIES = 3
"""Failures beside the success of others, or alone at a broker that answers, after which a row is not sent any more."""


@dataclass(kw_only=True)
class Setbacks:
    """Failures per row: which rows the broker never takes although it answers."""

    failures: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    barren: int = 0

    @property
    def one_by_one(self) -> bool:
        """Whether sending together has failed so often that the rows must be tried by themselves."""
        return self.barren >= BARREN_SENDS

    @property
    def patience_s(self) -> float:
        """How long to wait before the next send, 0.3 s to 5 s while nothing is acknowledged."""
        return min(5.0, 0.3 * 2 ** min(self.barren - 1, 10)) if self.barren else 0.0

    def count(self, rows: Sequence[OutgoingEvent], outcomes: Sequence[Sent], *, alone: bool) -> dict[int, str]:
        """Take note of a send; returns which rows (by seq) will never be sent, with the reason."""
        moved = any(isinstance(outcome, Ack) for outcome in outcomes)
        self.barren = 0 if moved else self.barren + 1
        given_up: dict[int, str] = {}
        for row, outcome in zip(rows, outcomes, strict=True):
            place = (row.topic, row.seq)
            if isinstance(outcome, Unsendable):
                given_up[row.seq] = outcome.reason
            elif outcome is None and (moved or alone):
                self.failures[place] += 1
                if self.failures[place] >= TRIES:
                    given_up[row.seq] = f"the broker did not take it {TRIES} times, and answers otherwise"
            if outcome is not None or row.seq in given_up:
                self.failures.pop(place, None)
        return given_up
