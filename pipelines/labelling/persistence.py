"""Edit persistence: how much of what the model wrote is still there later.

Two published measures over texts (the 4-gram survival and the no-revert measure; facts/rl.md, section 5.2), for an edit that replaced
`before` by `ai` in a region that now reads `now`:

    sim4(a, b)  = (N − Σ_g |count_a(g) − count_b(g)|) / N      over character 4-grams g, N = number of 4-grams of both texts
    four_gram   = sim4(now, ai)
    no_revert   = 1 − max(sim4(now, before) − sim4(ai, before), 0) / (1 − sim4(ai, before))
"""

from collections import Counter
from collections.abc import Mapping

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


def survival(measured: Mapping[float, float], *, ended_at: float | None) -> float:
    """Mean survival over the horizons (seconds → four-gram) that were observed.

    Horizons after `ended_at` are censored: nobody looked, so they say nothing, and the mean is over the others. With no horizon
    observed there is no value; the caller abstains.
    """
    seen = [value for horizon, value in measured.items() if ended_at is None or horizon <= ended_at]
    return sum(seen) / len(seen)


def _grams(text: str) -> Counter[str]:
    return Counter(text[i : i + GRAM] for i in range(len(text) - GRAM + 1))
