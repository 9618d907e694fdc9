"""Inconclusive at the horizon never ships (argoproj/argo-rollouts#3850 promoted on inconclusive; sheet 4.5)."""

import numpy as np
import pytest

from app.domain.release.gates import CanaryAction, Verdict
from pipelines.evaluation.config import GatesConfig, MetricClass, MetricConfig, StageConfig
from pipelines.evaluation.counting.evidence import Assigned, Evidence, Lane
from pipelines.evaluation.counting.references import Reference
from pipelines.evaluation.live.decide import decide
from tests.fakes.evidence import calm

HOUR = 3_600_000_000
CONFIG = GatesConfig(
    stages=(StageConfig(share=0.5, units=0, minutes=0.0, least_units=0),),
    metrics=(MetricConfig(name="task_success", source="observation:task_success", kind=MetricClass.GOLD, margin=0.02),),
    slos=(),
)


def evidence(*, units: int, effect: float, hours: float, n_max: int = 20_000) -> Evidence:
    """A canary at share 0.5 whose units closed evenly over its time; champion at 0.6."""
    rng, at = np.random.default_rng(4), int(hours * HOUR)
    treated = rng.random(units) < 0.5
    outcome = (rng.random(units) < 0.6 + effect * treated).astype("<f8")
    lane = Lane(
        window_s=CONFIG.window_s,
        treated=treated.astype("u1").tobytes(),
        probability=np.full(units, 0.5).astype("<f8").tobytes(),
        stratum=np.zeros(units, dtype="<i8").tobytes(),
        closed_at=np.linspace(0, at, units).astype("<i8").tobytes(),
        covered=np.ones(units, dtype="u1").tobytes(),
        outcomes={"task_success": outcome.tobytes()},
        missing={"task_success": 0},
    )
    arm = int(treated.sum())
    row = Assigned(stratum=0, probability=0.5, treated=arm, control=units - arm, covered_treated=arm, covered_control=units - arm)
    return calm(
        at=at, state="canary", stage=0, stage_since=0, since=0, lanes=(lane,), assigned=(row,), n_max={"task_success": n_max},
        references={"task_success": Reference(mean=0.6, variance=0.24, units=1000)},
    )  # fmt: skip


@pytest.mark.parametrize("hours", [2.0, 2.5, 48.0])
def test_no_answer_by_the_deadline_is_inconclusive_and_the_champion_stays(hours: float) -> None:
    decision = decide(CONFIG, evidence(units=2000, effect=0.0, hours=hours))
    assert decision.action is CanaryAction.INCONCLUSIVE
    assert decision.verdict is not Verdict.PASS


def test_all_declared_units_without_an_answer_are_inconclusive() -> None:
    decision = decide(CONFIG, evidence(units=2000, effect=-0.02, hours=1.0, n_max=1500))
    assert (decision.action, decision.cause) == (CanaryAction.INCONCLUSIVE, "n_max")


def test_before_the_deadline_it_goes_on() -> None:
    assert decide(CONFIG, evidence(units=2000, effect=0.0, hours=1.0)).action is CanaryAction.CONTINUE


def test_only_evidence_makes_it_ready_and_only_harm_aborts_it() -> None:
    assert decide(CONFIG, evidence(units=8000, effect=0.08, hours=1.0)).action is CanaryAction.READY
    assert decide(CONFIG, evidence(units=8000, effect=-0.08, hours=3.0)).action is CanaryAction.ABORT
