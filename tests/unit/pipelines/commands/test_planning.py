"""The demo's plan: sizes for the machine that was measured, and a forecast that learns."""

from dataclasses import replace

import numpy as np
import pytest

from app.domain.errors import BadConfig
from pipelines.commands.demonstration.planning import CYCLE, Forecast, Part, Speed, cycle_parts, fit, last_parts, spoken
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
    assert fit(REAL, speed(0.01)).profile.patience == 10.0


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


# --- by hand ---------------------------------------------------------------------------------------------------------------------------


def test_the_plans_of_the_two_models_at_their_usual_speeds_by_hand() -> None:
    # 40 answers a second, 20 beside other processes, 8 of them the suite's; labels after 2.5 + 1 s; a quarter more of everything
    tiny = fit(PROFILES["tiny"], speed(40.0, turn_s=0.05))
    cycle = [160 / 20 * 1.2 + 3.5, 160 * 0.05 * 0.4 / 0.5 + 4, 48 * 2 / 8 + 4, 130 / 20 + 3 * 3.5 + 3]
    assert tiny.promotions == 2
    assert [lasts for _, lasts in tiny.parts] == pytest.approx([10, *cycle, *cycle, 625 / 8 + 3.5, 30 / 20])
    # 5 answers a second, 2.5 and 1; labels after 4 + 1 s
    real = fit(REAL, speed(5.0, turn_s=0.7))
    cycle = [48 / 2.5 * 1.2 + 5, 48 * 0.7 * 0.25 / 0.5 + 4, 24 * 2 / 1 + 4, 130 / 2.5 + 3 * 5 + 3]
    assert real.promotions == 1
    assert [lasts for _, lasts in real.parts] == pytest.approx([10, *cycle, 96 / 1 + 5, 30 / 2.5])


def test_a_machine_at_a_third_of_the_usual_speed_gets_thrice_the_patience_and_fewer_people() -> None:
    found = fit(REAL, Speed(cores=2, answers_per_s=2.2, turn_s=0.7, training_threads=3)).profile
    # 5 / 2.2 = 2.2727…; 2.2 answers a second in 8 s are 17.6
    assert (found.patience, found.concurrency, found.label_wait_s, found.default_slot_s) == (2.27, 18, 9.1, 136)
    assert found.training_threads == 3
    assert fit(REAL, speed(5.0)).profile.concurrency == REAL.concurrency == 24
    assert dict(fit(REAL, speed(2.5)).parts)[Part.START] == pytest.approx(20.0)


def test_the_larger_of_what_fits_is_chosen_and_two_promotions_before_one() -> None:
    fast = speed(20.0, turn_s=0.1)
    larger = fit(REAL, fast, target_s=1e9)
    sizes = larger.profile
    assert (sizes.min_turns, sizes.max_turns, sizes.suite_tasks, sizes.panel_turns, larger.promotions) == (60, 62, 36, 120, 2)
    assert fit(REAL, fast, target_s=larger.seconds) == larger
    smaller = fit(REAL, fast, target_s=larger.seconds - 0.01)
    assert (smaller.profile.min_turns, smaller.promotions) == (48, 2)
    one = fit(REAL, fast, target_s=smaller.seconds - 0.01)
    assert (one.profile.min_turns, one.promotions) == (48, 1)
    assert fit(REAL, fast, target_s=0.0) == one


def test_four_minutes_are_what_the_demo_likes_to_end_within() -> None:
    machine = speed(6.0, turn_s=0.7)
    assert fit(REAL, machine) == fit(REAL, machine, target_s=240.0) != fit(REAL, machine, target_s=480.0)


def test_the_plan_says_how_many_answers_a_side_the_suite_asks() -> None:
    assert "24 people at a time, 48 labels an update, 48 suite answers a side, 96 questions" in fit(REAL, speed(5.0)).sentence(speed(5.0))
    assert "and 2 promotions: about" in fit(REAL, speed(40.0, turn_s=0.05)).sentence(speed(40.0))


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (99.4, "99 s"), (100.0, "2 minutes"), (210.1, "4 minutes")])
def test_seconds_are_spoken_up_to_a_hundred_and_minutes_from_there(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_a_start_that_was_ten_times_as_fast_as_planned_promises_no_more_than_a_quarter() -> None:
    forecast = Forecast(parts=[(Part.START, 10.0), (Part.COLLECT, 20.0)])
    assert forecast.pace == 1.0
    ticking(forecast, 1.0)
    assert forecast.reach(Part.COLLECT)
    assert forecast.pace == 0.25
    assert [part for part, _ in forecast.took] == [Part.START]
    assert forecast.took[0][1] == pytest.approx(1.0, abs=0.2)


def test_a_forecast_is_at_its_end_when_nothing_is_to_come() -> None:
    forecast = Forecast(parts=[(Part.HARM, 10.0)])
    ticking(forecast, 4.0)
    assert forecast.left_s() == pytest.approx(6.0, abs=0.2)
    forecast.begin_anew([])
    assert forecast.part is None
    assert forecast.left_s() == 0.0
    forecast.begin_anew([(Part.COLLECT, 1.0)])
    assert len(forecast.took) == 1, "no part was under way"


def test_memory_that_is_just_enough_is_enough() -> None:
    require_memory(REAL, free=6 * GIB)
    with pytest.raises(BadConfig, match="--model tiny"):
        require_memory(REAL, free=2 * GIB)
    with pytest.raises(BadConfig) as refused:
        require_memory(PROFILES["tiny"], free=2 * GIB - 1)
    assert "--model" not in str(refused.value)
