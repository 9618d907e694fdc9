"""Membership in long lists: one statement and one parameter however long the list is, or the list in pieces.

A thousand placeholders cost more to render and bind than the lookups behind them, and databases bound their number.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import ARRAY, ColumnElement, Connection, String, any_, bindparam, cast, func, select, tuple_

from app.db.engine import to_json

T = TypeVar("T")

IN_LIST = 500


def chunked(items: Iterable[T], size: int = IN_LIST) -> Iterator[list[T]]:
    """The items in lists of at most `size`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def rows_of(connection: Connection, texts: Collection[str]) -> Any:  # noqa: ANN401 - a table of one column, `value`
    """The texts as a table, one row each."""
    if connection.dialect.name == "sqlite":
        return func.json_each(to_json(list(texts))).table_valued("value")
    return func.unnest(bindparam(None, list(texts), ARRAY(String))).table_valued("value").render_derived()


def one_of(connection: Connection, column: ColumnElement[Any], values: Collection[str] | Collection[int]) -> ColumnElement[bool]:
    """Whether the column is one of these texts or integers."""
    if connection.dialect.name == "sqlite":
        return column.in_(select(func.json_each(to_json(list(values))).table_valued("value").c.value))
    return column == any_(bindparam(None, list(values), ARRAY(column.type)))


def pair_of(
    connection: Connection, columns: tuple[ColumnElement[str], ColumnElement[str]], pairs: Sequence[tuple[str, str]]
) -> ColumnElement[bool]:
    """Whether the two text columns are one of these pairs."""
    if connection.dialect.name == "sqlite":
        given = func.json_each(to_json(pairs)).table_valued("value").c.value
        return tuple_(*columns).in_(select(func.json_extract(given, "$[0]"), func.json_extract(given, "$[1]")))
    parts = [cast(bindparam(None, [pair[n] for pair in pairs], ARRAY(String)), ARRAY(String)) for n in (0, 1)]
    given = func.unnest(*parts).table_valued("a", "b").render_derived()
    return tuple_(*columns).in_(select(given.c.a, given.c.b))
