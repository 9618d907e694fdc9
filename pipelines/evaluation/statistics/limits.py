"""Is the rate of bad turns above an absolute limit, from some moment on? Asked after every turn, for ever, of people who come back.

An e-process under "no turn is bad with a higher probability than the limit, whatever went before". Each turn is a bet, and the capital is
spread over every moment at which an incident may begin: the share of turn t is C / ((t + 2) log^2(t + 2)), which sums to one. So a long
healthy past costs about log t of evidence and hides nothing, and P(ever above 1/alpha) <= alpha by Ville's inequality, without a window.

    S_j <- (S_j + share_t) * (1 + stake * (LR_j - 1)),   E = mean_j S_j,   LR_j = r_j/L of a bad turn, (1 - r_j)/(1 - L) of a good one

The stake is 1 for a person's first turn in ten minutes and 1/k^2 for the k-th: it is known before the turn is, so the bet stays fair, and
one person in a loop of failing retries cannot outweigh the others.
"""

import math
from dataclasses import dataclass, field

ALTERNATIVES = (1.5, 2.0, 4.0, 8.0)
"""Rates that the limit is held against, as multiples of it."""
SHARES_SUM = 2.1097
"""Sum of 1 / (n log^2 n) over n >= 2, by its integral beyond 1e6."""
BELOW = (0.4, 0.05)
"""Rates that a version which is held to be healthier is expected to have, as multiples of the rate it is held against."""


@dataclass(slots=True, kw_only=True)
class LimitProcess:
    """The evidence about one limit in one arm."""

    limit: float
    turns: int = 0
    log_capital: list[float] = field(default_factory=list[float])
    """Of each alternative, over all beginnings so far."""
    rise: list[float] = field(default_factory=list[float])
    """Each alternative's evidence since it was last at or below nothing (CUSUM): where the incident, if it is one, began."""
    began: list[int] = field(default_factory=list[int])
    """The turn at which each rise began."""
    calm: float = 0.0
    """Evidence for a rate of at most half the limit since it was last at or below nothing."""
    _rates: tuple[float, ...] = ()
    """What the limit is held against: worked out once, bet on at every turn."""

    def __post_init__(self) -> None:
        rates = self._rates = alternatives(self.limit)
        self.log_capital = self.log_capital or [-math.inf] * len(rates)
        self.rise = self.rise or [0.0] * len(rates)
        self.began = self.began or [0] * len(rates)

    @property
    def log_e(self) -> float:
        """log E now."""
        return _log_mean_exp(self.log_capital)

    @property
    def onset(self) -> int:
        """The turn at which what is seen now began, by the alternative that fits best."""
        return self.began[max(range(len(self.rise)), key=self.rise.__getitem__)]

    def bet(self, *, bad: bool, stake: float) -> None:
        """One more turn."""
        share = -math.log(SHARES_SUM * (self.turns + 2) * math.log(self.turns + 2) ** 2)
        for j, rate in enumerate(self._rates):
            grown = growth(rate, self.limit, bad=bad, stake=stake)
            self.log_capital[j] = _log_add(self.log_capital[j], share) + grown
            if self.rise[j] <= 0.0:
                self.rise[j], self.began[j] = 0.0, self.turns
            self.rise[j] += grown
        self.calm = max(0.0, self.calm + growth(self.limit / 2.0, self.limit, bad=bad, stake=stake))
        self.turns += 1

    def restart(self) -> None:
        """What was found was acted on: begin again, with the shares that are left."""
        rates = len(self.rise)
        self.log_capital, self.rise, self.began = [-math.inf] * rates, [0.0] * rates, [self.turns] * rates


@dataclass(slots=True, kw_only=True)
class HealthierProcess:
    """Evidence that a version's turns are bad less often than `rate`; by Ville's inequality, too."""

    rate: float
    log_capital: list[float] = field(default_factory=lambda: [0.0] * len(BELOW))

    @property
    def log_e(self) -> float:
        """log E now."""
        return _log_mean_exp(self.log_capital)

    def bet(self, *, bad: bool, stake: float) -> None:
        """One more turn."""
        self.log_capital = [
            held + growth(multiple * self.rate, self.rate, bad=bad, stake=stake)
            for held, multiple in zip(self.log_capital, BELOW, strict=True)
        ]


def alternatives(limit: float) -> tuple[float, ...]:
    """Rates above the limit; halfway to one where every multiple lies beyond it."""
    return tuple(rate for rate in (m * limit for m in ALTERNATIVES) if rate < 1.0) or ((1.0 + limit) / 2.0,)


def growth(rate: float, limit: float, *, bad: bool, stake: float) -> float:
    """log of what a turn multiplies the capital by that is bet on `rate` against `limit`."""
    ratio = rate / limit if bad else (1.0 - rate) / (1.0 - limit)
    return math.log1p(stake * (ratio - 1.0))


def _log_add(a: float, b: float) -> float:
    top, low = max(a, b), min(a, b)
    return top + math.log1p(math.exp(low - top))


def _log_mean_exp(logs: list[float]) -> float:
    top = max(logs)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(value - top) for value in logs) / len(logs))
