"""Means, and differences of means, each with an interval: for looking at, never for deciding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A mean with its 95 % interval (normal approximation: for looking at, not for deciding)."""

    n: int
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """`0.43 [0.38, 0.48]`."""
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def measure(values: Sequence[float], *, low: float = -math.inf, high: float = math.inf) -> Measure | None:
    """Mean and interval of a sample within [low, high]; None below two values. Equal values get the rule of three's width."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = 1.96 * deviation / math.sqrt(n) if min(values) < max(values) else 3 / n  # ten times 0.1 has a deviation, of 1e-17
    return Measure(n=n, mean=mean, low=max(low, mean - half), high=min(high, mean + half))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Second mean minus first, with its interval (Welch)."""

    first: Measure
    second: Measure
    difference: float
    low: float
    high: float
    level: float = 0.95
    """Of the interval."""


def difference(first: Sequence[float], second: Sequence[float], *, error: float = 0.05) -> Difference | None:
    """What changed from the first sample to the second, with an interval of that error; None where either sample is too small."""
    before, after = measure(first), measure(second)
    if before is None or after is None:
        return None
    wider = NormalDist().inv_cdf(1 - error / 2) / NormalDist().inv_cdf(0.975)
    half = wider * math.hypot(before.high - before.mean, after.high - after.mean)
    delta = after.mean - before.mean
    return Difference(first=before, second=after, difference=delta, low=delta - half, high=delta + half, level=1 - error)
