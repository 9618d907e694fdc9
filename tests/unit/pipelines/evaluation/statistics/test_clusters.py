"""Means over turns of people who were drawn: by hand, and how often the interval holds the truth where few people have most turns."""

import numpy as np
import pytest

from app.domain.release.holdouts import PersonSums
from pipelines.evaluation.statistics import clusters
from pipelines.evaluation.statistics.clusters import difference, effective, mean, variance


def sums_of(turns: list[float], totals: list[float]) -> PersonSums:
    n, x = np.array(turns, dtype=float), np.array(totals, dtype=float)
    return PersonSums(people=len(n), n=n.sum(), x=x.sum(), nn=(n * n).sum(), xx=(x * x).sum(), nx=(n * x).sum())


def test_three_people_by_hand() -> None:
    """Turns 1, 2, 3 with 1, 1, 1 good ones: mean 1/2; residuals 1/2, 0, -1/2, so 3/2 * (1/2) / 36."""
    sums = sums_of([1, 2, 3], [1, 1, 1])
    assert mean(sums) == pytest.approx(0.5)
    assert variance(sums) == pytest.approx(1.5 * 0.5 / 36)
    assert effective(sums) == pytest.approx(36 / 14)


def test_people_with_one_turn_each_have_the_variance_of_a_mean() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert variance(sums_of([1] * 5, values)) == pytest.approx(np.var(values, ddof=1) / 5)


def test_too_few_people_who_matter_have_no_interval() -> None:
    many = sums_of([1] * 100, [1] * 100)
    assert difference(many, sums_of([1] * 29, [1] * 29)) is None
    assert difference(many, sums_of([1] * 30, [1] * 30)) == (0.0, 0.0, 0.0)
    one_who_is_most = sums_of([1_000, *[1] * 200], [500, *[1] * 200])
    assert difference(many, one_who_is_most) is None
    assert difference(PersonSums(), many) is None
    assert mean(PersonSums()) is None


@pytest.mark.parametrize("effect", [0.0, 0.05])
def test_the_interval_holds_the_truth_where_turns_of_a_person_are_alike(effect: float) -> None:
    """Zipf activity up to 60 turns, intraclass correlation about .3, 400 people held and 1,600 beside: 95 % of 600 times, within 3 SE."""
    dice, times, covered = np.random.default_rng(20261123), 600, 0
    for _ in range(times):
        low, high = _drawn(dice, effect)
        covered += low <= effect <= high
    assert 0.95 - 3 * (0.95 * 0.05 / times) ** 0.5 <= covered / times <= 0.985


def test_taking_turns_for_people_would_not_hold_it() -> None:
    """The same with every turn a person of its own: what the delta method is for."""
    dice, times, covered = np.random.default_rng(20261123), 300, 0
    for _ in range(times):
        low, high = _drawn(dice, 0.0, naive=True)
        covered += low <= 0.0 <= high
    assert covered / times < 0.80


def _drawn(dice: np.random.Generator, effect: float, *, naive: bool = False) -> tuple[float, float]:
    arms = []
    for people, shift in ((1_600, effect), (400, 0.0)):
        turns = np.minimum(dice.zipf(1.6, people), 60)
        good = dice.binomial(turns, np.clip(dice.beta(1.2, 1.2, people) * 0.9 + shift, 0.0, 1.0))
        if naive:
            single = np.concatenate([np.ones(good.sum()), np.zeros((turns - good).sum())])
            arms.append(sums_of([1] * len(single), single.tolist()))
        else:
            arms.append(sums_of(turns.tolist(), good.tolist()))
    found = clusters.difference(*arms)
    assert found is not None
    return found[1], found[2]
