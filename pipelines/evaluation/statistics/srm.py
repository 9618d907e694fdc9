"""Sequential sample-ratio mismatch and feedback-coverage test: Dirichlet-multinomial Bayes factor (sheet 3.6).

Lindon & Malek 2020 ("Anytime-valid inference for multinomial count data"), c = 1000. A chi-squared test peeked at 1,000
times raises a false alarm in 55 % of healthy canaries at p < 0.05; this one in at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONCENTRATION = 1000.0


@dataclass(frozen=True, kw_only=True)
class ArmCounts:
    """How many units one share epoch put in each arm: exposures, or units with at least one outcome."""

    treated: int
    control: int
    probability: float
    """Intended canary share of the epoch."""

    def __post_init__(self) -> None:
        if min(self.treated, self.control) < 0 or not 0.0 < self.probability < 1.0:
            raise ValueError("arm counts must be >= 0 and the intended share inside (0, 1)")


@dataclass(frozen=True, kw_only=True)
class SampleRatio:
    """Verdict over all epochs so far."""

    log_bayes_factor: float
    evidence_needed: float
    observed_share: float | None
    """Canary share over all epochs; None before the first unit."""

    @property
    def is_mismatch(self) -> bool:
        return self.log_bayes_factor >= self.evidence_needed


def log_bayes_factor(counts: ArmCounts, *, concentration: float = CONCENTRATION) -> float:
    """ln B(cp + a, c(1-p) + n - a) - ln B(cp, c(1-p)) - a ln p - (n - a) ln(1 - p)."""
    a, b, p = counts.treated, counts.control, counts.probability
    prior_a, prior_b = concentration * p, concentration * (1.0 - p)
    fit = _log_beta(prior_a + a, prior_b + b) - _log_beta(prior_a, prior_b)
    return fit - a * math.log(p) - b * math.log1p(-p)


def sample_ratio(epochs: Sequence[ArmCounts], *, alpha: float, concentration: float = CONCENTRATION) -> SampleRatio:
    """Multiply the Bayes factors of the share epochs: one e-process, so peek as often as you like.

    Pass exposures for the sample-ratio test, units with feedback for the coverage test: if coverage does not depend on
    the arm, covered units keep the intended share. Compare at every look; a mismatch once found stays found upstream.
    """
    treated = sum(e.treated for e in epochs)
    total = treated + sum(e.control for e in epochs)
    return SampleRatio(
        log_bayes_factor=math.fsum(log_bayes_factor(e, concentration=concentration) for e in epochs),
        evidence_needed=-math.log(alpha),
        observed_share=treated / total if total else None,
    )


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
