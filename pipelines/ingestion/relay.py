"""The one relay: inbox, then outbox, to Kafka, in order; and the reconciler, which brings what got lost on the way.

    take office (lease) ──▶ read unsent rows ──▶ send ──▶ wait for every ack ──▶ mark the acknowledged ones ──▶ …
                                                   └─ never taken (too large, refused) ──▶ apply from the inbox, or bury with the reason
                     every 3 s: rows sent and not applied ──▶ on their way? wait ──▶ else send again ──▶ after 3 rounds apply directly

A crash between ack and mark costs a second sending, never a loss; ingestion ignores what it applied already.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from app.domain.errors import LeaseLost, Unavailable
from app.domain.ids import utc_now, uuid7
from app.domain.ports import Clock
from app.domain.telemetry.decoding import sort_out
from app.domain.telemetry.events import EventType, Topic, envelope
from app.domain.telemetry.streams import (
    Ack,
    DeadLetter,
    Delivery,
    EffectBatch,
    EffectStore,
    EventSink,
    OutgoingEvent,
    RelayOffice,
    RelayTerm,
    Sent,
)
from app.domain.telemetry.traceparent import traceparent_in
from app.telemetry.traces import NOWHERE, SpanKind, Traces
from pipelines.ingestion.config import RelayConfig
from pipelines.ingestion.isolate import Isolator
from pipelines.ingestion.journey import ALONE, Journey, Setbacks

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
    sweep: Callable[[datetime], int] = lambda now: 0
    """Drops what was deposited for events that never came; returns how much."""
    keep_payloads: timedelta | None = timedelta(days=7)
    """How long the inbox keeps the bodies of applied events (`inbox_days` of `[retention]`)."""
    sent: Callable[[int], None] = lambda count: None
    """Hears how many rows were sent, or applied without the broker."""
    traces: Traces = NOWHERE

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
    trimming: bool = False
    """Payloads are old still: the next ones go after the next sending, so that trimming keeps up with whatever arrives."""
    swept_at: float = field(default_factory=time.monotonic)
    journey: Journey = field(default_factory=Journey)
    setbacks: dict[str, Setbacks] = field(default_factory=lambda: {"inbox": Setbacks(), "outbox": Setbacks()})

    @cached_property
    def isolator(self) -> Isolator:
        """Applies what does not go through the broker."""
        return Isolator(store=self.relay.store, clock=self.relay.clock, pause=self.relay.pause)

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
                self.relay.sent(sent)
                self._when_due()
            except Unavailable as error:
                log.warning("event=broker_unavailable error=%s", error)
                self.relay.pause(0.3)
                continue
            if not sent and not self.trimming:
                self.relay.pause(max(self.relay.config.idle_s, *(setback.patience_s for setback in self.setbacks.values())))

    def send_inbox(self) -> int:
        """Send what waits in the inbox; returns how many were acknowledged."""
        rows = self.term.unsent_inbox(self.relay.config.batch)
        outcomes, never = self._send(rows, self.setbacks["inbox"])
        now = self.relay.clock()  # one reading for both: the journey knows a batch by the moment that its rows were marked with
        acked = self._mark(rows, outcomes, self.term.mark_inbox, now)
        if acked:
            self.journey.sent(now, [outcome for outcome in outcomes if isinstance(outcome, Ack)])
            self._tell(rows, outcomes)
        self._apply_directly([row for row in rows if row.seq in never], why=never)
        return acked + len(never)

    def _tell(self, rows: Sequence[OutgoingEvent], outcomes: Sequence[Sent]) -> None:
        """A span for each traced turn, from the inbox's commit until the broker had it."""
        if not self.relay.traces.on:
            return
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, Ack) and row.event.type == EventType.TURN and (parent := traceparent_in(row.event.data)):
                self.relay.traces.tell(
                    f"publish {Topic.EVENTS}", parent=parent, kind=SpanKind.PRODUCER, started=row.received_at, ended=self.relay.clock(),
                    messaging__system="kafka", messaging__destination__name=outcome.topic,
                    messaging__destination__partition__id=str(outcome.partition), messaging__kafka__offset=outcome.offset,
                    ratchet__inference_id=row.event.id,
                )  # fmt: skip

    def send_outbox(self) -> int:
        """Send what waits in the outbox."""
        rows = self.term.unsent_outbox(self.relay.config.batch)
        outcomes, never = self._send(rows, self.setbacks["outbox"])
        acked = self._mark(rows, outcomes, self.term.mark_outbox, self.relay.clock())
        self._bury([row for row in rows if row.seq in never], never)
        return acked + len(never)

    def _send(self, rows: Sequence[OutgoingEvent], setbacks: Setbacks) -> tuple[list[Sent], dict[int, str]]:
        """What became of each row, and why the broker will never take some. Nothing may stand in front of the others for ever."""
        if not rows:
            return [], {}
        alone = setbacks.one_by_one
        outcomes = self._one_by_one(rows) if alone else self.relay.sink.send(rows)
        tried = rows[:ALONE] if alone else rows
        return outcomes, setbacks.count(tried, outcomes[: len(tried)], alone=alone)

    def _one_by_one(self, rows: Sequence[OutgoingEvent]) -> list[Sent]:
        """The first rows, each by itself, while the broker answers at all. Raises `Unavailable` where it does not."""
        outcomes: list[Sent] = [None] * len(rows)
        for index, row in enumerate(rows[:ALONE]):
            self.relay.sink.check_topics()
            outcomes[index] = self.relay.sink.send([row])[0]
        return outcomes

    def _mark(self, rows: Sequence[OutgoingEvent], outcomes: Sequence[Sent], mark: Callable[..., None], now: datetime) -> int:
        sent = [row.seq for row, outcome in zip(rows, outcomes, strict=True) if isinstance(outcome, Ack)]
        if sent:
            mark(sent, now=now)
        return len(sent)

    def _bury(self, rows: Sequence[OutgoingEvent], why: dict[int, str]) -> None:
        """What the loop itself wanted to say and the broker never takes; not the copies of dead letters, which are in their table."""
        if not rows:
            return
        log.error("event=outbox_not_sendable count=%d reason=%s", len(rows), why[rows[0].seq])
        dead = [_dead(row, why[row.seq]) for row in rows if row.topic != Topic.DEAD_LETTERS]
        if dead:
            self.relay.store.apply(EffectBatch(dead=tuple(dead)), now=self.relay.clock())
        self.term.mark_outbox([row.seq for row in rows], now=self.relay.clock())

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

    def _apply_directly(self, rows: Sequence[OutgoingEvent], *, why: dict[int, str] | None = None) -> None:
        if not rows:
            return
        reason = why[rows[0].seq] if why else "events did not reach ingestion through the broker"
        log.error("event=applied_from_inbox count=%d alarm=%s", len(rows), reason)
        events, dead = sort_out([_delivery(row) for row in rows])
        self.isolator.apply(EffectBatch(events=tuple(events), dead=tuple(dead)))
        self.term.applied_directly([row.seq for row in rows], now=self.relay.clock())

    def _when_due(self) -> None:
        now = time.monotonic()
        if now - self.reconciled_at > self.relay.config.reconcile_every_s:
            self.reconciled_at = now
            self.reconcile()
        if now - self.kept_house_at > self.relay.config.housekeeping_every_s:
            self.kept_house_at = now
            self.relay.sink.rotate(applied_before=self.term.applied_before(now=self.relay.clock()))
            self.trimming = True
        if self.trimming:
            keep = self.relay.keep_payloads
            self.trimming = keep is not None and self.term.trim(applied_before=self.relay.clock() - keep) > 0
        if now - self.swept_at > self.relay.config.sweep_every_s:
            self.swept_at = now
            if swept := self.relay.sweep(self.relay.clock()):
                log.warning("event=claims_swept count=%d reason=their events were never committed", swept)


class Heartbeat:
    """Renews the lease from a thread of its own: a broker that lets us wait twelve seconds must not cost the office."""

    def __init__(self, term: RelayTerm, clock: Clock, *, every_s: float = RENEW_EVERY_S) -> None:
        self._every_s = every_s
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

    def join(self, timeout_s: float) -> None:
        """Wait until the beating ends: the office is lost, or the relay leaves it."""
        self._thread.join(timeout_s)

    def check(self) -> None:
        """Raises `LeaseLost` once the office is lost."""
        if self._lost is not None:
            raise self._lost

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._term.renew(now=self._clock())
            except LeaseLost as error:
                self._lost = error
                return
            except Exception as error:  # noqa: BLE001 - a database that is busy now may renew in a second; the token decides
                log.warning("event=renewal_failed error=%r", error)


def _delivery(row: OutgoingEvent) -> Delivery:
    return Delivery(
        topic="inbox", partition=0, offset=row.seq, headers=envelope(row.event, row.received_at), value=row.event.data, event=row.event,
        received_at=row.received_at,
    )  # fmt: skip


def _dead(row: OutgoingEvent, reason: str) -> DeadLetter:
    return DeadLetter(
        topic="outbox", partition=0, offset=row.seq, headers=envelope(row.event, row.received_at), payload=row.event.data, reason=reason
    )
