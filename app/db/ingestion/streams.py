"""Exactly once in effect: deduplication row, effect and offset of every record in one transaction.

1. applied_events   insert, ignore what is known → only the new ones go on
2. turns, exposures, retractions, observations; what waited for these turns is joined
3. segment          said, then written durably, before the transaction; here the turns begin to point into it (`segment_rows`)
4. dead letters, counters, offsets
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, delete, exc, func, select

from app.db import locks
from app.db.access import erasures
from app.db.chunks import pair_of
from app.db.counters import add_counts, read_counts
from app.db.engine import insert_or_ignore, inserting, reading, writing
from app.db.ingestion import dead_letters, history, segment_rows
from app.db.ingestion.observations import (
    Joined,
    apply_retractions,
    expire_parked,
    insert_observations,
    join_waiting,
    settle_crossed,
    targets_of,
)
from app.db.ingestion.turn_counts import count_turns
from app.db.ingestion.turns import lock_turns, note_evidence, point_to_segment
from app.db.release.exposures import insert_exposures
from app.db.tables import applied_events, observations, stream_offsets, turns
from app.db.verdicts import judged
from app.domain.errors import Unavailable
from app.domain.learning.batches import payload_of
from app.domain.telemetry.events import Erasure, Exposure, Observation, Retraction
from app.domain.telemetry.streams import AppliedEvent, EffectBatch, JoinRules, Position, SegmentFiles, TopicPartition
from app.domain.telemetry.turns import PayloadClaim, TurnServed

E = TypeVar("E")
Counts = Counter[tuple[str, str]]
"""By (policy, what)."""
log = logging.getLogger(__name__)


class SqlEffects:
    """The EffectStore port."""

    def __init__(
        self,
        engine: Engine,
        *,
        rules: Callable[[], JoinRules],
        segments: SegmentFiles,
        holds: Callable[[PayloadClaim], bool] = lambda _: False,
    ) -> None:
        self._engine = engine
        self._rules = rules
        self._segments = segments
        self._holds = holds

    def apply(self, batch: EffectBatch, *, now: datetime) -> int:
        """Apply in one transaction. Raises `BadRequest` when a record cannot be stored, `Unavailable` when retrying may help, and
        `OwnFault` when the schema is not the one of this version.
        """
        missing = self._missing_claims(batch)
        with judged():
            for _, erasure in _of(batch.events, Erasure):
                erasures.announce(self._engine, erasure)
            segment = self._write_segment_of(batch, now)
            try:
                count, owing = locks.settled(self._engine, lambda connection: self._apply(connection, batch, segment, missing, now))
            except BaseException:
                self._abandon(segment)
                raise
            self._tidy(owing, now)
            return count

    def _write_segment_of(self, batch: EffectBatch, now: datetime) -> "_Segment | None":
        """Write the tokens of the batch's new turns, named after the first of them, before the transaction: a slow bucket holds no lock.

        What is not new any more, or its person erased, when the transaction looks again is left out after it."""
        planned = self._new_turns(batch)
        if not planned:
            return None
        first = min((event.delivery for event, _ in planned), key=lambda at: (at.topic, at.partition, at.offset))
        name = segment_rows.intend(self._engine, f"{first.topic}-{first.partition}-{first.offset:020d}", now=now)
        try:
            size = self._segments.write_sized(name, [payload_of(turn) for _, turn in planned])
        except BaseException:
            segment_rows.abandon(self._engine, name, self._segments)
            raise
        return _Segment(name=name, turns=frozenset(turn.inference_id for _, turn in planned), size_bytes=size)

    def _new_turns(self, batch: EffectBatch) -> list[tuple[AppliedEvent, TurnServed]]:
        served = [(event, turn) for event, turn in history.served_first(_of(batch.events, TurnServed)) if not turn.payload]
        if not served:
            return []
        with reading(self._engine) as connection:
            known = applied_among(connection, [(event.source, event.id) for event, _ in served])
            shells = _shells(connection, served)
        return [(e, turn) for e, turn in served if (e.source, e.id) not in known and turn.inference_id not in shells]

    def _abandon(self, segment: "_Segment | None") -> None:
        """As far as possible now; `sweep` does the rest."""
        if segment is not None:
            with suppress(exc.SQLAlchemyError, OSError):
                segment_rows.abandon(self._engine, segment.name, self._segments)

    def _tidy(self, owing: Collection[str], now: datetime) -> None:
        """What this batch leaves in files must not stay there. It is applied whatever comes of it: the upkeep does the rest."""
        if owing:
            try:
                segment_rows.tidy(self._engine, self._segments, now=now, names=owing)
            except (exc.SQLAlchemyError, OSError, Unavailable) as error:
                log.warning("event=segments_owing count=%d error=%s", len(owing), error)

    def expire_parked(self, *, now: datetime) -> int:
        """Ledger observations whose turn never came as orphans, after joining those whose turn came at the same moment.

        And remove what a member that was killed left half done: segments that it had begun.
        """
        with judged():
            swept = segment_rows.sweep(self._engine, self._segments, now=now)
            if swept:
                log.warning("event=segments_swept count=%d", swept)
            return locks.settled(self._engine, lambda connection: self._expire(connection, now))

    def _expire(self, connection: Connection, now: datetime) -> int:
        locks.share(connection, locks.ERASURES)
        locks.hold(connection, "ratchet.expiring")  # of several members one looks, the others find nothing left
        joined = settle_crossed(connection, rules=self._rules())
        note_evidence(connection, joined.changed_turns)
        counts = expire_parked(connection, rules=self._rules(), now=now)
        add_counts(connection, counts + joined.counts)
        return counts.total()

    def _missing_claims(self, batch: EffectBatch) -> frozenset[str]:
        """Turns whose payload is not where their event says: they are applied without it, and never trained on. Raises `Unavailable`."""
        claimed = [turn for _, turn in _of(batch.events, TurnServed) if turn.payload]
        missing = frozenset(turn.inference_id for turn in claimed if turn.payload and not self._holds(turn.payload))
        for id_ in sorted(missing):
            log.error("event=claim_missing inference_id=%s alarm=the payload of a turn is not in the trajectory store", id_)
        return missing

    def _apply(
        self, connection: Connection, batch: EffectBatch, segment: "_Segment | None", missing: frozenset[str], now: datetime
    ) -> tuple[int, set[str]]:
        """How many were new, and which segments owe something now."""
        locks.share(connection, locks.ERASURES)
        fresh, counts = _deduplicate(connection, batch.events, now)
        counts["", "claim_missing"] += sum(turn.inference_id in missing for _, turn in _of(fresh, TurnServed))
        rules = self._rules()
        fresh = self._forget_erased(connection, fresh, counts)
        _lock_touched(connection, fresh)
        joined, new, owing = self._apply_turns(connection, fresh, segment, missing, rules, now)
        counts["", "exposure_ignored"] += insert_exposures(connection, [e for _, e in _of(fresh, Exposure)])
        joined.merge(apply_retractions(connection, _of(fresh, Retraction)))
        joined.merge(insert_observations(connection, _of(fresh, Observation), rules=rules))
        note_evidence(connection, joined.changed_turns)
        for _, erasure in _of(fresh, Erasure):
            owing |= erasures.erase_actor(connection, erasure, now=now).segments
        dead_letters.bury(connection, batch.dead, now=now)
        counts["", "dead_lettered"] += len(batch.dead)
        if batch.replayed_dead_letters:
            dead_letters.mark_replayed(connection, batch.replayed_dead_letters, now=now)
        count_turns(connection, [(turn.policy, turn.version) for turn in new])
        add_counts(connection, counts + joined.counts)
        save_offsets(connection, batch, now=now)
        return len(fresh), owing

    def _forget_erased(self, connection: Connection, fresh: list[AppliedEvent], counts: Counts) -> list[AppliedEvent]:
        """Without what people said or saw before they were erased; their turns stay, and become shells."""
        gone = erasures.erased_at(connection, {actor for event in fresh if (actor := _actor(event)) is not None})
        if not gone:
            return fresh
        kept: list[AppliedEvent] = []
        for event in fresh:
            erased = gone.get(_actor(event) or "")
            if erased is None or isinstance(event.effect, TurnServed | Erasure) or not erasures.tells_of_before(event, erased):
                kept.append(event)
            else:
                counts["", "erased"] += 1
        return kept

    def _apply_turns(
        self, connection: Connection, fresh: Sequence[AppliedEvent], segment: "_Segment | None", missing: frozenset[str], rules: JoinRules,
        now: datetime,
    ) -> tuple[Joined, list[TurnServed], set[str]]:  # fmt: skip
        """What came together by these turns, those of them that were not known, and which segments owe something."""
        served = history.served_first(_of(fresh, TurnServed))
        shells = _shells(connection, served)
        inserted, owing = history.insert_served(connection, [turn for _, turn in served], rules=rules, erased=shells)
        new = [turn for _, turn in served if turn.inference_id in inserted]
        owing |= self._claim(connection, [turn for turn in new if turn.inference_id not in missing], frozenset(shells), now)
        if segment is not None and not self._point(connection, segment, {t.inference_id for t in new if not t.payload} - set(shells)):
            owing.add(segment.name)
        joined = join_waiting(connection, sorted(inserted), sorted({turn.episode_id for turn in new}), rules=rules)
        erasures.forget_said(connection, sorted(inserted & set(shells)))
        joined.changed_turns.difference_update(shells)
        joined.counts["", "turn_ignored"] += len(_of(fresh, TurnServed)) - len(new)
        return joined, new, owing

    def _claim(self, connection: Connection, new: Sequence[TurnServed], shells: frozenset[str], now: datetime) -> set[str]:
        """Point at the segments that were written before their events; those of people who were erased meanwhile are to go."""
        owing: set[str] = set()
        for turn in new:
            if not turn.payload:
                continue
            name = turn.payload.segment
            segment_rows.record(connection, name, rows=1, size_bytes=turn.payload.bytes, now=now)
            if turn.inference_id in shells:
                segment_rows.supersede(connection, [name])
                owing.add(name)
            else:
                point_to_segment(connection, name, [turn.inference_id])
        return owing

    def _point(self, connection: Connection, segment: "_Segment", placed: set[str]) -> bool:
        """Say where the tokens of these turns lie; whether the file holds no others. Nobody would find those there again."""
        if not placed <= segment.turns:
            raise Unavailable("turns became new again after their segment was written without them: the batch is applied again")
        exact = placed == segment.turns
        if placed:
            segment_rows.complete(connection, segment.name, rows=len(placed), size_bytes=segment.size_bytes, exact=exact)
            point_to_segment(connection, segment.name, sorted(placed))
        else:
            segment_rows.supersede(connection, [segment.name])
        return exact


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """A file that is written and nobody points into yet."""

    name: str
    turns: frozenset[str]
    size_bytes: int


def _shells(connection: Connection, served: Sequence[tuple[AppliedEvent, TurnServed]]) -> dict[str, datetime]:
    """Those of the turns whose person was erased after they were served or accepted, and when."""
    gone = erasures.erased_at(connection, {turn.actor for _, turn in served if turn.actor is not None})
    return {
        turn.inference_id: gone[turn.actor]
        for event, turn in served
        if turn.actor is not None and turn.actor in gone and erasures.tells_of_before(event, gone[turn.actor])
    }


def _lock_touched(connection: Connection, fresh: Sequence[AppliedEvent]) -> None:
    """The known turns that these events are about, in the one order, before any of them is looked at."""
    said = [(o.inference_id, o.episode_id) for _, o in _of(fresh, Observation)]
    said += targets_of(connection, [(r.source, r.observation_id) for _, r in _of(fresh, Retraction)])
    said += [(turn.inference_id, turn.episode_id) for _, turn in _of(fresh, TurnServed)]
    lock_turns(connection, {turn for turn, _ in said if turn is not None}, {episode for _, episode in said if episode is not None})


def _of(events: Sequence[AppliedEvent], kind: type[E]) -> list[tuple[AppliedEvent, E]]:
    return [(event, event.effect) for event in events if isinstance(event.effect, kind)]


def _actor(event: AppliedEvent) -> str | None:
    return getattr(event.effect, "actor", None)


def _deduplicate(connection: Connection, events: Sequence[AppliedEvent], now: datetime) -> tuple[list[AppliedEvent], Counts]:
    """The events that were never applied before, in order, and counts of the others."""
    counts: Counts = Counter()
    first: dict[tuple[str, str], AppliedEvent] = {}
    for event in events:
        if first.setdefault((event.source, event.id), event) is not event:
            same = first[event.source, event.id].payload_hash == event.payload_hash
            counts["", "redelivered" if same else "conflict"] += 1
    if not first:
        return [], counts
    rows = [
        {"source": e.source, "event_id": e.id, "payload_hash": e.payload_hash, "applied_at": now}
        for _, e in sorted(first.items(), key=lambda item: item[0])
    ]
    statement = insert_or_ignore(connection, applied_events).returning(applied_events.c.source, applied_events.c.event_id)
    inserted = {(row.source, row.event_id) for row in connection.execute(statement, rows)}
    known = [event for identity, event in first.items() if identity not in inserted]
    for identity, stored in _stored_hashes(connection, known).items():
        counts["", "redelivered" if stored in (None, first[identity].payload_hash) else "conflict"] += 1
    return [event for identity, event in first.items() if identity in inserted], counts


def applied_among(connection: Connection, identities: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of the (source, id) pairs that are applied."""
    a = applied_events.c
    known = select(a.source, a.event_id).where(pair_of(connection, (a.source, a.event_id), identities))
    return {(row.source, row.event_id) for row in connection.execute(known)}


def _stored_hashes(connection: Connection, events: Sequence[AppliedEvent]) -> dict[tuple[str, str], bytes | None]:
    if not events:
        return {}
    a = applied_events.c
    known = pair_of(connection, (a.source, a.event_id), [(event.source, event.id) for event in events])
    rows = connection.execute(select(a.source, a.event_id, a.payload_hash).where(known))
    return {(row.source, row.event_id): row.payload_hash for row in rows}


# --- offsets ------------------------------------------------------------------------------------------------------------------


def save_offsets(connection: Connection, batch: EffectBatch, *, now: datetime) -> None:
    """Move the group's offsets forward; a consumer that lost its partitions and comes late never moves them back.

    Offsets of another topic of the same name are no later and no earlier: they take the place of the old ones.
    """
    if not batch.next_offsets:
        return
    rows = [
        {
            "consumer_group": batch.group, "topic": topic, "partition": partition, "next_offset": offset,
            "high_water": max(offset, batch.high_waters.get((topic, partition), offset)), "updated_at": now,
            "incarnation": batch.incarnations.get(topic),
        }
        for (topic, partition), offset in sorted(batch.next_offsets.items())
    ]  # fmt: skip
    statement = inserting(connection, stream_offsets)
    new = statement.excluded
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["consumer_group", "topic", "partition"],
            set_={name: new[name] for name in ("next_offset", "high_water", "updated_at", "incarnation")},
            where=(stream_offsets.c.next_offset < new.next_offset) | stream_offsets.c.incarnation.is_distinct_from(new.incarnation),
        ),
        rows,
    )


def offsets(connection: Connection, group: str) -> dict[TopicPartition, int]:
    """Next offset per topic and partition: where ingestion reads on."""
    statement = select(stream_offsets).where(stream_offsets.c.consumer_group == group)
    return {(row.topic, row.partition): row.next_offset for row in connection.execute(statement)}


def read_offsets(engine: Engine, group: str) -> Mapping[TopicPartition, int]:
    """`offsets` in a transaction of its own. Raises `Unavailable`."""
    with judged(), reading(engine) as connection:
        return offsets(connection, group)


class SqlPositions:
    """The Positions port."""

    def __init__(self, engine: Engine, *, group: str) -> None:
        self._engine = engine
        self._group = group

    def read(self) -> Mapping[TopicPartition, Position]:
        """Every partition's. Raises `Unavailable`."""
        statement = select(stream_offsets).where(stream_offsets.c.consumer_group == self._group)
        with judged(), reading(self._engine) as connection:
            rows = connection.execute(statement).all()
        return {(row.topic, row.partition): Position(row.next_offset, row.incarnation) for row in rows}

    def forget(self, places: Collection[TopicPartition]) -> None:
        """Forget where we were, and count it. Raises `Unavailable`."""
        c = stream_offsets.c
        with judged(), writing(self._engine) as connection:
            for topic, partition in sorted(places):
                mine = (c.consumer_group == self._group) & (c.topic == topic) & (c.partition == partition)
                connection.execute(delete(stream_offsets).where(mine))
            add_counts(connection, Counter({("", "offsets_reset"): len(places)}))


# --- metrics ------------------------------------------------------------------------------------------------------------------


def stream_lag(connection: Connection) -> int:
    """Records at the broker that ingestion had not read when it last applied something."""
    behind = func.coalesce(func.sum(stream_offsets.c.high_water - stream_offsets.c.next_offset), 0)
    return int(connection.execute(select(behind)).scalar_one())


def stream_metrics(connection: Connection) -> dict[str, Any]:
    """Gauges and counters of ingestion from the state database.

    `lag` (records), `parked`, `turns_unlabelled`, `oldest_due_at` (of turns without a label) and `counters` by (policy, name).
    """
    unlabelled = select(func.count(), func.min(turns.c.label_due_at)).where(turns.c.labelled_at.is_(None))
    count, oldest = connection.execute(unlabelled).one()
    return {
        "lag": stream_lag(connection),
        "parked": connection.execute(select(func.count()).select_from(observations).where(observations.c.status == "parked")).scalar_one(),
        "turns_unlabelled": count,
        "oldest_due_at": oldest,
        "counters": read_counts(connection),
    }
