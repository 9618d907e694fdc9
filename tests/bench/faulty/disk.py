"""A disk whose fsync fails: the kernel answers EIO to every fsync and fdatasync of a process that asked for it (seccomp), for good.

`python -m tests.bench.faulty.disk DATABASE` accepts events, prints what was acknowledged, loses its disk, tries on, and kills itself.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys

from app.db.engine import open_engine
from app.db.ingestion.inbox import SqlInbox
from app.domain.errors import Unavailable
from tests.fakes.served import event_of, turn

GOOD, BAD = 30, 10
_NUMBERS = {"x86_64": ((74, 75), 317), "aarch64": ((82, 83), 277)}
"""fsync and fdatasync, and seccomp itself."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def break_fsync() -> None:
    """From now on every fsync of this process, in all its threads, fails with EIO."""
    calls, seccomp = _NUMBERS[platform.machine()]
    lines = [(_LOAD, 0, 0, 0)]
    lines += [(_EQUAL, len(calls) - n, 0, call) for n, call in enumerate(calls)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EIO)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(seccomp, 1, 1, program):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter")


def main() -> None:
    """See the top."""
    door = SqlInbox(open_engine(f"sqlite:///{sys.argv[1]}"), free_bytes=lambda: 1 << 40)
    for n in range(GOOD + BAD):
        if n == GOOD:
            break_fsync()
        try:
            door.append_blocking([event_of(turn(f"t{n}"))])
            print(f"acknowledged t{n}", flush=True)
        except Unavailable:
            print(f"refused t{n}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
