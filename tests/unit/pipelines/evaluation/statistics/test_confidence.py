import numpy as np

from pipelines.evaluation.statistics.confidence import betting_interval
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
