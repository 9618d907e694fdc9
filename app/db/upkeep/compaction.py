"""Small segments of a day that is over become large ones, one for each policy; nobody who reads or erases meanwhile is disturbed.

    the day's small segments ──▶ `writing` rows for the new ones ──▶ files ──▶ one transaction ──▶ the small ones' files go ──▶ their rows
                                             turns point into the new ones, which are `whole`; the small ones are `dropping`

When no small ones are left, those that were made and are below half of their size are merged again, with their like of the same policy and
day: of a policy with little traffic every step makes a small one.

Killed before the transaction, the new files are swept with their rows; killed after it, the small ones are removed by whoever comes next.
Whoever looked up a place before the transaction and reads after it finds the turn by its row (`places_of`). An erasure that came while the
files were written is seen in the transaction: its turns point nowhere, and the new file is copied without them at once (`tidy`).
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, Engine, Row, not_, select

from app.db import locks
from app.db.chunks import chunked, one_of
from app.db.engine import reading
from app.db.ingestion import segment_rows
from app.db.ingestion.segment_rows import WHOLE
from app.db.ingestion.turns import point_to_segment
from app.db.tables import segments, turn_counts, turns
from app.domain.telemetry.streams import SegmentFiles

MERGED = "day-"
"""Segments that begin so are merged ones."""
CLAIM = "claim-"
DAY = timedelta(days=1)
FEWEST, MOST = 2, 10_000
"""Segments that are merged at a time."""
log = logging.getLogger(__name__)


class MergingFiles(SegmentFiles, Protocol):
    """The segments' files."""

    def merge(self, sources: Mapping[str, int], *, target: Callable[[str], str], at_most_bytes: int) -> Mapping[str, frozenset[str]]:
        """Write the turns of these segments (name and bytes) into one for each policy, or several of about that size, each named by
        `target(policy)`; whose turns each new one holds."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a segment."""
        ...


class Merged(NamedTuple):
    """What one step made."""

    sources: int
    files: int
    bytes: int


def compact(
    engine: Engine, files: MergingFiles, *, now: datetime, over_for: timedelta, at_most_bytes: int,
    fence: Callable[[Connection], None] = lambda connection: None, lost: set[str] | None = None,
) -> Merged | None:  # fmt: skip
    """Merge the oldest small segments that belong together; None where there are none. One call is one transaction of turns.

    Segments in `lost` are left out, and those whose file turns out to be gone are added to it: whoever calls until None comes back hands
    over the same set, or meets them again at every call.
    """
    segment_rows.tidy(engine, files, now=now)
    lost = set() if lost is None else lost
    while len(sources := _next(engine, before=_midnight(now - over_for), at_most_bytes=at_most_bytes, lost=lost)) >= FEWEST:
        made, gone = _merge(engine, files, sources, now=now, at_most_bytes=at_most_bytes, fence=fence)
        lost.update(gone)
        if made.sources:
            return made
    return None


def _next(engine: Engine, *, before: datetime, at_most_bytes: int, lost: Collection[str]) -> list[Row[*tuple[Any, ...]]]:
    sources = _together(engine, before=before, at_most_bytes=at_most_bytes, lost=lost)
    return sources if len(sources) >= FEWEST else _still_small(engine, at_most_bytes=at_most_bytes, lost=lost)


def _merge(
    engine: Engine, files: MergingFiles, sources: Sequence[Row[*tuple[Any, ...]]], *, now: datetime, at_most_bytes: int,
    fence: Callable[[Connection], None],
) -> tuple[Merged, list[str]]:  # fmt: skip
    """What these became, and those of them whose file is gone."""
    day, names = f"{sources[0].created_at:%Y%m%d}", [row.name for row in sources]
    made: list[str] = []

    def target(policy: str) -> str:
        digest = blake2b(policy.encode(), digest_size=4).hexdigest()
        made.append(segment_rows.intend(engine, f"{MERGED}{day}-{digest}", now=now))
        return made[-1]

    try:
        held = files.merge({row.name: row.bytes for row in sources}, target=target, at_most_bytes=at_most_bytes)
        missing = frozenset(name for name in names if not files.size(name))
        sizes = {name: files.size(name) for name in held}
        lost = locks.settled(engine, lambda connection: _switch(connection, sources, held, sizes, missing, fence))
    except Exception:
        for name in made:  # a process that is killed leaves this to `sweep`
            segment_rows.abandon(engine, name, files)
        raise
    segment_rows.tidy(engine, files, now=now)
    if lost:
        log.error("event=segments_missing count=%d first=%s alarm=files that rows tell of are gone", len(lost), lost[0])
    return Merged(len(sources) - len(lost), len(held), sum(sizes.values())), lost


def _midnight(moment: datetime) -> datetime:
    return datetime(moment.year, moment.month, moment.day, tzinfo=UTC)


def _together(engine: Engine, *, before: datetime, at_most_bytes: int, lost: Collection[str] = ()) -> list[Row[*tuple[Any, ...]]]:
    """The oldest small segments that were begun on one day, as many as make one file for each policy."""
    s = segments.c
    small = (s.state == WHOLE) & (s.created_at < before) & not_(s.name.startswith(MERGED)) & not_(s.name.startswith(CLAIM))
    oldest = select(s.name, s.created_at, s.bytes, s.rows).where(small).order_by(s.created_at, s.name)
    with reading(engine) as connection:
        policies = len(connection.execute(select(turn_counts.c.policy).distinct()).all())
        found: list[Row[*tuple[Any, ...]]] = []
        for row in connection.execution_options(stream_results=True).execute(oldest):
            if row.name in lost:
                continue
            full = sum(one.bytes for one in found) + row.bytes > at_most_bytes * max(1, policies)
            if found and (full or len(found) == MOST or row.created_at >= _midnight(found[0].created_at) + DAY):
                if len(found) >= FEWEST:
                    break
                found.clear()  # a day's only small one has nobody to be merged with
            found.append(row)
    return found


def _still_small(engine: Engine, *, at_most_bytes: int, lost: Collection[str] = ()) -> list[Row[*tuple[Any, ...]]]:
    """Merged segments of one policy and day that are below half of the size, as many as make one."""
    s = segments.c
    small = (s.state == WHOLE) & s.name.startswith(MERGED) & (s.bytes < at_most_bytes // 2)
    with reading(engine) as connection:
        rows = connection.execute(select(s.name, s.created_at, s.bytes, s.rows).where(small).order_by(s.name)).all()
    for _, alike in groupby(rows, key=lambda row: row.name.partition(".")[0]):
        found: list[Row[*tuple[Any, ...]]] = []
        for row in alike:
            if row.name not in lost and sum(one.bytes for one in found) + row.bytes <= at_most_bytes:
                found.append(row)
        if len(found) >= FEWEST:
            return found
    return []


def _switch(
    connection: Connection, sources: Sequence[Row[*tuple[Any, ...]]], held: Mapping[str, frozenset[str]], sizes: Mapping[str, int],
    missing: frozenset[str], fence: Callable[[Connection], None],
) -> list[str]:  # fmt: skip
    """Everything at once: turns, new rows, old rows. Returns sources whose file is gone: they stay, and so does what points into them."""
    fence(connection)
    names, newest = [row.name for row in sources], max((row.created_at for row in sources), default=None)
    places = _lock(connection, sorted(id_ for ids in held.values() for id_ in ids), set(names))
    for name, ids in sorted(held.items()):
        here = sorted(ids & places.keys())
        if not here:
            segment_rows.supersede(connection, [name])
            continue
        exact = len(here) == len(ids)  # else erased meanwhile, or never pointed at: a turn that lies in two files stays in the other one
        segment_rows.complete(connection, name, rows=len(here), size_bytes=sizes[name], created_at=newest, exact=exact)
        point_to_segment(connection, name, here)
    # A row that says that nothing is in it: a version before this one removed the file of which an erasure left nothing.
    full = select(segments.c.name).where(
        one_of(connection, segments.c.name, sorted(missing)), segments.c.rows > 0, segments.c.state == WHOLE
    )
    lost = sorted(connection.execute(full).scalars()) if missing else []
    segment_rows.supersede(connection, [name for name in names if name not in lost])
    return lost


def _lock(connection: Connection, ids: Sequence[str], names: set[str]) -> dict[str, str]:
    """Those of the turns that still point into the sources, locked in the one order."""
    t = turns.c
    found: dict[str, str] = {}
    for some in chunked(ids, 5_000):
        mine = select(t.inference_id, t.payload_segment).where(one_of(connection, t.inference_id, some), t.payload_segment.is_not(None))
        rows = connection.execute(mine.order_by(t.inference_id).with_for_update())
        found |= {row.inference_id: row.payload_segment for row in rows if row.payload_segment in names}
    return found


def places_of(connection: Connection, ids: Collection[str]) -> dict[str, str]:
    """In which segment each of these turns lies now."""
    t = turns.c
    found: dict[str, str] = {}
    for some in chunked(ids, 5_000):
        query = select(t.inference_id, t.payload_segment).where(one_of(connection, t.inference_id, some), t.payload_segment.is_not(None))
        found |= {row.inference_id: row.payload_segment for row in connection.execute(query)}
    return found
