"""Schema revisions: upgrade, and a clear word when this code cannot run on the revision that a database is at.

A rolling upgrade migrates first and replaces processes afterwards, so for a while older code runs on a newer schema. A migration that only
expands leaves the older revisions in `compatible_revisions`; one that contracts deletes those whose code it breaks. Newer code on an older
schema is refused: it needs what is not there yet.
"""

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import delete, inspect, select
from sqlalchemy.exc import OperationalError

from app.db import locks
from app.db.engine import insert_or_ignore, open_engine, reading, writing
from app.db.tables import compatible_revisions
from app.domain.errors import BadConfig
from app.sealing import Seal

ROOT = Path(__file__).resolve().parents[2]


def _config(url: str, seal: Seal | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = url
    config.attributes["seal"] = seal
    return config


def upgrade(url: str, revision: str = "head", *, seal: Seal | None = None) -> None:
    """Bring the database at `url` to `revision`, creating it where it is an absent SQLite file; `seal` where it holds webhooks."""
    command.upgrade(_config(url, seal), revision)
    _declare_compatible(url)


def downgrade(url: str, revision: str, *, seal: Seal | None = None) -> None:
    """Bring the database at `url` back to `revision` (`base` for an empty schema); `seal` where it holds webhooks."""
    command.downgrade(_config(url, seal), revision)
    _declare_compatible(url, only=True)


@cache
def head_revision() -> str:
    """The revision this code was written for; read once a process, because every store of a service asks for it at start."""
    head = ScriptDirectory.from_config(_config("sqlite://")).get_current_head()
    assert head is not None
    return head


def current_revision(url: str) -> str | None:
    """The revision a database is at; None for an empty one."""
    engine = open_engine(url)
    try:
        with reading(engine) as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except OperationalError as error:
        raise BadConfig(
            f"the database cannot be opened ({error.orig}): check RATCHET_DATA and RATCHET_DATABASE_URL, then run `ratchet db upgrade`"
        ) from error
    finally:
        engine.dispose()


def compatible(url: str) -> set[str]:
    """Revisions whose code may run on the database as it is now; empty before the revision that began to write them down."""
    engine = open_engine(url)
    try:
        with reading(engine) as connection:
            if not inspect(connection).has_table(compatible_revisions.name):
                return set()
            return set(connection.execute(select(compatible_revisions.c.revision)).scalars())
    finally:
        engine.dispose()


def _declare_compatible(url: str, *, only: bool = False) -> None:
    """The code of the revision that the database is at may run on it; `only`: nobody else's, because the schema went back."""
    engine = open_engine(url)
    try:
        with writing(engine) as connection:
            current = MigrationContext.configure(connection).get_current_revision()
            if current is not None and inspect(connection).has_table(compatible_revisions.name):
                if only:
                    connection.execute(delete(compatible_revisions))
                connection.execute(insert_or_ignore(connection, compatible_revisions), {"revision": current})
    finally:
        engine.dispose()


def contract(url: str) -> list[str]:
    """No process of an older revision runs any more, and none may start from now on. Returns those revisions."""
    engine = open_engine(url)
    try:
        with writing(engine) as connection:
            locks.hold(connection, locks.ERASURES)  # whoever writes what people said before this commit is waited for
            older = delete(compatible_revisions).where(compatible_revisions.c.revision != head_revision())
            return sorted(connection.execute(older.returning(compatible_revisions.c.revision)).scalars())
    finally:
        engine.dispose()


def knows(url: str) -> bool:
    """Whether the database's revision is one of this code's; a newer one is nothing to migrate."""
    current = current_revision(url)
    return current is None or current in {s.revision for s in ScriptDirectory.from_config(_config("sqlite://")).walk_revisions()}


def refuse_unknown(url: str) -> None:
    """Refuse to migrate a database whose revision this code has never heard of: a newer Ratchet wrote it, and its schema stays as it is.

    One that the newer Ratchet says this code may run on is fine, and there is nothing to migrate.
    """
    current = current_revision(url)
    if not knows(url) and head_revision() not in compatible(url):
        raise BadConfig(
            f"the database is at schema revision {current}, which this version of Ratchet does not know: "
            "install the version that wrote it, or name another folder with --data"
        )


def require_head(url: str) -> None:
    """Refuse a database on which this code cannot run, with the command that cures it."""
    current, head = current_revision(url), head_revision()
    if current != head and head not in compatible(url):
        raise BadConfig(
            f"the database is at schema revision {current or 'none'}, this version of Ratchet needs {head}: run `ratchet db upgrade`"
        )
