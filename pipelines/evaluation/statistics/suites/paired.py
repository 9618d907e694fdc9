"""Offline suites: candidate against champion on the same items, paired and clustered (sheet 4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipelines.evaluation.statistics import normal
from pipelines.evaluation.statistics.units import FloatArray

DRAWS = 4000
CHUNK = 250
"""Resamples at a time: 250 of 2,318 clusters and five moments are 23 MB."""


class SuiteVerdict(StrEnum):
    """Only PASS lets a candidate go on."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """Candidate minus champion over the items of one suite."""

    mean: float
    low: float
    """One-sided lower bound at level alpha, by cluster bootstrap."""
    high: float
    p_value: float
    """Of H0 "worse by the margin or more": see `p_value_of`."""
    items: int
    clusters: int
    items_needed: int
    """What the sample-size rule asks for at the variance seen."""


def compare(
    difference: FloatArray, clusters: Sequence[str], *, margin: float, seed: int, alpha: float = 0.05, draws: int = DRAWS
) -> PairedComparison:
    """Compare per-item mean scores; `difference` in [-1, 1], one per item. Raises ValueError on empty or NaN input.

    The items of one task or document move together, so whole clusters are resampled and flipped.
    """
    if len(difference) == 0 or not np.all(np.abs(difference) <= 1.0) or len(clusters) != len(difference):
        raise ValueError("paired differences must be present, within [-1, 1] and carry one cluster each; rerun the suite")
    sums, sizes = _cluster_sums(difference, clusters)
    totals = resampled_totals(sums, sizes, seed=seed, draws=draws)
    means = totals[:, 0] / totals[:, 1]
    return PairedComparison(
        mean=float(difference.mean()),
        low=float(np.quantile(means, alpha)),
        high=float(np.quantile(means, 1.0 - alpha)),
        p_value=p_value_of(sums, sizes, totals, margin=margin),
        items=len(difference),
        clusters=len(sums),
        items_needed=items_needed(variance=float(difference.var()), margin=margin),
    )


def resampled_totals(sums: FloatArray, sizes: FloatArray, *, seed: int, draws: int = DRAWS) -> FloatArray:
    """Totals over resampled clusters of s, n, s^2, s n and n^2, s being a cluster's sum and n its items. [draws, 5]"""
    rng, table = np.random.default_rng(seed), _moments(sums, sizes)
    chunks = [min(CHUNK, draws - start) for start in range(0, draws, CHUNK)]
    return np.concatenate([table[rng.integers(len(sums), size=(chunk, len(sums)))].sum(axis=1) for chunk in chunks])


def p_value_of(sums: FloatArray, sizes: FloatArray, totals: FloatArray, *, margin: float) -> float:
    """One-sided p of "the mean is above -margin", by bootstrap-t over clusters, with one broken cluster too many.

    Breaks are rare and whole: at a true rate of exactly the margin, a hundred tasks see none in 13 of 100 cases, and a permutation or a
    plain bootstrap then finds no variance and passes. So one cluster more, of average size and wholly broken, is counted in with the
    sample and with each resample (it costs 1/n of the margin), and the larger of two p-values counts: that of the resampled t, which knows
    the skew, and the normal one, which is right where nothing at all varies. Error at the margin: at most 5 % in every cell tried.
    """
    break_ = _moments(np.array([-sizes.mean()]), np.array([sizes.mean()]))[0]
    mean, error = _mean_and_error(_moments(sums, sizes).sum(axis=0) + break_)
    means, errors = _mean_and_error(totals + break_)
    t = float((mean + margin) / error)
    exceeding = int(np.sum((means - mean) / errors >= t - 1e-12))
    return max((1 + exceeding) / (1 + len(totals)), 1.0 - normal.below(t))


def _moments(sums: FloatArray, sizes: FloatArray) -> FloatArray:
    return np.column_stack([sums, sizes, sums**2, sums * sizes, sizes**2])


def _mean_and_error(totals: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Ratio of totals, and its standard error sqrt(sum (s - m n)^2) / sum n (clusters of unequal size weigh by their items)."""
    s, n, ss, sn, nn = np.moveaxis(totals, -1, 0)
    mean = s / n
    return mean, np.sqrt(np.maximum(ss - 2.0 * mean * sn + mean**2 * nn, 1e-12)) / n


def power_of(scores_MK: FloatArray, others_MK: FloatArray, *, margin: float, alpha: float = 0.05) -> float:
    """Probability that a candidate no different from the champion passes a suite of this size, from how their own answers vary."""
    shift, error = _equal_versions(scores_MK, others_MK)
    return normal.below((margin - shift) / error - normal.quantile(1.0 - alpha))


def attainable_margin(scores_MK: FloatArray, others_MK: FloatArray, *, power: float, alpha: float = 0.05) -> float:
    """Smallest margin at which an equal candidate passes a suite of this size with `power`."""
    shift, error = _equal_versions(scores_MK, others_MK)
    return shift + error * (normal.quantile(1.0 - alpha) + normal.quantile(power))


def _equal_versions(scores_MK: FloatArray, others_MK: FloatArray) -> tuple[float, float]:
    """What the break too many shifts the mean difference of two equal versions by, and its standard error.

    Both arms' variance between answers to one task, over k answers, is what that difference varies by. With a single answer a task it
    cannot be seen, and the variance of the differences stands in for it.
    """
    items, k = scores_MK.shape
    if k > 1:
        variance = float((scores_MK.var(axis=1, ddof=1) + others_MK.var(axis=1, ddof=1)).mean()) / k
    else:
        variance = float((scores_MK[:, 0] - others_MK[:, 0]).var())
    return 1.0 / (items + 1), math.sqrt(variance * items + 1.0) / (items + 1)


def judge_core(
    comparisons: Mapping[str, PairedComparison], *, margins: Mapping[str, float], levels: Mapping[str, float] | None = None
) -> dict[str, SuiteVerdict]:
    """Verdict per core suite, with Holm's correction over the suites, at 5 % each or at the level that the suite has left.

    PASS: worse-by-the-margin is rejected. FAIL: even the upper bound is below -margin. Else INCONCLUSIVE.
    """
    strictness = {name: 0.05 / max((levels or {}).get(name, 0.05), 1e-300) for name in comparisons}
    passed = holm({name: c.p_value * strictness[name] for name, c in comparisons.items()}, alpha=0.05)
    verdicts: dict[str, SuiteVerdict] = {}
    for name, comparison in comparisons.items():
        failed = comparison.high < -margins[name]
        open_ = SuiteVerdict.FAIL if failed else SuiteVerdict.INCONCLUSIVE
        verdicts[name] = SuiteVerdict.PASS if passed[name] else open_
    return verdicts


def failing_clusters(scores_MK: FloatArray, clusters: Sequence[str]) -> tuple[int, int]:
    """How many clusters have an answer that fails (scores below 1), and how many there are. [M, k], one cluster per item."""
    worst_M: FloatArray = scores_MK.min(axis=1)
    failed = {cluster for cluster, score in zip(clusters, worst_M, strict=True) if not score >= 1.0}
    return len(failed), len(set(clusters))


def judge_safety(*, new_critical_failures: int, failing: int, clusters: int, limit: float) -> SuiteVerdict:
    """Zero new critical failures, and the exact upper 95 % bound on the share of clusters that fail within `limit`.

    Clusters are independent of one another, so the number of those that fail is binomial (Clopper & Pearson 1934). Answers to one task are
    not: a version that fails it often fails it with all of them, and 75 tasks with four answers each say what 75 say, not 300. A cluster
    fails with the first answer that does, which is at least as likely as that any one of them does: so the bound holds for the rate of
    answers too, however they depend on each other. It is exact where all of a cluster fail together.
    """
    if new_critical_failures > 0:
        return SuiteVerdict.FAIL
    if clusters == 0:
        return SuiteVerdict.INCONCLUSIVE
    if rate_upper_bound(failing, clusters) <= limit:
        return SuiteVerdict.PASS
    return SuiteVerdict.FAIL if failing / clusters > limit else SuiteVerdict.INCONCLUSIVE


def holm(p_values: Mapping[str, float], *, alpha: float) -> dict[str, bool]:
    """Which hypotheses are rejected when all are tested together (Holm 1979): the j-th smallest at alpha/(m - j)."""
    rejected = dict.fromkeys(p_values, False)
    for j, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if not p <= alpha / (len(p_values) - j):
            break
        rejected[name] = True
    return rejected


def best_of_k(scores: FloatArray, k: int) -> FloatArray:
    """Unbiased expected maximum of k of the n samples of each item. [M, n] -> [M]

    The i-th smallest (from 1) is the maximum of C(i-1, k-1) of the C(n, k) subsets. For 0/1 scores this is pass@k
    (Chen et al. 2021). Raises ValueError if k > n: fewer samples cannot say.
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"best of {k} needs at least {k} samples an item, there are {n}")
    chance = np.array([math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1)])
    return np.sort(scores, axis=-1) @ chance


def rule_of_three(items: int) -> float:
    """Upper 95 % bound on a failure rate after no failure in `items`."""
    return 3.0 / items


def rate_upper_bound(failures: int, items: int, *, alpha: float = 0.05) -> float:
    """Exact (Clopper-Pearson) one-sided upper bound on a rate: where P(X <= failures) falls to alpha."""
    low, high = failures / items, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2.0
        if _binomial_below(failures, items, middle) > alpha:
            low = middle
        else:
            high = middle
    return high


def items_needed(*, variance: float, margin: float, alpha: float = 0.05, power: float = 0.80) -> int:
    """Items for non-inferiority: (z_.95 + z_.80)^2 Var(D)/margin^2 = 6.18 Var(D)/margin^2."""
    return math.ceil((normal.quantile(1.0 - alpha) + normal.quantile(power)) ** 2 * variance / margin**2)


def _cluster_sums(difference: FloatArray, clusters: Sequence[str]) -> tuple[FloatArray, FloatArray]:
    _, inverse = np.unique(np.array(clusters, dtype=object).astype(str), return_inverse=True)
    sums = np.bincount(inverse, difference).astype(np.float64)
    return sums, np.bincount(inverse).astype(np.float64)


def _binomial_below(successes: int, n: int, p: float) -> float:
    """P(X <= successes) for a rate inside (0, 1)."""
    return math.fsum(math.exp(_log_choose(n, i) + i * math.log(p) + (n - i) * math.log1p(-p)) for i in range(successes + 1))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
