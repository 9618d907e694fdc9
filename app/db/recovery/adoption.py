"""After a restore to a moment: turns whose file has gone since find their words in the file that took its place.

No file goes before its turns lie in another one (merged, or copied without somebody), unless they were to go. So whatever moment a database
went back to, the words of its turns are in files that are there: in some, since then, of which it knows nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from sqlalchemy import Connection, Engine, func, insert, select

from app.db import locks
from app.db.chunks import one_of
from app.db.engine import reading, writing
from app.db.ingestion import segment_rows
from app.db.ingestion.segment_rows import TRIMMING, WHOLE, WRITING
from app.db.ingestion.turns import point_to_segment
from app.db.tables import segments, turns
from app.db.upkeep.compaction import places_of
from app.domain.telemetry.streams import SegmentFiles


class EveryFile(SegmentFiles, Protocol):
    """The files that turns' words lie in."""

    def names(self) -> list[str]:
        """Every segment there is."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a segment; 0 where there is none."""
        ...


def adopt(engine: Engine, files: EveryFile, *, now: datetime) -> int:
    """Let turns whose file is gone point into one that no row knows and that holds them; returns how many. Called again it finds none."""
    adopted, gone = 0, dict[str, bool]()
    for name in segment_rows.unknown_among(engine, files.names()):
        held = files.turns(name)
        with reading(engine) as connection:
            places = places_of(connection, held)
        gone |= {place: not files.size(place) for place in set(places.values()) - gone.keys()}
        wanted = {id_: place for id_, place in places.items() if gone[place]}
        if wanted:
            found = _Found(name, held, wanted, files.size(name))
            adopted += locks.settled(engine, lambda connection, found=found: _take(connection, found, now))
    segment_rows.tidy(engine, files, now=now)
    return adopted


class _Found(NamedTuple):
    """A file that no row knows."""

    name: str
    held: Sequence[str]
    wanted: Mapping[str, str]
    """Those of its turns whose own file is gone, and where they point."""
    size: int


def _take(connection: Connection, found: _Found, now: datetime) -> int:
    """A row for the file, as old as what it stands for; its other turns, who lie elsewhere or were erased, are left out of it by `tidy`."""
    born = select(func.max(segments.c.created_at)).where(one_of(connection, segments.c.name, sorted(set(found.wanted.values()))))
    state = WHOLE if len(found.wanted) == len(found.held) else TRIMMING
    row = {"name": found.name, "rows": len(found.wanted), "bytes": found.size, "state": state}
    connection.execute(insert(segments), row | {"created_at": connection.execute(born).scalar() or now})
    point_to_segment(connection, found.name, sorted(found.wanted))
    return len(found.wanted)


def let_go(engine: Engine, files: EveryFile, *, now: datetime) -> int:
    """Rows of files that are gone and into which nobody points any more go; returns how many."""
    with reading(engine) as connection:
        known = connection.execute(select(segments.c.name).where(segments.c.state != WRITING)).scalars().all()
    gone = [name for name in known if not files.size(name)]
    with writing(engine) as connection:
        mine = select(turns.c.payload_segment).where(one_of(connection, turns.c.payload_segment, gone)).distinct()
        left = set(gone) - set(connection.execute(mine).scalars())
        segment_rows.supersede(connection, left)
    segment_rows.tidy(engine, files, now=now)
    return len(left)
