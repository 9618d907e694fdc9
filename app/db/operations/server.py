"""What the database server says about itself: what a commit survives, and on which timeline it is."""

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
    fsync: bool
    full_page_writes: bool
    commit: str
    """`synchronous_commit`, as this connection has it."""
    standby_named: bool
    encoding: str

    @property
    def synchronous(self) -> bool:
        """A commit waits for a standby: what was acknowledged survives the loss of this server."""
        return self.standby_named and self.commit in WAITING

    def weaknesses(self) -> list["Weakness"]:
        """What could lose something that was acknowledged."""
        found = [
            Weakness(what=f"{name} is off", cure="set it in postgresql.conf: acknowledged events are lost with the machine", here=True)
            for name, on in (("fsync", self.fsync), ("full_page_writes", self.full_page_writes))
            if not on
        ]
        if self.commit == "off":
            cure = "take it out of the URL's options: an acknowledged event may not be on any disk"
            found.append(Weakness(what="synchronous_commit is off", cure=cure, here=True))
        elif not self.synchronous:
            cure = "set synchronous_standby_names = 'ANY 1 (*)' with a standby running: a failover loses what was acknowledged last"
            found.append(Weakness(what="no standby is synchronous", cure=cure, here=False))
        return found


@dataclass(frozen=True, kw_only=True)
class Weakness:
    """Something about a server that could lose what was acknowledged."""

    what: str
    cure: str
    here: bool
    """With this machine alone; else only where another takes over from it."""


def server_state(connection: Connection) -> ServerState | None:
    """The server at the other end; None on SQLite."""
    if connection.dialect.name == "sqlite":
        return None
    query = (
        "SELECT current_setting('server_version'), current_setting('synchronous_standby_names'), current_setting('synchronous_commit'), "
        "current_setting('fsync'), current_setting('full_page_writes'), current_setting('server_encoding')"
    )
    version, names, commit, fsync, full_pages, encoding = connection.execute(text(query)).one()
    return ServerState(
        version=version, timeline=timeline(connection), fsync=fsync == "on", full_page_writes=full_pages == "on", commit=commit,
        standby_named=bool(names), encoding=encoding,
    )  # fmt: skip


def timeline(connection: Connection) -> int:
    """The timeline that the next commit is written to; 0 on SQLite, which has one history."""
    if connection.dialect.name == "sqlite":
        return 0
    name = connection.execute(text("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")).scalar_one()
    return int(str(name)[:8], 16)
