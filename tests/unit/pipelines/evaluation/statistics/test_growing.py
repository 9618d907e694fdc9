"""Looks at units that grow: no look is worth more than it should be, and all of them together keep their level."""

import math

import numpy as np

from pipelines.evaluation.statistics import betting
from pipelines.evaluation.statistics.growing import LOOKS, log_e_value, log_sums, look_at_s

REPETITIONS = 600


def _looks(rng: np.random.Generator, *, people: int = 300, harm: float = 0.0) -> list[float]:
    """log E at a dozen looks at the same people, whose turns keep coming and who differ for good (ICC .5)."""
    rate, treated = rng.beta(0.6, 0.4, people), rng.random(people) < 0.25
    rate = np.clip(rate - harm * treated, 0.0, 1.0)
    good, turns, said = np.zeros(people), np.zeros(people), list[float]()
    began = np.sort(rng.integers(0, 12, people))
    for look in range(12):
        more = rng.poisson(2.0, people) + 1
        good, turns = good + rng.binomial(more, rate), turns + more
        here = began <= look
        process = betting.harm(margin=0.0, variance=0.24)
        said.append(
            log_e_value(
                process, outcome=(good / turns)[here], treated=treated[here], probability=np.full(here.sum(), 0.25),
                usual=np.full(here.sum(), 0.6),
            )
        )  # fmt: skip
    return said


def test_a_sum_of_looks_at_the_same_growing_people_keeps_its_level() -> None:
    """Betting after every turn with the arm known would not: its turns are one draw, however many they are."""
    rng, needed = np.random.default_rng(7), betting.evidence_needed(0.05)
    found = [float(log_sums(np.array(_looks(rng)))[-1]) + math.log(LOOKS / 12) >= needed for _ in range(REPETITIONS)]
    assert np.mean(found) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / REPETITIONS)


def test_harm_to_growing_people_is_found() -> None:
    rng, needed = np.random.default_rng(8), betting.evidence_needed(0.05)
    assert np.mean([float(log_sums(np.array(_looks(rng, harm=0.3)))[-1]) >= needed for _ in range(60)]) > 0.8


def test_looks_are_due_at_times_fixed_before_from_half_a_minute_to_a_month() -> None:
    assert look_at_s(0) == 30.0
    assert 33 * 86_400 < look_at_s(LOOKS - 1) < 36 * 86_400
    assert look_at_s(LOOKS) == math.inf


def test_the_sum_is_the_mean_over_all_looks_that_will_ever_be() -> None:
    two = log_sums(np.log(np.array([2.0, 6.0])))  # 2/64, then 8/64
    assert np.allclose(np.exp(two), [2.0 / LOOKS, 8.0 / LOOKS])


def test_nobody_is_no_evidence_in_either_direction() -> None:
    nobody = np.zeros(0)
    process = betting.harm(margin=0.0, variance=0.24)
    assert log_e_value(process, outcome=nobody, treated=nobody.astype(bool), probability=nobody, usual=nobody) == 0.0
    assert log_sums(nobody).tolist() == []
