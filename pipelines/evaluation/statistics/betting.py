"""Mixture betting e-processes on Z: harm, non-inferiority and two-sided (sheet 3.2, 3.5).

An e-process is the capital of a gambler who bets against the null hypothesis and can only lose on average if it is
true. By Ville's inequality P(capital ever reaches 1/alpha) <= alpha: any peeking, any n, no central limit theorem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipelines.evaluation.statistics.resumed import Resumed
from pipelines.evaluation.statistics.units import FloatArray, Units, effect, effect_lower_bound, effect_upper_bound

HARM_TARGETS = (0.02, 0.05, 0.10, 0.20)
NON_INFERIORITY_MULTIPLES = (0.5, 1.0, 2.0, 4.0)
RATE_MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
RARE_SUCCESS_MULTIPLES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
RARE = 0.10
"""Below this rate of failures (or successes) the targets are multiples of the rate."""
RATE_FLOOR = 0.002
"""A rate that was hardly ever seen is taken for this one."""
STAKE_CAP = 0.95
"""A bet risks at most this share of its capital, so every factor stays >= 0.05 (sheet 3.2)."""


class Tail(StrEnum):
    """The side of the threshold on which the bet wins."""

    BELOW = "below"
    """Wins when the effect is below the threshold; rejects H0: effect >= threshold."""
    ABOVE = "above"
    """Wins when the effect is above the threshold; rejects H0: effect <= threshold."""


@dataclass(frozen=True, kw_only=True)
class Bet:
    """A mixture of bets, one per target, against one one-sided hypothesis about the effect."""

    tail: Tail
    threshold: float
    """The boundary of H0, signed: -c for harm with abort margin c, -delta for non-inferiority."""
    targets: tuple[float, ...]
    """Distances d_j from the threshold at which each bet grows fastest."""
    variance: float
    """s^2, variance of Y, from before the canary. Wrong values cost power, never validity."""

    def __post_init__(self) -> None:
        if not abs(self.threshold) < 1.0:
            raise ValueError(f"threshold {self.threshold} is not inside (-1, 1); effects are shares, 0.02 is 2 pp")
        if not self.targets or min(self.targets) <= 0.0:
            raise ValueError("a bet needs at least one positive target")
        if not self.variance > 0.0:
            raise ValueError(f"variance {self.variance} is not positive; use m(1 - m) of the pre-period mean")


@dataclass(frozen=True, kw_only=True)
class EProcess:
    """The average of one or two bets: one tail, or both tails of a two-sided test."""

    legs: tuple[Bet, ...]


@dataclass(frozen=True, kw_only=True)
class Wealth:
    """Where a stream stands: log-capital of every target of every leg, and how many units were seen."""

    log_capital: tuple[float, ...]
    units: int


def harm(*, margin: float, variance: float, targets: tuple[float, ...] = HARM_TARGETS) -> EProcess:
    """Evidence that the canary is worse than the champion by more than `margin`; H0: effect >= -margin."""
    return EProcess(legs=(Bet(tail=Tail.BELOW, threshold=-margin, targets=targets, variance=variance),))


def non_inferiority(*, margin: float, variance: float) -> EProcess:
    """Evidence that the canary is not worse by `margin`; H0: effect <= -margin (sheet 3.5)."""
    targets = tuple(k * margin for k in NON_INFERIORITY_MULTIPLES)
    return EProcess(legs=(Bet(tail=Tail.ABOVE, threshold=-margin, targets=targets, variance=variance),))


def two_sided(*, margin: float, variance: float, targets: tuple[float, ...] = HARM_TARGETS) -> EProcess:
    """Evidence that the effect lies outside [-margin, margin]: the average of both directions (sheet 3.2)."""
    below = Bet(tail=Tail.BELOW, threshold=-margin, targets=targets, variance=variance)
    above = Bet(tail=Tail.ABOVE, threshold=margin, targets=targets, variance=variance)
    return EProcess(legs=(below, above))


def rate_targets(bad_rate: float) -> tuple[float, ...]:
    """Targets for an error-like metric whose champion fails at `bad_rate` (sheet 3.2)."""
    return tuple(k * bad_rate for k in RATE_MULTIPLES if k * bad_rate <= 1.0)


def rare_success_targets(success_rate: float) -> tuple[float, ...]:
    """Targets for a success that is rare: it can fall by its own rate at most (sheet 3.2)."""
    return tuple(k * success_rate for k in RARE_SUCCESS_MULTIPLES)


def harm_targets(champion_mean: float, *, points: tuple[float, ...] = HARM_TARGETS) -> tuple[float, ...]:
    """Targets that fit a metric oriented good-is-up: absolute points, or multiples of a rate below 10 %."""
    if champion_mean < RARE:
        return rare_success_targets(max(champion_mean, RATE_FLOOR))
    if 1.0 - champion_mean < RARE:
        return rate_targets(max(1.0 - champion_mean, RATE_FLOOR))
    return points


@dataclass(frozen=True, kw_only=True, eq=False)
class _Path:
    """log E after each unit, and the capital after the last."""

    log_e: FloatArray
    wealth: Wealth


_PATHS: Resumed[_Path] = Resumed()


def log_factors(process: EProcess, units: Units) -> FloatArray:
    """log of what each unit multiplies the capital of each target by. [N, J]"""
    return np.hstack([_leg_log_factors(leg, units) for leg in process.legs])


def start(process: EProcess) -> Wealth:
    """The capital before the first unit: one."""
    return Wealth(log_capital=(0.0,) * sum(len(leg.targets) for leg in process.legs), units=0)


def advance(process: EProcess, wealth: Wealth, units: Units) -> Wealth:
    """Bet on the next units, one or many; any split of a stream gives the same wealth as the whole batch."""
    return _after(wealth, _capital_path(process, wealth, units))


def log_e(process: EProcess, wealth: Wealth) -> float:
    """log E now."""
    return float(log_mixture(process, np.array(wealth.log_capital)))


def log_e_path(process: EProcess, units: Units) -> FloatArray:
    """log E after each unit. [N]"""
    return log_mixture(process, _capital_path(process, start(process), units)[1:])


def log_e_path_so_far(process: EProcess, units: Units) -> FloatArray:
    """`log_e_path` of a stream that is asked about again when it is longer: only what is new is computed. Read-only. [N]"""
    nothing = _Path(log_e=np.empty(0), wealth=start(process))
    return _PATHS.ask(process, units, nothing, lambda path, new: _longer(process, path, new)).log_e


def log_mixture(process: EProcess, log_capital: FloatArray) -> FloatArray:
    """log of the average capital over targets, then over legs, without overflow. [..., J] -> [...]"""
    shares = np.concatenate([np.full(len(leg.targets), 1.0 / len(leg.targets)) for leg in process.legs])
    top = log_capital.max(axis=-1, keepdims=True)
    return top[..., 0] + np.log(np.exp(log_capital - top) @ (shares / len(process.legs)))


def evidence_needed(alpha: float) -> float:
    """log(1/alpha), the log E at which a test at level alpha rejects."""
    return -math.log(alpha)


def _longer(process: EProcess, path: _Path, units: Units) -> _Path:
    capital = _capital_path(process, path.wealth, units)
    log_e = np.concatenate([path.log_e, log_mixture(process, capital[1:])])
    log_e.setflags(write=False)  # others are given it as well
    return _Path(log_e=log_e, wealth=_after(path.wealth, capital))


def _after(wealth: Wealth, capital: FloatArray) -> Wealth:
    """At the end of a path that began with `wealth`. [N + 1, J]"""
    return Wealth(log_capital=tuple(capital[-1].tolist()), units=wealth.units + len(capital) - 1)


def _capital_path(process: EProcess, wealth: Wealth, units: Units) -> FloatArray:
    """Log-capital before the first unit and after each one. [N + 1, J]"""
    return np.cumsum(np.vstack([wealth.log_capital, log_factors(process, units)]), axis=0)


def _leg_log_factors(bet: Bet, units: Units) -> FloatArray:
    """log(1 + lambda (t - Z)) or log(1 + lambda (Z - t)), lambda = min(d pi (1 - pi)/s^2, 0.95/worst loss). [N, J]"""
    z = effect(units)
    if bet.tail is Tail.BELOW:
        payoff, worst_loss = bet.threshold - z, effect_upper_bound(units) - bet.threshold
    else:
        payoff, worst_loss = z - bet.threshold, bet.threshold - effect_lower_bound(units)
    pull = np.outer(units.probability * (1.0 - units.probability) / bet.variance, bet.targets)
    stake = np.minimum(pull, (STAKE_CAP / worst_loss)[:, None])
    return np.log1p(stake * payoff[:, None])
