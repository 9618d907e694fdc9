"""The power goes while everything is written: what the disk has at that moment is all that is left, and it has what was acknowledged.

    writer ─▶ ext4 in a file on XFS with reflinks ── a copy in no time: what reached the disk, and no page cache ─▶ mounted, looked at

Nothing that calls itself whole (a segment, READY) may be torn. SQLite with `synchronous=NORMAL` stands beside it: it loses what it
acknowledged, so the copy is a power loss.
"""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.bench.faulty.power import surviving
from tests.real.parts import ROOT, debian, missing

pytestmark = [pytest.mark.real, pytest.mark.machine, pytest.mark.timeout(900)]
LOSSES = 6
DISK_BYTES, POOL_BYTES = 256 << 20, 2 << 30
START_S = 120.0


def ran(*command: str | Path) -> None:
    """A program of the system's. Fails by name where the kernel does not do that here."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        missing("a disk that loses its power", f"{' '.join(map(str, command))}: {done.stderr.strip()}")


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """A file system in a file."""
    at.mkdir(exist_ok=True)
    ran("mount", "-o", "loop", image, at)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=False)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system whose files are copied in no time."""
    if os.geteuid() != 0:
        missing("a disk that loses its power", "not root: nothing can be mounted")
    debian("mkfs.xfs", "xfsprogs")
    folder = tmp_path_factory.mktemp("pool")
    image = folder / "pool.img"
    with image.open("wb") as file:
        file.truncate(POOL_BYTES)
    ran("mkfs.xfs", "-q", "-m", "reflink=1", image)
    with mounted(image, folder / "pool") as at:
        yield at
    image.unlink()


@dataclass
class Disk:
    """A disk, and what it has at a moment."""

    pool: Path
    image: Path = field(init=False)

    def __post_init__(self) -> None:
        """An empty one."""
        self.image = self.pool / "disk.img"
        with self.image.open("wb") as file:
            file.truncate(DISK_BYTES)
        ran("mkfs.ext4", "-q", "-F", self.image)

    def without_power(self) -> Path:
        """What it has now."""
        copy = self.pool / "lost.img"
        copy.unlink(missing_ok=True)
        ran("cp", "--reflink=always", self.image, copy)
        return copy


@dataclass
class Writer:
    """`tests.bench.faulty.power` at work, and what it was told is kept."""

    folder: Path
    said: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        """Begin."""
        command = [sys.executable, "-m", "tests.bench.faulty.power", str(self.folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.listening = threading.Thread(target=self._listen, daemon=True)
        self.listening.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append(line.rstrip("\n"))

    def await_more(self, count: int) -> None:
        """Until it was told so often more that something is kept."""
        wanted, ends = len(self.said) + count, time.monotonic() + START_S
        while len(self.said) < wanted:
            assert self.process.poll() is None, "the writer ended"
            assert time.monotonic() < ends, f"only {len(self.said)} of {wanted} were kept"
            time.sleep(0.01)

    def end(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.listening.join()


def test_what_was_acknowledged_is_there_after_the_power_was_lost(pool: Path) -> None:
    chance, disk = random.Random(14), Disk(pool)
    with mounted(disk.image, pool / "live") as live:
        writer = Writer(live)
        try:
            writer.await_more(60)
            for _ in range(LOSSES):
                writer.await_more(chance.randint(1, 80))
                promised = list(writer.said)
                image = disk.without_power()
                with mounted(image, pool / "after") as after:
                    copy = pool / "copy"  # looked at elsewhere: a look writes
                    shutil.copytree(after, copy, ignore=shutil.ignore_patterns("lost+found"))
                left = set(surviving(copy))
                shutil.rmtree(copy)
                assert sorted(set(promised) - left) == []
                assert {line.split()[0] for line in promised} == {"inbox", "spool", "segment", "weights", "erasure"}
        finally:
            writer.end()


def test_a_database_that_does_not_wait_for_its_disk_loses_what_it_acknowledged(pool: Path) -> None:
    """The test above sees what it is there for."""
    disk = Disk(pool)
    with mounted(disk.image, pool / "live") as live:
        database = sqlite3.connect(live / "careless.db", isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("CREATE TABLE kept (n INTEGER)")
        os.sync()
        for number in range(200):
            database.execute("INSERT INTO kept VALUES (?)", (number,))
        image = disk.without_power()
        database.close()
    with mounted(image, pool / "after") as after:
        shutil.copytree(after, pool / "copy", ignore=shutil.ignore_patterns("lost+found"))
    left = sqlite3.connect(pool / "copy" / "careless.db")
    assert left.execute("SELECT count(*) FROM kept").fetchone()[0] < 200
    left.close()
