"""How many threads a decoding step takes: as many as are fastest now, because what else wants these cores comes and goes.

On two idle cores two threads decode 64 rows in 125 ms where one takes 200; beside two busy processes one takes 340 and two take 500,
since a thread that has to wait for its core keeps the other one waiting at every product. So every few seconds some steps are taken
in turn with the number in use and with its neighbours, and the fastest one stays.
"""

import logging
import time
from collections.abc import Callable
from itertools import takewhile

import torch

log = logging.getLogger(__name__)

EVERY_S = 5.0
ROUNDS = 3
"""Steps tried with each number, turn and turn about."""
BETTER = 0.9
"""Another number takes over when its steps last less than this share of the present one's."""


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
        self._seen: dict[int, list[float]] = {}
        self._due = float("-inf")

    def begin(self) -> None:
        """On the thread that decodes, before anything else."""
        self._use(self.count)

    def step(self, act: Callable[[], int]) -> None:
        """Run one step; `act` returns how many tokens it fed, which is what its time is measured by."""
        if len(self._ladder) == 1:
            act()
            return
        if not self._trial and self._clock() >= self._due:
            self._trial, self._seen = self._neighbours() * ROUNDS, {}
        if not self._trial:
            act()
            return
        count = self._trial.pop()
        self._use(count)
        began = self._clock()
        fed = act()
        if fed:
            self._seen.setdefault(count, []).append((self._clock() - began) / fed)
        if not self._trial:
            self._decide()

    def _neighbours(self) -> list[int]:
        at = self._ladder.index(self.count)
        return self._ladder[max(0, at - 1) : at + 2]

    def _decide(self) -> None:
        """By the least of each number's steps: what disturbs a machine for a moment must not choose for seconds."""
        least = {count: min(lasted) for count, lasted in self._seen.items()}
        if self.count in least:
            fastest = min(least, key=least.__getitem__)
            if least[fastest] < BETTER * least[self.count]:
                log.info("threads count=%d before=%d", fastest, self.count)
                self.count = fastest
        self._use(self.count)
        self._due = self._clock() + EVERY_S
