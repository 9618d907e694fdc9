"""How many threads a decoding step takes: as many as are fastest now, because what else wants these cores comes and goes.

On two idle cores two threads decode 64 rows in 125 ms where one takes 200; beside two busy processes one takes 340 and two take 500,
since a thread that has to wait for its core keeps the other one waiting at every product. So every few seconds some rounds are taken
in turn with the number in use and with its neighbours, and the fastest one stays. Fewer that are no slower stay before more: what a thread
costs to wake at every product is processor time that others can have (8 rows of SmolLM2 on a Xeon: 61 ms a step with one thread or two,
and 79 ms of processor time with two).

A round is a step of every version that decodes, and only rounds without a prompt are compared: a token of a prompt costs a tenth of one
that is decoded, and one of a version with many rows half of one with few. Prompts come in a row, so another number is tried behind a round
without one: else a trial that begins with them feeds all of them on half of the threads.
"""

import logging
import time
from collections.abc import Callable
from itertools import takewhile

import torch

log = logging.getLogger(__name__)

EVERY_S = 5.0
ROUNDS = 4
"""Compared with each number, turn and turn about; the slowest of them does not count, because what disturbs a machine for a moment must
not choose for seconds."""
MOST_ROUNDS = 40
"""Taken for one comparison; where prompts are fed in so many, all stays as it is."""
BETTER = 0.9
"""More threads take over when their rounds last less than this share of the present number's; fewer when theirs last no longer."""


class Threads:
    """For the one thread that decodes: torch keeps the number per thread."""

    def __init__(
        self, most: int, *, use: Callable[[int], None] = torch.set_num_threads, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._ladder = [*takewhile(lambda count: count < most, (2**power for power in range(32))), most]
        """1, 2, 4, …, most."""
        self._use, self._clock = use, clock
        self.count = most
        self._trial: list[int] = []
        """Numbers that are being compared, the next one first; empty between two comparisons."""
        self._seen: dict[int, list[float]] = {}
        self._taken = 0
        self._calm = False
        """Whether the last round had no prompt."""
        self._due = float("-inf")

    def begin(self) -> None:
        """On the thread that decodes, before anything else."""
        self._use(self.count)

    def round(self, act: Callable[[], int]) -> None:
        """Take one round; `act` returns how many tokens it decoded, by which its time is measured, and 0 where it says nothing."""
        if len(self._ladder) == 1:
            act()
            return
        if not self._trial and self._calm and self._clock() >= self._due:
            self._trial, self._seen, self._taken = self._neighbours(), {}, 0
        if not self._trial:
            self._calm = act() > 0
            return
        count = self._trial[0] if self._calm else self.count
        self._use(count)
        began = self._clock()
        decoded = act()
        self._taken, self._calm = self._taken + 1, decoded > 0
        if decoded and count == self._trial[0]:
            self._seen.setdefault(count, []).append((self._clock() - began) / decoded)
            self._trial = [*self._trial[1:], *[count] * (len(self._seen[count]) < ROUNDS)]
        if not self._trial or self._taken >= MOST_ROUNDS:
            self._decide()

    def _neighbours(self) -> list[int]:
        at = self._ladder.index(self.count)
        return self._ladder[max(0, at - 1) : at + 2]

    def _decide(self) -> None:
        if not self._trial:
            lasted = {count: sum(sorted(seconds)[:-1]) for count, seconds in self._seen.items()}
            worth_it = {count for count in lasted if lasted[count] < BETTER * lasted[self.count]}
            no_slower = {count for count in lasted if count < self.count and lasted[count] <= lasted[self.count]}
            if better := worth_it or no_slower:
                found = min(better, key=lasted.__getitem__)
                log.info("threads count=%d before=%d", found, self.count)
                self.count = found
        self._trial = []
        self._use(self.count)
        self._due = self._clock() + EVERY_S
