"""The demo's plan: sizes for the machine that was measured, and a forecast that learns."""

from dataclasses import replace

import numpy as np
import pytest

from app.domain.errors import BadConfig
from pipelines.commands.demonstration.planning import CYCLE, MOST_PATIENCE, Forecast, Part, Speed, cycle_parts, fit, last_parts, spoken
from pipelines.commands.demonstration.profiles import GIB, PROFILES, Profile, require_memory
from pipelines.evaluation.statistics.suites.paired import compare

REAL = PROFILES["smollm2"]


def speed(answers_per_s: float, turn_s: float = 0.7) -> Speed:
    return Speed(cores=2, answers_per_s=answers_per_s, turn_s=turn_s)


def test_a_fast_machine_gets_two_promotions_within_the_target() -> None:
    plan = fit(REAL, speed(40.0, turn_s=0.05))
    assert plan.promotions == 2
    assert plan.seconds <= 240
    assert plan.profile.patience == 1.0
    assert plan.profile.min_turns > REAL.min_turns


def test_a_slow_machine_keeps_the_promise_and_takes_its_time() -> None:
    plan = fit(REAL, speed(0.5, turn_s=6.0))
    assert plan.promotions == 1
    assert plan.seconds > 240
    # below these sizes an interval of the comparison could not exclude zero
    assert (plan.profile.panel_turns, plan.profile.min_turns) == (REAL.panel_turns, REAL.min_turns)
    assert plan.profile.concurrency == 6  # an answer would take longer than eight seconds with more
    assert plan.profile.patience == pytest.approx(10.0)
    assert plan.profile.label_wait_s == pytest.approx(3 * REAL.label_wait_s)


def test_patience_has_an_end() -> None:
    assert fit(REAL, speed(0.01)).profile.patience == MOST_PATIENCE


def test_the_plan_is_said_in_one_sentence_with_its_sizes() -> None:
    plan = fit(REAL, speed(5.0))
    sentence = plan.sentence(speed(5.0))
    for word in (
        "2 cores",
        "5.0 answers a second",
        f"{REAL.min_turns} labels",
        f"{REAL.panel_turns} questions",
        "one promotion",
        spoken(plan.seconds),
    ):
        assert word in sentence


def test_the_parts_of_a_plan_are_in_order() -> None:
    plan = fit(REAL, speed(5.0))
    assert [part for part, _ in plan.parts] == [Part.START, *CYCLE, Part.COMPARE, Part.HARM]


def test_what_each_part_takes_by_hand() -> None:
    # 20 answers a second, half of them beside the other processes: 10, of which the suite and the panel get 4; labels come after 4 + 1 s
    how = replace(
        REAL, min_turns=50, label_wait_s=4.0, window_s=1.0, turn_share=0.25, suite_tasks=30, suite_samples=2, panel_turns=100, patience=2.0
    )  # fmt: skip
    assert dict([*cycle_parts(how, speed(20.0, turn_s=0.8)), *last_parts(how, speed(20.0))]) == pytest.approx({
        Part.COLLECT: 50 / 10 * 1.2 + 5,
        Part.UPDATE: 50 * 0.8 * 0.25 / 0.5 + 2 * 4,  # on half of the cores, and the weights are loaded
        Part.SUITE: 60 / 4 + 2 * 4,
        Part.CANARY: 130 / 10 + 3 * 5 + 3,
        Part.COMPARE: 100 / 4 + 5,
        Part.HARM: 30 / 10,
    })  # fmt: skip


def ticking(forecast: Forecast, lasts: float) -> None:
    """Let `lasts` seconds pass for the part under way."""
    forecast._began -= lasts


def test_what_is_left_follows_the_pace_of_what_is_over() -> None:
    forecast = Forecast(parts=[(Part.START, 10.0), (Part.COLLECT, 20.0), (Part.UPDATE, 30.0)])
    assert forecast.left_s() == pytest.approx(60.0, abs=0.5)
    ticking(forecast, 30.0)  # the start took three times as long as was planned
    assert forecast.reach(Part.COLLECT)
    assert forecast.pace == pytest.approx(3.0, abs=0.05)
    assert forecast.left_s() == pytest.approx(150.0, abs=1.0)  # 3 × (20 + 30)


def test_a_part_that_lasts_longer_than_expected_is_never_over_by_the_clock() -> None:
    forecast = Forecast(parts=[(Part.START, 10.0)])
    ticking(forecast, 500.0)
    assert forecast.left_s() == pytest.approx(1.0, abs=0.1)  # a tenth of what was expected


def test_a_part_that_is_not_to_come_has_to_be_planned_anew() -> None:
    forecast = Forecast(parts=[(Part.SUITE, 10.0), (Part.CANARY, 20.0), (Part.COMPARE, 5.0)])
    assert not forecast.reach(Part.COLLECT)
    ticking(forecast, 10.0)
    forecast.begin_anew([(Part.COLLECT, 1.0), (Part.COMPARE, 5.0)])
    assert forecast.part is Part.COLLECT
    assert [part for part, _ in forecast.took] == [Part.SUITE]


def test_a_part_that_was_over_before_anybody_looked_is_passed_over() -> None:
    forecast = Forecast(parts=[(Part.START, 10.0), (Part.COLLECT, 20.0), (Part.UPDATE, 30.0)])
    assert forecast.reach(Part.UPDATE)
    assert forecast.part is Part.UPDATE


def test_a_machine_without_memory_is_refused_in_one_sentence_with_the_cure() -> None:
    with pytest.raises(BadConfig, match=r"needs 6 GiB of free memory .* 4\.0 are left here: .*--model tiny"):
        require_memory(REAL, free=4 * GIB)
    require_memory(REAL, free=8 * GIB)


def test_the_small_model_is_no_cure_where_it_does_not_fit_either() -> None:
    with pytest.raises(BadConfig) as refused:
        require_memory(REAL, free=GIB)
    assert "tiny" not in str(refused.value)


def _passes(profile: Profile, *, worse_by: float) -> float:
    """Share of candidates that the demo's suite lets through, whose answers parse less often by that much; 200 of them.

    Tasks differ as the run's did: rates from a Beta(1.2, 2.4), a third of the answers parses.
    """
    drawn, tasks, samples = np.random.default_rng(17), profile.suite_tasks, profile.suite_samples
    champion = drawn.beta(1.2, 2.4, size=(200, tasks))
    candidate = np.clip(champion - worse_by, 0.0, 1.0)
    differences = (drawn.binomial(samples, candidate) - drawn.binomial(samples, champion)) / samples
    names = [str(task) for task in range(tasks)]
    judged = [compare(row, names, margin=profile.suite_margin, seed=seed, draws=500) for seed, row in enumerate(differences)]
    return sum(found.p_value <= 0.05 for found in judged) / len(judged)


def test_the_suite_of_the_demo_seldom_stops_an_equal_candidate_and_usually_a_broken_one() -> None:
    assert _passes(REAL, worse_by=0.0) >= 0.88
    assert _passes(REAL, worse_by=1.0) <= 0.05
