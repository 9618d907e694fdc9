"""The two programs of a graded answer, each spoken to over its pipes as the host does, without a box around them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pipelines.evaluation.suites.boxed import grading

Frame = dict[str, Any]


class Spoken:
    """One of the programs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def hear(self) -> Frame:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def say(self, **frame: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(frame).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, **frame: Any) -> Frame:
        self.say(**frame)
        return self.hear()


@contextmanager
def program(role: str) -> Iterator[Spoken]:
    command = [sys.executable, str(grading.__file__), role]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        spoken = Spoken(process)
        assert spoken.hear() == {"ready": True}
        yield spoken
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0, "whoever is let go of ends"
        assert process.stderr is not None
        assert process.stderr.read() == b"", "what is printed is nobody's verdict"


ANSWER = """
import sys
print("verdict: passed")
LIMIT, THING = 3, object()
def add(a, b=LIMIT): return a + b
def first(xs): return xs.pop(0)
"""


def test_an_answer_says_what_it_defines_and_serves_calls_until_it_is_let_go() -> None:
    with program("answer") as answer:
        assert answer.ask(program=ANSWER, names=["add", "first", "LIMIT", "THING", "absent"]) == {
            "defined": {"add": {"function": True}, "first": {"function": True}, "LIMIT": {"value": 3}, "THING": {"opaque": "object"}}
        }
        assert answer.ask(call="add", args=grading.written(((1,), {"b": 5}))) == {"value": 6}
        assert answer.ask(call="first", args=grading.written((([7, 8],), {}))) == {
            "value": 7, "args": grading.written((([8],), {})),
        }  # fmt: skip
        assert answer.ask(call="add", args=grading.written((("x",), {})))["raised"][0] == "TypeError"


@pytest.mark.parametrize(
    ("text", "said"), [("def f(:", "SyntaxError"), ("import no_such", "ModuleNotFoundError: No module"), ("exit(3)", "SystemExit: 3")]
)
def test_an_answer_that_does_not_load_says_why(text: str, said: str) -> None:
    with program("answer") as answer:
        assert answer.ask(program=text, names=[])["failed"].startswith(said)


FUNCTION = {"f": {"function": True}}


def judged(tests: str, *replies: Frame | str, prefix: str = "", defined: Frame = FUNCTION) -> tuple[str, str]:
    """The verdict of tests on a function `f` whose calls are answered so."""
    with program("tests") as spoken:
        spoken.say(prefix=prefix, tests=tests, defined=defined, word="secret")
        left = [*replies]
        while "call" in (said := spoken.hear()):
            reply = left.pop(0)
            assert spoken.process.stdin is not None
            spoken.process.stdin.write((reply if isinstance(reply, str) else json.dumps(reply)).encode() + b"\n")
            spoken.process.stdin.flush()
        assert said["word"] == "secret"
        return said["verdict"], said["detail"]


def raised(kind: str, sentence: str, *, ordinary: bool = True) -> Frame:
    return {"raised": [kind, f"{kind}: {sentence}", ordinary]}


TWICE = "assert f(2) == 4\nassert f(3) == 6\n"
FORGIVING = "try:\n    f(1)\nexcept Exception:\n    pass\n"
CASES: dict[str, tuple[str, list[Frame | str], tuple[str, str]]] = {
    "right": (TWICE, [{"value": 4}, {"value": 6}], ("passed", "")),
    "wrong": (TWICE, [{"value": 4}, {"value": 7}], ("failed", "AssertionError: ")),
    "exits well": ("f(1)\nraise SystemExit(0)", [{"value": 1}], ("passed", "")),
    "exits badly": ("f(1)\nraise SystemExit(2)", [{"value": 1}], ("failed", "the tests ended with 2")),
    "in place": ("xs = [2, 1]\nf(xs)\nassert xs == [1, 2]", [{"value": None, "args": grading.written((([1, 2],), {}))}], ("passed", "")),
    "its error": ("try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\n", [raised("ValueError", "no")], ("passed", "")),
    "its own error": (
        "class Odd(Exception): pass\ntry:\n    f(1)\nexcept Odd:\n    pass\n", [raised("Odd", "x")], ("passed", ""),
    ),
    "unknown error": (FORGIVING, [raised("Unknown", "x")], ("passed", "")),
    "error that cannot be made": ("try:\n    f(1)\nexcept UnicodeDecodeError:\n    pass\n", [raised("UnicodeDecodeError", "x")],
                                  ("failed", "AnswerError: UnicodeDecodeError: x")),
    "ends an iteration": ("list(map(f, [1, 2]))", [raised("StopIteration", "")], ("failed", "AnswerError: StopIteration: ")),
    "leaves": (FORGIVING, [raised("SystemExit", "0", ordinary=False)], ("failed", "SystemExit: 0")),
    "opaque": (FORGIVING, [{"opaque": "an object of type A is no literal"}],
               ("failed", "f returned what cannot be graded: an object of type A is no literal")),
    "no literal": (FORGIVING, [{"value": ["import", "os"]}], ("failed", "f returned no literal")),
    "other arguments": (FORGIVING, [{"value": 1, "args": ["tuple"]}], ("failed", "f returned no literal")),
    "no JSON": (FORGIVING, ["{"], ("failed", "f did not return")),
    "no frame": (FORGIVING, ["[1]"], ("failed", "f did not return")),
    "what cannot be sent": ("try:\n    f(lambda: 1)\nexcept Exception:\n    pass", [],
                            ("unable", "the tests give f what cannot be sent to it: an object of type function is no literal")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is_of_what_the_tests_saw_and_no_test_forgives_what_no_function_does(case: str) -> None:
    tests, replies, verdict = CASES[case]
    assert judged(tests, *replies) == verdict


def test_tests_that_do_not_run_are_unable_and_an_answer_that_is_no_function_has_failed() -> None:
    assert judged("f(1", prefix="")[0] == "unable"
    assert judged("f(1)", prefix="import no_such") == ("unable", "ModuleNotFoundError: No module named 'no_such'")
    assert judged("pass", defined={"f": {"opaque": "A"}}) == ("failed", "Broken: f is an object of type A, not a function")
    assert judged("assert LIMIT == (1, 2)", defined={"LIMIT": {"value": ["tuple", 1, 2]}}) == ("passed", "")
    assert judged("assert f.__name__ == 'f'") == ("passed", "")
