"""What the database server says about itself: what a commit survives, and on which timeline it is."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

WAITING = ("on", "remote_write", "remote_apply")
"""Values of `synchronous_commit` that wait for a standby, where `synchronous_standby_names` names any."""
MOST_LOST_S = 60
"""Of a database that is restored from its archive: what was committed in so many seconds before its end may be gone."""


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
    archives: bool
    """It keeps its log (`archive_mode`)."""
    archived_every_s: int
    """Until a file of the log is archived that is not full (`archive_timeout`); 0: only full ones are."""

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

    def unarchived(self) -> tuple[str, str] | None:
        """What a restore would leave out, and the cure; None where it is what was committed in the last `MOST_LOST_S` at most."""
        if not self.archives:
            cure = "set archive_mode and archive_command (docs/backup.md), unless pg_receivewal keeps its log"
            return "no log is archived: a restore goes back to the last base backup", cure
        if not 0 < self.archived_every_s <= MOST_LOST_S:
            until = f"after {self.archived_every_s} s" if self.archived_every_s else "when it is full"
            cure = "set archive_timeout = '30s': what is in the open file is lost with the disk"
            return f"a file of its log is archived {until}", cure
        return None


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
        "current_setting('fsync'), current_setting('full_page_writes'), current_setting('server_encoding'), "
        "current_setting('archive_mode'), (SELECT setting::int FROM pg_settings WHERE name = 'archive_timeout')"
    )
    version, names, commit, fsync, full_pages, encoding, archives, every_s = connection.execute(text(query)).one()
    return ServerState(
        version=version, timeline=timeline(connection), fsync=fsync == "on", full_page_writes=full_pages == "on", commit=commit,
        standby_named=bool(names), encoding=encoding, archives=archives != "off", archived_every_s=every_s,
    )  # fmt: skip


def timeline(connection: Connection) -> int:
    """The timeline that the next commit is written to; 0 on SQLite, which has one history."""
    if connection.dialect.name == "sqlite":
        return 0
    name = connection.execute(text("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")).scalar_one()
    return int(str(name)[:8], 16)
