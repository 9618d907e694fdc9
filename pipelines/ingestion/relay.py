"""The one relay: inbox, then outbox, to Kafka, in order; and the reconciler, which brings what got lost on the way.

    take office (lease) ──▶ read unsent rows ──▶ send ──▶ wait for every ack ──▶ mark the acknowledged ones ──▶ …
                     every 3 s: rows sent and not applied ──▶ on their way? wait ──▶ else send again ──▶ after 3 rounds apply directly

A crash between ack and mark costs a second sending, never a loss; ingestion ignores what it applied already.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from app.domain.errors import LeaseLost, Unavailable
from app.domain.ids import utc_now, uuid7
from app.domain.ports import Clock
from app.domain.streams import (
    Ack,
    Delivery,
    EffectBatch,
    EffectStore,
    EventSink,
    OutgoingEvent,
    RelayOffice,
    RelayTerm,
    TopicPartition,
)
from pipelines.ingestion.config import RelayConfig
from pipelines.ingestion.decode import sort_out
from pipelines.ingestion.ingest import apply_isolating

log = logging.getLogger(__name__)

RENEW_EVERY_S = 1.0
RECONCILE_ROWS = 20_000


@dataclass(kw_only=True)
class Relay:
    """One candidate for the office; several may run, one acts."""

    office: RelayOffice
    sink: EventSink
    store: EffectStore
    config: RelayConfig
    clock: Clock = utc_now
    pause: Callable[[float], None] = time.sleep
    owner: str = field(default_factory=uuid7)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Take office whenever it is free and do its work until told to stop."""
        while not stopping():
            term = self.office.take(self.owner, now=self.clock())
            if term is None:
                self.pause(0.5)
                continue
            log.info("event=office_taken owner=%s", self.owner)
            try:
                with Heartbeat(term, self.clock) as heartbeat:
                    Term(relay=self, term=term).serve(stopping, heartbeat.check)
                term.leave(now=self.clock())
            except LeaseLost as error:
                log.warning("event=office_lost error=%s", error)
            finally:
                self.sink.close()


@dataclass(kw_only=True)
class Term:
    """What one relay remembers while it is in office."""

    relay: Relay
    term: RelayTerm
    reconciled_at: float = float("-inf")
    kept_house_at: float = float("-inf")
    journey: "Journey" = field(default_factory=lambda: Journey())

    def serve(self, stopping: Callable[[], bool], check_office: Callable[[], None]) -> None:
        """Send, reconcile and keep house until told to stop. Raises `LeaseLost`."""
        topics_checked = False
        while not stopping():
            check_office()
            try:
                if not topics_checked:  # before the first row waits, so that ingestion finds something to join
                    self.relay.sink.check_topics()
                    topics_checked = True
                sent = self.send_inbox() + self.send_outbox()
                self._when_due()
            except Unavailable as error:
                log.warning("event=broker_unavailable error=%s", error)
                self.relay.pause(0.3)
                continue
            if not sent:
                self.relay.pause(self.relay.config.idle_s)

    def send_inbox(self) -> int:
        """Send what waits in the inbox; returns how many were acknowledged."""
        rows = self.term.unsent_inbox(self.relay.config.batch)
        return self._send(rows, self.term.mark_inbox, remember=True)

    def send_outbox(self) -> int:
        """Send what waits in the outbox."""
        rows = self.term.unsent_outbox(self.relay.config.batch)
        return self._send(rows, self.term.mark_outbox, remember=False)

    def _send(self, rows: Sequence[OutgoingEvent], mark: Callable[..., None], *, remember: bool) -> int:
        if not rows:
            return 0
        acks = self.relay.sink.send(rows)
        sent = [row.seq for row, ack in zip(rows, acks, strict=True) if ack is not None]
        now = self.relay.clock()
        mark(sent, now=now)
        if remember:
            self.journey.sent(now, [ack for ack in acks if ack is not None])
        return len(sent)

    def reconcile(self) -> int:
        """Bring what was sent, is not applied and is not on its way any more; returns how many."""
        now = self.relay.clock()
        self.journey.arrived(self.term.consumed(), now)
        missing = self.term.confirm_applied(
            relayed_before=now - timedelta(seconds=self.relay.config.resend_after_s), limit=RECONCILE_ROWS, now=now
        )
        if missing:
            self.relay.sink.check_topics()
            self.journey.forget_lost(self.relay.sink.live_topics())
        patience = timedelta(seconds=self.relay.config.stalled_after_s)
        lost = [row for row in missing if not self.journey.is_under_way(row, now, stalled_after=patience)]
        again = [row for row in lost if row.rounds < self.relay.config.max_rounds]
        if again:
            log.warning("event=sent_again count=%d oldest=%s", len(again), again[0].received_at.isoformat())
            self.term.send_again([row.seq for row in again])
        self._apply_directly([row for row in lost if row.rounds >= self.relay.config.max_rounds])
        return len(lost)

    def _apply_directly(self, rows: Sequence[OutgoingEvent]) -> None:
        if not rows:
            return
        log.error("event=applied_from_inbox count=%d alarm=events did not reach ingestion through the broker", len(rows))
        events, dead = sort_out([_delivery(row) for row in rows])
        apply_isolating(self.relay.store, EffectBatch(events=tuple(events), dead=tuple(dead)), clock=self.relay.clock)
        self.term.applied_directly([row.seq for row in rows], now=self.relay.clock())

    def _when_due(self) -> None:
        now = time.monotonic()
        if now - self.reconciled_at > self.relay.config.reconcile_every_s:
            self.reconciled_at = now
            self.reconcile()
        if now - self.kept_house_at > self.relay.config.housekeeping_every_s:
            self.kept_house_at = now
            self.relay.sink.rotate(applied_before=self.term.applied_before(now=self.relay.clock()))
            self.term.trim(applied_before=self.relay.clock() - timedelta(seconds=self.relay.config.keep_payloads_s))


class Heartbeat:
    """Renews the lease from a thread of its own: a broker that lets us wait twelve seconds must not cost the office."""

    def __init__(self, term: RelayTerm, clock: Clock) -> None:
        self._term = term
        self._clock = clock
        self._stop = threading.Event()
        self._lost: LeaseLost | None = None
        self._thread = threading.Thread(target=self._beat, name="relay-lease", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raises `LeaseLost` once the office is lost."""
        if self._lost is not None:
            raise self._lost

    def _beat(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                self._term.renew(now=self._clock())
            except LeaseLost as error:
                self._lost = error
                return
            except Exception as error:  # noqa: BLE001 - a database that is busy now may renew in a second; the token decides
                log.warning("event=renewal_failed error=%r", error)


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


def _delivery(row: OutgoingEvent) -> Delivery:
    return Delivery(
        topic="inbox", partition=0, offset=row.seq, headers={}, value=row.event.data, event=row.event, received_at=row.received_at
    )
