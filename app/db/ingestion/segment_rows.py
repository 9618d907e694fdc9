"""Segments in the database: what is to be written is said before, so that no file with somebody's words is ever unknown.

    intend (its own commit) ──▶ file ──▶ turns and `complete`, one commit
          └── killed on the way? the intent stays, and `sweep` removes it with its file

What is in a file never changes, and no two attempts write under one name: one that wakes up late overwrites nobody's. Rows go first, and no
transaction waits for a disk or a bucket: what its file owes to a row is written down with it, and done by `tidy` afterwards.

    whole ──▶ trimming: it holds turns that do not point there ──▶ a copy without them ──▶ the others point into the copy, one commit
    whole ──▶ dropping: nobody points there any more           ──▶ the file goes ──▶ the row goes
"""

import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Row, Select, delete, func, insert, or_, select, text, update

from app.db import locks
from app.db.chunks import chunked, one_of
from app.db.engine import insert_or_ignore, reading, writing
from app.db.ingestion.turns import point_to_segment
from app.db.tables import segments, turns
from app.domain.errors import Unavailable
from app.domain.telemetry.streams import SegmentFiles

WRITING, WHOLE, TRIMMING, DROPPING = "writing", "whole", "trimming", "dropping"
GIVEN_UP = timedelta(minutes=10)
"""An intent this old has lost its process. One that is alive after all finds its intent gone and tries again."""
SWEPT_AT_ONCE = 100
ROUNDS = 50
"""Of `tidy`: a copy owes something again where somebody was erased while it was written."""
_OWED = text("state IN ('trimming', 'dropping')")
"""As the index says it."""


def intend(engine: Engine, name: str, *, now: datetime) -> str:
    """Say that a segment will be written; returns its name, this one with something behind it that nobody else has."""
    own = f"{_ATTEMPT.sub('', name)}.{secrets.token_hex(4)}"
    with writing(engine) as connection:
        connection.execute(insert(segments).values(name=own, rows=0, bytes=0, created_at=now, state=WRITING))
    return own


_ATTEMPT = re.compile(r"\.[0-9a-f]{8}$")


def record(connection: Connection, name: str, *, rows: int, size_bytes: int, now: datetime) -> None:
    """A segment that somebody else wrote and swears to: a claim, whose own sweep knows it by its event."""
    row = {"name": name, "rows": rows, "bytes": size_bytes, "created_at": now}
    connection.execute(insert_or_ignore(connection, segments), row)


def complete(
    connection: Connection, name: str, *, rows: int, size_bytes: int, created_at: datetime | None = None, exact: bool = True
) -> None:
    """The file is written and the transaction's turns point into it. Raises `Unavailable` where the intent was swept meanwhile.

    `created_at` where what is in it is older than the file; not `exact` where it holds turns that point elsewhere.
    """
    mine = (segments.c.name == name) & (segments.c.state == WRITING)
    values: dict[str, Any] = {"state": WHOLE if exact else TRIMMING, "rows": rows, "bytes": size_bytes}
    if created_at is not None:
        values["created_at"] = created_at
    if connection.execute(update(segments).where(mine).values(values)).rowcount != 1:
        raise Unavailable(f"segment {name} took longer than {GIVEN_UP} and was swept: the batch is applied again")


def leave_out(connection: Connection, names: Iterable[str]) -> None:
    """These hold turns that do not point there any more from this commit on; `tidy` copies them without."""
    mine = one_of(connection, segments.c.name, sorted(names)) & (segments.c.state == WHOLE)
    connection.execute(select(segments.c.name).where(mine).order_by(segments.c.name).with_for_update()).all()
    connection.execute(update(segments).where(mine).values(state=TRIMMING))


def files_owing(connection: Connection) -> int:
    """Files that are to be copied without turns of theirs, or removed."""
    return connection.execute(select(func.count()).select_from(segments).where(_OWED)).scalar_one()


def supersede(connection: Connection, names: Iterable[str]) -> None:
    """Nobody points into these any more from this commit on, or ever will; `tidy` removes their files."""
    connection.execute(update(segments).where(one_of(connection, segments.c.name, sorted(names))).values(state=DROPPING))


def abandon(engine: Engine, name: str, files: SegmentFiles) -> None:
    """Take back an intent and its file; not where turns point into it after all, because only the answer to the commit was lost."""
    with writing(engine) as connection:
        state = connection.execute(select(segments.c.state).where(segments.c.name == name).with_for_update()).scalar()
        if state == WRITING:
            supersede(connection, [name])
    if state not in (WHOLE, TRIMMING):
        _drop(engine, files, name)


def sweep(engine: Engine, files: SegmentFiles, *, now: datetime) -> int:
    """Remove intents whose process was killed, with their files, and files that nobody points into any more; returns how many."""
    dead = or_(segments.c.created_at < now - GIVEN_UP, segments.c.created_at > now + GIVEN_UP)
    given_up = select(segments.c.name).where(segments.c.state == WRITING, dead).order_by(segments.c.name).limit(SWEPT_AT_ONCE)
    with writing(engine) as connection:
        if names := connection.execute(given_up.with_for_update(skip_locked=True)).scalars().all():
            supersede(connection, names)
    owed = [row.name for row in _owed(engine, None) if row.state == DROPPING]
    for name in owed:
        _drop(engine, files, name)
    return len(owed)


def tidy(engine: Engine, files: SegmentFiles, *, now: datetime, names: Collection[str] | None = None) -> int:
    """Do what files owe to their rows (all of them, or these); returns how many went.

    Any number of processes may do so at once, and be killed: of two that copy one file the first counts, and the other's copy goes.
    """
    wanted, gone = None if names is None else set(names), 0
    for _ in range(ROUNDS):
        if not (owed := _owed(engine, wanted)):
            break
        for row in owed:
            if row.state == DROPPING:
                _drop(engine, files, row.name)
                gone += 1
            elif (copy := _trim(engine, files, row, now=now)) and wanted is not None:
                wanted.add(copy)
    return gone


def forget_in(engine: Engine, files: SegmentFiles, names: Collection[str], *, now: datetime) -> None:
    """Leave out of these files who does not point into them; a file that no row knows has nobody who does."""
    with writing(engine) as connection:
        rows = [{"name": name, "rows": 0, "bytes": 0, "created_at": now, "state": TRIMMING} for name in sorted(names)]
        if rows:
            connection.execute(insert_or_ignore(connection, segments), rows)
        leave_out(connection, names)
    tidy(engine, files, now=now, names=names)


def _owed(engine: Engine, names: Collection[str] | None) -> Sequence[Row[*tuple[Any, ...]]]:
    with reading(engine) as connection:
        mine = select(segments.c.name, segments.c.state, segments.c.created_at).where(_OWED)
        if names is not None:
            mine = mine.where(one_of(connection, segments.c.name, sorted(names)))
        return connection.execute(mine.order_by(segments.c.name)).all()


def _drop(engine: Engine, files: SegmentFiles, name: str) -> None:
    files.drop(name)
    with writing(engine) as connection:
        connection.execute(delete(segments).where(segments.c.name == name, segments.c.state == DROPPING))


def _trim(engine: Engine, files: SegmentFiles, row: Row[*tuple[Any, ...]], *, now: datetime) -> str | None:
    """Copy a segment without what does not point there, and let the others point into the copy; its name, None where it has none."""
    held = set(files.turns(row.name))
    if not held:  # the file is gone: `ratchet recover check` tells so, and nothing is left in it to be forgotten
        with writing(engine) as connection:
            connection.execute(update(segments).where(segments.c.name == row.name, segments.c.state == TRIMMING).values(state=WHOLE))
        return None
    with reading(engine) as connection:
        here = pointing(connection, row.name, held)
    if not here:
        locks.settled(engine, lambda connection: _switch(connection, row, None, here, 0))
        return None
    copy = intend(engine, row.name, now=now)
    try:
        size = files.copy(row.name, copy, without=held - here)
        switched = size > 0 and locks.settled(engine, lambda connection: _switch(connection, row, copy, here, size))
    except Exception as error:
        abandon(engine, copy, files)  # a process that is killed leaves this to `sweep`
        if isinstance(error, OSError) and not _owed(engine, [row.name]):
            return None  # somebody else's copy took its place, and the file went while it was read
        raise
    if not switched:
        abandon(engine, copy, files)
    return copy


def _switch(connection: Connection, row: Row[*tuple[Any, ...]], copy: str | None, here: Collection[str], size: int) -> bool:
    """Whether the copy takes the segment's place: not where somebody else's took it, or nobody points there any more."""
    still = pointing(connection, row.name, here, lock=True)
    mine = (segments.c.name == row.name) & (segments.c.state == TRIMMING)
    if connection.execute(update(segments).where(mine).values(state=DROPPING)).rowcount != 1:
        return False
    if copy is None or not still:
        return False
    complete(connection, copy, rows=len(still), size_bytes=size, created_at=row.created_at, exact=len(still) == len(here))
    point_to_segment(connection, copy, sorted(still))
    return True


def pointing(connection: Connection, name: str, ids: Collection[str], *, lock: bool = False) -> set[str]:
    """Those of the turns that point into a segment; locked in the one order where they are to point elsewhere."""
    found: set[str] = set()
    t = turns.c
    for some in chunked(sorted(ids), 5_000):
        mine = select(t.inference_id).where(one_of(connection, t.inference_id, some), t.payload_segment == name).order_by(t.inference_id)
        found.update(connection.execute(mine.with_for_update() if lock else mine).scalars())
    return found


def unknown_among(engine: Engine, names: Sequence[str]) -> list[str]:
    """Those of the files that no row tells of: left by a process of a version that wrote files before rows, and killed in between."""
    with reading(engine) as connection:
        known = {name for some in chunked(names) for name in connection.execute(_named(connection, some)).scalars()}
    return sorted(set(names) - known)


def _named(connection: Connection, names: list[str]) -> Select[tuple[str]]:
    return select(segments.c.name).where(one_of(connection, segments.c.name, names))
