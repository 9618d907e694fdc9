"""Runs hidden tests of every shape outside a box: which pass, which do not and why, and what becomes of their spoiled copies."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelines.rollouts.boxed import runner
from pipelines.rollouts.grading import RUNNER, Found, Verdict, judged
from tests.integration.rollouts.practising import LIBRARY

assert Path(runner.__file__) == RUNNER, "what a box is given is the program that is asked here"

LIB = "def double(n):\n    return 2 * n\ndef fail(n):\n    raise ValueError(f'no {n}')\n"

PASS = """
import pytest, unittest, warnings, sys
left_out_if = getattr(pytest.mark, "skipif")
from lib import double, fail

def test_plain(): assert double(2) == 4
def test_raises():
    with pytest.raises(ValueError, match="no 3") as caught: fail(3)
    assert str(caught.value) == "no 3"
def test_raises_called(): pytest.raises(ValueError, fail, 1)
def test_warns():
    with pytest.warns(UserWarning): warnings.warn("x")
def test_approx(): assert double(0.1) == pytest.approx(0.2000000001)
def test_approx_below(): assert double(-1) == pytest.approx(-2)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("a, b", [(3, 6), (4, 8)])
def test_rows(n, a, b): assert (double(a), n > 0) == (b, True)
@left_out_if(False, reason="no")
def test_not_skipped(): assert double(1) == 2
@pytest.mark.slow
def test_marked(): assert double(1) == 2
class TestPlain:
    def test_in_class(self): assert double(3) == 6
class TestUnit(unittest.TestCase):
    def test_unit(self): self.assertEqual(double(4), 8)
def test_silent():
    print("passed"); sys.stderr.write("x"); assert sys.stdin.read() == ""
"""
PASSING = [
    *("test_plain", "test_raises", "test_raises_called", "test_warns", "test_approx", "test_approx_below", "test_rows"),
    *("test_not_skipped", "test_marked", "TestPlain::test_in_class", "TestUnit::test_unit", "test_silent"),
]

FAIL = """
import os, pytest, unittest, warnings
from pytest import skip as later
left_out_if = getattr(pytest.mark, "skipif")
from lib import double, fail

def test_wrong(): assert double(2) == 5, "two and two"
def test_no_error():
    with pytest.raises(ValueError): double(1)
def test_other_error():
    with pytest.raises(KeyError): fail(1)
def test_other_words():
    with pytest.raises(ValueError, match="yes"): fail(1)
def test_no_warning():
    with pytest.warns(UserWarning): pass
def test_error_beside_a_warning():
    with pytest.warns(UserWarning): fail(2)
def test_far(): assert double(1) == pytest.approx(2.1)
def test_object():
    class Equal:
        def __eq__(self, other): return True
    assert Equal() is None or pytest.approx(1) == Equal()
def test_skips(): later("later")
@left_out_if(True, reason="never")
def test_skipped(): pass
@pytest.mark.xfail(strict=True)
def test_expected_to_fail(): assert 0
@pytest.mark.parametrize("n", [])
def test_no_rows(n): pass
@pytest.mark.parametrize("n", [1, 2])
def test_second_row(n): assert n == 1
def test_fixture(tmp_path): pass
def test_generator():
    yield 1
def test_exits(): os._exit(0)
def test_claims():
    for d in range(3, 20):
        try: os.write(d, b"passed ")
        except OSError: pass
    os._exit(0)
class TestSetUp:
    def setup_method(self): pass
    def test_a(self): pass
class TestReturns:
    def test_b(self): return 1
class TestUnit(unittest.TestCase):
    def test_c(self): self.assertEqual(double(4), 9)
    @unittest.skip("no")
    def test_d(self): pass
    @unittest.expectedFailure
    def test_e(self): assert 0
"""
FAILING = {
    "test_wrong": "AssertionError: two and two",
    "test_no_error": "AssertionError: did not raise <class 'ValueError'>",
    "test_other_error": "ValueError: no 1",
    "test_other_words": "AssertionError: no 1 does not match yes",
    "test_no_warning": "AssertionError: no warning",
    "test_error_beside_a_warning": "ValueError: no 2",
    "test_far": "AssertionError: ",
    "test_object": "AssertionError: ",
    "test_skips": "Skipped: later",
    "test_skipped": "Skipped: marked",
    "test_expected_to_fail": "Skipped: marked",
    "test_no_rows": "Skipped: it wants a fixture",
    "test_second_row": "AssertionError: ",
    "test_fixture": "Skipped: it wants a fixture",
    "test_generator": "Skipped: a generator",
    "test_exits": "it ended without a word",
    "test_claims": "passed ",
    "TestSetUp::test_a": "Skipped: it wants to be set up, or returned something",
    "TestReturns::test_b": "Skipped: it wants to be set up, or returned something",
    "TestUnit::test_c": "AssertionError: ",
    "TestUnit::test_d": "Skipped: not run",
    "TestUnit::test_e": "Skipped: not run",
    "test_absent": "AttributeError: ",
}


def runs(folder: Path, tests: dict[str, str], ids: list[str], canaries: list[str] | None = None) -> bytes:
    asked = {"tests": tests, "ids": ids, "canaries": canaries or [], "seed": 3}
    (folder / "lib.py").write_text(LIB)
    (folder / "asked.json").write_text(json.dumps(asked))
    said = subprocess.run([sys.executable, str(RUNNER), "asked.json"], cwd=folder, capture_output=True, check=True).stdout
    assert not (folder / "asked.json").exists(), "whoever is tested must not find it"
    return said


def found(said: bytes) -> Found:
    return msgspec.json.decode(said, type=Found)


def test_tests_of_every_shape_pass_where_the_code_is_right(tmp_path: Path) -> None:
    ids = [f"t/test_it.py::{name}" for name in PASSING]
    said = found(runs(tmp_path, {"t/test_it.py": PASS}, ids))
    assert (sorted(said.passed), said.failed) == (sorted(ids), {})


def test_what_does_not_run_to_its_end_and_hold_did_not_pass_and_why_is_said(tmp_path: Path) -> None:
    said = found(runs(tmp_path, {"t.py": FAIL}, [f"t.py::{name}" for name in FAILING]))
    assert said.passed == []
    reasons = {name.removeprefix("t.py::"): reason for name, reason in said.failed.items()}
    assert {name: reason[: len(FAILING[name])] for name, reason in reasons.items()} == FAILING


def test_a_module_that_is_marked_as_a_whole_did_not_run(tmp_path: Path) -> None:
    module = "import pytest\npytestmark = getattr(pytest.mark, 'skipif')(True, reason='x')(lambda: 0)\ndef test_a(): pass\n"
    assert found(runs(tmp_path, {"t.py": module}, ["t.py::test_a"])).failed == {"t.py::test_a": "Skipped: marked"}


HONEST = """
import pytest, unittest
from lib import double, fail
def test_compares(): assert double(1) == 2
def test_claims(): assert double(1)
def test_raises(): pytest.raises(ValueError, fail, 1)
def test_none(): double(1)
class TestUnit(unittest.TestCase):
    def test_equal(self): self.assertEqual(double(1), 2)
    def test_error(self):
        with self.assertRaises(ValueError): fail(1)
"""
SPOILED = ["test_compares", "test_claims", "test_raises", "TestUnit::test_equal", "TestUnit::test_error"]


def test_a_spoiled_copy_of_each_test_fails_and_one_with_nothing_to_spoil_has_none(tmp_path: Path) -> None:
    names = [f"t.py::{name}" for name in [*SPOILED, "test_none"]]
    said = found(runs(tmp_path, {"t.py": HONEST}, names, names))
    assert sorted(said.passed) == sorted(names)
    assert sorted(said.canaries) == sorted(f"t.py::{name}" for name in SPOILED)
    assert None not in said.canaries.values()


ALWAYS_EQUAL = "class A:\n    def __eq__(self, other): return True\ndef double(n): return A()\ndef fail(n): pass\n"


@pytest.mark.parametrize("test", ["assert double(1) == 2", "assert 2 == double(1)"])
def test_an_answer_that_equals_everything_passes_a_canary_too_and_so_fails(tmp_path: Path, test: str) -> None:
    name = LIBRARY.expected[0]
    tests = {"hidden/test_it.py": f"from other import double\ndef test_it(): {test}\n"}
    (tmp_path / "other.py").write_text(ALWAYS_EQUAL)
    said = runs(tmp_path, tests, [name], [name])
    assert found(said).passed == [name]
    grade = judged(LIBRARY, said)
    assert (grade.verdict, grade.reason) == (Verdict.FAILED, f"a test passed that nothing can pass: the canary of {name}")


def said_by_a_box(**more: Any) -> bytes:
    return json.dumps({"passed": [], "failed": {}, "canaries": {}, **more}).encode()


@pytest.mark.parametrize(
    ("said", "complaint", "reason"),
    [
        (b"", b"", "the tests said nothing that counts: it said nothing"),
        (b"[]", b"Traceback\nMemoryError", "the tests said nothing that counts: MemoryError"),
        (said_by_a_box(reward=1), b"", "the tests said nothing that counts: it said nothing"),
        (said_by_a_box(), b"", "1 of 1: hidden/test_it.py::test_it: it did not run"),
        (said_by_a_box(failed={LIBRARY.expected[0]: "x" * 300}), b"", f"1 of 1: {LIBRARY.expected[0]}: {'x' * 200}"),
    ],
)
def test_words_of_a_box_that_are_no_pass_are_none(said: bytes, complaint: bytes, reason: str) -> None:
    grade = judged(LIBRARY, said, complaint)
    assert (grade.verdict, grade.reason) == (Verdict.FAILED, reason)


BOUNDS = """
import pytest, sys, os
near = pytest.approx
def test_near(): assert 1.0 == near(1.0 + 9e-7) and -1.0 == near(-1.0 - 9e-7) and 0.0 == near(9e-13)
def test_rel(): assert 100 == near(101, rel=0.01) and 5 == near(5.5, abs=0.5)
def test_true_is_no_number(): assert not (True == near(1)) and not ("1" == near(1))
def test_far_above(): assert 1.0 == near(1.0 + 2e-6)
def test_far_below(): assert -1.0 == near(-1.0 - 2e-6)
def test_far_from_nothing(): assert 0.0 == near(2e-12)
def test_folder(): assert sys.path[0] == os.getcwd() and __file__ == os.path.join(os.getcwd(), "t.py")
@pytest.fixture
def made(): return 1
def test_default(n=1): assert n == 1
def test_starred(*rest, **more): assert (rest, more) == ((), {})
@pytest.mark.parametrize(["n", "m"], [(1, 2)])
def test_list_of_names(n, m): assert (n, m) == (1, 2)
@pytest.mark.parametrize("n", [(1, 2)])
def test_a_pair_is_one_value(n): assert n == (1, 2)
@pytest.mark.parametrize("n", [1])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_every_pair(n, m): assert m < 3
def test_long(): assert 0, "x" * 5000
"""


def test_what_is_near_and_what_rows_are_there_at_their_bounds(tmp_path: Path) -> None:
    names = [line.split("(")[0].removeprefix("def ") for line in BOUNDS.splitlines() if line.startswith("def test")]
    said = found(runs(tmp_path, {"t.py": BOUNDS}, [f"t.py::{name}" for name in names]))
    passed = {"test_near", "test_rel", "test_true_is_no_number", "test_folder", "test_list_of_names", "test_a_pair_is_one_value"}
    assert {name.removeprefix("t.py::") for name in said.passed} == passed
    failed = {name.removeprefix("t.py::"): reason for name, reason in said.failed.items()}
    assert failed["test_long"] == "AssertionError: " + "x" * 284, "three hundred characters of a reason"
    assert {name for name, reason in failed.items() if reason == "AssertionError: "} == {
        "test_far_above", "test_far_below", "test_far_from_nothing", "test_every_pair"
    }  # fmt: skip
    assert {failed["test_default"], failed["test_starred"]} == {"Skipped: it wants a fixture"}


def test_the_order_of_tests_is_drawn_by_the_seed(tmp_path: Path) -> None:
    module = "".join(f"def test_{n}(): pass\n" for n in range(6))
    ids = [f"t.py::test_{n}" for n in range(6)]
    first, again = (found(runs(tmp_path, {"t.py": module}, ids)).passed for _ in range(2))
    assert list(first) == list(again)
    assert sorted(first) == ids
    assert list(first) != ids


def test_a_test_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    program = RUNNER.read_text().replace("EACH_S = 10.0", "EACH_S = 0.2")
    assert program != RUNNER.read_text(), "ten seconds each"
    (tmp_path / "lib.py").write_text(LIB)
    tests = {"t.py": "import time\ndef test_hangs(): time.sleep(60)\ndef test_goes_on(): pass\n"}
    asked = {"tests": tests, "ids": ["t.py::test_hangs", "t.py::test_goes_on"], "canaries": [], "seed": 1}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run([sys.executable, "-c", program, "asked.json"], cwd=tmp_path, capture_output=True, check=True, timeout=30)
    said = found(done.stdout)
    assert (list(said.passed), said.failed) == (["t.py::test_goes_on"], {"t.py::test_hangs": "it ended without a word"})
