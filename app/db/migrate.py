"""Schema revisions: upgrade, and a clear word when a database is not at the revision this code was written for."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import OperationalError

from app.db.engine import open_engine, reading
from app.domain.errors import BadConfig

ROOT = Path(__file__).resolve().parents[2]


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = url
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at `url` to `revision`, creating it where it is an absent SQLite file."""
    command.upgrade(_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Bring the database at `url` back to `revision` (`base` for an empty schema)."""
    command.downgrade(_config(url), revision)


def head_revision() -> str:
    """The revision this code was written for."""
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


def refuse_unknown(url: str) -> None:
    """Refuse a database whose revision this code has never heard of: a newer Ratchet wrote it."""
    current = current_revision(url)
    known = {script.revision for script in ScriptDirectory.from_config(_config("sqlite://")).walk_revisions()}
    if current is not None and current not in known:
        raise BadConfig(
            f"the database is at schema revision {current}, which this version of Ratchet does not know: "
            "install the version that wrote it, or name another folder with --data"
        )


def require_head(url: str) -> None:
    """Refuse a database at another revision, with the command that cures it."""
    current, head = current_revision(url), head_revision()
    if current != head:
        raise BadConfig(
            f"the database is at schema revision {current or 'none'}, this version of Ratchet needs {head}: run `ratchet db upgrade`"
        )
