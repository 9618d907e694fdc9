"""Graders, one by one."""

import pytest

from app.sandbox.processes import ProcessBoxes
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
    with pytest.raises(ValueError, match="did not answer with a number"):
        grade(grader, "x", examination=EXAMINATION, judge=lambda _: "splendid")


def test_human_eval_has_its_164_tasks_with_tests_to_execute() -> None:
    tasks = list(human_eval_tasks())
    assert len(tasks) == 164
    assert all(task.grader.kind is GraderKind.EXECUTE and "check(" in task.grader.tests for task in tasks)
