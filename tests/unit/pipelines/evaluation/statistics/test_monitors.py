import math

import numpy as np
import pytest

from pipelines.evaluation.statistics import monitors
from pipelines.evaluation.statistics.monitors import Cusum, Level


def test_one_component_carrying_the_reward_is_named() -> None:
    # |proxy| sums to 19, |style| to 1: share 0.95
    finding = monitors.component_dominance({"proxy": np.array([10.0, -9.0]), "style": np.array([0.5, 0.5])})
    assert (finding.level, finding.detail) == (Level.ALERT, "proxy")
    assert finding.value == pytest.approx(0.95)


@pytest.mark.parametrize(("share", "level"), [(0.45, Level.OK), (0.46, Level.WARN), (0.90, Level.WARN), (0.91, Level.ALERT)])
def test_limits_warn_at_half(share: float, level: Level) -> None:
    split = np.array([share]), np.full(3, (1 - share) / 3)
    components = {"a": split[0], "b": split[1][:1], "c": split[1][1:2], "d": split[1][2:]}
    assert monitors.component_dominance(components).level is level


@pytest.mark.parametrize(("ratio", "level"), [(0.5, Level.OK), (0.19, Level.WARN), (0.04, Level.ALERT)])
def test_variance_collapse(ratio: float, level: Level) -> None:
    assert monitors.variance_collapse(np.full(8, 0.3 * ratio), reference_std=0.3).level is level


def test_collapsed_groups() -> None:
    assert monitors.collapsed_groups(np.array([0.0, 0.0, 0.0, 0.4])).level is Level.ALERT
    assert monitors.collapsed_groups(np.array([0.0, 0.3, 0.3, 0.4])).level is Level.OK


@pytest.mark.parametrize(("mean", "level"), [(100, Level.OK), (180, Level.WARN), (240, Level.ALERT), (-60, Level.ALERT)])
def test_length_drift_goes_both_ways(mean: float, level: Level) -> None:
    finding = monitors.length_drift(np.full(10, float(mean)), reference_mean=100.0, reference_std=40.0)
    assert finding.level is level


def test_ceiling_rate() -> None:
    assert monitors.ceiling_rate(np.array([1.0] * 9 + [0.2]), ceiling=1.0).level is Level.ALERT
    assert monitors.ceiling_rate(np.array([1.0] * 4 + [0.2] * 6), ceiling=1.0).level is Level.OK


def test_excluding_failures_is_caught() -> None:
    """Broken tool calls were dropped from training: 1 % excluded before, 6 % now."""
    found = monitors.rate_shift("exclusion", count=60, total=1000, reference_count=100, reference_total=10_000)
    assert found.level is Level.ALERT
    assert found.value == pytest.approx(0.05)
    same = monitors.rate_shift("exclusion", count=11, total=1000, reference_count=100, reference_total=10_000)
    assert same.level is Level.OK
    small = monitors.rate_shift("exclusion", count=2000, total=100_000, reference_count=1000, reference_total=100_000)
    assert small.level is Level.WARN  # one point, far beyond chance, below the limit of three


def test_cusum_by_hand() -> None:
    # 2 - 0.5 a step: 1.5, 3.0, 4.5, 6.0 > 5 at the fourth
    state = monitors.cusum(Cusum(), np.array([2.0, 2.0, 2.0, 2.0]))
    assert state.alarmed_at == 4
    assert state.up == pytest.approx(6.0)
    assert monitors.cusum(Cusum(), np.array([-2.0] * 4)).alarmed_at == 4


def test_cusum_streams_and_remembers() -> None:
    values = np.random.default_rng(1).standard_normal(50) + 1.0
    whole = monitors.cusum(Cusum(), values)
    parts = monitors.cusum(monitors.cusum(Cusum(), values[:17]), values[17:])
    assert parts == whole
    assert monitors.cusum(whole, np.full(100, -0.1)).alarmed_at == whole.alarmed_at


def test_cusum_seldom_alarms_in_health() -> None:
    """h = 5, drift = 0.5: average run length 465 two-sided (Montgomery, table 9.3)."""
    rng = np.random.default_rng(2)
    lengths = [monitors.cusum(Cusum(), rng.standard_normal(5000)).alarmed_at or 5000 for _ in range(200)]
    assert np.mean(lengths) == pytest.approx(465, rel=0.25)


def test_missing_values_alert() -> None:
    empty, nan = np.array([]), np.array([math.nan])
    findings = [
        monitors.component_dominance({}),
        monitors.component_dominance({"a": nan}),
        monitors.variance_collapse(empty, 0.3),
        monitors.variance_collapse(nan, 0.3),
        monitors.collapsed_groups(nan),
        monitors.length_drift(empty, reference_mean=1.0, reference_std=1.0),
        monitors.length_drift(nan, reference_mean=1.0, reference_std=1.0),
        monitors.ceiling_rate(empty, ceiling=1.0),
        monitors.ceiling_rate(nan, ceiling=1.0),
        monitors.rate_shift("coverage", count=0, total=0, reference_count=1, reference_total=2),
    ]
    assert {f.level for f in findings} == {Level.ALERT}
    assert monitors.cusum(Cusum(), nan).alarmed_at == 1
