"""Control groups, version 1 or 2: what all processes of a box use together, its files in memory among it.

A group lies below our own, so that whatever holds us holds the box. Its name carries the process that made it and when that began: when it
is gone, `sweep` ends and removes what it left. Where we may make none (no right to, or a version 2 group whose controllers were not handed
down) there is `None`, and a box has the limits of a process alone.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from app.domain.learning.boxes import Limits

MOUNTED = Path("/sys/fs/cgroup")
NAME = "ratchet-box"
GONE_S = 5.0
"""How long the kernel may take to let go of the killed."""
_numbers = count()


@dataclass(frozen=True)
class ControlGroups:
    """Where groups of ours can be made: one folder for version 2, one for each controller for version 1."""

    parents: tuple[Path, ...]
    version: int

    def make(self, limits: Limits) -> "Group":
        """A group for a box."""
        name = f"{NAME}-{os.getpid()}-{born(os.getpid())}-{next(_numbers)}"
        folders = tuple(parent / name for parent in self.parents)
        for folder in folders:
            folder.mkdir()
        values = self.limits(limits)
        for file in (folder / named for folder in folders for named in values):
            if file.exists():  # without swap there is no file for it
                file.write_text(values[file.name])
        return Group(folders)

    def limits(self, limits: Limits) -> dict[str, str]:
        """What is written into a group's files, by their names."""
        processes = {"pids.max": str(limits.processes + 1)}  # the namespace's first process is not the program's
        if self.version == 2:
            return processes | {"memory.max": str(limits.memory_bytes), "memory.swap.max": "0", "memory.oom.group": "1"}
        bound = str(limits.memory_bytes)
        return processes | {"memory.limit_in_bytes": bound, "memory.memsw.limit_in_bytes": bound}

    def sweep(self) -> int:
        """End and remove what dead processes of ours left; returns how many groups that were."""
        left = [folder for parent in self.parents for folder in parent.glob(f"{NAME}-*") if not owner_lives(folder.name)]
        for folder in left:
            Group((folder,)).remove()
        return len({folder.name for folder in left})


@dataclass(frozen=True)
class Group:
    """The group of one box."""

    folders: tuple[Path, ...]

    def admit(self, process: int) -> None:
        """Put a process into it; what it starts from now on is in it too."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(process))

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed anything in it for want of memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    said = dict(line.split() for line in (folder / name).read_text().splitlines())
                    return int(said.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """End what is in it, and the group. May be called again."""
        until = time.monotonic() + GONE_S
        for folder in self.folders:
            while folder.exists() and time.monotonic() < until:
                with suppress(OSError):
                    for process in (folder / "cgroup.procs").read_text().split():
                        with suppress(ProcessLookupError):
                            os.kill(int(process), signal.SIGKILL)
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.005)


def find(mounted: Path = MOUNTED, ours: Path = Path("/proc/self/cgroup")) -> ControlGroups | None:
    """What this machine lets us make below our own groups; None where nothing."""
    own = dict(line.split(":", 2)[1:] for line in ours.read_text().splitlines())
    by_controller = {name: path for names, path in own.items() for name in names.split(",")}
    if "memory" in by_controller and "pids" in by_controller:
        parents = tuple(mounted / name / by_controller[name].lstrip("/") for name in ("memory", "pids"))
        return ControlGroups(parents, 1) if all(os.access(parent, os.W_OK) for parent in parents) else None
    parent = mounted / by_controller.get("", "/").lstrip("/")
    with suppress(OSError):
        (parent / "cgroup.subtree_control").write_text("+memory +pids")
    with suppress(OSError):
        if {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()) and os.access(parent, os.W_OK):
            return ControlGroups((parent,), 2)
    return None


def born(process: int) -> str:
    """When a process began, in ticks since the machine did: with its number, its name for good."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def owner_lives(name: str) -> bool:
    """Whether the process is there that a name ends with: `…-<process id>-<birth>-<number>`."""
    *_, process, started, _ = name.split("-")
    try:
        return born(int(process)) == started
    except (OSError, ValueError):
        return False
