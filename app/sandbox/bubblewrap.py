"""Boxes of namespaces, by bubblewrap (bwrap): users, processes, mounts, network, host name and shared memory of their own.

What a box sees: the system's programs and a Python, read-only; a fresh /proc and /dev; a temporary folder in memory that dies with it; its
workspace and the gateway's socket, where it was asked for with them. What it does not: our files, our environment, our processes, any
network but its own loopback.

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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NoReturn

from app.domain.errors import BadInput, Refused, Unavailable
from app.domain.learning.boxes import WORKSPACE, Box, BoxSpec, Ended, Executed, Limits, Patch, Talk, TalkEnded
from app.sandbox import control_groups
from app.sandbox.child import GRACE_S, Child
from app.sandbox.control_groups import ControlGroups, Group
from app.sandbox.limits import as_user, limited
from app.sandbox.live import LiveBox
from app.sandbox.runtime import SYSTEM, Runtime, find, shared_folder
from app.sandbox.system_calls import seccomp_filter
from app.sandbox.workspaces import POOL, Workspace, Workspaces

KEEPER = Path(__file__).with_name("keeper.py")
INSIDE_KEEPER, INSIDE_GATEWAY = "/run/keeper.py", "/run/gateway.sock"
USERS_FROM = 1 << 30
"""The users of boxes: 256 for each process id there can be (2²² of them), above every user that a system hands out."""
START_S = 30.0
TRIAL = Limits(cpu_s=1, memory_bytes=256 << 20, file_bytes=1 << 20)
FEW_PROCESSES = 4
"""What a box may have of them where no control group holds its memory as a whole."""
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
    copies: bool | None = None
    """Whether every workspace is a copy of its folder; None to try whether this machine mounts overlays, which are 30 times faster."""

    @cached_property
    def _runtime(self) -> Runtime:
        self.sweep()
        return find(shared_folder(), self.bwrap)

    @cached_property
    def _groups(self) -> ControlGroups | None:
        return control_groups.find()

    @property
    def python(self) -> str:
        return self._runtime.python

    @cached_property
    def _workspaces(self) -> Workspaces:
        self._runtime  # noqa: B018 - sweeps first
        return Workspaces(shared_folder(), copies=not self._mounts_overlays() if self.copies is None else self.copies)

    def open(self, spec: BoxSpec) -> Box:
        held = _held(spec, self._groups)
        if spec.workspace is not None:
            return self._open_live(held, spec.workspace, self._workspaces)
        if spec.gateway is not None or spec.lifetime_s is not None or spec.scratch:
            raise BadInput("a gateway, a lifetime and folders to write in are for boxes that stay: ask for a workspace too")
        return BubblewrapBox(held, self._runtime, self._groups)

    def _open_live(self, spec: BoxSpec, folder: Path, workspaces: Workspaces) -> LiveBox:
        place = workspaces.take()
        user = _user(place) if os.geteuid() == 0 else None
        workspace: Workspace | None = None
        try:
            workspace = workspaces.make(folder, user)
            box = BubblewrapBox(spec, self._runtime, self._groups, user=user, workspace=workspace)
            keeping = box.keep()
            return LiveBox(spec, keeping, workspace, stopped=lambda: workspaces.give_back(place))
        except BaseException:
            if workspace is not None:
                workspace.remove()
            workspaces.give_back(place)
            raise

    def _mounts_overlays(self) -> bool:
        """Whether an overlay can be mounted here, by opening a box with one."""
        trial = Workspaces(shared_folder(), copies=False)
        folder = shared_folder() / f"overlay-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        try:
            self._open_live(BoxSpec(limits=TRIAL), folder, trial).stop()
        except (Refused, Unavailable):
            return False
        finally:
            folder.rmdir()
        return True

    def sweep(self) -> int:
        left = Workspaces(shared_folder(), copies=False).sweep()
        return left + (self._groups.sweep() if self._groups is not None else 0)

    def describe(self) -> dict[str, object]:
        held = f"control groups {self._groups.version}" if self._groups is not None else "each process"
        return {
            "kept_by": "bubblewrap", "network": False, "namespaces": True, "user_per_box": os.geteuid() == 0, "memory_of": held,
            "system_calls": "filtered", "workspaces": "unused" if "_workspaces" not in vars(self) else self._kind(),
        }  # fmt: skip

    def _kind(self) -> str:
        return "copies" if self._workspaces.copies else "overlays"


def _held(spec: BoxSpec, groups: ControlGroups | None) -> BoxSpec:
    """Without control groups memory is counted for each process alone, so there are few of them."""
    few = replace(spec.limits, processes=min(spec.limits.processes, FEW_PROCESSES))
    return spec if groups is not None else replace(spec, limits=few)


@dataclass
class BubblewrapBox:
    """One box. Every program in it runs in namespaces of its own, which end with it."""

    spec: BoxSpec
    runtime: Runtime
    groups: ControlGroups | None
    user: int | None = field(default_factory=lambda: _fresh_user() if os.geteuid() == 0 else None)
    workspace: Workspace | None = None
    running: ExitStack = field(default_factory=ExitStack)

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        running = self._start(argv)
        executed = running.child.run(stdin, deadline_s=deadline_s, most_output_bytes=most_output_bytes)
        is_out_of_memory, has_ended = running.ran_out_of_memory(), running.reported_an_end()
        running.stop()
        if is_out_of_memory:
            return replace(executed, ended=Ended.OOM, code=None)
        if not has_ended and executed.ended is Ended.EXITED:
            raise Unavailable(f"the box could not be made: {_last_line(executed.stderr)}; {CURE}")
        return executed

    def talk(self, argv: Sequence[str]) -> Talk:
        running = self._start(argv)
        self.running.callback(running.stop)
        return running

    def put(self, path: str, data: bytes) -> None:
        raise Refused("this box has no workspace: ask for one")

    def patch(self) -> Patch:
        raise Refused("this box has no workspace: ask for one")

    def alive(self) -> bool:
        return True  # every program begins one anew

    def stop(self) -> None:
        self.running.close()

    def keep(self) -> "_Running":
        """Start the keeper, and wait until it is ready. Raises `Refused`."""
        socket = [INSIDE_GATEWAY] if self.spec.gateway is not None else []
        running = self._start([self.runtime.python, "-I", "-S", INSIDE_KEEPER, WORKSPACE, *socket])
        try:
            running.receive(deadline=time.monotonic() + START_S, most_bytes=1 << 12)
        except TalkEnded as ended:
            said = _last_line(running.child.heard())
            running.stop()
            raise Refused(f"the box's keeper did not begin ({ended}; {said}): {CURE}") from ended
        return running

    def _start(self, argv: Sequence[str]) -> "_Running":
        command = limited(argv, self.spec.limits) if self.workspace is None else argv  # the keeper sets them for what it runs
        bwrap = as_user([str(self.runtime.bwrap)], self.user)
        group = self.groups.make(self.spec.limits) if self.groups is not None else None
        status, theirs = os.pipe()
        held, release = os.pipe()
        calls = _memory_file(seccomp_filter())
        arguments = _memory_file(b"\0".join(argument.encode() for argument in self._arguments(theirs, held, calls)))
        try:
            process = subprocess.Popen(
                [*bwrap, "--args", str(arguments), "--", *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(arguments, theirs, held, calls),
                env={}, cwd="/", bufsize=0,
            )  # fmt: skip
        except OSError as error:
            for descriptor in (status, release):
                os.close(descriptor)
            if group is not None:
                group.remove()
            raise Refused(f"bwrap cannot be started ({error}): set TMPDIR to a folder whose programs may run, or see {CURE}") from error
        finally:
            for descriptor in (arguments, theirs, held, calls):
                os.close(descriptor)
        return _Running(process, status, release, group)

    def _arguments(self, status: int, held: int, calls: int) -> list[str]:
        said = [
            "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv",
            "--uid", "1000", "--gid", "1000", "--hostname", "box", "--json-status-fd", str(status), "--block-fd", str(held),
            "--seccomp", str(calls),
        ]  # fmt: skip
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
        if self.workspace is not None:  # its first process is the keeper, which nothing in it can kill
            said += ["--as-pid-1", "--ro-bind", str(self.runtime.keeper(KEEPER)), INSIDE_KEEPER, *self.workspace.arguments(WORKSPACE)]
        for folder in self.spec.scratch:
            said += ["--size", str(self.spec.limits.file_bytes), "--tmpfs", folder]
        if self.spec.gateway is not None:
            said += ["--bind", str(self.spec.gateway), INSIDE_GATEWAY]
        said += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
        for name, value in self.runtime.environment.items():
            said += ["--setenv", name, value]
        return said


class _Running:
    """One program in a box: bwrap outside, the first process of its namespace inside, whose end is the end of everything in it."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, release: int, group: Group | None) -> None:
        self.child = Child(process, kill=self._kill)
        self._status, self._first_process, self._group = status, -1, group
        try:
            first = _first_line(status)
            if first is None:
                self._refuse()
            else:
                self._begin(json.loads(first)["child-pid"], release)
        finally:
            os.close(release)

    def _begin(self, first_process: int, release: int) -> None:
        """Put the namespace's first process under its limits; only then may it make the box and start the program."""
        with suppress(ProcessLookupError, BrokenPipeError):
            self._first_process = os.pidfd_open(first_process)
            if self._group is not None:
                self._group.admit(first_process)
            os.write(release, b"x")

    def _refuse(self) -> NoReturn:
        ended = self.child.run(b"", deadline_s=GRACE_S, most_output_bytes=1 << 12)
        self.stop()
        raise Refused(f"no box can be made on this machine ({_last_line(ended.stderr)}): {CURE}")

    def send(self, line: bytes, *, deadline: float) -> None:
        try:
            self.child.send(line, deadline=deadline)
        except TalkEnded as ended:
            raise self._explained(ended) from ended

    def receive(self, *, deadline: float, most_bytes: int) -> bytes:
        try:
            return self.child.receive(deadline=deadline, most_bytes=most_bytes)
        except TalkEnded as ended:
            raise self._explained(ended) from ended

    def _explained(self, ended: TalkEnded) -> TalkEnded:
        return TalkEnded(Ended.OOM, "it used more memory than it may") if self.ran_out_of_memory() else ended

    def ran_out_of_memory(self) -> bool:
        """Whether anything in it was killed for want of memory."""
        return self._group is not None and self._group.ran_out_of_memory()

    def stop(self) -> None:
        self.child.stop()
        self._close_status()
        if self._group is not None:
            self._group.remove()

    def abort(self) -> None:
        """Kill the box, from any thread; whoever talks to it sees its end."""
        with suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._first_process, signal.SIGKILL)

    def reported_an_end(self) -> bool:
        """Whether the program itself began and ended, and not bwrap alone."""
        return b"exit-code" in os.read(self._status, 1 << 12)

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
    file = os.memfd_create("given")
    os.write(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _fresh_user() -> int:
    return _user(next(_numbers) % POOL.start)


def _user(place: int) -> int:
    return USERS_FROM + os.getpid() * 256 + place


def _last_line(said: bytes) -> str:
    return said.decode(errors="replace").strip().rsplit("\n", 1)[-1] or "bwrap said nothing"
