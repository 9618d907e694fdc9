"""Limits and user of a process, as the programs `prlimit` and `setpriv` (util-linux) set them before they become the one that is wanted.

Limits are set after the box was made: set before, the number of processes would count those of the user outside.
"""

import shutil
from collections.abc import Sequence

from app.domain.errors import Refused
from app.domain.learning.boxes import Limits

OPEN_FILES = 64


def limited(argv: Sequence[str], limits: Limits) -> list[str]:
    """The command, under its limits. Raises `Refused` where the machine has no prlimit."""
    return [_found("prlimit"), *plain_limits(argv, limits)[1:]]


def as_user(argv: Sequence[str], user: int | None) -> list[str]:
    """The command as that user, in its group and no other; as ours where it is None. Raises `Refused` where the machine has no setpriv.

    Python's own `Popen(user=…)` forks, and a fork copies the page tables of whatever weights this process holds: from one of 1.5 GB a
    program starts after 88 ms instead of 5.
    """
    if user is None:
        return [*argv]
    return [_found("setpriv"), f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", *argv]


def plain_limits(argv: Sequence[str], limits: Limits) -> list[str]:
    """The command under its limits, wherever another machine has its prlimit."""
    held = {
        "cpu": limits.cpu_s, "as": limits.memory_bytes, "fsize": limits.file_bytes, "nproc": limits.processes, "nofile": OPEN_FILES,
        "core": 0,
    }  # fmt: skip
    return ["prlimit", *(f"--{name}={value}:{value}" for name, value in held.items()), "--", *argv]


def _found(program: str) -> str:
    path = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")
    if path is None:
        raise Refused(f"no {program} on this machine: install util-linux")
    return path
