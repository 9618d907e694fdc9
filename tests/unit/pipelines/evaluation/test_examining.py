"""Between the two boxes of a graded answer: whose fault it is when either says something else than it should, or nothing more."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.domain.errors import Unavailable
from app.domain.learning.boxes import Box, BoxSpec, Ended, Executed, Limits, Patch, Talk, TalkEnded
from pipelines.evaluation.suites.execution import Examination, Execution, Outcome, wanted

Said = dict[str, Any] | bytes | Ended
READY: Said = {"ready": True}
DEFINED: Said = {"defined": {"f": {"function": True}}}
CALL: Said = {"call": "f", "args": ["tuple", ["tuple", 1], ["dict"]]}


class Scripted:
    """A box whose program says what it was told to; the word of a verdict is the one that it heard."""

    python = "python3"

    def __init__(self, said: list[Said]) -> None:
        self.said, self.heard, self.stopped = [*said], list[Any](), 0

    def talk(self, argv: Sequence[str]) -> Talk:
        return self

    def send(self, line: bytes, *, deadline: float) -> None:
        self.heard.append(json.loads(line))

    def receive(self, *, deadline: float, most_bytes: int) -> bytes:
        said = self.said.pop(0)
        if isinstance(said, Ended):
            raise TalkEnded(said, f"so it ended: {said.value}")
        if isinstance(said, dict) and said.get("word") == "the right one":
            said = said | {"word": self.heard[0]["word"]}
        return said if isinstance(said, bytes) else json.dumps(said).encode()

    def stop(self) -> None:
        self.stopped += 1

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        raise AssertionError("nobody asks for this here")

    def put(self, path: str, data: bytes) -> None:
        raise AssertionError("nobody asks for this here")

    def patch(self) -> Patch:
        raise AssertionError("nobody asks for this here")

    def alive(self) -> bool:
        return True


class Pair:
    """Opens the answer's box, then the tests'."""

    python = "python3"

    def __init__(self, *boxes: Scripted) -> None:
        self.boxes, self.left = boxes, [*boxes]

    def open(self, spec: BoxSpec) -> Box:
        return self.left.pop(0)

    def sweep(self) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {}


def verdict(said: str, *, word: str = "the right one", detail: str = "") -> Said:
    return {"verdict": said, "detail": detail, "word": word}


def run(answer: list[Said], tests: list[Said]) -> Execution:
    pair = Pair(Scripted([READY, *answer]), Scripted([READY, *tests]))
    try:
        return Examination(boxes=pair, limits=Limits(cpu_s=1, memory_bytes=1, file_bytes=1), wall_s=5.0).run(
            prefix="", program="def f(x): ...", tests="assert f(1) == 1"
        )
    finally:
        assert [box.stopped >= 1 for box in pair.boxes] == [True, True], "no box is left behind"


def test_calls_and_replies_pass_until_the_verdict_that_bears_our_word() -> None:
    assert run([DEFINED, {"value": 1}], [CALL, verdict("passed")]) == Execution(outcome=Outcome.PASSED, detail="")
    assert run([DEFINED], [verdict("failed", detail="no")]) == Execution(outcome=Outcome.FAILED, detail="no")


@pytest.mark.parametrize(
    ("answer", "outcome", "detail"),
    [
        ([{"failed": "SyntaxError: x"}], Outcome.FAILED, "SyntaxError: x"),
        ([{"defined": []}], Outcome.FAILED, "it ended"),
        ([b"passed"], Outcome.FAILED, "it said what is no frame"),
        ([b"[" * 100_000], Outcome.FAILED, "it said what is no frame"),
        ([b"[]"], Outcome.FAILED, "it said what is no frame"),
        ([DEFINED, Ended.EXITED], Outcome.FAILED, "so it ended: exited"),
        ([DEFINED, Ended.TIMEOUT], Outcome.TIMEOUT, "so it ended: timeout"),
        ([DEFINED, Ended.OOM], Outcome.LIMIT, "so it ended: oom"),
        ([DEFINED, Ended.OUTPUT_LIMIT], Outcome.LIMIT, "so it ended: output_limit"),
    ],
)
def test_what_the_answers_box_does_is_the_answers_fault(answer: list[Said], outcome: Outcome, detail: str) -> None:
    assert run(answer, [CALL, verdict("passed")]) == Execution(outcome=outcome, detail=detail)


@pytest.mark.parametrize(
    ("answer", "tests", "sentence"),
    [
        ([DEFINED, Ended.BOX_LOST], [CALL], "the box of the answer was lost"),
        ([DEFINED], [Ended.EXITED], "the box of the tests was lost: so it ended: exited"),
        ([DEFINED], [Ended.OOM], "the box of the tests was lost"),
        ([DEFINED], [verdict("passed", word="guessed")], "a verdict came that nobody had asked for"),
    ],
)
def test_what_says_nothing_about_an_answer_is_no_zero(answer: list[Said], tests: list[Said], sentence: str) -> None:
    with pytest.raises(Unavailable, match=sentence):
        run(answer, tests)


def test_a_box_that_does_not_begin_is_unavailable_and_the_other_one_is_stopped() -> None:
    pair = Pair(Scripted([READY]), Scripted([Ended.TIMEOUT]))
    with pytest.raises(Unavailable, match="a box did not start: so it ended: timeout"):
        Examination(boxes=pair, limits=Limits(cpu_s=1, memory_bytes=1, file_bytes=1), wall_s=5.0).run(prefix="", program="", tests="f()")
    assert [box.stopped for box in pair.boxes] == [1, 1]


def test_tests_that_cannot_be_run_say_so_as_a_fault_of_the_task() -> None:
    with pytest.raises(ValueError, match="an execute task cannot be graded: no module"):
        run([DEFINED], [verdict("unable", detail="no module")])


def test_tests_that_chew_on_what_an_answer_gave_them_past_the_deadline_are_the_answers_fault() -> None:
    assert run([DEFINED], [Ended.TIMEOUT]).outcome is Outcome.TIMEOUT


@pytest.mark.parametrize(
    ("prefix", "tests", "names"),
    [
        ("", "assert add(1, 2) == 3", ["add"]),
        ("", "def check(a):\n    kept = add(a, 2)\n    return kept\nfor n in (1, 3):\n    assert check(n)", ["add"]),
        ("", "import math\nassert [area(r) for r in range(3)][1] == math.pi", ["area"]),
        ("def add(a, b):\n", "assert add(1, 2) == 3", ["add"]),
        ("def half(n):\n    return n / 2\ndef add(a, b):\n", "assert half(add(1, 2)) == 1.5", ["add"]),
        ("", "def check():\n    kept = 1\n    assert kept\ncheck()", []),
    ],
)
def test_wanted_of_an_answer_is_what_the_tests_take_from_outside_and_nothing_of_their_own(
    prefix: str, tests: str, names: list[str]
) -> None:  # fmt: skip
    assert wanted(prefix, tests) == names
