"""What a second policy is paid for one step of the harness: it names the files and lines that matter, another policy does the work.

    reward = overlap · (1 − weight · min(1, seconds / budget))

overlap: of what was named with what the final patch touched, F(β = ½) of the files and of the lines, the mean of both. Naming too much
costs more than naming too little: whoever reads it pays for every line. The final patch is the rollout's own where it solved the task;
one that did not says little about what matters, so there the task's own solution is asked, and where there is none nothing is paid.

seconds: of the engine, for each search; waiting for leave to ask is nobody's doing. F(½) for retrieval in agents, a few parallel calls in a
few turns: Cognition 2025, "SWE-grep".
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from pipelines.rollouts.interception import Exchange
from pipelines.rollouts.tasks import TaskData

BETA = 0.5
Line = tuple[str, int]
"""A file and the number of a line in it, from 1."""
Patch = Mapping[str, str | None]


class Place(msgspec.Struct, frozen=True):
    """Lines of a file, as the model names them."""

    path: str
    first: Annotated[int, msgspec.Meta(ge=1)]
    last: int


class Places(msgspec.Struct, frozen=True):
    """The answer that ends a search."""

    places: list[Place]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The step, and what it is worth."""

    policy: str
    """Whose step it is: its turns are of this policy."""
    budget_s: float = 10.0
    """A search that takes as long as this has paid all that time costs."""
    weight: float = 0.3
    """What time may cost, of what was found."""

    def reward(self, exchanges: Sequence[Exchange], task: TaskData, patch: Patch, *, solved: bool) -> float | None:
        """Of an episode's searches together; None where there were none, or nobody knows what mattered."""
        mine = [one for one in exchanges if one.policy == self.policy]
        matters = touched(task.files, patch if solved else task.gold)
        if not mine or not matters:
            return None
        found = named(mine, task.files)
        searches = max(1, sum(_places(one) is not None for one in mine))
        slow = min(1.0, sum(one.took_s for one in mine) / searches / self.budget_s)
        files = f_measure({path for path, _ in found}, {path for path, _ in matters})
        return (files + f_measure(found, matters)) / 2 * (1.0 - self.weight * slow)


def f_measure(found: set[Line] | set[str], wanted: set[Line] | set[str]) -> float:
    """F(β) of a set beside another: (1 + β²)·p·r / (β²·p + r).

    >>> f_measure({"a", "b"}, {"a"})  # p = 1/2, r = 1: 1.25 · 0.5 / (0.125 + 1)
    0.5555555555555556
    """
    common = len(found & wanted)  # pyright: ignore[reportOperatorIssue] - both of files or both of lines
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def touched(files: Mapping[str, str], patch: Patch) -> set[Line]:
    """The lines of the files before that a patch replaced or removed, and those beside which it put something; new files have none."""
    return {(path, line) for path, after in patch.items() if path in files for line in _changed(files[path], after or "")}


def _changed(before: str, after: str) -> Iterator[int]:
    old = before.splitlines()
    for kind, first, end, _, _ in difflib.SequenceMatcher(None, old, after.splitlines(), autojunk=False).get_opcodes():
        if kind == "insert":
            yield from (line for line in (first, first + 1) if 1 <= line <= len(old))
        elif kind != "equal":
            yield from range(first + 1, end + 1)


def named(exchanges: Sequence[Exchange], files: Mapping[str, str]) -> set[Line]:
    """The lines that answers named, of those that there are."""
    places = [place for one in exchanges for place in (_places(one) or Places([])).places if place.path in files]
    length = {path: len(files[path].splitlines()) for path in {place.path for place in places}}
    return {
        (place.path, line) for place in places for line in range(place.first, min(length[place.path], max(place.first, place.last)) + 1)
    }


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message = _Message()


class _Said(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


def _places(exchange: Exchange) -> Places | None:
    """What an answer named; None where it is another step's, or cut off."""
    said = msgspec.convert(exchange.answer, _Said).choices
    try:
        return msgspec.json.decode((said[0].message.content if said else None) or "", type=Places)
    except msgspec.DecodeError:
        return None
