"""Carries a region of a file through later edits: where does what the model wrote stand now?

Lines, then words, then characters are aligned: within a changed block the next finer pieces decide. Large blocks are aligned by pieces
that occur once in both (patience diff: Cohen's anchors and a longest increasing subsequence, O(n log n)), small ones by difflib within
a budget: what is over it stays one changed block.
What was typed at a border of the region lies outside it; what was changed across a border lies inside.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from itertools import accumulate

SMALL = 1_000_000
"""Product of the two lengths up to which difflib aligns."""
DEPTH = 12
"""How often anchors are looked for between anchors."""
Block = tuple[int, int, int, int]
"""[i1, i2) of the old became [j1, j2) of the new."""


@dataclass
class Budget:
    """Comparisons of two pieces that aligning a pair of texts may still cost: for texts of few different characters difflib is cubic.

    Revisions of source files and prose, also those that rewrote a whole file, took at most 51 a character and 661,000 in all (1,200 of this
    repository's); a second of CPU does about ten million.
    """

    left: float

    @classmethod
    def of(cls, old: str, new: str) -> "Budget":
        """By the length of both, so that no text costs much more than its size."""
        return cls(1_000_000 + 64 * (len(old) + len(new)))


_LEVELS = (re.compile(r"[^\n]*\n|[^\n]+"), re.compile(r"\w+|\s+|[^\w\s]"), re.compile(r".", re.DOTALL))


def region_now(*, before: str, start: int, replaced: int, inserted: str, after: str) -> str:
    """What stands in `after` where `before[start:start+replaced]` had become `inserted`; all are whole files but `inserted`."""
    start = min(start, len(before))
    edited = before[:start] + inserted + before[start + replaced :]
    first, last = carry(edited, after, start, start + len(inserted))
    return after[first:last]


def carry(old: str, new: str, start: int, end: int) -> tuple[int, int]:
    """Where [start, end) of `old` lies in `new`; empty where all of it is gone."""
    first, last = start, end
    for i1, i2, j1, j2 in changes(old, new):
        shift = j2 - i2
        if i2 <= start:
            first = start + shift
        elif i1 <= start:
            first = j1
        if i2 <= end and not (i1 == i2 == end):
            last = end + shift
        elif i1 < end:
            last = j2
    return first, max(first, last)


def changes(old: str, new: str, budget: Budget | None = None) -> Iterator[Block]:
    """Blocks of characters that differ, in order; coarse ones from where the budget is spent."""
    return _changes(old, new, 0, budget or Budget.of(old, new))


def _changes(old: str, new: str, level: int, budget: Budget) -> Iterator[Block]:
    a, b = _LEVELS[level].findall(old), _LEVELS[level].findall(new)
    at_a, at_b = [0, *accumulate(map(len, a))], [0, *accumulate(map(len, b))]
    for i1, i2, j1, j2 in _align(a, b, DEPTH, budget):
        block = at_a[i1], at_a[i2], at_b[j1], at_b[j2]
        if i1 == i2 or j1 == j2 or level + 1 == len(_LEVELS):
            yield block
        else:
            finer = _changes(old[block[0] : block[1]], new[block[2] : block[3]], level + 1, budget)
            yield from ((block[0] + k1, block[0] + k2, block[2] + l1, block[2] + l2) for k1, k2, l1, l2 in finer)


def _align(a: Sequence[str], b: Sequence[str], depth: int, budget: Budget) -> Iterator[Block]:
    """Blocks of pieces that differ; what is the same at both ends is taken off first."""
    head = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    most = min(len(a), len(b)) - head
    tail = next((n for n in range(most) if a[len(a) - 1 - n] != b[len(b) - 1 - n]), most)
    mine, theirs = a[head : len(a) - tail], b[head : len(b) - tail]
    if not mine and not theirs:
        return
    found = _small(mine, theirs, budget) if len(mine) * len(theirs) <= SMALL else _large(mine, theirs, depth, budget)
    yield from ((head + i1, head + i2, head + j1, head + j2) for i1, i2, j1, j2 in found)


def _small(a: Sequence[str], b: Sequence[str], budget: Budget) -> Iterator[Block]:
    matcher = _Matcher(a, b, budget)
    yield from ((i1, i2, j1, j2) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


class _Matcher(SequenceMatcher[str]):
    """difflib's, which finds nothing more that is the same where looking for it is over the budget."""

    def __init__(self, a: Sequence[str], b: Sequence[str], budget: Budget) -> None:
        super().__init__(None, a, b, autojunk=False)
        self._budget = budget
        in_b = Counter(b)
        self._cost = [0, *accumulate(1 + in_b[piece] for piece in a)]

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Match:
        cost = self._cost[-1 if ahi is None else ahi] - self._cost[alo]
        if cost > self._budget.left:
            return Match(alo, blo, 0)
        self._budget.left -= cost
        return super().find_longest_match(alo, ahi, blo, bhi)


def _large(a: Sequence[str], b: Sequence[str], depth: int, budget: Budget) -> Iterator[Block]:
    anchors = _anchors(a, b) if depth else []
    if not anchors:
        yield 0, len(a), 0, len(b)
        return
    i, j = 0, 0
    for x, y in [*anchors, (len(a), len(b))]:
        yield from ((i + i1, i + i2, j + j1, j + j2) for i1, i2, j1, j2 in _align(a[i:x], b[j:y], depth - 1, budget))
        i, j = x + 1, y + 1


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Positions of pieces that occur once in both, as many as are in the same order in both."""
    in_a, in_b = Counter(a), Counter(b)
    where = {piece: at for at, piece in enumerate(b) if in_b[piece] == 1}
    pairs = [(at, where[piece]) for at, piece in enumerate(a) if in_a[piece] == 1 and piece in where]
    ends: list[int] = []
    tops: list[int] = []
    previous: list[int] = []
    for index, (_, y) in enumerate(pairs):
        place = bisect_left(ends, y)
        ends[place : place + 1] = [y]
        tops[place : place + 1] = [index]
        previous.append(tops[place - 1] if place else -1)
    chain: list[tuple[int, int]] = []
    index = tops[-1] if tops else -1
    while index >= 0:
        chain.append(pairs[index])
        index = previous[index]
    return chain[::-1]
