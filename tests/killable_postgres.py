"""A PostgreSQL server that a fault run kills with SIGKILL and starts again on the same data, as an operating system would."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg

from tests.postgres import OPTIONS, _binaries, _server_user, _short_temporary_folder

START_TIMEOUT_S = 60.0
RESTART_AFTER_S = 0.5


class KillablePostgres:
    """One server with one database, on a Unix socket, and at a port of `host` where one is given; gone at the end of the block.

    `clients`: a range of addresses other than loopback from which it is reached.
    """

    def __init__(self, *, port: int | None = None, host: str = "127.0.0.1", clients: str | None = None) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="ratchet-pg-", dir=_short_temporary_folder()))
        self._owner = _server_user()
        self._programs = _binaries(self._home, self._owner)
        self._data = self._home / "data"
        self._process: subprocess.Popen[Any] | None = None
        self._lock = threading.Lock()
        self._options = OPTIONS if port is None else OPTIONS | {"listen_addresses": host, "port": str(port)}
        self._clients = clients
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self._home}" + ("" if port is None else f"&port={port}")

    def __enter__(self) -> Self:
        if self._owner is not None:
            os.chown(self._home, self._owner.pw_uid, self._owner.pw_gid)
        initdb = [
            self._programs / "initdb",
            "-D",
            self._data,
            "-U",
            "postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-sync",
            "--locale=C",
        ]
        subprocess.run(initdb, check=True, capture_output=True, **self._as_owner())
        if self._clients is not None:
            with (self._data / "pg_hba.conf").open("a") as allowed:
                allowed.write(f"host all all {self._clients} trust\n")
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._end(signal.SIGQUIT)
        shutil.rmtree(self._home, ignore_errors=True)

    def kill(self) -> bool:
        """SIGKILL the server; it is back half a second later, after its own recovery. False while it is down already."""
        if not self._lock.acquire(blocking=False):
            return False
        self._end(signal.SIGKILL)
        threading.Thread(target=self._restart, daemon=True).start()
        return True

    def pause(self) -> None:
        """SIGSTOP the server and all of its processes: connections are taken by the kernel, and nobody says anything."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def fail_over(self) -> None:
        """SIGKILL it and start it again as a standby that is promoted: on a new timeline, as after the loss of a primary."""
        with self._lock:
            self._end(signal.SIGKILL)
            signal_file = self._data / "recovery.signal"
            signal_file.touch()
            if self._owner is not None:
                os.chown(signal_file, self._owner.pw_uid, self._owner.pw_gid)
            with (self._data / "postgresql.auto.conf").open("a") as settings:
                settings.write("restore_command = 'false'\n")
            self._start()
            self._await_writes()

    def _await_writes(self) -> None:
        """A server that recovers answers readers first."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=2) as connection:
                if connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,):
                    return
            time.sleep(0.05)
        raise TimeoutError("PostgreSQL was not promoted")

    def _restart(self) -> None:
        try:
            time.sleep(RESTART_AFTER_S)
            self._start()
        finally:
            self._lock.release()

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(START_TIMEOUT_S)

    def _start(self) -> None:
        """Start and wait until it answers; the dead server's last children may hold its memory for a moment."""
        deadline = time.monotonic() + START_TIMEOUT_S
        options = [argument for name, value in self._options.items() for argument in ("-c", f"{name}={value}")]
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                with (self._home / "log").open("ab") as log:
                    command = [self._programs / "postgres", "-D", self._data, "-k", self._home, *options]
                    self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **self._as_owner())
            try:
                psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=2).close()
            except psycopg.OperationalError:
                time.sleep(0.1)
            else:
                return
        raise TimeoutError(f"PostgreSQL did not come back: {(self._home / 'log').read_text(errors='replace')[-2000:]}")

    def _as_owner(self) -> dict[str, Any]:
        common: dict[str, Any] = {"cwd": self._home, "env": {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}}
        return common if self._owner is None else common | {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
