"""What the database server says about itself: whether a commit waits for a standby, and on which timeline it is."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

WAITING = ("on", "remote_write", "remote_apply")
"""Values of `synchronous_commit` that wait for a standby, where `synchronous_standby_names` names any."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """A PostgreSQL server that takes writes."""

    version: str
    timeline: int
    """One more after each failover."""
    synchronous: bool
    """A commit waits for a standby: what was acknowledged survives the loss of this server."""
    fsync: bool
    encoding: str


def server_state(connection: Connection) -> ServerState | None:
    """The server at the other end; None on SQLite."""
    if connection.dialect.name == "sqlite":
        return None
    query = (
        "SELECT current_setting('server_version'), current_setting('synchronous_standby_names'), current_setting('synchronous_commit'), "
        "current_setting('fsync'), current_setting('server_encoding')"
    )
    version, names, commit, fsync, encoding = connection.execute(text(query)).one()
    return ServerState(
        version=version, timeline=timeline(connection), synchronous=bool(names) and commit in WAITING, fsync=fsync == "on",
        encoding=encoding,
    )  # fmt: skip


def timeline(connection: Connection) -> int:
    """The timeline that the next commit is written to; 0 on SQLite, which has one history."""
    if connection.dialect.name == "sqlite":
        return 0
    name = connection.execute(text("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")).scalar_one()
    return int(str(name)[:8], 16)
