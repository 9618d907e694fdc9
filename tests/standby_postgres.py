"""A PostgreSQL primary with a standby behind it: killed and started again, or lost, so that the standby takes over and gets one of its own.

    primary ── every commit waits for ──▶ standby        fail_over():  primary SIGKILLed ──▶ standby promoted (a new timeline)
                (where `synchronous`)                                   └─ its data goes; a base backup of the new primary follows it

With `synchronous` nothing is acknowledged while there is no standby, as it should be where durability is required.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg

from tests.broker import free_port
from tests.postgres import OPTIONS, _binaries, _server_user, _short_temporary_folder

PATIENCE_S = 90.0
RESTART_AFTER_S = 0.5
SETTINGS = OPTIONS | {
    "listen_addresses": "127.0.0.1", "full_page_writes": "on", "wal_level": "replica", "max_wal_senders": "6", "hot_standby": "on",
    "wal_keep_size": "512MB", "wal_retrieve_retry_interval": "200ms", "shared_buffers": "32MB",
}  # fmt: skip


class Server:
    """One of them: a folder with data, and a process or none."""

    def __init__(self, home: Path, name: str) -> None:
        self.data, self.port = home / name, free_port()
        self.process: subprocess.Popen[Any] | None = None


class ReplicatedPostgres:
    """Two servers, of which one takes writes. `moved` hears the port of whichever does, at the start and after each failover."""

    def __init__(self, *, synchronous: bool = True, moved: Callable[[int], None] = lambda port: None) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="ratchet-pair-", dir=_short_temporary_folder()))
        self._owner = _server_user()
        self._programs = _binaries(self._home, self._owner)
        self._synchronous, self._moved = synchronous, moved
        self._lock, self._number = threading.Lock(), 0
        self.failovers = 0
        self.primary, self.standby = Server(self._home, "data-0"), Server(self._home, "data-0")

    def __enter__(self) -> Self:
        if self._owner is not None:
            os.chown(self._home, self._owner.pw_uid, self._owner.pw_gid)
        initdb = ("initdb", "-D", self.primary.data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync", "--locale=C")
        self._run(*initdb)
        self._start(self.primary)
        self._follow()
        self._moved(self.primary.port)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for server in (self.standby, self.primary):
                self._end(server, signal.SIGQUIT)
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def url(self) -> str:
        """Of the server that takes writes at present."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.primary.port}/postgres"

    def kill_primary(self) -> bool:
        """SIGKILL the primary; it is back half a second later on the same data. False while something of this kind is under way."""
        return self._later(self._restart_primary)

    def kill(self) -> bool:
        """Lose the primary: the standby takes over, and gets a standby of its own. False while something of this kind is under way."""
        return self._later(self.fail_over)

    def fail_over(self, *, behind: Callable[[], None] | None = None) -> None:
        """`kill`, at once; `behind` is done while the standby hears nothing more: all that it commits is lost."""
        senders = self._senders() if behind is not None else []
        for process in senders:
            process.suspend()
        if behind is not None:
            behind()
        self._end(self.primary, signal.SIGKILL)
        for process in senders:
            process.kill()
        self._run("pg_ctl", "promote", "-D", self.standby.data, "-w", "-t", "60")  # a query could be in the way of what is replayed
        lost, self.primary = self.primary, self.standby
        self._moved(self.primary.port)
        self.failovers += 1
        shutil.rmtree(lost.data)
        self._follow()

    def _later(self, act: Callable[[], None]) -> bool:
        if not self._lock.acquire(blocking=False):
            return False

        def run() -> None:
            try:
                act()
            finally:
                self._lock.release()

        threading.Thread(target=run, daemon=True).start()
        return True

    def _restart_primary(self) -> None:
        self._end(self.primary, signal.SIGKILL)
        time.sleep(RESTART_AFTER_S)
        self._start(self.primary)
        self._await_standby()

    def _follow(self) -> None:
        """A new standby, copied from the primary; whoever commits meanwhile waits for it."""
        self._number += 1
        self.standby = Server(self._home, f"data-{self._number}")
        address = ("-h", "127.0.0.1", "-p", str(self.primary.port), "-U", "postgres")
        self._run("pg_basebackup", *address, "-D", self.standby.data, "--checkpoint=fast", "--no-sync", "-X", "stream", "-R")
        self._start(self.standby)
        self._await_standby()

    def _await_standby(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self._ask(self.primary, "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'") == [(1,)]:
                return
            time.sleep(0.05)
        raise TimeoutError(f"the standby does not follow: {self._log()}")

    def _start(self, server: Server) -> None:
        told = SETTINGS | {"port": str(server.port)} | ({"synchronous_standby_names": "ANY 1 (*)"} if self._synchronous else {})
        options = [argument for name, value in told.items() for argument in ("-c", f"{name}={value}")]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if server.process is None or server.process.poll() is not None:
                with (self._home / "log").open("ab") as log:
                    command = [self._programs / "postgres", "-D", server.data, "-k", self._home, *options]
                    server.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **self._as_owner())
            try:
                self._ask(server, "SELECT 1")
            except psycopg.OperationalError:
                time.sleep(0.05)
            else:
                return
        raise TimeoutError(f"PostgreSQL did not start: {self._log()}")

    def _ask(self, server: Server, query: str) -> list[tuple[Any, ...]]:
        address = f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres connect_timeout=2"
        with psycopg.connect(address, autocommit=True) as connection:
            return connection.execute(query).fetchall()  # type: ignore[arg-type] - our own words

    def _end(self, server: Server, number: signal.Signals) -> None:
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)
            server.process.send_signal(number)
            server.process.wait(PATIENCE_S)

    def _senders(self) -> list[psutil.Process]:
        """Who tells the standby what is committed."""
        assert self.primary.process is not None
        children = psutil.Process(self.primary.process.pid).children()
        return [child for child in children if "walsender" in " ".join(child.cmdline())]

    def _log(self) -> str:
        return (self._home / "log").read_text(errors="replace")[-2000:]

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._programs / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._as_owner())
        if done.returncode != 0:
            raise RuntimeError(f"{program}: {done.stderr}")

    def _as_owner(self) -> dict[str, Any]:
        common: dict[str, Any] = {"cwd": self._home, "env": {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}}
        return common if self._owner is None else common | {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
