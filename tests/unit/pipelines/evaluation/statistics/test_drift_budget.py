import math

import pytest

from pipelines.evaluation.statistics.drift_budget import DEFAULT_KL_NAT, MeasuredVersion, drift_budget


def versions(a: float, b: float, kl: list[float]) -> list[MeasuredVersion]:
    return [MeasuredVersion(kl_nat=k, gold_lift=math.sqrt(k) * (a - b * math.log(math.sqrt(k)))) for k in kl]


def test_the_budget_is_four_fifths_of_the_fitted_peak() -> None:
    # a = 0.06, b = 0.03: d* = exp(2 - 1) = e, KL* = e^2 = 7.389; budget (0.8 e)^2 = 4.729
    budget = drift_budget(versions(0.06, 0.03, [0.5, 1.0, 2.0, 3.0, 4.0, 6.0]))
    assert budget.peak_kl_nat == pytest.approx(math.e**2)
    assert budget.kl_nat == pytest.approx(4.729, abs=1e-3)


def test_too_few_versions_use_the_default() -> None:
    assert drift_budget(versions(0.06, 0.03, [1.0, 2.0, 3.0])).kl_nat == DEFAULT_KL_NAT


def test_a_gain_without_a_peak_does_not_widen_the_budget() -> None:
    rising = [MeasuredVersion(kl_nat=k, gold_lift=0.01 * k) for k in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)]
    assert drift_budget(rising).kl_nat == DEFAULT_KL_NAT


def test_missing_gold_is_left_out() -> None:
    measured = [*versions(0.06, 0.03, [0.5, 1.0, 2.0, 3.0, 4.0]), MeasuredVersion(kl_nat=6.0, gold_lift=math.nan)]
    assert drift_budget(measured).peak_kl_nat is None
