"""Keeps the processes of one deployment running on this machine: starts them in order, restarts what dies, ends all of them.

```
 start: broker → engine → api → …   one log file each, each in a process group of its own
 check: dead?  → its group is swept, it waits 0.5, 1, 2 … 10 s, it is started again       (a minute alive resets the wait)
 stop:  SIGTERM to every group, all at once → 5 s → SIGKILL to what is left, with every descendant
```

One supervisor per data folder: an exclusive lock on a file in it, released by the kernel however this process ends.
"""

import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.domain.errors import AlreadyRunning
from app.secret_files import data_folder

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
HEALTHY_AFTER_S = 60.0
GRACE_S = 5.0
"""From SIGTERM to SIGKILL. Every process ends within 2 s of SIGTERM by itself and is safe to kill at any point anyway."""

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One process to keep running."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment, not an addition."""
    once: bool = False
    """Ends by itself when its work is done; exit code 0 is then no crash."""


@dataclass(kw_only=True)
class Process:
    """A program and what became of it."""

    program: Program
    running: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    """Monotonic seconds of the last start."""
    starts: int = 0
    wait_s: float = FIRST_WAIT_S
    restart_at: float | None = None
    """Monotonic seconds; None while it runs."""


@dataclass(frozen=True, kw_only=True)
class Crash:
    """A process ended by itself and is to be restarted."""

    name: str
    code: int
    """Exit status, or minus the signal's number."""
    wait_s: float

    def __str__(self) -> str:
        """A sentence for the terminal."""
        how = signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"
        return f"{self.name} ended ({how}); it is started again in {self.wait_s:g} s"


class Supervisor:
    """Owns the processes. Not thread-safe: one thread calls `start`, then `check` about twice a second, then `stop`."""

    def __init__(
        self, programs: Sequence[Program], *, logs: Path, monotonic: Callable[[], float] = time.monotonic, grace_s: float = GRACE_S
    ) -> None:
        self.processes = {program.name: Process(program=program) for program in programs}
        self._logs = logs
        self._now = monotonic
        self._grace_s = grace_s

    def add(self, program: Program) -> None:
        """One more program, to be started by name."""
        self.processes[program.name] = Process(program=program)

    def start(self, name: str) -> None:
        """Start one process."""
        process = self.processes[name]
        process.started, process.restart_at = self._now(), None
        process.starts += 1
        with (self._logs / f"{name}.log").open("ab") as output:
            process.running = subprocess.Popen(
                process.program.command, env=dict(process.program.environment), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    def start_all(self) -> None:
        """Start every process, in the order of the programs."""
        for name in self.processes:
            self.start(name)

    def check(self) -> list[Crash]:
        """Notice what died since the last call, and restart what has waited long enough."""
        crashes = [crash for process in self.processes.values() if (crash := self._reap(process)) is not None]
        for name, process in self.processes.items():
            if process.restart_at is not None and self._now() >= process.restart_at:
                self.start(name)
        return crashes

    def pid(self, name: str) -> int | None:
        """The process id; None while it is down."""
        running = self.processes[name].running
        return None if running is None else running.pid

    def down(self) -> list[str]:
        """Names of those that crashed and have not been alive for a minute since."""
        now = self._now()
        return [
            name
            for name, process in self.processes.items()
            if process.restart_at is not None or (process.wait_s > FIRST_WAIT_S and now - process.started < HEALTHY_AFTER_S)
        ]

    def stop(self) -> None:
        """End every process and everything they started."""
        self._end(list(self.processes.values()))

    def end(self, name: str) -> None:
        """End one process and leave it ended until `start`."""
        self._end([self.processes[name]])

    def _end(self, processes: Sequence[Process]) -> None:
        alive = [process.running for process in processes if process.running is not None]
        families = [member for running in alive for member in _family(running.pid)]
        for running in alive:
            _signal_group(running.pid, signal.SIGTERM)
        _, stubborn = psutil.wait_procs(families, timeout=self._grace_s)
        for member in stubborn:
            _kill(member)
        for running in alive:
            _signal_group(running.pid, signal.SIGKILL)
            running.wait()
        for process in processes:
            process.running, process.restart_at = None, None

    def _reap(self, process: Process) -> Crash | None:
        running = process.running
        if running is None or running.poll() is None:
            return None
        _signal_group(running.pid, signal.SIGKILL)
        if process.program.once and running.returncode == 0:
            process.running = None
            return None
        if self._now() - process.started > HEALTHY_AFTER_S:
            process.wait_s = FIRST_WAIT_S
        crash = Crash(name=process.program.name, code=running.returncode, wait_s=process.wait_s)
        process.running, process.restart_at = None, self._now() + process.wait_s
        process.wait_s = min(LONGEST_WAIT_S, process.wait_s * 2)
        log.warning("process ended name=%s code=%d restart_in_s=%g", crash.name, crash.code, crash.wait_s)
        return crash


@contextmanager
def owning(data: Path) -> Generator[None]:
    """Hold the data folder for this process alone. Raises `AlreadyRunning` when another one holds it."""
    data_folder(data)
    with (data / "supervisor.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise AlreadyRunning(f"process {owner} already runs on {data}: end it first, or name another folder with --data") from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def die_with_parent() -> None:
    """In the child: end when its parent does, even by SIGKILL."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _kill(member: psutil.Process) -> None:
    try:
        member.kill()
    except psutil.NoSuchProcess:
        return
