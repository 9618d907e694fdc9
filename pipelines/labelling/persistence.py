"""Edit persistence: how much of what the model wrote is still there later.

Two published measures over texts (the 4-gram survival and the no-revert measure; facts/rl.md, section 5.2), for an edit that replaced
`before` by `ai` in a region that now reads `now`:

    sim4(a, b)  = (N − Σ_g |count_a(g) − count_b(g)|) / N      over character 4-grams g, N = number of 4-grams of both texts
    four_gram   = sim4(now, ai)
    no_revert   = 1 − max(sim4(now, before) − sim4(ai, before), 0) / (1 − sim4(ai, before))

Both are means over a turn's edits, weighted by their lengths. Neither is enough by itself: after a small change in a large range is taken
back, four_gram is still near 1; after the user has rewritten all of it, no_revert is. So what survives of an edit is the lesser of the two.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 4


def similarity(a: str, b: str) -> float:
    """sim4: 1 for equal texts, 0 for texts without a common 4-gram; plain equality where a text has fewer than four characters."""
    if len(a) < GRAM or len(b) < GRAM:
        return float(a == b)
    grams_a, grams_b = _grams(a), _grams(b)
    total = sum(grams_a.values()) + sum(grams_b.values())
    different = sum(abs(count - grams_b[gram]) for gram, count in grams_a.items())
    different += sum(count for gram, count in grams_b.items() if gram not in grams_a)
    return (total - different) / total


def no_revert(*, before: str, ai: str, now: str) -> float:
    """1 while the region has not moved back towards what stood there before, 0 when it is that again."""
    start = similarity(ai, before)
    if start >= 1.0:
        return 1.0
    return 1.0 - max(similarity(now, before) - start, 0.0) / (1.0 - start)


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at one edit."""

    edit: str
    """Which edit of the turn."""
    horizon_s: float
    four_gram: float
    no_revert: float | None
    """None where the edit replaced nothing, so that there is nothing to revert to."""
    length: int | None
    """Characters, the weight of the edit among the others of the turn; None where nobody said."""
    ended: bool = False
    """Nobody looked at this edit afterwards."""

    @property
    def survived(self) -> float:
        """The share of the edit that is there and was not taken back."""
        return self.four_gram if self.no_revert is None else min(self.four_gram, self.no_revert)


def survival(looks: Sequence[Look]) -> dict[float, float]:
    """Horizon (seconds) → what survived of the turn's edits, weighted by length; the curve.

    Of several looks at one edit at one horizon the last counts, as corrected. An edit whose observation ended is censored: later looks
    at it say nothing, and at later horizons the mean is over the others.
    """
    last = {(look.edit, look.horizon_s): look for look in looks}
    ended: dict[str, float] = {}
    for look in last.values():
        if look.ended:
            ended[look.edit] = min(look.horizon_s, ended.get(look.edit, look.horizon_s))
    at: dict[float, list[Look]] = defaultdict(list)
    for look in last.values():
        if look.horizon_s <= ended.get(look.edit, look.horizon_s):
            at[look.horizon_s].append(look)
    return {horizon: _weighted(at[horizon]) for horizon in sorted(at)}


def _weighted(looks: Sequence[Look]) -> float:
    """Mean by length; where a length is unknown, or all are 0, every edit weighs the same."""
    lengths = [look.length for look in looks if look.length is not None]
    weights = lengths if len(lengths) == len(looks) and any(lengths) else [1] * len(looks)
    return sum(weight * look.survived for weight, look in zip(weights, looks, strict=True)) / sum(weights)


def _grams(text: str) -> Counter[str]:
    return Counter(text[i : i + GRAM] for i in range(len(text) - GRAM + 1))
