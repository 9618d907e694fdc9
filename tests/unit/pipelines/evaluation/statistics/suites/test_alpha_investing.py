"""Alpha-investing over a month of candidates: false passes stay within the budget, good candidates keep their level."""

import numpy as np
import pytest

from pipelines.evaluation.statistics.suites.alpha_investing import BUDGET, level_now

MONTH = 144


def month(rng: np.random.Generator, *, passing: float) -> list[tuple[float, bool]]:
    """A month of candidates of which those at the margin pass with the level itself, and good ones with `passing`."""
    tested: list[tuple[float, bool]] = []
    for _ in range(MONTH):
        level = level_now(tested)
        tested.append((level, bool(rng.random() < (passing or level))))
    return tested


def test_a_month_of_bad_candidates_passes_half_a_one_at_most() -> None:
    rng = np.random.default_rng(1)
    passes = [sum(passed for _, passed in month(rng, passing=0.0)) for _ in range(300)]
    # alpha E[passes] + W0 bounds it: E <= 0.5 / 0.95 = 0.526; fixed levels would pass 7.2. Standard error 0.05.
    assert np.mean(passes) <= BUDGET / 0.95 + 3 * np.std(passes) / np.sqrt(300)


def test_a_month_of_equal_candidates_keeps_its_level() -> None:
    tested = month(np.random.default_rng(2), passing=0.7)
    assert min(level for level, _ in tested) >= 0.04
    assert tested[-1][0] == pytest.approx(0.05)


def test_a_suite_grows_stricter_by_degrees_and_never_shuts_within_a_month() -> None:
    tested: list[tuple[float, bool]] = []
    for _ in range(MONTH):
        tested.append((level_now(tested), False))
    assert tested[10][0] == pytest.approx(0.05 * (1 - 0.1 / 0.95) ** 10, rel=0.05)
    assert tested[-1][0] > 0.0
