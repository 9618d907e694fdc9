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


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (monitors.variance_collapse(0.05 * 0.20 / 0.05, 1.0), Level.OK), (monitors.variance_collapse(0.1999, 1.0), Level.WARN),
        (monitors.variance_collapse(0.05, 1.0), Level.WARN), (monitors.variance_collapse(0.0499, 1.0), Level.ALERT),
        (monitors.variance_collapse(0.401, 1.0, limit=0.1), Level.OK), (monitors.variance_collapse(0.39, 1.0, limit=0.1), Level.WARN),
        (monitors.length_drift(25.0, reference_mean=10.0, reference_std=10.0), Level.OK),
        (monitors.length_drift(25.1, reference_mean=10.0, reference_std=10.0), Level.WARN),
        (monitors.length_drift(40.0, reference_mean=10.0, reference_std=10.0), Level.WARN),
        (monitors.length_drift(40.1, reference_mean=10.0, reference_std=10.0), Level.ALERT),
        (monitors.saturation(40, 100), Level.OK), (monitors.saturation(41, 100), Level.WARN),
        (monitors.saturation(80, 100), Level.WARN), (monitors.saturation(81, 100), Level.ALERT),
        (monitors.saturation(0, 1), Level.OK),
        (monitors.component_dominance({"a": 0.9, "b": 0.1}), Level.WARN),
        (monitors.component_dominance({"a": 0.901, "b": 0.099}), Level.ALERT),
    ],
)  # fmt: skip
def test_each_limit_from_both_sides(finding: monitors.Finding, level: Level) -> None:
    assert finding.level is level


def test_a_drift_says_which_way() -> None:
    said = [monitors.length_drift(mean, reference_mean=10.0, reference_std=1.0).detail for mean in (11.0, 9.0)]
    assert said == ["longer", "shorter"]


@pytest.mark.parametrize(
    ("count", "total", "reference_count", "reference_total", "level", "z"),
    [
        # gap .03, pooled .115, error sqrt(.115 * .885 * 2/2000) = .010088: z 2.97
        (260, 2000, 200, 2000, Level.OK, "z +3.0"),
        # gap .031: pooled .1155, error .010107, z 3.07
        (262, 2000, 200, 2000, Level.ALERT, "z +3.1"),
        (1300, 10_000, 1000, 10_000, Level.ALERT, "z +6.6"),  # exactly three points
        (1299, 10_000, 1000, 10_000, Level.WARN, "z +6.6"),
        (1000, 10_000, 1300, 10_000, Level.ALERT, "z -6.6"),
        (0, 10, 0, 10, Level.OK, "z +0.0"),
        (10, 10, 10, 10, Level.OK, "z +0.0"),
        (0, 1, 0, 1, Level.OK, "z +0.0"),
        (0, 0, 1, 10, Level.ALERT, "no turns to compare"),
        (1, 10, 0, 0, Level.ALERT, "no turns to compare"),
    ],
)
def test_a_shift_of_a_rate_is_large_and_no_chance(
    count: int, total: int, reference_count: int, reference_total: int, level: Level, z: str
) -> None:
    found = monitors.rate_shift("x", count=count, total=total, reference_count=reference_count, reference_total=reference_total)
    assert (found.level, found.detail, found.limit) == (level, z, 0.03)


def test_what_a_component_weighs_is_its_share_of_all() -> None:
    assert monitors.dominance({"rating": 3.0, "undo": 1.0}) == ("rating", 0.75)
    assert monitors.dominance({"rating": 3.0, "length": 1.0}) == ("length", 0.25), "people have one channel only"
    assert monitors.dominance({"rating": 3.0, "undo": 0.0, "length": 1.0}) == ("length", 0.25)
    assert monitors.dominance({"rating": 1.0}) == ("", 0.0)
    name, share = monitors.dominance({"rating": 0.0})
    assert (name, math.isnan(share)) == ("", True)
