"""What this machine leaves to a process of ours: the cores it may run on, and the memory it may still take."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

UNLIMITED = 1 << 60
"""Control groups of version 1 write a number near 2^63 where there is no limit."""


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under `taskset`, a container's cpuset or a batch system."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory_bytes(*, groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """What can still be taken: the machine's available memory, or what the tightest control group around us leaves, if that is less."""
    available = int(psutil.virtual_memory().available)
    return min([available, *_left_by_groups(groups, mount)])


def _left_by_groups(groups: Path, mount: Path) -> Iterator[int]:
    """Bytes that each control group above this process leaves: its limit less what is used and cannot be dropped (page cache can)."""
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            roots = (mount, mount / "unified")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            roots = (mount / "memory",)
        else:
            continue
        for root in roots:
            # inside a container the path may be the host's: then only the mount's own root is ours to read
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                if folder.is_relative_to(root) and (left := _left(folder, *names)) is not None:
                    yield left


def _left(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= UNLIMITED:
            return None
        used = int((folder / usage_name).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get(cache_name, 0)))
    except (OSError, ValueError):
        return None
