"""Means and differences with their intervals."""

import pytest

from app.domain.views.measures import difference, measure


def test_one_value_has_no_interval() -> None:
    assert measure([0.5]) is None


def test_the_interval_is_two_standard_errors_wide() -> None:
    found = measure([0.0, 1.0, 0.0, 1.0])
    assert found is not None
    # standard deviation sqrt(1/3) = 0.577, standard error 0.289, half width 1.96 · 0.289 = 0.566
    assert found.mean == 0.5
    assert found.high == pytest.approx(0.5 + 0.566, abs=1e-3)


@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3])
def test_equal_values_do_not_pretend_to_certainty(value: float) -> None:
    found = measure([value] * 30)
    assert found is not None
    assert found.low == pytest.approx(value - 0.1)  # rule of three: 3 / 30


def test_an_interval_stays_within_the_range_of_the_values() -> None:
    found = measure([0.0, 1.0], low=0, high=1)
    assert found is not None
    assert (found.low, found.high) == (0.0, 1.0)


def test_a_difference_adds_the_squares_of_the_half_widths() -> None:
    found = difference([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 2.0])
    assert found is not None
    # half widths 0.566 and 1.96 · sqrt((0 + 0 + 1 + 1) / 3 / 4) = 0.800: together sqrt(0.320 + 0.640) = 0.980
    assert found.difference == pytest.approx(0.5)
    assert found.high - found.difference == pytest.approx(0.980, abs=2e-3)


def test_a_difference_of_too_little_is_none() -> None:
    assert difference([0.5], [0.1, 0.2]) is None


def test_half_the_error_makes_the_interval_wider_by_the_ratio_of_the_quantiles() -> None:
    once, again = (difference([0.0, 1.0] * 20, [1.0, 2.0] * 20, error=error) for error in (0.05, 0.025))
    assert once is not None
    assert again is not None
    assert (again.high - again.low) / (once.high - once.low) == pytest.approx(2.241403 / 1.959964, rel=1e-4)
    assert (once.level, again.level) == (0.95, 0.975)


def test_two_values_are_enough_and_an_interval_reads_like_this() -> None:
    found = measure([0.2, 0.6], low=-1, high=0.7)
    assert found is not None
    # standard deviation sqrt(0.08) = 0.283, half width 1.96 · 0.2 = 0.392
    assert (found.n, found.low, found.high) == (2, pytest.approx(0.008), 0.7)
    assert str(found) == "0.40 [0.01, 0.70]"


def test_a_fall_is_below_zero_and_its_interval_around_it() -> None:
    found = difference([1.0, 2.0] * 20, [0.0, 1.0] * 20)
    assert found is not None
    assert found.difference == -1.0
    assert found.low + found.high == pytest.approx(-2.0)
    assert found.low < -1.0 < found.high
