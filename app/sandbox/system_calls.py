"""What a box may ask of the kernel: a seccomp filter, as classic BPF.

A list of what is refused (EPERM): what reaches into other processes, mounts, loads code into the kernel, or has been the way out of other
people's boxes and is needed by no program here (keys, bpf, io_uring, userfaultfd, perf). Of sockets only the families unix and internet are
made: a network namespace does not hold vsock, through which a virtual machine's guest talks to its host. `clone3` is unknown (ENOSYS),
because its flags cannot be seen; libraries then use `clone`. Another architecture's calls, and x32's, end the program.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.12.
"""

import errno
import platform
import struct

from app.domain.errors import Refused

NAMES = (
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "add_key", "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd",
    "mount", "umount2", "pivot_root", "setns", "unshare", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module",
    "name_to_handle_at", "open_by_handle_at", "swapon", "swapoff", "reboot", "acct", "syslog", "vmsplice", "quotactl",
)  # fmt: skip
NUMBERS = {
    "x86_64": (
        101, 310, 311, 312, 248, 249, 250, 321, 298, 323, 165, 166, 155, 308, 272, 246, 320, 175, 313, 176, 303, 304, 167, 168, 169, 163,
        103, 278, 179,
    ),
    "aarch64": (
        117, 270, 271, 272, 217, 218, 219, 280, 241, 282, 40, 39, 41, 268, 97, 104, 294, 105, 273, 106, 264, 265, 224, 225, 142, 89, 116,
        75, 60,
    ),
}  # fmt: skip
"""Of `NAMES`, in their order."""
EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring_setup, _enter, _register; open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr: newer calls, alike on all."""
CLONE3 = 435
SOCKET = {"x86_64": 41, "aarch64": 198}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
FAMILIES = (1, 2, 10)
"""unix, internet, internet version 6."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter for this machine's processor, as `bwrap --seccomp` reads it. Raises `Refused` for one whose calls are not known here."""
    machine = machine or platform.machine()
    if machine not in NUMBERS:
        raise Refused(f"no system call filter is known for {machine}: run boxes on {' or '.join(sorted(NUMBERS))}")
    steps = [_step(LOAD, AT_ARCHITECTURE), *_unless(ARCHITECTURE[machine], KILL), _step(LOAD, AT_NUMBER)]
    if machine == "x86_64":
        steps += [_step(AT_LEAST, X32, 0, 1), _step(RETURN, KILL)]
    for number in (*NUMBERS[machine], *EVERYWHERE):
        steps += [_step(EQUAL, number, 0, 1), _step(RETURN, REFUSE)]
    steps += [_step(EQUAL, CLONE3, 0, 1), _step(RETURN, UNKNOWN)]
    families = [_step(EQUAL, family, len(FAMILIES) - place, 0) for place, family in enumerate(FAMILIES)]
    steps += [_step(EQUAL, SOCKET[machine], 0, len(families) + 2), _step(LOAD, AT_FIRST_ARGUMENT), *families, _step(RETURN, REFUSE)]
    return b"".join([*steps, _step(RETURN, ALLOW)])


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction (`struct sock_filter`); a jump says how many instructions are passed over."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _unless(value: int, end: int) -> list[bytes]:
    return [_step(EQUAL, value, 1, 0), _step(RETURN, end)]
