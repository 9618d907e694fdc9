"""A machine is a network namespace with an address, and mounts of its own: /tmp, /dev/shm, and the checkout read-only.

    bridge ──┬── ray-storage   moto's S3
             ├── ray-head      Ray's head, a worker; the driver, with a RATCHET_DATA that nobody else on it sees
             ├── ray-worker    killed
             └── ray-another   comes in its place, with an empty disk

All of a machine's processes are in its namespace: that is how they are killed, and found again where a bench was killed itself.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.bench.fleet import network
from tests.bench.fleet.network import Network
from tests.real.parts import ROOT

HOMES = "ratchet-cluster-"
LOCK = Path("/run/lock/ratchet-bench-cluster")
ENTER = """
set -e
mount --make-rprivate /
if [ -n "$3" ]; then mkdir -p "$1/driver"; mount --bind "$3" "$1/driver"; fi
mount --rbind "$1" /tmp
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" "$2"
mount -o remount,bind,ro "$2"
cd /tmp
shift 3
exec "$@"
"""
GCS = 6379
OBJECT_STORE_BYTES = 80 << 20
START_S = 300.0
"""Ray starts within ten seconds on an idle machine."""


def refusal() -> str | None:
    """Why there can be no machines here, in a sentence; None where there can."""
    if ROOT.is_relative_to("/tmp"):
        return f"the checkout {ROOT} is below /tmp, which each machine has of its own: move it elsewhere"
    return network.refusal()


@dataclass(kw_only=True)
class Machine:
    """One machine; `environment` is what its processes are told."""

    name: str
    address: str
    home: Path
    """Its /tmp, as this process sees it."""
    inside: tuple[str, ...]
    environment: Mapping[str, str]
    _started: list["subprocess.Popen[bytes]"] = field(default_factory=list["subprocess.Popen[bytes]"])

    def start(self, *command: str | Path, log: IO[bytes] | int, private: Path | None = None, **more: str) -> "subprocess.Popen[bytes]":
        """Run a program on it; `private` is a folder that this program alone has as /tmp/driver."""
        words = [*self.inside, "sh", "-c", ENTER, "sh", self.home, ROOT, private or "", *command]
        process = subprocess.Popen(
            [str(word) for word in words], env={**self.environment, **more}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=None if log == subprocess.PIPE else subprocess.STDOUT,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, *command: str | Path) -> None:
        """Run a program to its end. Raises `OSError` with its last words."""
        with (self.home / "log").open("ab") as log:
            code = self.start(*command, log=log).wait(START_S)
        if code != 0:
            raise OSError(f"{command[:3]} on {self.name} ended with {code}: {(self.home / 'log').read_text()[-1500:]}")

    def processes(self) -> list[int]:
        """Ids of all that run on it."""
        return _processes(self.inside[-1])

    def kill(self) -> int:
        """SIGKILL for all of them at once; returns how many there were."""
        killed = _kill(self.inside[-1])
        for process in self._started:
            process.wait(START_S)
        return killed


@dataclass(kw_only=True)
class Machines:
    """All machines of one bench."""

    network: Network
    folder: Path
    environment: dict[str, str]
    all: dict[str, Machine] = field(default_factory=dict[str, Machine])

    def add(self, name: str) -> Machine:
        """A new one, with nothing on it."""
        home = self.folder / name
        home.mkdir()
        address = self.network.join(f"ray-{name}")
        self.all[name] = Machine(
            name=name, address=address, home=home, inside=self.network.inside(f"ray-{name}"), environment=self.environment
        )  # fmt: skip
        return self.all[name]

    def start_ray(self, machine: Machine, *, head: Machine | None = None) -> None:
        """Ray's head, or a node of that of `head`; one processor each, so that no machine takes two workers."""
        where = [f"--address={head.address}:{GCS}"] if head else ["--head", f"--port={GCS}", "--include-dashboard=false"]
        ray = Path(sys.executable).with_name("ray")
        machine.run(
            ray, "start", *where, f"--node-ip-address={machine.address}", "--num-cpus=1", "--disable-usage-stats",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
        )  # fmt: skip


@contextmanager
def machines(environment: Mapping[str, str]) -> Generator[Machines]:
    """None yet; at the end of the block they are gone, with what runs on them and their files. One bench at a time: it takes away first
    what a killed one left. Raises `OSError` where another one is running."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError("another bench of a Ray cluster is running on this machine: wait for its end") from error
        os.set_inheritable(lock.fileno(), False)
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=HOMES))
        told = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        told |= {"HOME": "/tmp", "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            with Network() as bridged:
                made = Machines(network=bridged, folder=folder, environment={**told, **environment})
                try:
                    yield made
                finally:
                    for machine in made.all.values():
                        machine.kill()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Take away what a killed bench left: processes, namespaces, lines, bridges, files. Only for who holds the lock."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    numbers: set[str] = set()
    for space, number in re.findall(r"^(r(\d+)-ray-\w+)", listed, flags=re.MULTILINE):
        _kill(space)
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        numbers.add(number)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    for number in numbers:
        for link in [*re.findall(rf"\b(rv{number}x\d+)[@:]", links), f"rbr{number}"]:
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
    for left in Path(tempfile.gettempdir()).glob(f"{HOMES}*"):
        shutil.rmtree(left, ignore_errors=True)


def _processes(space: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in listed.split()]


def _kill(space: str) -> int:
    """Until none is left: one that is about to fork is faster than a list."""
    killed, until = 0, time.monotonic() + 10
    while (found := _processes(space)) and time.monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed
