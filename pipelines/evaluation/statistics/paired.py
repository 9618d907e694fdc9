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
_SIGNS = np.array([-1.0, 1.0])


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
    """Of H0 "worse by the margin or more", by sign-flip permutation of clusters."""
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
    means = bootstrap_means(sums, sizes, seed=seed, draws=draws)
    return PairedComparison(
        mean=float(difference.mean()),
        low=float(np.quantile(means, alpha)),
        high=float(np.quantile(means, 1.0 - alpha)),
        p_value=permutation_p_value(sums + margin * sizes, seed=seed, draws=draws),
        items=len(difference),
        clusters=len(sums),
        items_needed=items_needed(variance=float(difference.var()), margin=margin),
    )


def bootstrap_means(sums: FloatArray, sizes: FloatArray, *, seed: int, draws: int = DRAWS) -> FloatArray:
    """Means of resampled clusters (ratio of totals, so that clusters of unequal size weigh by their items). [draws]"""
    rng = np.random.default_rng(seed)
    picks = (rng.integers(len(sums), size=len(sums)) for _ in range(draws))
    return np.array([sums[pick].sum() / sizes[pick].sum() for pick in picks])


def permutation_p_value(shifted_sums: FloatArray, *, seed: int, draws: int = DRAWS) -> float:
    """One-sided p of a positive total when the sign of each cluster is a coin flip: (1 + exceeding)/(1 + draws)."""
    rng = np.random.default_rng(seed)
    least, m = float(shifted_sums.sum()) - 1e-12, len(shifted_sums)
    exceeding = sum(float(shifted_sums @ rng.choice(_SIGNS, size=m)) >= least for _ in range(draws))
    return (1 + exceeding) / (1 + draws)


def judge_core(comparisons: Mapping[str, PairedComparison], *, margins: Mapping[str, float]) -> dict[str, SuiteVerdict]:
    """Verdict per core suite, with Holm's correction over the suites at 5 %.

    PASS: worse-by-the-margin is rejected. FAIL: even the upper bound is below -margin. Else INCONCLUSIVE.
    """
    passed = holm({name: c.p_value for name, c in comparisons.items()}, alpha=0.05)
    verdicts: dict[str, SuiteVerdict] = {}
    for name, comparison in comparisons.items():
        failed = comparison.high < -margins[name]
        open_ = SuiteVerdict.FAIL if failed else SuiteVerdict.INCONCLUSIVE
        verdicts[name] = SuiteVerdict.PASS if passed[name] else open_
    return verdicts


def judge_safety(*, new_critical_failures: int, failures: int, items: int, limit: float) -> SuiteVerdict:
    """Zero new critical failures, and the exact upper 95 % bound on the failure rate within `limit`."""
    if new_critical_failures > 0:
        return SuiteVerdict.FAIL
    if items == 0:
        return SuiteVerdict.INCONCLUSIVE
    if rate_upper_bound(failures, items) <= limit:
        return SuiteVerdict.PASS
    return SuiteVerdict.FAIL if failures / items > limit else SuiteVerdict.INCONCLUSIVE


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
    if p >= 1.0:
        return 1.0 if successes >= n else 0.0
    terms = (_log_choose(n, i) + i * math.log(p) + (n - i) * math.log1p(-p) for i in range(successes + 1))
    return math.fsum(math.exp(t) for t in terms) if p > 0.0 else 1.0


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
