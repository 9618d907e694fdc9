"""Segments in the database: what is to be written is said before, so that no file with somebody's words is ever unknown.

    intend (its own commit) ──▶ file ──▶ turns and `complete`, one commit
          └── killed on the way? the intent stays, and `sweep` removes it with its file

A file belongs to one intent: no two attempts write under one name, so one that wakes up late overwrites nobody's.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import count

from sqlalchemy import Connection, Engine, Select, delete, or_, select, update

from app.db.chunks import chunked, one_of
from app.db.engine import insert_or_ignore, reading, writing
from app.db.tables import segments
from app.domain.errors import Unavailable
from app.domain.telemetry.streams import EraseFromSegment

WRITING, WHOLE, DROPPING = "writing", "whole", "dropping"
GIVEN_UP = timedelta(minutes=10)
"""An intent this old has lost its process. One that is alive after all finds its intent gone and tries again."""
SWEPT_AT_ONCE = 100


def intend(engine: Engine, name: str, *, now: datetime) -> str:
    """Say that a segment will be written; returns its name, which has a number behind it where an earlier attempt took the plain one."""
    with writing(engine) as connection:
        for taken in _names(name):
            row = {"name": taken, "rows": 0, "bytes": 0, "created_at": now, "state": WRITING}
            if connection.execute(insert_or_ignore(connection, segments).returning(segments.c.name), [row]).first() is not None:
                return taken
    raise AssertionError("counting ends nowhere")


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}.{number}" for number in count(2))


def record(connection: Connection, name: str, *, rows: int, size_bytes: int, now: datetime) -> None:
    """A segment that somebody else wrote and swears to: a claim, whose own sweep knows it by its event."""
    row = {"name": name, "rows": rows, "bytes": size_bytes, "created_at": now}
    connection.execute(insert_or_ignore(connection, segments), row)


def complete(connection: Connection, name: str, *, rows: int, size_bytes: int, created_at: datetime | None = None) -> None:
    """The file is whole and the transaction's turns point into it. Raises `Unavailable` where the intent was swept meanwhile.

    `created_at` where what is in it is older than the file.
    """
    mine = (segments.c.name == name) & (segments.c.state == WRITING)
    values = {"state": WHOLE, "rows": rows, "bytes": size_bytes} | ({} if created_at is None else {"created_at": created_at})
    kept = connection.execute(update(segments).where(mine).values(values))
    if kept.rowcount != 1:
        raise Unavailable(f"segment {name} took longer than {GIVEN_UP} and was swept: the batch is applied again")


def supersede(connection: Connection, names: Iterable[str]) -> None:
    """Nobody points into these any more from this commit on; `finish` removes their files."""
    mine = one_of(connection, segments.c.name, list(names)) & (segments.c.state == WHOLE)
    connection.execute(update(segments).where(mine).values(state=DROPPING))


def finish(engine: Engine, erase_from_segment: EraseFromSegment) -> int:
    """Remove the files that nobody points into any more, then their rows; returns how many."""
    with reading(engine) as connection:
        names = connection.execute(select(segments.c.name).where(segments.c.state == DROPPING)).scalars().all()
    for name in names:
        erase_from_segment(name, None)
        with writing(engine) as connection:
            connection.execute(delete(segments).where(segments.c.name == name, segments.c.state == DROPPING))
    return len(names)


def forget(connection: Connection, name: str) -> None:
    """The intent of a file that turned out to hold nothing."""
    connection.execute(delete(segments).where(segments.c.name == name, segments.c.state == WRITING))


def abandon(engine: Engine, name: str, erase_from_segment: EraseFromSegment) -> None:
    """Take back an intent and its file."""
    erase_from_segment(name, None)
    with writing(engine) as connection:
        forget(connection, name)


def sweep(engine: Engine, erase_from_segment: EraseFromSegment, *, now: datetime) -> int:
    """Remove intents whose process was killed, with their files, and files that nobody points into any more; returns how many."""
    finished = finish(engine, erase_from_segment)
    dead = or_(segments.c.created_at < now - GIVEN_UP, segments.c.created_at > now + GIVEN_UP)
    given_up = select(segments.c.name).where(segments.c.state == WRITING, dead).order_by(segments.c.name).limit(SWEPT_AT_ONCE)
    with writing(engine) as connection:
        names = list(connection.execute(given_up.with_for_update(skip_locked=True)).scalars())
        for name in names:
            erase_from_segment(name, None)
        if names:
            connection.execute(delete(segments).where(one_of(connection, segments.c.name, names)))
    return finished + len(names)


def unknown_among(engine: Engine, names: Sequence[str]) -> list[str]:
    """Those of the files that no row tells of: left by a process of a version that wrote files before rows, and killed in between."""
    with reading(engine) as connection:
        known = {name for some in chunked(names) for name in connection.execute(_named(connection, some)).scalars()}
    return sorted(set(names) - known)


def _named(connection: Connection, names: list[str]) -> Select[tuple[str]]:
    return select(segments.c.name).where(one_of(connection, segments.c.name, names))


def erase_from(connection: Connection, located: Iterable[tuple[str, str]], erase_from_segment: EraseFromSegment) -> int:
    """Rewrite segments without these (segment, turn) pairs; returns how many segments.

    The rows are locked, in order of their names, until the transaction ends: of two people who share a segment and are erased at the
    same time, the second is taken from what the first left. Otherwise one of the two rewrites would bring the other person back.
    """
    by_segment: dict[str, set[str]] = {}
    for name, inference_id in located:
        by_segment.setdefault(name, set()).add(inference_id)
    if not by_segment:
        return 0
    mine = select(segments.c.name).where(one_of(connection, segments.c.name, list(by_segment))).order_by(segments.c.name)
    connection.execute(mine.with_for_update()).all()
    for name, ids in sorted(by_segment.items()):
        removed = erase_from_segment(name, frozenset(ids))
        connection.execute(update(segments).where(segments.c.name == name).values(rows=segments.c.rows - removed))
    return len(by_segment)
