"""How far a policy may drift from its anchor before more reward means less quality (sheet 4.1, 11).

Gao, Schulman & Hilton 2022 for RL: gold gain R(d) = d (a - b ln d) with d = sqrt(KL to the anchor), so the peak lies at
d* = exp(a/b - 1). The budget is a share of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_VERSIONS = 6
SHARE_OF_PEAK = 0.8
DEFAULT_KL_NAT = 10.0
"""Per response, until enough versions have been measured."""


@dataclass(frozen=True, kw_only=True)
class MeasuredVersion:
    """One earlier version against the anchor."""

    kl_nat: float
    """Per response."""
    gold_lift: float


@dataclass(frozen=True, kw_only=True)
class DriftBudget:
    kl_nat: float
    """Largest KL to the anchor per response that is still allowed."""
    peak_kl_nat: float | None
    """Where the fitted gold gain peaks; None if the default is used."""


def drift_budget(history: Sequence[MeasuredVersion]) -> DriftBudget:
    """0.8 of the fitted peak distance, or 10 nat with fewer than six versions or a fit without a peak ahead.

    Without a peak (b <= 0) the history says nothing about where quality turns, so the default is not widened.
    """
    far = [v for v in history if v.kl_nat > 0.0 and math.isfinite(v.gold_lift)]
    if len(far) >= MIN_VERSIONS:
        d = np.sqrt(np.array([v.kl_nat for v in far]))
        gold = np.array([v.gold_lift for v in far])
        (a, b), *_ = np.linalg.lstsq(np.column_stack([d, -d * np.log(d)]), gold, rcond=None)
        if b > 0.0 and abs(a / b) < 10.0:
            peak = math.exp(float(a / b) - 1.0)
            return DriftBudget(kl_nat=(SHARE_OF_PEAK * peak) ** 2, peak_kl_nat=peak**2)
    return DriftBudget(kl_nat=DEFAULT_KL_NAT, peak_kl_nat=None)
