"""From records to rows, exactly once in effect.

    poll ──▶ sort out ──▶ one transaction (new events, their effects, dead letters, offsets) ──▶ commit the offsets to Kafka (a hint)

What waits for what: nothing is committed to Kafka before the database has it; a record at fault is found by halving the batch and buried,
and never blocks the others; a database, disk or bucket that does not answer is waited for; a fault of ours ends the process and
buries nothing.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from app.domain.errors import OwnFault, Unavailable
from app.domain.ids import utc_now
from app.domain.ports import Clock
from app.domain.telemetry.decoding import DECODERS, Decoder, sort_out
from app.domain.telemetry.streams import Delivery, EffectBatch, EffectStore, EventSource, TopicPartition
from app.domain.telemetry.traceparent import HEADER
from app.telemetry.traces import NOWHERE, SpanKind, Traces
from pipelines.ingestion.config import IngestionConfig
from pipelines.ingestion.isolate import Isolator, log_burial

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ingest:
    """One member of the consumer group."""

    source: EventSource
    store: EffectStore
    config: IngestionConfig
    clock: Clock = utc_now
    decoders: Mapping[str, Decoder] = field(default_factory=lambda: DECODERS)
    pause: Callable[[float], None] = time.sleep
    report: Callable[[str | None], None] = lambda trouble: None
    """Hears what ingestion waits for, and None when it goes on."""
    applied: Callable[[int], None] = lambda count: None
    """Hears how many events were new."""
    traces: Traces = NOWHERE

    @cached_property
    def isolator(self) -> Isolator:
        """Applies, and finds what cannot be."""
        return Isolator(store=self.store, clock=self.clock, tries=self.config.retries, pause=self.pause)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Apply what comes until told to stop."""
        expired_at = float("-inf")
        while not stopping():
            try:
                self.step(stopping)
            except Unavailable:
                break
            if time.monotonic() - expired_at > self.config.expire_every_s:
                expired_at = time.monotonic()
                self._expire()
        self.source.close()

    def _expire(self) -> None:
        try:
            orphans = self.store.expire_parked(now=self.clock())
        except Unavailable as error:
            log.warning("event=waiting error=%s", error)
            return
        if orphans:
            log.warning("event=orphaned count=%d", orphans)

    def step(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """One poll and its transaction; returns how many events were new."""
        try:
            deliveries = self.source.poll(self.config.poll_s)
        except Unavailable as error:
            log.warning("event=broker_unavailable error=%s", error)
            self.report(str(error))
            self.pause(0.5)
            return 0
        if not deliveries:
            self.report(None)
            return 0
        began = self.clock()
        batch = self._batch(deliveries)
        new = self._apply(batch, stopping)
        self._tell(deliveries, began)
        self.source.commit(batch.next_offsets)
        self.applied(new)
        log.debug("event=applied records=%d new=%d dead=%d", len(deliveries), new, len(batch.dead))
        return new

    def _tell(self, deliveries: Sequence[Delivery], began: datetime) -> None:
        """A span for each traced turn, from its poll until its effects were committed."""
        if not self.traces.on:
            return
        for one in deliveries:
            if (parent := one.headers.get(HEADER)) is not None:
                self.traces.tell(
                    f"apply {one.topic}", parent=parent, kind=SpanKind.CONSUMER, started=began, ended=self.clock(),
                    messaging__system="kafka", messaging__destination__name=one.topic, messaging__kafka__offset=one.offset,
                    messaging__destination__partition__id=str(one.partition), messaging__batch__message_count=len(deliveries),
                    ratchet__inference_id=one.headers.get("ce_id", ""),
                )  # fmt: skip

    def _batch(self, deliveries: Sequence[Delivery]) -> EffectBatch:
        events, dead = sort_out(deliveries, self.decoders)
        for letter in dead:
            log_burial(letter)
        ends: dict[TopicPartition, int] = {}
        for delivery in deliveries:
            place = (delivery.topic, delivery.partition)
            ends[place] = max(delivery.offset + 1, ends.get(place, 0))
        return EffectBatch(
            events=tuple(events),
            dead=tuple(dead),
            next_offsets=ends,
            high_waters=self.source.high_waters(),
            incarnations=self.source.incarnations(),
            group=self.config.group,
        )

    def _apply(self, batch: EffectBatch, stopping: Callable[[], bool]) -> int:
        """Apply, however long what it needs does not answer: nothing is committed meanwhile, and `/health` says what is waited for."""
        attempt = 0
        while True:
            try:
                new = self.isolator.apply(batch)
            except Unavailable as error:
                attempt += 1
                log.warning("event=waiting attempt=%d error=%s", attempt, error)
                self.report(str(error))
                if stopping():
                    raise
                self.pause(min(10.0, 0.2 * 3 ** min(attempt, 5)) * random.uniform(0.5, 1.5))
            except OwnFault as error:
                self.report(str(error))
                raise
            else:
                self.report(None)
                return new
