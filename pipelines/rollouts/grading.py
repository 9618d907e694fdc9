"""The grade of a patch: exact tests, each passed, in a box that the agent never saw.

    what may travel of the patch ──▶ the task's files ──▶ fresh box ──▶ hidden tests and canaries from memory ──▶ verdict

A verdict is `passed` where every expected test passed and every canary failed for want of what it asked. Anything that the box does not say
is not passed; a box that goes away under the grade is an error of ours, never a zero.

Not covered: a patch whose code takes its own process apart to find out which of the tests it shares that process with are canaries. No
grader that runs the tested code beside its tests can refuse that; the audit of the transcript looks for it.
"""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from app.domain.errors import RatchetError
from app.domain.learning.boxes import Boxes, BoxSpec, Ended, Limits, Patch
from pipelines.rollouts.interception import Exchange
from pipelines.rollouts.scratch import scratched
from pipelines.rollouts.tasks import TaskData

RUNNER = Path(__file__).with_name("boxed") / "runner.py"
MOST_SAID_BYTES = 1 << 20
GOLD_TRIES = 3
CANARIES = 3
"""As many of the expected tests are run a second time in a spoiled copy; which, is drawn for each grade."""
GRADING = Limits(cpu_s=60, memory_bytes=512 << 20, file_bytes=8 << 20, processes=32, workspace_bytes=64 << 20)


class Verdict(StrEnum):
    """What a grade says."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    """Nothing was found out: the box was lost, or the tests themselves do not run."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """A verdict with its reason."""

    verdict: Verdict
    reason: str = ""
    passed: tuple[str, ...] = ()
    reward: float | None = None
    """Where a task is paid in parts; None: 1 where it passed, else 0."""


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the runner says."""

    passed: list[str]
    failed: dict[str, str]
    canaries: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Grader:
    """Grades patches."""

    boxes: Boxes
    limits: Limits = GRADING
    canaries: int = CANARIES

    def grade(self, task: TaskData, files: Mapping[str, str | None], *, seed: int, exchanges: Sequence[Exchange] = ()) -> Grade:
        """The verdict on a workspace with these changes; those that may not travel stay behind, and what was said decides nothing."""
        kept = {path: content for path, content in files.items() if task.may_change(path)}
        try:
            return self._graded(task, kept, random.Random(f"{seed}{task.hash}"))
        except RatchetError as error:
            return Grade(verdict=Verdict.ERROR, reason=str(error))

    def proven(self, task: TaskData) -> str | None:
        """Why the task's own solution cannot be trusted, or None: it has to pass every time."""
        for attempt in range(GOLD_TRIES):
            found = self.grade(task, task.gold, seed=attempt)
            if found.verdict is not Verdict.PASSED:
                return f"its gold patch does not pass (try {attempt + 1} of {GOLD_TRIES}): {found.reason}"
        return None

    def _graded(self, task: TaskData, files: Mapping[str, str | None], drawn: random.Random) -> Grade:
        order = list(task.expected)
        drawn.shuffle(order)
        asked = {"tests": dict(task.tests), "ids": order, "canaries": order[: self.canaries], "seed": drawn.getrandbits(32)}
        with scratched("grade") as made:
            folder = made / "work"
            folder.mkdir()
            apply(task, files, folder)
            open_to_all(folder)
            box = self.boxes.open(BoxSpec(limits=self.limits, workspace=folder, lifetime_s=task.grading_s + 30))
            try:
                box.put(".asked.json", json.dumps(asked).encode())
                runner = [self.boxes.python, "-I", "-S", "-B", "-c", RUNNER.read_text(), ".asked.json"]
                done = box.exec(runner, deadline_s=task.grading_s, most_output_bytes=MOST_SAID_BYTES)
            finally:
                box.stop()
        if done.ended is Ended.BOX_LOST:
            return Grade(verdict=Verdict.ERROR, reason="the box of the grade was lost")
        if done.ended is not Ended.EXITED:
            return Grade(verdict=Verdict.FAILED, reason=f"the tests did not come to an end: {done.ended.value}")
        return judged(task, done.stdout, done.stderr)


def judged(task: TaskData, said: bytes, complaint: bytes = b"") -> Grade:
    """What the runner's words come to; words that are none of its own are no pass."""
    try:
        found = msgspec.json.decode(said, type=Found)
    except msgspec.DecodeError:
        why = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return Grade(verdict=Verdict.FAILED, reason=f"the tests said nothing that counts: {why[0][:200]}")
    done = tuple(sorted(found.passed))
    if believed := [name for name, reason in found.canaries.items() if reason is None]:
        return Grade(verdict=Verdict.FAILED, reason=f"a test passed that nothing can pass: the canary of {believed[0]}", passed=done)
    if missing := [name for name in task.expected if name not in done]:
        reason = found.failed.get(missing[0], "it did not run")
        return Grade(verdict=Verdict.FAILED, reason=f"{len(missing)} of {len(task.expected)}: {missing[0]}: {reason[:200]}", passed=done)
    return Grade(verdict=Verdict.PASSED, passed=done)


def apply(task: TaskData, files: Mapping[str, str | None], folder: Path) -> None:
    """The task's files with these changes; one that would lie where something stays that may not change is left out."""
    task.lay_out(folder)
    for path in (path for path, content in files.items() if content is None):
        _take_away(folder / path, folder)
    for path, content in files.items():
        if content is not None:
            file = folder / path
            with suppress(IsADirectoryError, NotADirectoryError, FileExistsError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)


def _take_away(file: Path, folder: Path) -> None:
    """With the folders that are empty then, in whose place a file may come."""
    with suppress(FileNotFoundError, NotADirectoryError):
        file.unlink()
    with suppress(OSError):
        for parent in file.relative_to(folder).parents[:-1]:
            (folder / parent).rmdir()


def open_to_all(folder: Path) -> None:
    """Let the user of a box read it."""
    for path in (folder.parent, folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def text_of(patch: Patch) -> dict[str, str | None]:
    """A patch as texts; it was checked to be such."""
    return {path: None if content is None else content.decode() for path, content in patch.files.items()}
