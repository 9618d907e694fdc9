"""Rows of any table, of which a test says what matters: the other columns that must hold something get something plain."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import JSON, Boolean, Column, Engine, LargeBinary, String, Table, insert
from sqlalchemy.types import TypeEngine

from app.db.engine import writing
from app.db.tables import UtcMicros

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
"""The first row's moments; each later one's are a second later."""
POLICY = "composer"


def fill(engine: Engine, table: Table, count: int = 1, **given: Any) -> None:
    """Insert rows; what is given as a function is asked for each row's number, from 0."""
    rows = [{column.name: _value(column, n, given) for column in table.c if column.name in given or _needed(column)} for n in range(count)]
    with writing(engine) as connection:
        connection.execute(insert(table), rows)


def _needed(column: Column[Any]) -> bool:
    return not column.nullable and column.server_default is None and column.autoincrement is not True


def _value(column: Column[Any], n: int, given: dict[str, Any]) -> Any:
    if column.name in given:
        value = given[column.name]
        return cast("Callable[[int], Any]", value)(n) if callable(value) else value
    return POLICY if column.name == "policy" else _plain(column.type, n)


def _plain(kind: TypeEngine[Any], n: int) -> Any:
    if isinstance(kind, UtcMicros):
        return NOON + timedelta(seconds=n)
    if isinstance(kind, String):
        return f"{n:06}"
    if isinstance(kind, JSON):
        return {}
    if isinstance(kind, Boolean):
        return False
    return n.to_bytes(4, "big") if isinstance(kind, LargeBinary) else n + 1
