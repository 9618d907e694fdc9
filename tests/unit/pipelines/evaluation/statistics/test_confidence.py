import numpy as np
import pytest

from pipelines.evaluation.statistics.confidence import asymptotic_path, betting_interval
from tests.unit.pipelines.evaluation.statistics.draws import drawn_units


def test_nothing_seen_means_nothing_known() -> None:
    interval = betting_interval(drawn_units(effect=0.0, n=1, seed=0).first(0), variance=0.24, alpha=0.05)
    assert (interval.low, interval.high) == (-1.0, 1.0)


def test_the_betting_interval_covers_the_truth_and_shrinks() -> None:
    covered: list[bool] = []
    for seed in range(60):
        units = drawn_units(effect=-0.05, n=2000, seed=seed)
        interval = betting_interval(units, variance=0.24, alpha=0.05)
        covered.append(interval.low <= -0.05 <= interval.high)
        assert interval.high - interval.low < 0.25
    assert np.mean(covered) >= 0.95 - 0.09


def test_more_units_never_widen_the_betting_interval() -> None:
    units = drawn_units(effect=0.03, n=3000, seed=2)
    early, late = (betting_interval(u, variance=0.24, alpha=0.05) for u in (units.first(1000), units))
    assert early.low - 1e-3 <= late.low <= late.high <= early.high + 1e-3


def test_the_asymptotic_band_by_hand() -> None:
    # GrowthBook's two-sided AsympCS with N* = 5000, alpha = 0.05: r^2 = (5.99146 + ln 6.99146)/5000 = 0.00158724
    units = drawn_units(effect=0.0, n=5000, seed=1)
    mean, low, high = asymptotic_path(units, alpha=0.05)
    n, r2 = 5000, 0.00158724
    spread = 0.24 / 0.25  # variance of Z
    half = (spread * 2 * (n * r2 + 1) / (n**2 * r2) * np.log(np.sqrt(n * r2 + 1) / 0.05)) ** 0.5
    assert (high[-1] - low[-1]) / 2 == pytest.approx(half, rel=0.02)
    assert mean[-1] == pytest.approx(0.0, abs=0.05)


def test_the_asymptotic_band_covers_the_truth() -> None:
    missed = 0
    for seed in range(100):
        _, low, high = asymptotic_path(drawn_units(effect=0.02, n=3000, seed=seed), alpha=0.05)
        missed += bool(np.any((low[100:] > 0.02) | (high[100:] < 0.02)))
    assert missed <= 12
