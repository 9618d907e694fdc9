import math

import pytest

from pipelines.evaluation.statistics import monitors
from pipelines.evaluation.statistics.monitors import Level


def test_one_component_carrying_the_reward_is_named() -> None:
    # 19 of 20: share 0.95
    finding = monitors.component_dominance({"proxy": 19.0, "style": 1.0})
    assert (finding.level, finding.detail) == (Level.ALERT, "proxy")
    assert finding.value == pytest.approx(0.95)


@pytest.mark.parametrize(("share", "level"), [(0.45, Level.OK), (0.46, Level.WARN), (0.90, Level.WARN), (0.91, Level.ALERT)])
def test_limits_warn_at_half(share: float, level: Level) -> None:
    components = {"a": share, **dict.fromkeys("bcd", (1 - share) / 3)}
    assert monitors.component_dominance(components).level is level


@pytest.mark.parametrize(("ratio", "level"), [(0.5, Level.OK), (0.19, Level.WARN), (0.04, Level.ALERT)])
def test_variance_collapse(ratio: float, level: Level) -> None:
    assert monitors.variance_collapse(0.3 * ratio, reference_std=0.3).level is level


@pytest.mark.parametrize(("mean", "level"), [(100, Level.OK), (180, Level.WARN), (240, Level.ALERT), (-60, Level.ALERT)])
def test_length_drift_goes_both_ways(mean: float, level: Level) -> None:
    finding = monitors.length_drift(float(mean), reference_mean=100.0, reference_std=40.0)
    assert finding.level is level


def test_saturation() -> None:
    assert monitors.saturation(9, 10).level is Level.ALERT
    assert monitors.saturation(4, 10).level is Level.OK


def test_excluding_failures_is_caught() -> None:
    """Broken tool calls were dropped from training: 1 % excluded before, 6 % now."""
    found = monitors.rate_shift("exclusion", count=60, total=1000, reference_count=100, reference_total=10_000)
    assert found.level is Level.ALERT
    assert found.value == pytest.approx(0.05)
    same = monitors.rate_shift("exclusion", count=11, total=1000, reference_count=100, reference_total=10_000)
    assert same.level is Level.OK
    small = monitors.rate_shift("exclusion", count=2000, total=100_000, reference_count=1000, reference_total=100_000)
    assert small.level is Level.WARN  # one point, far beyond chance, below the limit of three


def test_missing_values_alert() -> None:
    nan = math.nan
    findings = [
        monitors.component_dominance({}),
        monitors.component_dominance({"a": nan}),
        monitors.variance_collapse(nan, 0.3),
        monitors.variance_collapse(0.3, 0.0),
        monitors.length_drift(nan, reference_mean=1.0, reference_std=1.0),
        monitors.saturation(0, 0),
        monitors.rate_shift("coverage", count=0, total=0, reference_count=1, reference_total=2),
    ]
    assert {f.level for f in findings} == {Level.ALERT}
