"""A page of a list: it begins behind the last row of the page before, whose key goes through an address as text and comes back."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, and_, or_

from app.db.tables import EPOCH
from app.domain.errors import BadRequest
from app.domain.views.pages import Page

T = TypeVar("T")
Made = Callable[[Row[Any]], T]
"""A row of the page from one of the table."""


def page_by_key(
    connection: Connection, query: Any, moment: ColumnElement[datetime], id_: ColumnElement[str], *, after: str | None, limit: int,  # noqa: ANN401 - a select
    made: Made[T],
) -> Page[T]:  # fmt: skip
    """Newest first, by a moment and, where two have the same, by an id; the query has both."""
    if after is not None:
        at, last = read_key(after)
        query = query.where(moment <= at, or_(moment < at, and_(moment == at, id_ < last)))
    rows = connection.execute(query.order_by(moment.desc(), id_.desc()).limit(limit + 1)).all()
    return _page(rows, limit, made, lambda row: key_of(row._mapping[str(moment.key)], row._mapping[str(id_.key)]))


def page_by_number(
    connection: Connection, query: Any, number: ColumnElement[int], *, after: str | None, limit: int, made: Made[T],  # noqa: ANN401 - a select
) -> Page[T]:  # fmt: skip
    """The highest first."""
    if after is not None:
        query = query.where(number < read_number(after))
    rows = connection.execute(query.order_by(number.desc()).limit(limit + 1)).all()
    return _page(rows, limit, made, lambda row: str(row._mapping[str(number.key)]))


def _page(rows: Any, limit: int, made: Made[T], place: Callable[[Row[Any]], str]) -> Page[T]:  # noqa: ANN401 - a sequence of rows
    """One row more than is shown was asked for: it says whether there is another page."""
    shown = rows[:limit]
    return Page(rows=tuple(made(row) for row in shown), after=place(shown[-1]) if len(rows) > limit else None)


def key_of(moment: datetime, id_: str) -> str:
    """`1763733600000000.ID`."""
    return f"{(moment - EPOCH) // timedelta(microseconds=1)}.{id_}"


def read_key(text: str) -> tuple[datetime, str]:
    """Back again. Raises `BadRequest`."""
    micros, _, id_ = text.partition(".")
    if not micros.lstrip("-").isdigit() or len(micros) > 17 or not id_:
        raise BadRequest(f"{text[:60]!r} is no place in this list: begin at its first page", param="after")
    return EPOCH + timedelta(microseconds=int(micros)), id_


def read_number(text: str) -> int:
    """A key that is a number. Raises `BadRequest`."""
    if not text.isdigit() or len(text) > 18:
        raise BadRequest(f"{text[:60]!r} is no place in this list: begin at its first page", param="after")
    return int(text)
