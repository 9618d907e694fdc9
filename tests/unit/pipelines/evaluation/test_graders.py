"""Graders, one by one."""

import json
import subprocess
import sys
from collections import Counter, OrderedDict
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sandbox.processes import ProcessBoxes
from pipelines.evaluation.suites.boxed import grading
from pipelines.evaluation.suites.execution import Examination
from pipelines.evaluation.suites.graders import code_of, grade, program
from pipelines.evaluation.suites.offline_config import OfflineConfig
from pipelines.evaluation.suites.suites import Grader, GraderKind, human_eval_tasks

EXAMINATION = Examination.from_config(OfflineConfig(), ProcessBoxes())
PREFIX = 'from math import pi\n\ndef area(r):\n    """Area of a circle."""\n'


def score(grader: Grader, answer: str) -> float:
    return grade(grader, answer, examination=EXAMINATION, judge=lambda _: "7")


def test_code_is_taken_out_of_the_first_fence_even_when_it_is_cut_off() -> None:
    assert code_of("Sure!\n```python\nx = 1\n```\nBye") == "x = 1\n"
    assert code_of("```\nx = 1\ny") == "x = 1\ny"
    assert code_of("x = 1") == "x = 1"


def test_an_answer_continues_the_prefix_or_replaces_it_when_it_repeats_the_signature() -> None:
    assert program(PREFIX, "    return 1\n") == PREFIX + "    return 1\n"
    assert program(PREFIX, "def area(r):\n    return pi\n") == "from math import pi\ndef area(r):\n    return pi\n"


@pytest.mark.parametrize(("answer", "expected"), [("    return pi * r * r\n", 1.0), ("I think it is", 0.0), ("", 0.0)])
def test_parses_asks_whether_the_file_is_still_a_program(answer: str, expected: float) -> None:
    assert score(Grader(kind=GraderKind.PARSES, prefix=PREFIX), answer) == expected


def test_text_graders() -> None:
    assert score(Grader(kind=GraderKind.EXACT, expected="4"), " 4\n") == 1.0
    assert score(Grader(kind=GraderKind.REGEX, pattern="a.b"), "x a\nb") == 1.0
    schema = {"type": "object", "required": ["a"]}
    assert score(Grader(kind=GraderKind.JSON_SCHEMA, schema=schema), '```json\n{"a": 1}\n```') == 1.0
    assert score(Grader(kind=GraderKind.JSON_SCHEMA, schema=schema), '{"b": 1}') == 0.0
    assert score(Grader(kind=GraderKind.JSON_SCHEMA, schema=schema), "not json") == 0.0
    assert score(Grader(kind=GraderKind.JSON_SCHEMA, schema=schema), "[" * 100_000) == 0.0
    similar = Grader(kind=GraderKind.SIMILAR, expected="return a + b")
    assert (score(similar, "return a + b"), score(similar, "return a - b"), score(similar, "pass")) == (1.0, 0.75, 0.0)
    short = Grader(kind=GraderKind.SHORT, tokens=2)
    assert [score(short, text) for text in ("a b", "a b c", "a b c d", "a b c d e")] == [1.0, 0.5, 0.0, 0.0]
    answers = Grader(kind=GraderKind.ANSWERS)
    assert [score(answers, text) for text in ("It is 4.", "Which one? ", " ")] == [1.0, 0.0, 0.0]
    assert score(Grader(kind=GraderKind.JUDGE, rubric="Is it kind?"), "thanks") == 0.7


def test_a_judge_that_is_missing_or_talks_nonsense_is_an_error_not_a_zero() -> None:
    grader = Grader(kind=GraderKind.JUDGE, rubric="Is it kind?")
    with pytest.raises(ValueError, match="no judge is configured"):
        grade(grader, "x", examination=EXAMINATION, judge=None)
    for nonsense in ("splendid", "11", "-3", "8.5", "between 6 and 7", ""):
        with pytest.raises(ValueError, match="did not answer with one whole number"):
            grade(grader, "x", examination=EXAMINATION, judge=lambda _, said=nonsense: said)


@pytest.mark.parametrize(
    ("said", "worth"),
    [("9", 0.9), ("On a scale from 0 to 10 I give it 9.", 0.9), ("7/10", 0.7), ("10 out of 10", 1.0), ("Score: **0**", 0.0), ("10", 1.0)],
)
def test_a_judge_s_score_is_the_one_number_that_is_not_the_scale_s(said: str, worth: float) -> None:
    grader = Grader(kind=GraderKind.JUDGE, rubric="Is it kind?")
    assert grade(grader, "x", examination=EXAMINATION, judge=lambda _: said) == worth


def test_a_schema_or_a_pattern_that_cannot_grade_is_an_error_and_an_answer_that_is_no_json_is_none() -> None:
    nowhere = Grader(kind=GraderKind.JSON_SCHEMA, schema={"$ref": "#/$defs/nowhere"})
    for grader in (Grader(kind=GraderKind.REGEX, pattern="("), Grader(kind=GraderKind.JSON_SCHEMA, schema={"type": "objekt"}), nowhere):
        with pytest.raises(ValueError, match=r"is no regular expression|the schema of a task does not work"):
            score(grader, "{}")
    assert score(Grader(kind=GraderKind.JSON_SCHEMA, schema={"type": "integer"}), "9" * 4_301) == 0.0, "Python reads no such number"


def test_human_eval_has_its_164_tasks_with_tests_to_execute() -> None:
    tasks = list(human_eval_tasks())
    assert len(tasks) == 164
    assert all(task.grader.kind is GraderKind.EXECUTE and "check(" in task.grader.tests for task in tasks)


# --- literals, which are all that passes between the two boxes of a graded answer ---------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 65), 1 << 65), st.floats(allow_nan=False), st.text(max_size=5),
    st.complex_numbers(allow_nan=False), st.binary(max_size=5),
)  # fmt: skip
HASHED = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.tuples(st.integers(), st.text(max_size=2)))
LITERALS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.sets(HASHED, max_size=3), st.frozensets(HASHED, max_size=3),
        st.dictionaries(HASHED, inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip


@given(LITERALS)
def test_a_literal_comes_out_as_it_went_in(value: object) -> None:
    back = grading.read(json.loads(json.dumps(grading.written(value))))
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    ("value", "frame"),
    [
        ((1 << 62) - 1, (1 << 62) - 1), (1 << 62, ["int", hex(1 << 62)]), (-(1 << 62), ["int", hex(-(1 << 62))]),
        (1 - (1 << 62), 1 - (1 << 62)), (..., ["ellipsis"]), (range(1, 9, 2), ["range", 1, 9, 2]),
        (bytearray(b"\x01"), ["bytearray", "01"]),
        (iter([1, "a"]), ["iterator", 1, "a"]), ({1: 2}.keys(), ["list", 1]), ({1: 2}.values(), ["list", 2]),
        ({1: 2}.items(), ["list", ["tuple", 1, 2]]), (Counter("a"), ["dict", ["a", 1]]), (HTTPStatus.OK, 200),
        (1.5, ["float", "0x1.8000000000000p+0"]),
        (OrderedDict(a=[True]), ["dict", ["a", ["list", True]]]),
    ],
)  # fmt: skip
def test_a_literal_is_written_as_the_plain_value_it_stands_for(value: object, frame: object) -> None:
    assert grading.written(value) == frame


@pytest.mark.parametrize("value", [(..., 1), bytearray(b"ab"), range(3), [float("inf"), -0.0]])
def test_rarer_literals_come_out_as_they_went_in(value: object) -> None:
    assert grading.read(json.loads(json.dumps(grading.written(value)))) == value


def test_an_iterator_is_what_it_yields_up_to_so_many_items() -> None:
    most = grading.MOST_ITEMS
    assert len(grading.written(iter(range(most)))) == most + 1
    assert list(grading.read(["iterator", 1, 2])) == [1, 2]
    for value, said in (
        (iter(range(most + 1)), f"more than {most} items"),
        (object(), "type object is no literal"),
        (len, "is no literal"),
    ):
        with pytest.raises(TypeError, match=said):
            grading.written(value)


@pytest.mark.parametrize(
    "frame",
    [
        1.5, {"a": 1}, ["int", 5], ["int"], ["int", "0x1", "0x2"], ["float", 1.0], ["complex", "0x0p+0"], ["bytes", 1], ["bytes", "0g"],
        ["range", 1, 2], ["range", 1, 2, "3"], ["ellipsis", 1], ["object", "x"], [["list"], 1], ["dict", [1]],
    ],
)  # fmt: skip
def test_what_is_no_literal_is_refused(frame: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        grading.read(frame)


def conversation(role: str, *frames: dict[str, Any]) -> list[dict[str, Any]]:
    """What the program of a box says to these lines, in a plain process."""
    said = "".join(json.dumps(frame) + "\n" for frame in frames)
    source = Path(grading.__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source, role], input=said, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


ANSWER = """
import sys
LIMIT = 3
THING = object()
print("a verdict")
def double(x, *, by=2): return x * by
def grow(items): items.append(1); return len(items)
def fail(x): raise KeyError("k" * 500)
def leave(): sys.exit(3)
def strange(): return object()
"""


def test_an_answers_box_answers_calls_one_by_one() -> None:
    names = ["LIMIT", "THING", "double", "missing"]
    calls = [
        ("double", (4,), {"by": 3}),
        ("grow", ([],), {}),
        ("grow", ((),), {}),
        ("leave", (), {}),
        ("strange", (), {}),
        ("fail", (1,), {}),
    ]
    asked = [{"call": name, "args": grading.written((args, kwargs))} for name, args, kwargs in calls]
    ready, defined, product, grown, wrong, left, strange, failed = conversation("answer", {"program": ANSWER, "names": names}, *asked)
    assert (ready, defined) == (
        {"ready": True}, {"defined": {"LIMIT": {"value": 3}, "THING": {"opaque": "object"}, "double": {"function": True}}},
    )  # fmt: skip
    assert product == {"value": 12}
    assert grown == {"value": 1, "args": grading.written((([1],), {}))}
    assert wrong["raised"][::2] == ["AttributeError", True]
    assert left == {"raised": ["SystemExit", "SystemExit: 3", False]}
    assert strange == {"opaque": "an object of type object is no literal"}
    assert failed["raised"][0] == "KeyError"
    assert len(failed["raised"][1]) == 400
    [_, broken] = conversation("answer", {"program": "def (", "names": []})
    assert broken["failed"].startswith("SyntaxError: ")


def judged(tests: str, *replies: dict[str, Any], defined: dict[str, Any] | None = None, prefix: str = "") -> list[dict[str, Any]]:
    asked = {"prefix": prefix, "tests": tests, "defined": defined or {"f": {"function": True}}, "word": "w"}
    return conversation("tests", asked, *replies)[1:]


@pytest.mark.parametrize(
    ("tests", "replies", "verdict", "detail"),
    [
        ("assert f(1) == 2", [{"value": 2}], "passed", ""),
        ("assert f(1) == 2", [{"value": 3}], "failed", "AssertionError: "),
        ("import sys; f(1); sys.exit()", [{"value": 2}], "passed", ""),
        ("import sys; f(1); sys.exit(0)", [{"value": 2}], "passed", ""),
        ("import sys; f(1); sys.exit(2)", [{"value": 2}], "failed", "the tests ended with 2"),
        ("x = []; f(x); assert x == [7]", [{"value": None, "args": ["tuple", ["tuple", ["list", 7]], ["dict"]]}], "passed", ""),
        ("x = {1: 2}; f(a=x); assert x == {}", [{"value": None, "args": ["tuple", ["tuple"], ["dict", ["a", ["dict"]]]]}], "passed", ""),
        ("try: f(1)\nexcept KeyError as e: assert e.args == ('k',)", [{"raised": ["KeyError", "KeyError: k", True]}], "passed", ""),
        ("list(map(f, [1, 2]))", [{"raised": ["StopIteration", "StopIteration: ", True]}], "failed", "AnswerError: StopIteration: "),
        ("try: f(1)\nexcept Exception: pass", [{"raised": ["SystemExit", "SystemExit: 3", False]}], "failed", "SystemExit: 3"),
        ("try: f(1)\nexcept Exception: pass", [{"opaque": "no"}], "failed", "f returned what cannot be graded: no"),
        ("try: f(1)\nexcept Exception: pass", [{"value": ["object"]}], "failed", "f returned no literal"),
        ("f(object())", [], "unable", "the tests give f what cannot be sent to it: an object of type object is no literal"),
        ("def (", [], "unable", "SyntaxError: "),
    ],
)
def test_hidden_tests_are_judged_with_the_word_of_whoever_asked(
    tests: str, replies: list[dict[str, Any]], verdict: str, detail: str
) -> None:
    said = judged(tests, *replies)
    assert [frame["call"] for frame in said[:-1]] == ["f"] * len(replies)
    assert (said[-1]["verdict"], said[-1]["word"]) == (verdict, "w")
    assert said[-1]["detail"].startswith(detail)


def test_a_value_is_given_to_the_tests_and_an_object_is_no_function() -> None:
    assert judged("assert LIMIT == 3 and HELP == 1", defined={"LIMIT": {"value": 3}}, prefix="HELP = 1")[-1]["verdict"] == "passed"
    [only] = judged("pass", defined={"f": {"opaque": "thing"}})
    assert (only["verdict"], only["detail"]) == ("failed", "Broken: f is an object of type thing, not a function")
    assert judged("pass", prefix="1 / 0")[-1]["detail"].startswith("ZeroDivisionError")
