"""Intervals for the effect, for display. Decisions are made by the e-processes and looks, never by these.

`betting_interval` inverts the two-sided betting test and assumes a constant effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.evaluation.statistics.betting import HARM_TARGETS, Bet, EProcess, Tail, evidence_needed, log_e_path
from pipelines.evaluation.statistics.units import Units


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Effect of the canary, good is up; [-1, 1] while nothing is known."""

    low: float
    high: float
    alpha: float
    units: int


def betting_interval(units: Units, *, variance: float, alpha: float, targets: tuple[float, ...] = HARM_TARGETS) -> Interval:
    """Effects that neither tail of the betting test has ever rejected at alpha/2. Valid at every n, wide at small n."""
    tails = {tail: _rejected_edge(units, tail, variance=variance, alpha=alpha / 2.0, targets=targets) for tail in Tail}
    return Interval(low=tails[Tail.ABOVE], high=tails[Tail.BELOW], alpha=alpha, units=len(units))


def _rejected_edge(units: Units, tail: Tail, *, variance: float, alpha: float, targets: tuple[float, ...]) -> float:
    """The extreme effect not rejected in favour of `tail`, by bisection to 1e-4."""
    sign = 1.0 if tail is Tail.BELOW else -1.0
    kept, rejected = -0.999 * sign, 0.999 * sign
    if len(units) == 0 or not _rejects(units, tail, rejected, variance, alpha, targets):
        return sign
    while abs(rejected - kept) > 1e-4:
        middle = (kept + rejected) / 2.0
        if _rejects(units, tail, middle, variance, alpha, targets):
            rejected = middle
        else:
            kept = middle
    return rejected


def _rejects(units: Units, tail: Tail, threshold: float, variance: float, alpha: float, targets: tuple[float, ...]) -> bool:
    bet = Bet(tail=tail, threshold=threshold, targets=targets, variance=variance)
    return float(log_e_path(EProcess(legs=(bet,)), units).max()) >= evidence_needed(alpha)
