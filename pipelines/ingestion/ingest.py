"""From records to rows, exactly once in effect.

    poll ──▶ sort out ──▶ one transaction (new events, their effects, dead letters, offsets) ──▶ commit the offsets to Kafka (a hint)

What waits for what: nothing is committed to Kafka before the database has it; a record that the database refuses is isolated by
halving the batch and buried, and never blocks the others; a database that does not answer is tried again, then the process ends.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.domain.errors import BadRequest, Unavailable
from app.domain.ids import utc_now
from app.domain.ports import Clock
from app.domain.streams import AppliedEvent, DeadLetter, Delivery, EffectBatch, EffectStore, EventSource, TopicPartition
from pipelines.ingestion.config import IngestionConfig
from pipelines.ingestion.decode import DECODERS, Decoder, as_dead_letter, sort_out

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

    def run(self, stopping: Callable[[], bool]) -> None:
        """Apply what comes until told to stop."""
        expired_at = float("-inf")
        while not stopping():
            self.step()
            if time.monotonic() - expired_at > self.config.expire_every_s:
                expired_at = time.monotonic()
                orphans = self.store.expire_parked(now=self.clock())
                if orphans:
                    log.warning("event=orphaned count=%d", orphans)
        self.source.close()

    def step(self) -> int:
        """One poll and its transaction; returns how many events were new."""
        try:
            deliveries = self.source.poll(self.config.poll_s)
        except Unavailable as error:
            log.warning("event=broker_unavailable error=%s", error)
            self.pause(0.5)
            return 0
        if not deliveries:
            return 0
        batch = self._batch(deliveries)
        new = self._apply(batch)
        self.source.commit(batch.next_offsets)
        log.debug("event=applied records=%d new=%d dead=%d", len(deliveries), new, len(batch.dead))
        return new

    def _batch(self, deliveries: Sequence[Delivery]) -> EffectBatch:
        events, dead = sort_out(deliveries, self.decoders)
        for letter in dead:
            _log_burial(letter)
        ends: dict[TopicPartition, int] = {}
        for delivery in deliveries:
            place = (delivery.topic, delivery.partition)
            ends[place] = max(delivery.offset + 1, ends.get(place, 0))
        return EffectBatch(
            events=tuple(events), dead=tuple(dead), next_offsets=ends, high_waters=self.source.high_waters(), group=self.config.group
        )

    def _apply(self, batch: EffectBatch) -> int:
        for attempt in range(self.config.retries):
            try:
                return apply_isolating(self.store, batch, clock=self.clock)
            except Unavailable as error:
                log.warning("event=database_unavailable attempt=%d error=%s", attempt + 1, error)
                self.pause(min(10.0, 0.2 * 3**attempt) * random.uniform(0.5, 1.5))
        return apply_isolating(self.store, batch, clock=self.clock)


def apply_isolating(store: EffectStore, batch: EffectBatch, *, clock: Clock) -> int:
    """Apply a batch; when a record cannot be stored, find it by halving, bury it, and apply the others.

    Halves go without offsets; those follow with the last, empty batch, when everything before them is in the database.
    """
    try:
        return store.apply(batch, now=clock())
    except BadRequest as error:
        if not batch.events:
            raise
        new, dead = _isolate(store, batch, batch.events, error, clock)
        store.apply(replace(batch, events=(), dead=(*batch.dead, *dead)), now=clock())
        return new


def _isolate(
    store: EffectStore, batch: EffectBatch, events: Sequence[AppliedEvent], error: BadRequest, clock: Clock
) -> tuple[int, list[DeadLetter]]:
    if len(events) == 1:
        letter = as_dead_letter(events[0].delivery, str(error))
        _log_burial(letter)
        return 0, [letter]
    new, dead = 0, list[DeadLetter]()
    for half in (events[: len(events) // 2], events[len(events) // 2 :]):
        try:
            new += store.apply(EffectBatch(events=tuple(half), group=batch.group), now=clock())
        except BadRequest as again:
            more, found = _isolate(store, batch, half, again, clock)
            new, dead = new + more, dead + found
    return new, dead


def _log_burial(letter: DeadLetter) -> None:
    place = (letter.topic, letter.partition, letter.offset)
    log.warning("event=dead_letter topic=%s partition=%d offset=%d reason=%s", *place, letter.reason)
