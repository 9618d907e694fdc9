"""Runs one program and, when that has ended or the reaper is told to stop, ends everything that came of it.

    python -I -S reaper.py PROGRAM ARGUMENT…

Whatever the program leaves behind, in a session of its own too, becomes the reaper's child (`PR_SET_CHILD_SUBREAPER`) and is killed. It
dies with whoever started it. Its exit code is the program's (128 + signal). Run as a program of its own; nothing imports it.
"""

import ctypes
import os
import signal
import sys

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36


def main(argv: list[str]) -> int:
    """Start it, wait for it, clear up after it."""
    libc = ctypes.CDLL(None)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, _stop)
    program = os.posix_spawn(argv[0], argv, os.environ, setpgroup=0)
    os.close(0)
    os.close(1)
    status = 0
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == program:
            break
    clear()
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _stop(_signal: int, _frame: object) -> None:
    clear()
    os._exit(128 + signal.SIGTERM)


def clear() -> None:
    """Kill what descends from us, again and again, until nothing does: a child of the killed becomes ours."""
    while children := _descendants(os.getpid()):
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


def _descendants(root: int) -> list[int]:
    parents = {pid: _parent(pid) for name in os.listdir("/proc") if name.isdigit() for pid in (int(name),)}
    found, new = [], [root]
    while new:
        new = [pid for pid, parent in parents.items() if parent in new]
        found += new
    return found


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
