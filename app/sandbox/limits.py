"""Limits of a process, as the program `prlimit` (util-linux) sets them before it becomes the one that is wanted.

They are set by a program of its own, after the box was made: set before, the number of processes would count those of the user outside.
"""

import shutil
from collections.abc import Sequence

from app.domain.errors import Refused
from app.domain.learning.boxes import Limits

OPEN_FILES = 64


def limited(argv: Sequence[str], limits: Limits) -> list[str]:
    """The command, under its limits. Raises `Refused` where the machine has no prlimit."""
    prlimit = shutil.which("prlimit", path="/usr/bin:/bin:/usr/sbin:/sbin")
    if prlimit is None:
        raise Refused("no prlimit on this machine: install util-linux")
    return [prlimit, *plain_limits(argv, limits)[1:]]


def plain_limits(argv: Sequence[str], limits: Limits) -> list[str]:
    """The command under its limits, wherever another machine has its prlimit."""
    held = {
        "cpu": limits.cpu_s, "as": limits.memory_bytes, "fsize": limits.file_bytes, "nproc": limits.processes, "nofile": OPEN_FILES,
        "core": 0,
    }  # fmt: skip
    return ["prlimit", *(f"--{name}={value}:{value}" for name, value in held.items()), "--", *argv]
