"""Engines and transactions: one place that knows how SQLite and PostgreSQL are opened."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql.dml import Insert
from sqlalchemy.sql.schema import Table

from app.domain.errors import Unavailable

BUSY_TIMEOUT_MS = 30_000
"""How long a SQLite writer waits for another one. A stage's transaction takes milliseconds; thirty seconds pass when a process hangs."""

CACHE_KIB = 16_384
"""Pages of a SQLite file that a connection keeps, at most: a transaction of trimming or cutting must not spill SQLite's own 2 MB."""

POSTGRES = {"connect_timeout": 3, "tcp_user_timeout": 5_000, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""A server that is gone without a word (seconds; milliseconds) is noticed, instead of holding a thread for the kernel's two hours."""
SESSION = {"synchronous_commit": "on", "statement_timeout": "60s", "lock_timeout": "10s", "idle_in_transaction_session_timeout": "60s"}
"""No statement, no wait for a lock and no forgotten transaction lasts longer, and what is committed is on the
disk of this server and of every synchronous standby, whatever the server's default is. What a URL's own `options` say goes before."""
MIGRATING = {"statement_timeout": "0", "lock_timeout": "10s", "idle_in_transaction_session_timeout": "0"}
"""An index over a year takes hours; but nobody waits longer than this behind a migration that waits for a lock."""
SNAPSHOT: dict[str, dict[str, Any]] = {
    "sqlite": {"sqlite_begin": "DEFERRED"},
    "postgresql": {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True},
}
"""How a transaction is begun all of whose statements see the database as it was at the first of them."""


def open_engine(url: str, *, session: Mapping[str, str] = SESSION) -> Engine:
    """Open a database: `sqlite:////path/file.db` or `postgresql+psycopg://…` (plain `postgresql://` is accepted).

    Of several hosts (`?host=a:5432&host=b:5432`) the one that takes writes is found, before a failover and after it.
    """
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(parsed.render_as_string(hide_password=False))
    options = {"connect_args": _postgres_arguments(parsed, session), "pool_pre_ping": True, "pool_size": 5, "max_overflow": 10}
    return create_engine(parsed, **options, **_OURS)


def _postgres_arguments(url: URL, session: Mapping[str, str]) -> dict[str, Any]:
    """What the driver is told, except for what the URL itself says."""
    own = url.query.get("options", "")
    settings = " ".join([f"-c {name}={value}" for name, value in session.items()] + [own if isinstance(own, str) else " ".join(own)])
    several = {"target_session_attrs": "read-write"} if isinstance(url.query.get("host"), tuple) else {}
    told = {name: value for name, value in (POSTGRES | several).items() if name not in url.query}
    return told | {"options": settings.strip()}


class _Closing(sqlite3.Connection):
    """Is closed when nobody holds it any more, as Python did without a word before 3.13: a command's store has no end of its own."""

    def __del__(self) -> None:
        with suppress(sqlite3.ProgrammingError):  # it was never opened
            self.close()


def _open_sqlite(url: str) -> Engine:
    options = {"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False, "factory": _Closing}
    engine = create_engine(url, connect_args=options, **_OURS)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:  # noqa: ANN401 - the driver's connection, whichever driver
        # The driver's own transaction handling is switched off: it starts transactions late (DEFERRED), and a reader that
        # becomes a writer then fails with "database is locked" at once instead of waiting for its turn.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # NORMAL loses acknowledged commits at power loss
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA secure_delete=ON")  # what is erased or trimmed is overwritten, not left in a free page

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        mode = connection.get_execution_options().get("sqlite_begin", "IMMEDIATE")
        connection.exec_driver_sql(f"BEGIN {mode}")

    return engine


_FROM_JSON = msgspec.json.Decoder().decode


def to_json(value: object) -> str:
    """Wire types and builtins as JSON; a number that JSON cannot say (NaN, infinity) becomes null on both databases."""
    return msgspec.json.encode(value).decode()


_OURS: dict[str, Any] = {"json_serializer": to_json, "json_deserializer": _FROM_JSON, "hide_parameters": True}
"""An error that is logged, or kept with a dead letter, tells nothing of what the statement was given: people's words."""


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction that may write; leaving by an exception rolls it back."""
    with engine.begin() as connection:
        yield connection


@contextmanager
def expected_to_answer(otherwise: str = "check RATCHET_DATABASE_URL") -> Iterator[None]:
    """Raises `Unavailable` for a database that is away; `otherwise` is the cure, or what follows from it."""
    try:
        yield
    except OperationalError as error:
        raise Unavailable(f"the database does not answer ({error.orig}): {otherwise}") from error


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """One consistent read that takes no write lock: what others commit meanwhile is seen by the next one.

    On PostgreSQL a statement that would write or lock rows is refused.
    """
    with engine.connect().execution_options(**SNAPSHOT[engine.dialect.name]) as connection, connection.begin():
        yield connection


def inserting(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """`INSERT` in the connection's dialect, for `ON CONFLICT`."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def insert_or_ignore(connection: Connection, table: Table) -> Insert:
    """`INSERT … ON CONFLICT DO NOTHING` in the connection's dialect."""
    return inserting(connection, table).on_conflict_do_nothing()


def upsert(connection: Connection, table: Table, *, key: tuple[str, ...], update: tuple[str, ...]) -> Insert:
    """`INSERT … ON CONFLICT (key) DO UPDATE` that overwrites the columns in `update`."""
    statement = inserting(connection, table)
    return statement.on_conflict_do_update(index_elements=list(key), set_={name: statement.excluded[name] for name in update})


def add_up(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, key: tuple[str, ...], add: tuple[str, ...]) -> None:
    """Add the columns `add` to the rows with these keys, which begin at nothing. The caller sorts them by key: two writers that do
    cannot wait for each other in a ring."""
    if rows:
        statement = inserting(connection, table)
        more = {name: table.c[name] + statement.excluded[name] for name in add}
        connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=more), rows)
