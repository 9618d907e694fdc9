"""Values added up: their mean, their spread, and intervals for one look and for all looks at once."""

import math
from dataclasses import dataclass

from app.domain.views.measures import Measure

MILLION = 1_000_000.0


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Values of one measure, added up, in millionths (`app.db.learning.rollups`)."""

    n: int = 0
    total: int = 0
    squares: int = 0
    negative: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        """Both together."""
        return Sums(
            n=self.n + other.n, total=self.total + other.total, squares=self.squares + other.squares,
            negative=self.negative + other.negative,
        )  # fmt: skip

    @property
    def mean(self) -> float:
        """0 without any value."""
        return self.total / self.n / MILLION if self.n else 0.0

    @property
    def variance(self) -> float:
        """Of the sample; 0 below two values, and where rounding each value and its square to millionths could have made all of it."""
        if self.n < 2:
            return 0.0
        spread = (self.squares / MILLION - self.n * self.mean**2) / (self.n - 1)
        return spread if spread > (1 + 2 * abs(self.mean)) / MILLION else 0.0

    @property
    def below_zero(self) -> "Sums":
        """The share of values below zero, as a measure of its own."""
        counted = round(self.negative * MILLION)
        return Sums(n=self.n, total=counted, squares=counted)

    def measure(self, *, low: float = -math.inf, high: float = math.inf) -> Measure | None:
        """Mean with the 95 % interval of one look; None below two values. Equal values get the rule of three's width."""
        if self.n < 2:
            return None
        half = 1.96 * math.sqrt(self.variance / self.n) if self.variance > 0 else 3 / self.n
        return Measure(n=self.n, mean=self.mean, low=max(low, self.mean - half), high=min(high, self.mean + half))

    def sequence_half_width(self, *, alpha: float = 0.05, rho: float = 0.1) -> float:
        """Half the width of an asymptotic confidence sequence around the mean, good at every look at once.

        Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021, AsympCS, equation 3; `rho` tunes it to about a hundred values and more.
        """
        if self.n < 2:
            return math.inf
        n, scaled = self.n, self.n * rho * rho
        variance = self.variance or (3 / n) ** 2
        return math.sqrt(variance * 2 * (scaled + 1) / (n * n * rho * rho) * math.log(math.sqrt(scaled + 1) / alpha))
