"""Sums of labels: mean, spread, and a sequence of intervals that holds at every look at once."""

import math
import random
import statistics

import pytest

from app.domain.release.sums import Sums


def of(values: list[float]) -> Sums:
    return Sums(
        n=len(values), total=sum(round(v * 1e6) for v in values), squares=sum(round(v * v * 1e6) for v in values),
        negative=sum(v < 0 for v in values),
    )  # fmt: skip


def test_sums_say_mean_and_variance_and_add_up() -> None:
    values = [0.1, -0.5, 0.7, 0.2]
    both = of(values[:2]) + of(values[2:])
    assert both == of(values) == Sums() + of(values) == of(values) + Sums()
    assert both.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert both.variance == pytest.approx(statistics.variance(values), abs=1e-5)
    assert (both.below_zero.n, both.below_zero.mean) == (4, 0.25)


def test_few_or_equal_values_are_never_sure() -> None:
    assert Sums().measure() is None
    assert of([0.5]).sequence_half_width() == float("inf")
    equal = of([1.0] * 10).measure(low=0, high=1)
    assert equal is not None
    assert (equal.low, equal.high) == (pytest.approx(0.7), 1.0)
    for value in (0.1, 1 / 3, -2 / 3, 12.3456789):  # whose squares are no whole millionths
        alike = of([value] * 30).measure()
        assert alike is not None
        assert alike.low == pytest.approx(value - 3 / 30, abs=1e-6)


def test_a_sequence_is_wider_than_one_look_and_holds_at_all_of_them() -> None:
    """Two hundred runs of a thousand fair coins, looked at after every tenth from the hundredth on: the mean leaves in few of them."""
    left, drawn = 0, random.Random(7)
    for _ in range(200):
        sums = Sums()
        for n in range(10, 1001, 10):
            sums += of([float(drawn.random() < 0.5) for _ in range(10)])
            if n >= 100 and abs(sums.mean - 0.5) > sums.sequence_half_width():
                left += 1
                break
    assert left <= 10, "5 % of 200 runs"
    one_look = of([0.0, 1.0] * 500).measure()
    assert one_look is not None
    assert of([0.0, 1.0] * 500).sequence_half_width() > one_look.high - one_look.mean


def test_two_values_by_hand() -> None:
    """0.2 and 0.6: mean 0.4, variance 0.08, half a width of 1.96 sqrt(0.08 / 2) = 0.392."""
    two = of([0.2, 0.6])
    assert two.variance == pytest.approx(0.08)
    found = two.measure()
    assert found is not None
    assert (found.n, found.low, found.high) == (2, pytest.approx(0.008), pytest.approx(0.792))
    bounded = two.measure(low=0.1, high=0.7)
    assert bounded is not None
    assert (bounded.low, bounded.high) == (0.1, 0.7)
    assert of([0.2]).measure() is None
    assert (of([0.2]).variance, Sums().mean) == (0.0, 0.0)


def test_half_a_width_by_hand() -> None:
    """n = 100, rho = 0.1: n rho^2 = 1, so sqrt(variance · 2 · 2 / 100 · ln(sqrt(2) / 0.05)); the variance of 50 of 100 is 25 / 99."""
    coins = of([0.0, 1.0] * 50)
    assert coins.sequence_half_width() == pytest.approx(math.sqrt(25 / 99 * 4 / 100 * math.log(math.sqrt(2) / 0.05)))
    assert coins.sequence_half_width(alpha=0.1) == pytest.approx(math.sqrt(25 / 99 * 4 / 100 * math.log(math.sqrt(2) / 0.1)))
    equal = of([1.0] * 100)
    assert equal.sequence_half_width() == pytest.approx(0.03 * math.sqrt(4 / 100 * math.log(math.sqrt(2) / 0.05)))
    assert of([0.2, 0.6]).sequence_half_width() < math.inf


def test_a_spread_that_rounding_could_have_made_is_none() -> None:
    """Around 0 a millionth of variance may be rounding alone: 2 of 1,000 values of 0.03 have 1.8e-6, 1 has 9e-7."""
    assert of([0.03] + [0.0] * 999).variance == 0.0
    assert of([0.03] * 2 + [0.0] * 998).variance == pytest.approx(1.8e-6, rel=0.01)
    assert of([10.0, 10.006]).variance == 0.0, "around 10 twenty-one millionths are, and this is 18"
    assert of([10.0, 10.007]).variance == pytest.approx(2.45e-5, rel=0.01)
