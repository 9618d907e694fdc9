"""Tokens and words in segments, when they are old and nothing needs them.

which are old ──▶ whose turns they hold (the file is read, no lock is held) ──▶ the turns let go of them, one transaction
                      └── all of them? the row becomes `dropping`, then the file goes, then the row ◀── killed in between: `tidy`
                      └── some are needed? the row becomes `trimming`: a copy without the others takes its place, as after an erasure
"""

from collections.abc import Callable, Collection
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, Engine, func, select, update

from app.db import locks
from app.db.chunks import one_of
from app.db.engine import reading
from app.db.ingestion import segment_rows
from app.db.ingestion.segment_rows import WHOLE
from app.db.tables import batch_items, segments, turns
from app.db.upkeep.needs import Needs, needs
from app.domain.telemetry.streams import SegmentFiles


class Looked(NamedTuple):
    """What one step came to."""

    dropped: int
    """Turns that let go of their tokens."""
    until: tuple[datetime, str] | None
    """The last segment that was looked at; None when there are no more."""


def drop_old(
    engine: Engine, files: SegmentFiles, *, now: datetime, before: datetime, limit: int, after: tuple[datetime, str] | None = None,
    fence: Callable[[Connection], None] = lambda connection: None,
) -> Looked:  # fmt: skip
    """Let go of the oldest segments before that moment; `fence` is asked in every transaction."""
    s = segments.c
    old = select(s.name, s.created_at).where(s.state == WHOLE, s.created_at < before).order_by(s.created_at, s.name)
    with reading(engine) as connection:
        if after is not None:
            old = old.where((s.created_at > after[0]) | ((s.created_at == after[0]) & (s.name > after[1])))
        found = connection.execute(old.limit(limit)).all()
    dropped = 0
    for row in found:
        held = files.turns(row.name)

        def let_go(connection: Connection, name: str = row.name, held: Collection[str] = held) -> int:
            fence(connection)
            return _let_go(connection, name, held)

        dropped += locks.settled(engine, let_go)
    segment_rows.tidy(engine, files, now=now)
    return Looked(dropped, (found[-1].created_at, found[-1].name) if found else None)


def _let_go(connection: Connection, name: str, held: Collection[str]) -> int:
    t = turns.c
    policies = select(t.policy).where(one_of(connection, t.inference_id, held)).distinct()
    for policy in sorted(connection.execute(policies).scalars()):
        locks.hold(connection, locks.batches_of(policy))
    mine = select(t.inference_id, t.policy, t.finished_at, t.labelled_at).where(
        one_of(connection, t.inference_id, held), t.payload_segment == name
    )
    rows = connection.execute(mine.order_by(t.inference_id).with_for_update()).all()
    needed = needs(connection)
    at_work = _at_work(connection, [row.inference_id for row in rows], needed)
    kept = {
        row.inference_id
        for row in rows
        if row.inference_id in at_work or row.labelled_at is None or needed.keeps(row.policy, row.finished_at)
    }
    gone = sorted({row.inference_id for row in rows} - kept)
    connection.execute(update(turns).where(one_of(connection, t.inference_id, gone)).values(payload_segment=None))
    if not kept:
        segment_rows.supersede(connection, [name])
    elif kept < set(held):
        segment_rows.leave_out(connection, [name])
    return len(gone)


def _at_work(connection: Connection, ids: Collection[str], needed: Needs) -> set[str]:
    if not needed.batches:
        return set()
    mine = one_of(connection, batch_items.c.inference_id, ids) & one_of(connection, batch_items.c.batch_id, sorted(needed.batches))
    return set(connection.execute(select(batch_items.c.inference_id).where(mine)).scalars())


def oldest(connection: Connection) -> dict[str, datetime | None]:
    """When the oldest segment was begun."""
    return {"segments": connection.execute(select(func.min(segments.c.created_at)).where(segments.c.state == WHOLE)).scalar()}
