"""The grade of a patch: what is asked of the box, what its words come to, and whose fault it is where there are none."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import BadInput, Unavailable
from app.domain.learning.boxes import MOST_PATCH_BYTES, BoxSpec, Ended, Executed
from pipelines.rollouts.grading import GRADING, Grade, Grader, Verdict, apply, judged
from pipelines.rollouts.tasks import TaskData, checked

NAMES = tuple(f"hidden/t.py::test_{letter}" for letter in "abcde")
TASK = TaskData(
    taskset="t", key="k", instruction="", files={"a.py": "1\n", "sub/b.py": "2\n", "c.py": "3\n"}, editable=("a.py", "sub/"),
    tests={"hidden/t.py": "…"}, expected=NAMES, gold={"a.py": "gold\n"}, grading_s=7.0,
)  # fmt: skip


def told(*passed: str, failed: Mapping[str, str] | None = None, canaries: Mapping[str, str | None] | None = None) -> bytes:
    return json.dumps({"passed": passed, "failed": failed or {}, "canaries": canaries or {}}).encode()


@dataclass
class Boxes:
    """Keeps one kind of box, whose program ends as it is told here."""

    ended: Ended = Ended.EXITED
    said: bytes = told(*NAMES)
    breaks: bool = False
    python: str = "python-of-boxes"
    specs: list[BoxSpec] = field(default_factory=list[BoxSpec])
    seen: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    modes: list[set[int]] = field(default_factory=list[set[int]])
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ran: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stopped: int = 0

    def open(self, spec: BoxSpec) -> Any:
        folder = spec.workspace
        assert folder is not None
        self.specs.append(spec)
        self.seen.append({path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()})
        self.modes.append({path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*")) if path.is_dir()})
        self.modes.append({path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()})
        return self

    def put(self, path: str, data: bytes) -> None:
        assert path == ".asked.json"
        self.asked.append(json.loads(data))

    def exec(self, argv: Sequence[str], **how: Any) -> Executed:
        if self.breaks:
            raise Unavailable("the box broke")
        self.ran.append({"argv": [*argv], **how})
        return Executed(ended=self.ended, code=0, stdout=self.said, stderr=b"first\nlast words\n")

    def stop(self) -> None:
        self.stopped += 1

    def sweep(self) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {}


def grade(boxes: Boxes, files: Mapping[str, str | None] | None = None, *, seed: int = 1) -> Grade:
    return Grader(boxes=boxes).grade(TASK, {} if files is None else files, seed=seed)


def test_the_box_of_a_grade_has_the_task_with_what_may_travel_and_everybody_may_read_it() -> None:
    boxes = Boxes()
    assert grade(boxes, {"a.py": "new\n", "sub/deep/x.py": "x\n", "sub/b.py": None, "c.py": "mine\n", "d.py": "d\n"}) == Grade(
        verdict=Verdict.PASSED, passed=NAMES
    )
    assert boxes.seen == [{"a.py": "new\n", "sub/deep/x.py": "x\n", "c.py": "3\n"}]
    assert boxes.modes == [{0o755}, {0o644}]
    [spec] = boxes.specs
    assert (spec.lifetime_s, spec.limits, spec.gateway) == (37.0, GRADING, None)
    assert spec.workspace is not None
    assert (boxes.stopped, spec.workspace.exists(), spec.workspace.parent.exists()) == (1, False, False)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"sub": "a file\n", "sub/b.py": None, "sub/deep/d.py": None}, {"a.py": "1\n", "sub": "a file\n"}),
        ({"a.py/in.py": "in\n", "a.py": None}, {"a.py/in.py": "in\n", "sub/b.py": "2\n", "sub/deep/d.py": "4\n"}),
        ({"sub": "a file\n", "sub/b.py": None}, {"a.py": "1\n", "sub/deep/d.py": "4\n"}),
        ({"a.py/in.py": "in\n", "a.py/on/in.py": "in\n"}, {"a.py": "1\n", "sub/b.py": "2\n", "sub/deep/d.py": "4\n"}),
    ],
    ids=["folder to file", "file to folder", "over what stays in it", "below what stays"],
)
def test_a_folder_may_become_a_file_and_a_file_a_folder_and_what_may_not_change_stays(
    tmp_path: Path, files: Mapping[str, str | None], left: Mapping[str, str]
) -> None:
    apply(replace(TASK, files={"a.py": "1\n", "sub/b.py": "2\n", "sub/deep/d.py": "4\n"}), files, tmp_path)
    assert {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == left


def test_whoever_runs_a_box_may_read_its_files_whatever_the_mask_of_the_process_that_wrote_them() -> None:
    boxes, before = Boxes(), os.umask(0o077)
    try:
        grade(boxes, {"sub/deep/x.py": "x\n"})
    finally:
        os.umask(before)
    assert boxes.modes == [{0o755}, {0o644}]


def test_the_runner_gets_the_tests_in_an_order_of_its_seed_and_three_canaries_of_them() -> None:
    boxes = Boxes()
    for seed in (1, 1, 2):
        grade(boxes, seed=seed)
    first, same, other = boxes.asked
    assert first == same != other
    assert (sorted(first["ids"]), first["tests"]) == (sorted(NAMES), dict(TASK.tests))
    assert first["canaries"] == first["ids"][:3]
    assert 0 <= first["seed"] < 1 << 32
    [ran, *_] = boxes.ran
    assert ran["argv"][:5] == ["python-of-boxes", "-I", "-S", "-B", "-c"]
    assert ran["argv"][6:] == [".asked.json"]
    assert (ran["deadline_s"], ran["most_output_bytes"]) == (7.0, 1 << 20)


@pytest.mark.parametrize(
    ("ended", "verdict", "reason"),
    [
        (Ended.BOX_LOST, Verdict.ERROR, "the box of the grade was lost"),
        (Ended.TIMEOUT, Verdict.FAILED, "the tests did not come to an end: timeout"),
        (Ended.OOM, Verdict.FAILED, "the tests did not come to an end: oom"),
        (Ended.OUTPUT_LIMIT, Verdict.FAILED, "the tests did not come to an end: output_limit"),
    ],
)
def test_a_box_that_is_lost_is_our_fault_and_a_program_that_does_not_end_is_not(ended: Ended, verdict: Verdict, reason: str) -> None:
    boxes = Boxes(ended=ended)
    assert grade(boxes) == Grade(verdict=verdict, reason=reason)
    assert boxes.stopped == 1


def test_a_box_that_breaks_is_stopped_and_nothing_was_found_out() -> None:
    boxes = Boxes(breaks=True)
    assert grade(boxes) == Grade(verdict=Verdict.ERROR, reason="the box broke")
    assert boxes.stopped == 1
    assert boxes.specs[0].workspace is not None
    assert not boxes.specs[0].workspace.exists()


def test_a_gold_patch_has_to_pass_three_times_and_the_first_failure_is_told() -> None:
    boxes = Boxes()
    assert Grader(boxes=boxes).proven(TASK) is None
    assert [seen["a.py"] for seen in boxes.seen] == ["gold\n"] * 3
    assert len({json.dumps(asked) for asked in boxes.asked}) == 3, "each in another order"
    broken = Boxes(said=told(*NAMES[1:]))
    assert Grader(boxes=broken).proven(TASK) == (
        "its gold patch does not pass (try 1 of 3): 1 of 5: hidden/t.py::test_a: it did not run"
    )  # fmt: skip
    assert len(broken.specs) == 1


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (told(*NAMES[::-1], canaries={NAMES[0]: "AssertionError"}), Grade(verdict=Verdict.PASSED, passed=NAMES)),
        (
            told(*NAMES, canaries={NAMES[0]: "AssertionError", NAMES[1]: None}),
            Grade(
                verdict=Verdict.FAILED, reason=f"a test passed that nothing can pass: the canary of {NAMES[1]}", passed=NAMES
            ),
        ),
        (
            told(*NAMES[2:], failed={NAMES[0]: "x" * 201}),
            Grade(verdict=Verdict.FAILED, reason=f"2 of 5: {NAMES[0]}: {'x' * 200}", passed=NAMES[2:]),
        ),
        (b'{"passed": []}', Grade(verdict=Verdict.FAILED, reason=f"the tests said nothing that counts: {'y' * 200}")),
        (b"passed", Grade(verdict=Verdict.FAILED, reason=f"the tests said nothing that counts: {'y' * 200}")),
    ],
)  # fmt: skip
def test_what_the_runner_s_words_come_to(said: bytes, found: Grade) -> None:
    assert judged(TASK, said, b"first\n" + b"y" * 201) == found


def test_a_runner_that_said_nothing_at_all_is_told_as_that() -> None:
    assert judged(TASK, b"").reason == "the tests said nothing that counts: it said nothing"


# --- tasks -------------------------------------------------------------------------------------------------------------------------------


def test_a_task_s_hash_covers_what_decides_it_and_not_how_it_is_solved() -> None:
    for other in (
        replace(TASK, key="l"), replace(TASK, instruction="x"), replace(TASK, files={}), replace(TASK, editable=("a.py",)),
        replace(TASK, tests={"hidden/t.py": "other"}), replace(TASK, expected=NAMES[1:]), replace(TASK, answer_file="a.py"),
        replace(TASK, deadline_s=301.0), replace(TASK, most_turns=21), replace(TASK, most_tokens=16_385),
        replace(TASK, graded_by="http://bridge", judge_hash="j"),
    ):  # fmt: skip
        assert other.hash != TASK.hash
    for same in (replace(TASK, gold={}), replace(TASK, hacks={"h": {}}), replace(TASK, grading_s=9.0), replace(TASK, judge_hash="j")):
        assert same.hash == TASK.hash
    usual = replace(TASK, deadline_s=300.0, most_turns=20, most_tokens=16_384)
    assert usual.hash == TASK.hash, "five minutes, twenty turns and sixteen thousand tokens are what a task has that says nothing"


@pytest.mark.parametrize(
    ("path", "travels"), [("a.py", True), ("sub/b.py", True), ("sub", False), ("subs/b.py", False), ("b.py", False), ("x/a.py", False)]
)
def test_the_files_of_a_task_that_may_change_are_named_or_in_a_folder_that_is(path: str, travels: bool) -> None:
    assert TASK.may_change(path) is travels
    assert replace(TASK, editable=("*",)).may_change(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"expected": ()}, "it has no tests"),
        ({"tests": {}}, "it has no tests"),
        ({"expected": ("other.py::test_a",)}, "it expects other.py::test_a"),
        ({"instruction": "x" * 20_001}, "its instruction has 20001 characters and may have 20000"),
        ({"files": {"a.py": "x" * (MOST_PATCH_BYTES + 1)}}, "its files are larger than 8 MiB"),
        ({"deadline_s": 0.0}, "have to be above zero"),
        ({"grading_s": 0.0}, "have to be above zero"),
        ({"most_turns": 0}, "have to be above zero"),
        ({"most_tokens": 0}, "have to be above zero"),
        ({"editable": ("a.py", "hidden/")}, "hidden/t.py is a hidden test"),
        ({"files": {"hidden/t.py": ""}}, "hidden/t.py is a hidden test"),
        ({"gold": {"c.py": ""}}, "its gold patch changes what may not travel"),
        ({"editable": ("a.py", "sub/conftest.py")}, "may not be editable"),
        ({"editable": ("a.py", "sitecustomize.py")}, "may not be editable"),
        ({"taskset": "T"}, "a taskset is called 'T'"),
        ({"taskset": "t" * 62}, "61 at most"),
    ],
)
def test_a_task_that_cannot_be_graded_is_refused_and_named(change: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        checked([replace(TASK, key="other"), replace(TASK, **change)])


def test_tasks_at_the_very_bounds_are_taken_and_each_key_once() -> None:
    at_bounds = replace(
        TASK, taskset="t" * 61, instruction="x" * 20_000, files={"a.py": "x" * MOST_PATCH_BYTES}, deadline_s=0.1, grading_s=0.1,
        most_turns=1, most_tokens=1,
    )  # fmt: skip
    assert checked([at_bounds]) == [at_bounds]
    assert checked([replace(TASK, graded_by="http://bridge", expected=(), tests={})])
    with pytest.raises(BadInput, match="another task has this key"):
        checked([TASK, replace(TASK, instruction="y")])
    with pytest.raises(BadInput, match="has no tasks"):
        checked([])
    with pytest.raises(BadInput):
        checked([replace(TASK, files={"/etc/x": ""})])


def test_a_workspace_is_laid_out_with_the_folders_of_its_files(tmp_path: Path) -> None:
    replace(TASK, files={"a.py": "1\n", "x/y/z.py": "2\n", "x/y/w.py": "3\n"}).lay_out(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == {"a.py", "x/y/z.py", "x/y/w.py"}
