"""Cuts a product suite from real episodes: what held-out people asked, and what they turned the answers into.

The way CursorBench is built (facts/rl.md, section 3.5): tasks from real sessions, never trained on, several dimensions, short enough to be
checked by hand. Every chosen turn becomes up to four tasks of one cluster (the person, so that nobody counts twice):

| dimension   | grader    | what it asks                                                                              |
|-------------|-----------|-------------------------------------------------------------------------------------------|
| correctness | `similar` | how close the answer is to the text the user ended up with (a demonstration, or an edit kept whole) |
| quality     | `parses`  | whether the code in it is a whole program, where what they ended up with was one            |
|             | `judge`   | instead, where a judge is asked for: how well made it is beside what they ended up with     |
| efficiency  | `short`   | whether it is as short as the one that was useful                                          |
| interaction | `answers` | whether it does the work instead of asking back, where the work could be done              |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipelines.evaluation.suites.graders import code_of, parses
from pipelines.evaluation.suites.suites import Grader, GraderKind, Task


@dataclass(frozen=True, kw_only=True)
class SourceTurn:
    """One turn of a held-out person that ended well."""

    inference_id: str
    person: str
    messages: tuple[dict[str, Any], ...]
    ended_up_with: str
    """The text that the user kept or turned the answer into."""


RUBRIC = "Score how well made the answer is: clear, idiomatic, without needless parts. The user was content with this:\n\n{kept}"


def cut_product_suite(turns: Iterable[SourceTurn], *, most: int, most_per_person: int = 3, judged: bool = False) -> list[Task]:
    """Tasks of the suite, in the order of the turns; a turn without a result or without messages makes none. `judged`: quality is
    scored by the judge model."""
    tasks: list[Task] = []
    taken: dict[str, int] = {}
    for turn in turns:
        if len(tasks) >= most or not turn.ended_up_with.strip() or not turn.messages or taken.get(turn.person, 0) >= most_per_person:
            continue
        taken[turn.person] = taken.get(turn.person, 0) + 1
        tasks += _tasks(turn, judged=judged)
    return tasks[:most]


def _tasks(turn: SourceTurn, *, judged: bool) -> list[Task]:
    words = len(turn.ended_up_with.split())
    graders = {
        "correctness": Grader(kind=GraderKind.SIMILAR, expected=turn.ended_up_with),
        **_quality(turn.ended_up_with, judged=judged),
        "efficiency": Grader(kind=GraderKind.SHORT, tokens=max(words, 8)),
        "interaction": Grader(kind=GraderKind.ANSWERS),
    }
    return [
        Task(id=f"{turn.inference_id}:{name}", cluster=turn.person, messages=list(turn.messages), grader=grader, dimension=name)
        for name, grader in graders.items()
    ]


def _quality(kept: str, *, judged: bool) -> dict[str, Grader]:
    if judged:
        return {"quality": Grader(kind=GraderKind.JUDGE, rubric=RUBRIC.format(kept=kept))}
    return {"quality": Grader(kind=GraderKind.PARSES)} if parses(code_of(kept)) else {}
