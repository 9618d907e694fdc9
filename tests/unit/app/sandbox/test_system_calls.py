"""The filter of system calls, run as the kernel runs it: which number of which architecture ends how."""

import errno
import struct

import pytest

from app.domain.errors import Refused
from app.sandbox.system_calls import seccomp_filter

X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOWED, ENDED = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x00050000 + errno.EPERM, 0x00050000 + errno.ENOSYS
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""linux/bpf_common.h: BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_JMP | BPF_JGE | BPF_K, BPF_RET | BPF_K."""
REFUSED_ON = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "pivot_root": 155, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
        "reboot": 169, "init_module": 175, "delete_module": 176, "quotactl": 179, "kexec_load": 246, "add_key": 248, "request_key": 249,
        "keyctl": 250, "unshare": 272, "vmsplice": 278, "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320,
        "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "quotactl": 60, "vmsplice": 75, "acct": 89, "unshare": 97, "kexec_load": 104,
        "init_module": 105, "delete_module": 106, "syslog": 116, "ptrace": 117, "reboot": 142, "add_key": 217, "request_key": 218,
        "keyctl": 219, "swapon": 224, "swapoff": 225, "perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280,
        "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
REFUSED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
}  # fmt: skip
CLONE3 = 435
KINDS = [("x86_64", X86_64, 41), ("aarch64", AARCH64, 198)]


def verdict(program: bytes, *, architecture: int, number: int, first: int = 0) -> int:
    """What the kernel's interpreter answers for `struct seccomp_data` of a call with this first argument."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, first, 0, 0, 0, 0, 0)
    steps, at, held = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, then, otherwise, value = steps[at]
        at += 1
        if code == LOAD:
            (held,) = struct.unpack_from("=I", data, value)
        elif code == JUMP_EQUAL:
            at += then if held == value else otherwise
        elif code == JUMP_AT_LEAST:
            at += then if held >= value else otherwise
        else:
            assert code == RETURN
            return value


@pytest.mark.parametrize(("machine", "architecture", "socket"), KINDS)
def test_of_all_calls_exactly_the_listed_ones_are_refused(machine: str, architecture: int, socket: int) -> None:
    program = seccomp_filter(machine)
    found = {number: verdict(program, architecture=architecture, number=number, first=1) for number in range(600)}
    assert {number for number, said in found.items() if said == REFUSED} == {
        *REFUSED_ON[machine].values(), *REFUSED_EVERYWHERE.values(),
    }  # fmt: skip
    assert [number for number, said in found.items() if said == UNKNOWN] == [CLONE3], "libraries then use clone, whose flags can be seen"
    assert {said for number, said in found.items()} == {ALLOWED, REFUSED, UNKNOWN}


@pytest.mark.parametrize(("machine", "architecture", "socket"), KINDS)
def test_sockets_are_made_of_the_families_unix_and_internet_alone(machine: str, architecture: int, socket: int) -> None:
    program = seccomp_filter(machine)
    families = {family: verdict(program, architecture=architecture, number=socket, first=family) for family in range(64)}
    assert {family for family, said in families.items() if said == ALLOWED} == {1, 2, 10}
    assert families[40] == REFUSED, "vsock, through which a virtual machine's guest talks to its host"
    assert verdict(program, architecture=architecture, number=socket + 1, first=40) == ALLOWED, "connect takes no family"


@pytest.mark.parametrize(("machine", "architecture", "socket"), KINDS)
def test_calls_of_another_architecture_end_the_program(machine: str, architecture: int, socket: int) -> None:
    program = seccomp_filter(machine)
    for other in {X86_64, AARCH64, I386} - {architecture}:
        assert verdict(program, architecture=other, number=0) == ENDED


def test_calls_of_x32_end_the_program_where_there_are_any() -> None:
    x32 = 0x40000000
    ends = [verdict(seccomp_filter("x86_64"), architecture=X86_64, number=number) for number in (x32 - 1, x32, x32 + 101)]
    assert ends == [ALLOWED, ENDED, ENDED]
    assert verdict(seccomp_filter("aarch64"), architecture=AARCH64, number=x32) == ALLOWED


def test_a_processor_whose_calls_are_not_known_runs_no_boxes() -> None:
    with pytest.raises(Refused, match="known for riscv64: run boxes on aarch64 or x86_64"):
        seccomp_filter("riscv64")
