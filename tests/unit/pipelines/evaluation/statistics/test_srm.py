import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betaln

from pipelines.evaluation.statistics.srm import ArmCounts, log_bayes_factor, sample_ratio


def test_one_unit_is_no_evidence() -> None:
    # Beta-binomial predictive of the first unit is p itself, so the ratio is exactly 1
    assert log_bayes_factor(ArmCounts(treated=1, control=0, probability=0.25)) == pytest.approx(0.0, abs=1e-9)


def test_two_units_by_hand() -> None:
    # second treated unit: (1000 * 0.5 + 1)/(1000 + 1)/0.5 = 1.000999
    counts = ArmCounts(treated=2, control=0, probability=0.5)
    assert math.exp(log_bayes_factor(counts)) == pytest.approx(501 / 1001 / 0.5)


@given(a=st.integers(0, 10_000), b=st.integers(0, 10_000), p=st.floats(0.01, 0.99))
def test_bayes_factor_agrees_with_the_beta_function(a: int, b: int, p: float) -> None:
    expected = betaln(1000 * p + a, 1000 * (1 - p) + b) - betaln(1000 * p, 1000 * (1 - p))
    expected -= a * math.log(p) + b * math.log(1 - p)
    assert log_bayes_factor(ArmCounts(treated=a, control=b, probability=p)) == pytest.approx(float(expected), abs=1e-6)


def test_a_healthy_split_is_seldom_called_a_mismatch_at_a_thousand_looks() -> None:
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(100):
        arrivals = np.cumsum(rng.binomial(100, 0.1, size=200))
        alarms += any(
            sample_ratio([ArmCounts(treated=int(a), control=100 * (k + 1) - int(a), probability=0.1)], alpha=0.01).is_mismatch
            for k, a in enumerate(arrivals)
        )
    assert alarms <= 4  # alpha 0.01: P(more than 4 of 100) < 0.4 %


def test_a_52_48_split_is_found_by_twenty_thousand_units() -> None:
    verdict = sample_ratio([ArmCounts(treated=10_400, control=9_600, probability=0.5)], alpha=0.01)
    assert verdict.is_mismatch
    assert verdict.observed_share == pytest.approx(0.52)


def test_a_ramp_is_compared_with_the_share_of_each_epoch() -> None:
    epochs = [
        ArmCounts(treated=50, control=950, probability=0.05),
        ArmCounts(treated=500, control=500, probability=0.5),
    ]
    assert not sample_ratio(epochs, alpha=0.01).is_mismatch


def test_no_units_are_no_mismatch() -> None:
    assert sample_ratio([], alpha=0.01).observed_share is None
    assert not sample_ratio([], alpha=0.01).is_mismatch


def test_suppressed_feedback_shows_as_coverage_mismatch() -> None:
    """20,000 sessions, half of them rated; the canary loses 8 % of its ratings (sheet S11)."""
    assert sample_ratio([ArmCounts(treated=4600, control=5000, probability=0.5)], alpha=0.01).is_mismatch


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="intended share"):
        ArmCounts(treated=1, control=1, probability=1.0)
