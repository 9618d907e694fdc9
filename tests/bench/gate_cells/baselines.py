"""Other people's rules for "this canary is worse", as published, to stand beside ours (sheet 12, 13).

Interval rules return the units at which a one-sided 5 % harm test stops each canary; delivery controllers return the
minutes. None has the proprietary floors some vendors add (sheet S3c tried floors separately).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pipelines.evaluation.statistics import group_sequential, normal
from pipelines.evaluation.statistics.units import FloatArray, IntArray
from tests.bench.gate_cells.canaries import NEVER, Canaries, first_true

ALPHA = 0.05
SESSIONS_PER_MINUTE = 111


def wald(canaries: Canaries) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Difference of means, its plug-in variance, and units so far; NaN variance while an arm is empty. [R, L] each"""
    n_t = np.cumsum(canaries.treated_good + canaries.treated_bad, axis=1)
    n_c = np.cumsum(canaries.control_good + canaries.control_bad, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p_t, p_c = np.cumsum(canaries.treated_good, axis=1) / n_t, np.cumsum(canaries.control_good, axis=1) / n_c
        return p_t - p_c, p_t * (1 - p_t) / n_t + p_c * (1 - p_c) / n_c, n_t + n_c


def z_every_look(canaries: Canaries) -> IntArray:
    """A fixed-sample z test, peeked at."""
    return _stops(canaries, lambda variance, _n, _vt: normal.quantile(1 - ALPHA) * np.sqrt(variance))


def statsig(canaries: Canaries) -> IntArray:
    """Z*^2 = ((V + tau)/tau)(-2 ln a - ln(V/(V + tau))), tau = z^2 (var_t + var_c)/N, one-sided."""

    def half(variance: FloatArray, n: FloatArray, pooled: FloatArray) -> FloatArray:
        tau = normal.quantile(1 - ALPHA) ** 2 * pooled / n
        squared = (variance + tau) / tau * (-2 * math.log(ALPHA) - np.log(variance / (variance + tau)))
        return np.sqrt(squared * variance)

    return _stops(canaries, half)


def growthbook(canaries: Canaries, *, tuned_for: float = 5000.0, ignore_looks: int = 0) -> IntArray:
    """One-sided AsympCS: sqrt(2 (n r^2 + 1)/(n r)^2 log(1 + sqrt(n r^2 + 1)/(2 a)))."""
    r2 = (-2 * math.log(2 * ALPHA) + math.log(-2 * math.log(2 * ALPHA) + 1)) / tuned_for

    def half(variance: FloatArray, n: FloatArray, _pooled: FloatArray) -> FloatArray:
        width = 2 * (n * r2 + 1) / (n * r2) * np.log(1 + np.sqrt(n * r2 + 1) / (2 * ALPHA))
        return np.sqrt(variance * width)

    return _stops(canaries, half, ignore_looks)


def eppo(canaries: Canaries, *, tuned_for: float = 10_000.0) -> IntArray:
    """Normal mixture, 5 % in each tail: sqrt((t + rho)/t log((t + rho)/(rho a^2))), a = 0.10."""
    a = 2 * ALPHA
    rho = tuned_for / (math.log(1 - 2 * math.log(a)) - 2 * math.log(a))

    def half(variance: FloatArray, n: FloatArray, _pooled: FloatArray) -> FloatArray:
        return np.sqrt(variance * (n + rho) / n * np.log((n + rho) / (rho * a**2)))

    return _stops(canaries, half)


def spotify_gst(canaries: Canaries, *, n_max: int = 20_000, looks: int = 20) -> IntArray:
    """Lan-DeMets alpha t^2 at 20 looks with the Wald variance."""
    difference, variance, _ = wald(canaries)
    at = np.arange(1, looks + 1) * n_max // (looks * canaries.units_per_look) - 1
    at = at[at < difference.shape[1]]
    with np.errstate(divide="ignore", invalid="ignore"):
        z = -difference[:, at] / np.sqrt(variance[:, at])
    return first_true(z >= np.array(group_sequential.boundaries(ALPHA, looks))[: len(at)], (at + 1) * canaries.units_per_look)


INTERVALS: dict[str, Callable[[Canaries], IntArray]] = {
    "z at every look": z_every_look,
    "Statsig": statsig,
    "GrowthBook": growthbook,
    "Eppo": eppo,
    "Spotify GST": spotify_gst,
}


def argo(rng: np.random.Generator, repetitions: int, *, share: float, rate: float, least: float) -> IntArray:
    """Success rate of 5-minute windows must be >= `least`; abort when more than 3 of 36 fail. Minutes. [R]"""
    n = rng.binomial(5 * SESSIONS_PER_MINUTE, share, (repetitions, 36))
    failed = rng.binomial(n, rate) < least * n
    return first_true(np.cumsum(failed, axis=1) > 3, 5 * np.arange(1, 37))


def flagger(rng: np.random.Generator, repetitions: int, *, rate: float, least: float) -> IntArray:
    """1-minute checks, weight 2 % to 50 % in steps of 2 %, held on a failed check; roll back at 10. Minutes. [R]"""
    weight, failures = np.full(repetitions, 2), np.zeros(repetitions, dtype=np.int64)
    stopped = np.full(repetitions, NEVER)
    for minute in range(1, 60):
        n = rng.binomial(SESSIONS_PER_MINUTE, weight / 100)
        failed = rng.binomial(n, rate) < least * n
        running = (stopped == NEVER) & (weight <= 50)
        failures += failed & running
        stopped[running & (failures >= 10)] = minute
        weight = np.minimum(weight + np.where(failed, 0, 2), 50)
    return stopped


def kayenta(rng: np.random.Generator, repetitions: int, *, share: float, rate: float, effect: float = 0.0, metrics: int = 1) -> IntArray:
    """NetflixACAJudge on per-minute success rates after 1, 2 and 3 hours; any failed metric fails. Minutes. [R]"""
    stopped = np.full(repetitions, NEVER)
    for r in range(repetitions):
        points = [_points_per_minute(rng, share, rate, effect) for _ in range(metrics)]
        failed = [hour for hour in (60, 120, 180) if any(_is_low(a[:hour], b[:hour]) for a, b in points)]
        stopped[r] = failed[0] if failed else NEVER
    return stopped


def _points_per_minute(rng: np.random.Generator, share: float, rate: float, effect: float) -> tuple[FloatArray, FloatArray]:
    """Success rates of canary and an equally large fresh baseline. [180], [180]"""
    n = np.maximum(rng.binomial(SESSIONS_PER_MINUTE, share, (2, 180)), 1)
    return rng.binomial(n[0], rate + effect) / n[0], rng.binomial(n[1], rate) / n[1]


def _is_low(canary: FloatArray, control: FloatArray) -> bool:
    """Low: the 98 % Mann-Whitney interval of the shift lies below -0.25 |Hodges-Lehmann| and the mean ratio below 1."""
    minutes = len(canary)
    shifts = np.sort(np.subtract.outer(canary, control).ravel())
    margin = normal.quantile(0.99) * math.sqrt(minutes * minutes * (2 * minutes + 1) / 12)
    upper = shifts[min(int(minutes * minutes / 2 + margin), len(shifts) - 1)]
    return bool(upper < -0.25 * abs(np.median(shifts)) and canary.mean() < control.mean())


def _stops(canaries: Canaries, half: Callable[[FloatArray, FloatArray, FloatArray], FloatArray], ignore_looks: int = 0) -> IntArray:
    """Stop where difference + half width < 0. `half` gets the variance, the units and var_t + var_c."""
    difference, variance, n = wald(canaries)
    n_t = np.cumsum(canaries.treated_good + canaries.treated_bad, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p_t = np.cumsum(canaries.treated_good, axis=1) / n_t
        p_c = p_t - difference
        crossed = difference + half(variance, n, p_t * (1 - p_t) + p_c * (1 - p_c)) < 0
    crossed[:, :ignore_looks] = False
    return first_true(crossed, (np.arange(crossed.shape[1]) + 1) * canaries.units_per_look)
