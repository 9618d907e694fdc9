"""Forgetting a person: everything of theirs goes, in one transaction; the names of versions trained on it are reported.

What stays: that turns were served (empty shells, so that counts add up), that batches held them, and the pseudonym in `erasures`,
without which a replay would bring the rest back.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, LargeBinary, cast, delete, func, insert, literal, or_, select, update

from app.db import audit
from app.db.chunks import chunked
from app.db.engine import reading, writing
from app.db.outbox import OutboxEvent, enqueue
from app.db.tables import (
    batch_items,
    batches,
    dead_letters,
    exposures,
    inbox,
    labels,
    observations,
    outbox,
    returned_items,
    segments,
    training_runs,
    turns,
    versions,
)
from app.db.tables import erasures as erasures_table
from app.db.turns import SHELL
from app.domain.events import Erasure, EventType, Topic
from app.domain.streams import EraseFromSegment, ErasureReport


class SqlEraser:
    """Forgets people in every place of a deployment: inbox, state, segments; audited."""

    def __init__(self, state: Engine, inbox_engine: Engine, *, erase_from_segment: EraseFromSegment) -> None:
        self._state = state
        self._inbox = inbox_engine
        self._erase_from_segment = erase_from_segment

    def erase(self, erasure: Erasure, *, now: datetime) -> ErasureReport:
        """Erase; a second call removes what came since, usually nothing. The bytes are gone from the files as well (SQLite)."""
        with reading(self._state) as connection:
            ids, episodes = belongings(connection, erasure.actor)
        with writing(self._inbox) as connection:
            scrubbed = scrub_inbox(connection, erasure.actor, ids, episodes)
        with writing(self._state) as connection:
            report = erase_actor(connection, erasure, erase_from_segment=self._erase_from_segment, now=now, inbox_payloads=scrubbed)
            detail = {"turns": report.turns, "trained_versions": list(report.trained_versions), "again": report.already_erased}
            audit.append(connection, actor=erasure.requested_by, action="erase", subject=erasure.actor, detail=detail, now=now)
        for engine in {self._state, self._inbox}:
            _overwrite_free_space(engine)
        return report


def _overwrite_free_space(engine: Engine) -> None:
    """Rebuild a SQLite file: deleted rows stay readable in free pages and in the write-ahead log otherwise."""
    if engine.dialect.name != "sqlite":
        return
    raw = engine.raw_connection()
    try:
        cursor = raw.cursor()
        cursor.execute("VACUUM")
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        raw.close()


def erased_at(connection: Connection, actors: Iterable[str]) -> dict[str, datetime]:
    """When each of these actors was erased; absent where never."""
    found: dict[str, datetime] = {}
    for chunk in chunked(sorted(set(actors))):
        statement = select(erasures_table.c.actor, erasures_table.c.erased_at).where(erasures_table.c.actor.in_(chunk))
        found |= {row.actor: row.erased_at for row in connection.execute(statement)}
    return found


def erase_actor(
    connection: Connection, erasure: Erasure, *, erase_from_segment: EraseFromSegment, now: datetime, inbox_payloads: int = 0
) -> ErasureReport:
    """Erase everything of `erasure.actor` from the state database and the segments. A second call finds what came since."""
    actor = erasure.actor
    own = connection.execute(select(turns.c.inference_id, turns.c.episode_id, turns.c.payload_segment).where(turns.c.actor == actor)).all()
    ids, episodes = [row.inference_id for row in own], sorted({row.episode_id for row in own})
    before = connection.execute(select(erasures_table.c.report).where(erasures_table.c.actor == actor)).scalar()
    trained = sorted(set((before or {}).get("trained_versions", [])) | _trained_versions(connection, actor, ids))
    report = ErasureReport(
        actor=actor,
        turns=len(ids),
        segments=_erase_payloads(connection, [(r.payload_segment, r.inference_id) for r in own if r.payload_segment], erase_from_segment),
        observations=_erase_observations(connection, actor, ids, episodes),
        labels=_erase_labels(connection, actor, ids),
        exposures=connection.execute(delete(exposures).where(exposures.c.actor == actor)).rowcount,
        inbox_payloads=inbox_payloads,
        dead_letters=_erase_letters(connection, [actor, *ids]),
        trained_versions=tuple(trained),
        already_erased=before is not None,
    )
    _empty_turns(connection, ids, now)
    _tombstones(connection, ids, episodes, now)
    _remember(connection, erasure, report, before, now)
    return report


def scrub_inbox(connection: Connection, actor: str, inference_ids: Sequence[str], episode_ids: Sequence[str]) -> int:
    """Empty the payloads of everything in the inbox database that names the actor or belongs to their turns; identities stay."""
    scrubbed = 0
    full = inbox.c.payload != b""
    scrubbed += connection.execute(update(inbox).where(full, _contains(connection, inbox.c.payload, actor)).values(payload=b"")).rowcount
    for keys in chunked([*inference_ids, *episode_ids]):
        scrubbed += connection.execute(update(inbox).where(full, inbox.c.key.in_(keys)).values(payload=b"")).rowcount
    return scrubbed


def belongings(connection: Connection, actor: str) -> tuple[list[str], list[str]]:
    """Inference and episode ids of an actor's turns, and of what was shown to them."""
    served = select(turns.c.inference_id, turns.c.episode_id).where(turns.c.actor == actor)
    shown = select(exposures.c.inference_id, exposures.c.episode_id).where(exposures.c.actor == actor)
    mine = [(row[0], row[1]) for statement in (served, shown) for row in connection.execute(statement)]
    return sorted({inference for inference, _ in mine}), sorted({episode for _, episode in mine})


def _contains(connection: Connection, column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    if connection.dialect.name == "sqlite":
        return func.instr(column, literal(text.encode(), LargeBinary)) > 0
    return func.position(cast(literal(text.encode(), LargeBinary), LargeBinary).op("IN")(column)) > 0


def _trained_versions(connection: Connection, actor: str, ids: Sequence[str]) -> set[str]:
    """Names of the versions that runs made from batches with this actor's turns (the digest where no name is known)."""
    found: set[str] = set()
    tables = (batch_items, returned_items)
    conditions = [(t, t.c.actor == actor) for t in tables] + [(t, t.c.inference_id.in_(chunk)) for t in tables for chunk in chunked(ids)]
    for items, condition in conditions:
        statement = (
            select(func.coalesce(versions.c.name, training_runs.c.candidate))
            .select_from(items.join(batches, batches.c.id == items.c.batch_id))
            .join(training_runs, training_runs.c.batch_id == batches.c.id)
            .join(versions, (versions.c.digest == training_runs.c.candidate) & (versions.c.policy == training_runs.c.policy), isouter=True)
            .where(condition, training_runs.c.candidate.is_not(None))
            .distinct()
        )
        found.update(connection.execute(statement).scalars())
    return found


def _erase_payloads(connection: Connection, located: Sequence[tuple[str, str]], erase_from_segment: EraseFromSegment) -> int:
    by_segment: dict[str, set[str]] = {}
    for name, inference_id in located:
        by_segment.setdefault(name, set()).add(inference_id)
    for name, ids in by_segment.items():
        removed = erase_from_segment(name, frozenset(ids))
        connection.execute(update(segments).where(segments.c.name == name).values(rows=segments.c.rows - removed))
    return len(by_segment)


def _erase_observations(connection: Connection, actor: str, ids: Sequence[str], episodes: Sequence[str]) -> int:
    o = observations.c
    erased = connection.execute(delete(observations).where(o.actor == actor)).rowcount
    for chunk in chunked(ids):
        erased += connection.execute(delete(observations).where(o.inference_id.in_(chunk))).rowcount
    for chunk in chunked(episodes):
        erased += connection.execute(delete(observations).where(o.episode_id.in_(chunk))).rowcount
    return erased


def _erase_labels(connection: Connection, actor: str, ids: Sequence[str]) -> int:
    erased = connection.execute(delete(labels).where(labels.c.actor == actor)).rowcount
    for chunk in chunked(ids):
        erased += connection.execute(delete(labels).where(labels.c.inference_id.in_(chunk))).rowcount
        for items in (batch_items, returned_items):
            connection.execute(update(items).where(items.c.inference_id.in_(chunk)).values(actor=None))
    for items in (batch_items, returned_items):
        connection.execute(update(items).where(items.c.actor == actor).values(actor=None))
    return erased


def _erase_letters(connection: Connection, words: Sequence[str]) -> int:
    """Dead letters and outbox payloads that name the actor or one of their turns."""
    erased = 0
    for chunk in chunked(words, 100):
        erased += connection.execute(
            delete(dead_letters).where(or_(*(_contains(connection, dead_letters.c.payload, w) for w in chunk)))
        ).rowcount
        named = or_(*(_contains(connection, outbox.c.payload, word) for word in chunk))
        connection.execute(update(outbox).where(outbox.c.payload != b"", named).values(payload=b""))
    return erased


def _empty_turns(connection: Connection, ids: Sequence[str], now: datetime) -> None:
    """Leave shells, and let labelling give them their exclusion: every served turn ends with a label.

    A label that is being made at this moment from what stood there is stale, and says so by `evidence`.
    """
    for chunk in chunked(ids):
        due = {"erased_at": now, "labelled_at": None, "needs_relabel": False, "label_due_at": now}
        values = SHELL | due | {"evidence": turns.c.evidence + 1}
        connection.execute(update(turns).where(turns.c.inference_id.in_(chunk)).values(values))


def _tombstones(connection: Connection, ids: Sequence[str], episodes: Sequence[str], now: datetime) -> None:
    """Null records for every key: on a compacted topic they take the older ones away."""
    events = [OutboxEvent(topic=Topic.EVENTS, type=EventType.ERASURE, key=key, payload=b"") for key in (*episodes, *ids)]
    events += [OutboxEvent(topic=Topic.LABELS, type=EventType.ERASURE, key=key, payload=b"") for key in (*episodes, *ids)]
    enqueue(connection, events, now=now)


def _remember(connection: Connection, erasure: Erasure, report: ErasureReport, before: dict[str, Any] | None, now: datetime) -> None:
    counts = {
        name: getattr(report, name) + (before or {}).get(name, 0)
        for name in ("turns", "observations", "labels", "exposures", "inbox_payloads", "dead_letters", "segments")
    }
    row = {"erased_at": erasure.occurred_at, "report": counts | {"trained_versions": list(report.trained_versions)}}
    if before is None:
        connection.execute(insert(erasures_table), row | {"actor": erasure.actor, "requested_by": erasure.requested_by})
    else:
        connection.execute(update(erasures_table).where(erasures_table.c.actor == erasure.actor).values(row))
