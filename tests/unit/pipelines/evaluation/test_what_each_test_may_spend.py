"""What each test over turns may spend of its metric's evidence, what variance is left to it, and what a decision says from tick to tick."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from app.domain.release.gates import CanaryAction, Verdict
from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig
from pipelines.evaluation.counting.evidence import Evidence
from pipelines.evaluation.counting.references import Reference
from pipelines.evaluation.live.decide import Cause, Decision
from pipelines.evaluation.live.harm import effect_of, reference_of
from pipelines.evaluation.live.recording import said_by
from pipelines.evaluation.live.turn_tests import COVERAGE, Whose, alpha_of_a_look, lane_share, turn_tests
from pipelines.evaluation.statistics.proxy_gold import gap_process
from pipelines.evaluation.statistics.units import Units

CONFIG = GatesConfig()
METRICS = {metric.name: metric for metric in CONFIG.metrics}


@pytest.mark.parametrize(
    ("metric", "asked", "left"),
    [
        ("fault", {"all turns"}, 0.5), ("task_success", {"all turns", "heaviest users", "lasting cohort"}, 0.4),
        ("failed_turns", set[str](), 1.0),
        ("acts", set[str](), 1.0), ("reward", set[str](), 1.0), ("regenerated", set[str](), 1.0),
    ],
)  # fmt: skip
def test_a_metric_keeps_for_its_window_what_its_tests_over_turns_leave(metric: str, asked: set[str], left: float) -> None:
    assert {test.whose.value for test in turn_tests(CONFIG) if test.metric.name == metric} == asked
    assert lane_share(METRICS[metric]) == pytest.approx(left)


def test_the_tests_over_turns_are_named_by_metric_and_by_whose_turns_they_are_about() -> None:
    names = [test.name for test in turn_tests(CONFIG)]
    assert names[0] == "fault, all turns"
    assert "task_success, lasting cohort" in names
    assert len(set(names)) == len(names)
    assert (COVERAGE.name, COVERAGE.share, COVERAGE.metric.good) == ("feedback coverage per turn, all turns", 0.0, Good.SAME)
    assert COVERAGE.metric.abort_margin == 0.02


def test_one_look_spends_its_share_of_the_family_and_a_test_that_there_is_not_has_none() -> None:
    gold = METRICS["task_success"]
    whole = alpha_of_a_look(CONFIG, gold, Whose.EVERYBODYS) / 0.15
    assert alpha_of_a_look(CONFIG, gold, Whose.HEAVIEST) == pytest.approx(0.25 * whole)
    assert alpha_of_a_look(CONFIG, gold, Whose.LASTING) == pytest.approx(0.2 * whole)
    assert 0.0 < whole < CONFIG.alpha_abort_e * CONFIG.weight_of(gold)
    with pytest.raises(ValueError, match="acts is not asked of all turns"):
        alpha_of_a_look(CONFIG, METRICS["acts"], Whose.EVERYBODYS)


def known(metric: MetricConfig, *, usual: bool) -> Evidence:
    reference = Reference(mean=0.6, variance=0.24, explained=0.25)
    lane = SimpleNamespace(usual={metric.name: b""} if usual else {})
    return cast(Evidence, SimpleNamespace(references={metric.name: reference}, lane_of=lambda window_s: lane))


def test_where_habits_are_known_the_variance_that_they_explain_is_taken_off() -> None:
    gold = METRICS["task_success"]
    assert reference_of(CONFIG, known(gold, usual=False), gold).variance == 0.24
    left = reference_of(CONFIG, known(gold, usual=True), gold)
    assert (left.variance, left.mean) == (pytest.approx(0.18), 0.6)
    assert (Reference(mean=0.6, variance=0.24).residual, Reference(mean=0.6, variance=0.24).known) == (0.24, 1.0)


def test_the_means_of_both_arms_are_told_and_an_arm_of_nobody_has_none() -> None:
    units = Units.observed(outcome=np.array([1.0, 0.0, 0.5]), treated=[1, 1, 0], probability=0.5, baseline=0.5)
    assert effect_of(units) == {"treated": 0.5, "control": 0.5, "n_treated": 2.0, "n_control": 1.0}
    alone = Units.observed(outcome=np.array([1.0]), treated=[1], probability=0.5, baseline=0.5)
    assert effect_of(alone) == {"treated": 1.0, "control": 0.0, "n_treated": 1.0, "n_control": 0.0}
    others = Units.observed(outcome=np.array([0.25]), treated=[0], probability=0.5, baseline=0.5)
    assert effect_of(others) == {"treated": 0.0, "control": 0.25, "n_treated": 0.0, "n_control": 1.0}


def test_a_gap_is_bet_on_in_halves_as_its_units_are() -> None:
    # (proxy − gold + 1)/2: lifts and margins are halved, the variance is a quarter
    (bet,) = gap_process(margin=0.2, variance=0.48).legs
    assert (bet.threshold, bet.variance) == (pytest.approx(0.1), pytest.approx(0.12))
    assert bet.targets == pytest.approx((0.01, 0.025, 0.05, 0.1))


def decision(action: CanaryAction, cause: Cause | None, reason: str) -> Decision:
    return cast(Decision, SimpleNamespace(action=action, cause=cause, reason=reason, verdict=Verdict.INCONCLUSIVE))


@pytest.mark.parametrize(
    ("action", "cause", "reason", "said"),
    [
        (CanaryAction.CONTINUE, None, "3 of 200", ("continue",)), (CanaryAction.RAMP, Cause.INCIDENT, "x: y", ("ramp",)),
        (CanaryAction.HOLD, Cause.INCIDENT, "40 % fail: 4 of 10", ("hold", Cause.INCIDENT, "40 % fail")),
        (CanaryAction.HOLD, Cause.DATA, "lag: 9 s", ("hold", Cause.DATA, "")),
        (CanaryAction.HOLD, None, "lag: 9 s", ("hold", Cause.DATA, "")),
    ],
)  # fmt: skip
def test_what_a_decision_says_is_the_same_from_tick_to_tick(
    action: CanaryAction, cause: Cause | None, reason: str, said: tuple[str, ...]
) -> None:
    assert said_by(decision(action, cause, reason)) == said


def test_guards_of_cost_are_held_against_everybody_and_gold_is_the_only_one_that_wants_success() -> None:
    costs = [metric for metric in CONFIG.metrics if metric.kind is MetricClass.COST]
    assert {metric.good for metric in costs} == {Good.DOWN}
    assert {metric.abort_margin for metric in costs if metric.relative} == {0.06}
    assert {(metric.abort_margin, metric.quantile) for metric in costs if not metric.relative} == {(0.10, 0.95)}
    assert [metric.name for metric in CONFIG.metrics if metric.by_turns] == ["failed_turns"]
    assert {metric.window_s for metric in CONFIG.metrics if metric.kind is MetricClass.HARD} == {0.0}
