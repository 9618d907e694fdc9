"""Which task next: those whose tries come out differently, because a group in which all are paid alike teaches nothing.

Thompson sampling over learnability. Task i has a Beta posterior over its success rate p_i, from its tries so far, each of which counts for
nine tenths after the next one: what a version of long ago could do says little. For each group a p is drawn from every posterior, and the
task with the largest p(1 − p) is taken: with K tries, 1 − p^K − (1 − p)^K, the chance of a mixed group, grows with it. A task never tried
draws from Beta(1, 1), so it is tried; one that is always solved, or never, comes back as often as its posterior still leaves doubt. One
group in ten is drawn evenly, so that nothing is forgotten for good (p = 0 may become p > 0 after an update).

Chapelle and Li 2011 (Thompson sampling); learnability p(1 − p): Foster and Foerster 2025, arXiv 2502.12272.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FORGET = 0.9
"""What an earlier try counts, for each later one of the same task."""
EVENLY = 0.1


@dataclass
class Learnability:
    """The posterior of each task, and the draw."""

    tasks: Sequence[str]
    seed: int | str = 0
    solved: dict[str, float] = field(default_factory=dict[str, float])
    failed: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def learn(self, task: str, solved: bool) -> None:
        """One try more, of the model's own doing."""
        self.solved[task] = FORGET * self.solved.get(task, 0.0) + float(solved)
        self.failed[task] = FORGET * self.failed.get(task, 0.0) + float(not solved)

    def draw(self, count: int, *, held: Mapping[str, str] | None = None) -> list[str]:
        """The tasks of the next groups, each at most once as long as there are others; `held` ones (by reason) never."""
        open_ = [task for task in self.tasks if task not in (held or {})]
        drawn: list[str] = []
        while open_ and len(drawn) < count:
            left = [task for task in open_ if task not in drawn[len(drawn) // len(open_) * len(open_) :]]
            evenly = self._random.random() < EVENLY
            drawn.append(self._random.choice(left) if evenly else max(left, key=lambda task: self._worth(task)))
        return drawn

    def _worth(self, task: str) -> float:
        p = self._random.betavariate(1.0 + self.solved.get(task, 0.0), 1.0 + self.failed.get(task, 0.0))
        return p * (1.0 - p)
