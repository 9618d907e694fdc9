"""Where the stream stands: consumers, dead letters, what waits for its turn, who was forgotten."""

from sqlalchemy import Connection, func, select, text

from app.db.sight.paging import page_by_number
from app.db.tables import dead_letters, erasures, observations, stream_offsets
from app.domain.views.pages import ErasureRow, LetterRow, Page, StreamRow

MOST = 10_000


def read_letters(connection: Connection, *, after: str | None, limit: int) -> Page[LetterRow]:
    """Dead letters without their payloads, newest first."""
    d = dead_letters.c
    query = select(*(d[name] for name in LetterRow.__dataclass_fields__))
    return page_by_number(connection, query, d.id, after=after, limit=limit, made=lambda row: LetterRow(**row._mapping))


def read_streams(connection: Connection) -> list[StreamRow]:
    """How far each consumer is."""
    s = stream_offsets.c
    query = select(*(s[name] for name in StreamRow.__dataclass_fields__)).order_by(s.updated_at.desc()).limit(200)
    return sorted((StreamRow(**row._mapping) for row in connection.execute(query)), key=lambda r: (r.consumer_group, r.topic, r.partition))


def read_parked(connection: Connection) -> int:
    """Observations that wait for their turn, counted no further than `MOST`: a table is not counted to show a number."""
    some = select(observations.c.id).where(text("status = 'parked'")).limit(MOST).subquery()
    return connection.execute(select(func.count()).select_from(some)).scalar_one()


def read_erasures(connection: Connection, newest: int) -> list[ErasureRow]:
    """Newest first."""
    rows = connection.execute(select(erasures).order_by(erasures.c.erased_at.desc()).limit(newest))
    return [ErasureRow(actor=row.actor, requested_by=row.requested_by, erased_at=row.erased_at, report=row.report) for row in rows]
