"""When a draft head drafts: of one answer by what was drawn of its last drafts, of a whole decoder by whether it pays in measured time.

steps without drafts ─▶ what one costs, by rows ─▶ drafted steps, a window of them ─▶ gain = tokens a row / cost in plain steps
                                ▲                                                        │ worth it, or not yet sure: go on
                                └────────── rest, twice as long each time ◀──────────────┘ else
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median, stdev

LONGEST = 3
"""Tokens of a draft: each is as likely drawn as all before it and one more."""


class Pace:
    """How far ahead one answer is drafted: one token more after a draft that was drawn whole, else as far as the last one was right."""

    def __init__(self) -> None:
        self.length = 1
        """Tokens to draft now."""

    def emitted(self, count: int, *, drafted: int) -> None:
        """So many tokens were drawn, of which all but the last were drafted, among `drafted`."""
        if drafted:
            self.length = min(self.length + 1, LONGEST) if count > drafted else max(1, count - 1)


class Payoff:
    """Whether a head's drafts pay here, now: in seconds of this machine, whatever else it does."""

    PLAIN, WINDOW, PLAIN_EVERY = 8, 24, 32
    """Plain steps that are measured before anything is drafted; drafted ones between two judgements; drafted ones between two plain."""
    WINDOWS, NEWEST = 16, 3
    """That are looked back on: what a head gains is a few hundredths, and of 24 steps as much is luck; the newest of them."""
    SURE = 4.0
    """Standard errors by which fewer steps have to be behind: it is asked many times."""
    WORTH = 1.02
    """Gain from which on drafting goes on: what is less is lost in the next measurement."""
    FIRST_REST, LAST_REST = 2048, 1 << 20
    """Steps until a head that lost is tried again, the first time and at most: 24 tries of twice a step's cost are 1.2 % of 2,048, and so
    are 384 of a head that is a sixteenth behind."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._drafted: deque[tuple[float, float]] = deque(maxlen=self.WINDOW * self.WINDOWS)
        self._rest, self._resting, self._since_plain, self._since_judged = self.FIRST_REST, 0, 0, 0
        self.gain: float | None = None
        """Of the newest drafted steps: tokens each gave a row, over its cost in plain steps; None before there is one window."""

    @property
    def state(self) -> str:
        """`measuring` (nothing is known yet), `drafting` or `resting` (it lost)."""
        return "resting" if self._resting else "measuring" if self.gain is None else "drafting"

    def allows(self, rows: int) -> bool:
        """Whether a step of so many rows may be drafted for."""
        known = len(self._plain.get(rows, ()))
        return not self._resting and known >= self.PLAIN and self._since_plain < self.PLAIN_EVERY

    def took(self, *, rows: int, seconds: float, emitted: int | None) -> None:
        """A step took so long; `emitted` tokens came of it where the head drafted, None where nothing was drafted."""
        if emitted is None:
            self._plain.setdefault(rows, deque(maxlen=2 * self.PLAIN)).append(seconds)
            self._since_plain, self._resting = 0, max(0, self._resting - 1)
            return
        self._since_plain += 1
        self._drafted.append((emitted / rows, seconds / median(self._plain[rows])))
        self._since_judged += 1
        if self._since_judged == self.WINDOW:
            self._judge()

    def _judge(self) -> None:
        self._since_judged = 0
        steps = [*self._drafted]
        self.gain, error = _gain(steps)
        newest, newest_error = _gain(steps[-self.NEWEST * self.WINDOW :])
        is_behind = min(self.gain + self.SURE * error, newest + self.SURE * newest_error) < self.WORTH
        if is_behind or (self.gain < self.WORTH and len(steps) == self._drafted.maxlen):
            self._drafted.clear()
            self._resting, self._rest = self._rest, min(2 * self._rest, self.LAST_REST)
        elif self.gain >= self.WORTH:
            self._rest = self.FIRST_REST


def _gain(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """What drafted steps gained, and its standard error by the luck of drafts: tokens a row, over the median of costs, because a step that
    another program held up says nothing about drafting."""
    tokens, cost = [tokens for tokens, _ in steps], median(cost for _, cost in steps)
    return fmean(tokens) / cost, stdev(tokens) / math.sqrt(len(tokens)) / cost
