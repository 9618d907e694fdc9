"""Simulated canaries as counts per look, and what the production statistics make of them, many repetitions at once.

With 0/1 outcomes the log-capital depends only on how many units fell in each of the four cells arm x outcome, so whole
batches of canaries cost a few matrix products; the factors and statistics themselves come from production code.
R repetitions, L looks, S share epochs, K planned looks, J targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.evaluation.statistics import betting, group_sequential
from pipelines.evaluation.statistics.betting import EProcess, Tail
from pipelines.evaluation.statistics.group_sequential import GroupSequentialPlan, Totals
from pipelines.evaluation.statistics.units import FloatArray, IntArray, Units

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class Canaries:
    """Increments per look of the four cells. [R, L] each"""

    treated_good: FloatArray
    treated_bad: FloatArray
    control_good: FloatArray
    control_bad: FloatArray
    share: FloatArray
    """Canary share at each look. [L]"""
    units_per_look: int

    @property
    def cells(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        return self.treated_good, self.treated_bad, self.control_good, self.control_bad

    def every(self, looks: int) -> Canaries:
        """The same canaries seen only at every `looks`-th look; the share must not change in between."""

        def merged(x: FloatArray) -> FloatArray:
            return x.reshape(len(x), -1, looks).sum(axis=2)

        return Canaries(
            treated_good=merged(self.treated_good),
            treated_bad=merged(self.treated_bad),
            control_good=merged(self.control_good),
            control_bad=merged(self.control_bad),
            share=self.share[::looks],
            units_per_look=self.units_per_look * looks,
        )


def drawn(
    rng: np.random.Generator,
    *,
    repetitions: int,
    rate: npt.ArrayLike,
    effect: npt.ArrayLike = 0.0,
    share: npt.ArrayLike,
    looks: int,
    units_per_look: int,
) -> Canaries:
    """Champion at `rate`, canary at `rate + effect`; rate and share may vary by look, rate and effect by repetition."""
    shape = (repetitions, looks)
    shares = np.broadcast_to(np.asarray(share, dtype=np.float64), (looks,))
    champion = np.broadcast_to(np.asarray(rate, dtype=np.float64), shape)
    canary = np.clip(champion + np.asarray(effect), 0.0, 1.0)
    if units_per_look == 1:
        treated, luck = rng.random(shape) < shares, rng.random(shape)
        good_t, good_c = treated & (luck < canary), ~treated & (luck < champion)
        cells = (good_t, treated & ~good_t, good_c, ~treated & ~good_c)
    else:
        n_t = rng.binomial(units_per_look, shares, shape)
        good_t, good_c = rng.binomial(n_t, canary), rng.binomial(units_per_look - n_t, champion)
        cells = (good_t, n_t - good_t, good_c, units_per_look - n_t - good_c)
    tg, tb, cg, cb = (cell.astype(np.float64) for cell in cells)
    return Canaries(treated_good=tg, treated_bad=tb, control_good=cg, control_bad=cb, share=shares, units_per_look=units_per_look)


def log_capital(process: EProcess, canaries: Canaries, baseline: float) -> FloatArray:
    """Log-capital of every target after each look. [R, L, J]"""
    if np.ptp(canaries.share) > 0.0:
        return np.cumsum(log_growth(process, canaries, baseline), axis=1)
    counts = np.stack([np.cumsum(cell, axis=1) for cell in canaries.cells], axis=-1)
    return counts @ cell_factors(process, float(canaries.share[0]), baseline)


def log_growth(process: EProcess, canaries: Canaries, baseline: float) -> FloatArray:
    """What each look adds to the log-capital of each target. [R, L, J]"""
    epochs, epoch = np.unique(canaries.share, return_inverse=True)
    factors = np.stack([cell_factors(process, share, baseline) for share in epochs.tolist()])[epoch]  # [L, 4, J]
    growth = np.zeros((*canaries.treated_good.shape, factors.shape[2]))
    for k, cell in enumerate(canaries.cells):
        growth += cell[:, :, None] * factors[:, k]
    return growth


def cell_factors(process: EProcess, share: float, baseline: float) -> FloatArray:
    """Production log-factors of the four cells. [4, J]"""
    cells = Units.observed(outcome=[1.0, 0.0, 1.0, 0.0], treated=[1, 1, 0, 0], probability=share, baseline=baseline)
    return betting.log_factors(process, cells)


def group_sequential_stops(plan: GroupSequentialPlan, canaries: Canaries, *, threshold: float, tail: Tail) -> IntArray:
    """Units at which the group-sequential half rejects, NEVER if it does not. [R]"""
    information = np.cumsum(canaries.share * (1.0 - canaries.share)) * canaries.units_per_look
    planned = np.arange(1, plan.looks + 1) / plan.looks * plan.n_max * plan.share * (1.0 - plan.share)
    at = np.searchsorted(information, planned - 1e-9)
    at = at[at < len(information)]
    totals = totals_at(canaries, at)
    z = group_sequential.score_z(totals, threshold) * (-1.0 if tail is Tail.BELOW else 1.0)
    counted = group_sequential.expected_events(totals) >= plan.min_expected_events
    crossed = counted & (z >= np.array(group_sequential.boundaries(plan.alpha, plan.looks))[: len(at)])
    return first_true(crossed, (at + 1) * canaries.units_per_look)


def totals_at(canaries: Canaries, at: IntArray) -> Totals:
    """Production totals at the given looks, one stratum per share. [R, K, S]"""
    strata = [canaries.share == share for share in np.unique(canaries.share)]

    def upto(x: FloatArray) -> FloatArray:
        return np.stack([np.cumsum(x * member, axis=1)[:, at] for member in strata], axis=-1)

    tg, cg = upto(canaries.treated_good), upto(canaries.control_good)
    tb, cb = upto(canaries.treated_bad), upto(canaries.control_bad)
    return Totals(n_treated=tg + tb, n_control=cg + cb, sum_treated=tg, sum_control=cg, sum_squares=tg + cg)


def first_true(crossed: npt.NDArray[np.bool_], units: IntArray) -> IntArray:
    """Units at the first look that crossed, NEVER if none did. [R, L], [L] -> [R]"""
    return np.where(crossed.any(axis=1), units[crossed.argmax(axis=1)], NEVER)


def log_e_stops(process: EProcess, capital: FloatArray, *, alpha: float, units_per_look: int) -> IntArray:
    """Units at which each path of log-capital first reaches 1/alpha. [R, L, J] -> [R]

    A mixture never exceeds its best target, so only canaries whose best target gets there are mixed at all.
    """
    found = np.full(len(capital), NEVER)
    close = np.flatnonzero(capital.max(axis=(1, 2)) >= betting.evidence_needed(alpha))
    crossed = betting.log_mixture(process, capital[close]) >= betting.evidence_needed(alpha)
    found[close] = first_true(crossed, (np.arange(capital.shape[1]) + 1) * units_per_look)
    return found


def betting_stops(process: EProcess, canaries: Canaries, *, baseline: float, alpha: float) -> IntArray:
    """Units at which betting rejects each canary. [R]"""
    capital = log_capital(process, canaries, baseline)
    return log_e_stops(process, capital, alpha=alpha, units_per_look=canaries.units_per_look)


def harm_process(baseline: float) -> EProcess:
    """The harm e-process for a 0/1 metric whose champion succeeds at `baseline`, as the config defaults build it."""
    return betting.harm(margin=0.0, variance=baseline * (1.0 - baseline), targets=betting.harm_targets(baseline))


def hybrid_harm_stops(canaries: Canaries, *, baseline: float, n_max: int, share: float, alpha: float = 0.025) -> tuple[IntArray, IntArray]:
    """Where our harm test stops each canary: by betting, by group-sequential looks. [R], [R]"""
    by_betting = betting_stops(harm_process(baseline), canaries, baseline=baseline, alpha=alpha)
    plan = GroupSequentialPlan(n_max=n_max, alpha=alpha, share=share)
    return by_betting, group_sequential_stops(plan, canaries, threshold=0.0, tail=Tail.BELOW)
