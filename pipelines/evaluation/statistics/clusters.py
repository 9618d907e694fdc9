"""The difference of two means over turns where the people, not the turns, were drawn (delta method for a ratio of sums).

A person's turns belong together, and some people have a thousand times as many as others. The mean of an arm is total / turns, a ratio of
two sums over people; its variance is that of sum(total_i - mean * turns_i) / turns over the people i (Deng, Knoblich, Lu: Applying the
Delta Method in Metric Analytics, KDD 2018, section 2).
"""

import math

from app.domain.release.holdouts import PersonSums

LEAST_PEOPLE = 30
"""Of those who matter (`effective`), in each arm."""
Z = 1.959963984540054
"""Of a 95 % interval."""


def mean(sums: PersonSums) -> float | None:
    """Per turn; None without turns."""
    return sums.x / sums.n if sums.n > 0.0 else None


def effective(sums: PersonSums) -> float:
    """How many people with equally many turns each would say as much (Kish): fewer than there are where few have most of the turns."""
    return sums.n * sums.n / sums.nn if sums.nn > 0.0 else 0.0


def variance(sums: PersonSums) -> float:
    """Of the mean; of two people or more with a turn each."""
    rate = sums.x / sums.n
    squares = max(0.0, sums.xx - 2.0 * rate * sums.nx + rate * rate * sums.nn)
    return sums.people / (sums.people - 1.0) * squares / (sums.n * sums.n)


def difference(one: PersonSums, other: PersonSums) -> tuple[float, float, float] | None:
    """(one - other, low, high) of the means, 95 %; None where either has fewer than `LEAST_PEOPLE` who matter."""
    if min(effective(one), effective(other)) < LEAST_PEOPLE:
        return None
    found = one.x / one.n - other.x / other.n
    spread = Z * math.sqrt(variance(one) + variance(other))
    return found, found - spread, found + spread
