"""Task × harness, in the names and the shape of verifiers v1: what a task is, who offers tasks, and what tries them.

A task begins with files and ends with a patch. Which of the files may change is the task's to say; what else changed does not travel to
where the grade is made. The tests are never in the box that the agent works in.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from app.domain.errors import BadInput
from app.domain.learning.boxes import MOST_PATCH_BYTES, checked_path

MOST_INSTRUCTION_CHARS = 20_000
EVERYTHING = "*"
"""In the place of files that may change: all of them."""
PLAIN = re.compile(r"[a-z0-9][a-z0-9._-]{0,60}")
"""What a taskset may be called: its turns' source is `rollout:<name>`."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """One task, as data."""

    taskset: str
    key: str
    """Unique in its taskset."""
    instruction: str
    files: Mapping[str, str]
    """What the workspace begins with."""
    editable: tuple[str, ...]
    """Files, or folders with a slash at their end, whose changes travel."""
    tests: Mapping[str, str]
    """Hidden: modules of tests by path, laid where the grade is made."""
    expected: tuple[str, ...]
    """Ids (`path::name`) of the tests that have to pass, each of them."""
    gold: Mapping[str, str | None]
    """A patch that solves it."""
    hacks: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict[str, Mapping[str, str | None]])
    """Patches that do not and might be paid by a careless grader."""
    graded_by: str = ""
    """Address of the bridge that grades it (`bridged.py`); empty: its own tests do."""
    judge_hash: str = ""
    """Of how a bridge grades it."""
    answer_file: str | None = None
    """Set where the task is solved by one answer: its code is this file's content, and there are no tools."""
    deadline_s: float = 300.0
    """For the whole of the agent's work."""
    grading_s: float = 60.0
    most_turns: int = 20
    most_tokens: int = 16_384
    """Sampled, all turns together."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that decides what is asked and how it is judged."""
        content = [self.taskset, self.key, self.instruction, dict(self.files), self.editable, dict(self.tests), self.expected]
        content += [self.answer_file, self.deadline_s, self.most_turns, self.most_tokens, *([self.judge_hash] if self.graded_by else [])]
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()

    def may_change(self, path: str) -> bool:
        """Whether a change of this file travels."""
        return any(place in (path, EVERYTHING) or (place.endswith("/") and path.startswith(place)) for place in self.editable)

    def lay_out(self, folder: Path) -> None:
        """Write the workspace's files: nothing but what the task names, no history, no compiled file."""
        for path, content in self.files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)


class Taskset(Protocol):
    """Who offers tasks."""

    @property
    def name(self) -> str:
        """A plain word: its rollouts' turns have the source `rollout:<name>`."""
        ...

    def load(self) -> Sequence[TaskData]:
        """All of them, in an order that is always the same. Raises `BadInput`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a harness is started in a box."""

    argv: tuple[str, ...]
    files: Mapping[str, bytes]
    """Laid into the workspace before; they never travel."""
    stdin: bytes = b""


class Harness(Protocol):
    """A program that works on a task with a model behind an OpenAI endpoint: the product's own, in any language."""

    @property
    def name(self) -> str:
        """For the record."""
        ...

    @property
    def hash(self) -> str:
        """Of everything that decides what it does."""
        ...

    def launch(self, endpoint: str, secret: str, data: TaskData, *, model: str, python: str) -> Launch:
        """How to start it. `secret` samples one episode and does nothing else."""
        ...


def checked(tasks: Sequence[TaskData]) -> Sequence[TaskData]:
    """The tasks, each of a kind that can be graded. Raises `BadInput`, naming the task and the cure."""
    seen: set[str] = set()
    for task in tasks:
        if not PLAIN.fullmatch(task.taskset):
            raise BadInput(
                f"a taskset is called {task.taskset!r}: small letters, digits, `.`, `_` and `-`, 61 at most, a letter or digit first"
            )
        wrong = "another task has this key; give each its own" if task.key in seen else _wrong(task) or _leaks(task)
        if wrong is not None:
            raise BadInput(f"task {task.taskset}/{task.key}: {wrong}")
        seen.add(task.key)
    if not seen:
        raise BadInput("the taskset has no tasks")
    return tasks


def _wrong(task: TaskData) -> str | None:
    """What keeps it from being tried or graded."""
    if not task.graded_by and (not task.expected or not task.tests):
        return "it has no tests, so whatever an agent did would pass; name the tests in `expected`"
    if unknown := [test for test in task.expected if test.partition("::")[0] not in task.tests]:
        return f"it expects {unknown[0]}, and no file of `tests` is called so"
    if len(task.instruction) > MOST_INSTRUCTION_CHARS:
        return f"its instruction has {len(task.instruction)} characters and may have {MOST_INSTRUCTION_CHARS}"
    if sum(map(len, task.files.values())) > MOST_PATCH_BYTES:
        return f"its files are larger than {MOST_PATCH_BYTES >> 20} MiB"
    if task.deadline_s <= 0 or task.grading_s <= 0 or task.most_turns < 1 or task.most_tokens < 1:
        return "deadline_s, grading_s, most_turns and most_tokens have to be above zero"
    return None


def _leaks(task: TaskData) -> str | None:
    """What would let an agent see or decide how it is graded. Raises `BadInput` for a path that is none."""
    for path in (*task.files, *task.tests, *(place.rstrip("/") for place in task.editable)):
        checked_path(path)
    if inside := [path for path in task.tests if task.may_change(path) or path in task.files]:
        return f"{inside[0]} is a hidden test that the agent sees or may change; take it out of `files` and `editable`"
    if not all(task.may_change(path) for path in task.gold):
        return "its gold patch changes what may not travel; name the files in `editable`"
    if any(PurePosixPath(path).name in ("conftest.py", "sitecustomize.py") for path in task.editable):
        return "conftest.py and sitecustomize.py decide how tests run and may not be editable"
    return None
