"""The contamination probe: is the solution of a suite's task in what a version learned from?

A run of `RUN` words that a task's solution (its expected text, its tests) shares with a learned text is taken as a copy, as in the
decontamination of GPT-3 (Brown et al. 2020, 2005.14165, appendix C: 13-grams). Runs that several tasks share are boilerplate and say
nothing. The question itself may be there: people ask what suites ask, and what counts is whether the answer could be looked up.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from pipelines.evaluation.suites.suites import Task

RUN = 13
BOILERPLATE = 3
"""A run in so many tasks belongs to none of them."""
WORD = re.compile(r"\w+")


def contaminated(tasks: Sequence[Task], learned: Iterable[str]) -> dict[str, str]:
    """Task id → the shared words, for every task whose solution was learned from; short solutions cannot be told and are left out."""
    runs = {task.id: _runs(f"{task.grader.expected} {task.grader.tests}") for task in tasks}
    common = Counter(run for found in runs.values() for run in found)
    owners: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for task, found in runs.items():
        for run in found:
            if common[run] < BOILERPLATE:
                owners[run].append(task)
    shared: dict[str, str] = {}
    for text in learned if owners else ():
        for run in _runs(text) & owners.keys():
            shared |= {task: " ".join(run) for task in owners[run] if task not in shared}
    return shared


def _runs(text: str) -> set[tuple[str, ...]]:
    words = WORD.findall(text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
