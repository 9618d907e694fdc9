"""When a draft head drafts: of one answer by what was drawn of its last drafts, of a whole decoder by whether it pays in measured time.

steps without drafts ─▶ what one costs, by rows ─▶ drafted steps, a window of them ─▶ gain = tokens a row / cost in plain steps
                                ▲                                                        │ above 1: go on
                                └────────── rest, twice as long each time ◀──────────────┘ else
"""

from collections import deque
from statistics import fmean, median

LONGEST = 3
"""Tokens of a draft: each is as likely drawn as all before it and one more."""
LONGEST_REST = 64


class Pace:
    """How far ahead one answer is drafted: one token more after a draft that was drawn whole; after several in a row of which nothing was
    drawn a rest, twice as long each time."""

    def __init__(self) -> None:
        self._length, self._misses, self._resting = 1, 0, 0

    @property
    def length(self) -> int:
        """Tokens to draft now; 0 while it rests."""
        return 0 if self._resting else self._length

    def emitted(self, count: int, *, drafted: int) -> None:
        """So many tokens were drawn, of which all but the last were drafted, among `drafted`."""
        self._resting = max(0, self._resting - count)
        if not drafted:
            return
        if count == 1:
            self._misses, self._length = self._misses + 1, 1
            self._resting = 0 if self._misses == 1 else min(2 ** (self._misses - 1), LONGEST_REST)
        else:
            self._misses = 0
            self._length = min(self._length + 1, LONGEST) if count > drafted else count - 1


class Payoff:
    """Whether a head's drafts pay here, now: in seconds of this machine, whatever else it does."""

    PLAIN, WINDOW, PLAIN_EVERY = 8, 24, 32
    """Plain steps that are measured before anything is drafted; drafted ones before they are judged; drafted ones between two plain."""
    WORTH = 1.02
    """Gain from which on drafting goes on: what is less is lost in the next measurement."""
    FIRST_REST, LAST_REST = 2048, 1 << 20
    """Steps until a head that lost is tried again, the first time and at most: 24 tries of twice a step's cost are 1.2 % of 2,048."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._window: list[tuple[float, float]] = []
        self._rest, self._resting, self._since_plain = self.FIRST_REST, 0, 0
        self.gain: float | None = None
        """Of the newest window: tokens a drafted step gave each row, over its cost in plain steps; None before there is one."""

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
        self._window.append((emitted / rows, seconds / median(self._plain[rows])))
        if len(self._window) == self.WINDOW:
            self._judge()

    def _judge(self) -> None:
        # the median of costs, because a step that another program held up says nothing about drafting
        self.gain = fmean(tokens for tokens, _ in self._window) / median(cost for _, cost in self._window)
        self._window.clear()
        if self.gain >= self.WORTH:
            self._rest = self.FIRST_REST
        else:
            self._resting, self._rest = self._rest, min(2 * self._rest, self.LAST_REST)
