"""What a deployment knows about itself: its id, when it was backed up, when a backup was last restored and found whole."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from app.db.engine import insert_or_ignore, upsert
from app.db.tables import deployment_facts
from app.domain.ids import uuid7

IDENTITY, BACKUP, DRILL = "identity", "backup", "drill"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One of them, and since when it is so."""

    value: dict[str, Any]
    at: datetime


def read_fact(connection: Connection, name: str) -> Fact | None:
    """The fact, where it was ever written."""
    row = connection.execute(select(deployment_facts).where(deployment_facts.c.name == name)).one_or_none()
    return None if row is None else Fact(value=row.value, at=row.at)


def write_fact(connection: Connection, name: str, value: dict[str, Any], *, now: datetime) -> None:
    """Overwrite the fact."""
    statement = upsert(connection, deployment_facts, key=("name",), update=("value", "at"))
    connection.execute(statement, {"name": name, "value": value, "at": now})


def identity(connection: Connection, *, now: datetime) -> str:
    """The deployment's id, made with the first call; a restored database keeps it."""
    fresh = {"name": IDENTITY, "value": {"id": uuid7()}, "at": now}
    connection.execute(insert_or_ignore(connection, deployment_facts).values(**fresh))
    fact = read_fact(connection, IDENTITY)
    assert fact is not None
    return str(fact.value["id"])
