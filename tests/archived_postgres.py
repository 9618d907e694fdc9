"""A PostgreSQL server that keeps its log: base backups, an archive of WAL, and a restore to any moment in between."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.postgres import _binaries, _server_user, _short_temporary_folder

START_TIMEOUT_S = 120.0
OPTIONS = {
    "listen_addresses": "", "wal_level": "replica", "archive_mode": "on", "max_connections": "100", "shared_buffers": "64MB",
    "archive_timeout": "30", "fsync": "on", "max_wal_senders": "4",
}  # fmt: skip


class ArchivedPostgres:
    """One server on a Unix socket, with its archive beside it."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="ratchet-drill-", dir=_short_temporary_folder()))
        self._owner = _server_user()
        self._programs = _binaries(self.home, self._owner)
        self.archive = self.home / "archive"
        self._process: subprocess.Popen[Any] | None = None
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self.home}"

    def __enter__(self) -> Self:
        self.archive.mkdir()
        self._give(self.home)
        self._give(self.archive)
        self._run("initdb", "-D", self.home / "data", "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C")
        self._start(self.home / "data")
        return self

    def __exit__(self, *_: object) -> None:
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.home, ignore_errors=True)

    def base_backup(self) -> Path:
        """Copy the running server."""
        copy = self.home / "base"
        self._run("pg_basebackup", "-h", self.home, "-U", "postgres", "-D", copy, "--wal-method=none", "--checkpoint=fast", "--no-sync")
        return copy

    def moment(self) -> datetime:
        """The server's time now, committed into its log, and that log archived."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            row = connection.execute("SELECT clock_timestamp()").fetchone()
            assert row is not None
            return row[0]

    def switch(self) -> None:
        """Close the current log file, so that it is archived."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            name = connection.execute("SELECT pg_walfile_name(pg_switch_wal())").fetchone()
        assert name is not None
        until = time.monotonic() + START_TIMEOUT_S
        while not (self.archive / name[0]).is_file():
            if time.monotonic() > until:
                raise TimeoutError(f"{name[0]} was not archived: {self._log()}")
            time.sleep(0.05)

    def lose(self) -> None:
        """SIGKILL, and the data is gone."""
        self._end(signal.SIGKILL)
        shutil.rmtree(self.home / "data")

    def forget_archive(self) -> None:
        """Remove what a base backup made after this does not need."""
        for file in self.archive.iterdir():
            file.unlink()

    def restore(self, base: Path, moment: datetime | None, *, patience_s: float = START_TIMEOUT_S) -> None:
        """The base backup, carried on from the archive to the moment (None: to its end), on a timeline of its own."""
        data = self.home / "restored"
        shutil.copytree(base, data)
        (data / "recovery.signal").touch()
        with (data / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"restore_command = 'cp {self.archive}/%f %p'\n")
            if moment is not None:
                settings.write(f"recovery_target_time = '{moment.isoformat()}'\nrecovery_target_action = 'promote'\n")
        for path in (data, *data.rglob("*")):
            self._give(path)
        data.chmod(0o700)
        self._start(data, writable=True, patience_s=patience_s)

    @property
    def conninfo(self) -> str:
        """As psycopg takes it."""
        return self.url.replace("+psycopg", "")

    def _start(self, data: Path, *, writable: bool = False, patience_s: float = START_TIMEOUT_S) -> None:
        told = {**OPTIONS, "archive_command": f"cp %p {self.archive}/%f"}
        options = [argument for name, value in told.items() for argument in ("-c", f"{name}={value}")]
        with (self.home / "log").open("ab") as log:
            command = [self._programs / "postgres", "-D", data, "-k", self.home, *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **self._as_owner())
        until = time.monotonic() + patience_s
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with psycopg.connect(self.conninfo, connect_timeout=2) as connection:
                    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
                    if row == (False,) or not writable:
                        return
            except psycopg.OperationalError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL did not start: {self._log()}")

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(START_TIMEOUT_S)

    def _log(self) -> str:
        return (self.home / "log").read_text(errors="replace")[-2000:]

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._programs / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._as_owner())
        if done.returncode != 0:
            raise RuntimeError(f"{program}: {done.stderr}")

    def _give(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, self._owner.pw_uid, self._owner.pw_gid)

    def _as_owner(self) -> dict[str, Any]:
        common: dict[str, Any] = {"cwd": self.home, "env": {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}}
        return common if self._owner is None else common | {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
