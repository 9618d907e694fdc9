"""What a deployment knows about itself: its id, its people's salt, when it was backed up, when a backup was restored and whole."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, exists, inspect, make_url, select

from app.db.engine import expected_to_answer, insert_or_ignore, open_engine, reading, upsert
from app.db.tables import deployment_facts, turns
from app.domain.ids import uuid7

IDENTITY, SALT, BACKUP, DRILL = "identity", "actor_salt", "backup", "drill"


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


def write_first(connection: Connection, name: str, value: dict[str, Any], *, now: datetime) -> None:
    """Write the fact, unless it was ever written."""
    connection.execute(insert_or_ignore(connection, deployment_facts), {"name": name, "value": value, "at": now})


def identity(connection: Connection, *, now: datetime) -> str:
    """The deployment's id, made with the first call; a restored database keeps it."""
    write_first(connection, IDENTITY, {"id": uuid7()}, now=now)
    fact = read_fact(connection, IDENTITY)
    assert fact is not None
    return str(fact.value["id"])


def note_salt(connection: Connection, fingerprint: str, *, now: datetime) -> None:
    """People are stored under the salt of this fingerprint, unless one was noted before."""
    write_first(connection, SALT, {"fingerprint": fingerprint}, now=now)


@dataclass(frozen=True)
class StoredUnder:
    """What a database says of the salt of its people."""

    fingerprint: str | None
    """None where nobody noted it yet."""
    since_salts: bool
    """Its schema is of a time in which every deployment has a salt of its own."""
    people: bool
    """It holds somebody whose pseudonym was made since then."""


NOBODY = StoredUnder(None, since_salts=False, people=False)


def stored_under(url: str) -> StoredUnder:
    """Of the database at `url`, whatever its schema; an SQLite file that is not there is not made. Raises `Unavailable`."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not (parsed.database and Path(parsed.database).exists()):
        return NOBODY
    engine = open_engine(url)
    try:
        with expected_to_answer(), reading(engine) as connection:
            if not inspect(connection).has_table(deployment_facts.name):
                return NOBODY
            fact = read_fact(connection, SALT)
            people = connection.execute(select(exists().where(turns.c.actor.is_not(None)))).scalar_one()
    finally:
        engine.dispose()
    return StoredUnder(None if fact is None else str(fact.value["fingerprint"]), since_salts=True, people=people)
