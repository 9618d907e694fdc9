"""Boxes of namespaces, by bubblewrap (bwrap): users, processes, mounts, network, host name and shared memory of their own.

What a box sees: the system's programs and a Python, read-only; a fresh /proc and /dev; a temporary folder in memory that dies with it. What
it does not: our files, our environment, our processes, any network but its own empty loopback.

Started by root, a box belongs to a user that no other box and nobody else has: bwrap would otherwise map it to root, who reads every file
and has no limit of processes. Not covered: what the kernel itself can be talked into; timing; that it is a box can be seen from inside.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path

from app.domain.boxes import Box, BoxSpec, Ended, Executed, Talk
from app.domain.errors import Refused, Unavailable
from app.sandbox.child import GRACE_S, Child
from app.sandbox.limits import limited
from app.sandbox.runtime import SYSTEM, Runtime, find, shared_folder

USERS_FROM = 1 << 30
"""The users of boxes: 256 for each process id there can be (2²² of them), above every user that a system hands out."""
START_S = 30.0
_numbers = count()

CURE = (
    "boxes need user namespaces: allow them (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1; "
    "Ubuntu 24.04: an AppArmor profile for bwrap; Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined), or, only "
    "where every program that runs is trusted, set offline.allow_weak_isolation"
)


@dataclass(frozen=True)
class BubblewrapBoxes:
    """The keeper."""

    bwrap: Path | None = None
    """The program; None for the one that comes with us."""

    @cached_property
    def _runtime(self) -> Runtime:
        return find(shared_folder(), self.bwrap)

    @property
    def python(self) -> str:
        return self._runtime.python

    def open(self, spec: BoxSpec) -> Box:
        return BubblewrapBox(spec, self._runtime)

    def describe(self) -> dict[str, object]:
        return {"kept_by": "bubblewrap", "network": False, "namespaces": True, "user_per_box": os.geteuid() == 0}


@dataclass
class BubblewrapBox:
    """One box. Every program in it runs in namespaces of its own, which end with it."""

    spec: BoxSpec
    runtime: Runtime
    user: int | None = field(default_factory=lambda: _fresh_user() if os.geteuid() == 0 else None)
    running: "list[_Running]" = field(default_factory=list)

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        running = self._start(argv)
        executed = running.child.run(stdin, deadline_s=deadline_s, most_output_bytes=most_output_bytes)
        if not running.reported_an_end() and executed.ended is Ended.EXITED:
            raise Unavailable(f"the box could not be made: {_last_line(executed.stderr)}; {CURE}")
        return executed

    def talk(self, argv: Sequence[str]) -> Talk:
        running = self._start(argv)
        self.running.append(running)
        return running

    def stop(self) -> None:
        while self.running:
            self.running.pop().stop()

    def _start(self, argv: Sequence[str]) -> "_Running":
        status, theirs = os.pipe()
        arguments = _memory_file(b"\0".join(argument.encode() for argument in self._arguments(theirs)))
        try:
            process = subprocess.Popen(
                ["bwrap", "--args", str(arguments), "--", *limited(argv, self.spec.limits)], executable=self.runtime.bwrap,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(arguments, theirs), env={}, cwd="/",
                user=self.user, group=self.user, extra_groups=None if self.user is None else (), bufsize=0,
            )  # fmt: skip
        finally:
            os.close(arguments)
            os.close(theirs)
        return _Running(process, status)

    def _arguments(self, status: int) -> list[str]:
        said = [
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--clearenv",
        ]
        said += ["--uid", "1000", "--gid", "1000", "--hostname", "box", "--json-status-fd", str(status)]
        for folder in map(Path, SYSTEM):
            if folder.is_symlink():
                said += ["--symlink", os.readlink(folder), str(folder)]
            elif folder.is_dir():
                said += ["--ro-bind", str(folder), str(folder)]
        if self.runtime.inside != self.runtime.prefix:
            said += ["--ro-bind", str(self.runtime.prefix), str(self.runtime.inside)]
        for folder in self.runtime.hidden():
            said += ["--tmpfs", folder, "--remount-ro", folder]
        said += ["--proc", "/proc", "--dev", "/dev", "--size", str(self.spec.limits.file_bytes), "--tmpfs", "/tmp"]
        said += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
        said += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONDONTWRITEBYTECODE", "1"]
        return said


class _Running:
    """One program in a box: bwrap outside, the first process of its namespace inside, whose end is the end of everything in it."""

    def __init__(self, process: subprocess.Popen[bytes], status: int) -> None:
        self.child = Child(process, kill=self._kill)
        self._status, self._first_process = status, -1
        first = _first_line(status)
        if first is None:
            ended = self.child.run(b"", deadline_s=GRACE_S, most_output_bytes=1 << 12)
            os.close(status)
            raise Refused(f"no box can be made on this machine ({_last_line(ended.stderr)}): {CURE}")
        try:
            self._first_process = os.pidfd_open(json.loads(first)["child-pid"])
        except ProcessLookupError:
            self._first_process = -1

    def send(self, line: bytes, *, deadline: float) -> None:
        self.child.send(line, deadline=deadline)

    def receive(self, *, deadline: float, most_bytes: int) -> bytes:
        return self.child.receive(deadline=deadline, most_bytes=most_bytes)

    def stop(self) -> None:
        self.child.stop()
        self._close_status()

    def reported_an_end(self) -> bool:
        """Whether the program itself began and ended, and not bwrap alone."""
        said = os.read(self._status, 1 << 12)
        self._close_status()
        return b"exit-code" in said

    def _kill(self) -> None:
        """End the namespace's first process and wait until it is gone: by then the kernel has ended all others in it."""
        if self._first_process >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_process, signal.SIGKILL)
            poll = select.poll()
            poll.register(self._first_process, select.POLLIN)
            poll.poll(GRACE_S * 1000)
            os.close(self._first_process)
            self._first_process = -1
        else:
            self.child.process.kill()

    def _close_status(self) -> None:
        if self._status >= 0:
            os.close(self._status)
            self._status = -1


def _first_line(status: int) -> bytes | None:
    """What bwrap reports when the namespaces are there; None where it ended instead."""
    said, poll, deadline = b"", select.poll(), time.monotonic() + START_S
    poll.register(status, select.POLLIN)
    while b"\n" not in said:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        chunk = os.read(status, 1 << 12)
        if not chunk:
            return None
        said += chunk
    return said.split(b"\n")[0]


def _memory_file(content: bytes) -> int:
    """A file in memory that holds this, at its beginning: an argument list may be longer than a pipe takes."""
    file = os.memfd_create("arguments")
    os.write(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _fresh_user() -> int:
    return USERS_FROM + os.getpid() * 256 + next(_numbers) % 256


def _last_line(said: bytes) -> str:
    return said.decode(errors="replace").strip().rsplit("\n", 1)[-1] or "bwrap said nothing"
