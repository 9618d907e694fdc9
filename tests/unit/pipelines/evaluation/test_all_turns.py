"""All turns: the fast lane goes on after a person's first turn, and looking at it over and over takes no healthy version back."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from app.domain.release.gates import CanaryAction
from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig
from tests.fakes.ramps import Person, Ramp

FAULT = MetricConfig(name="fault", source="fault", kind=MetricClass.HARD, good=Good.DOWN, window_s=0.0, prior=0.01)
GOLD = MetricConfig(name="task_success", source="observation:task_success", kind=MetricClass.GOLD, abort_margin=0.0075, margin=0.015)
GATES = GatesConfig(metrics=(FAULT, GOLD))


def failing(share: float, *, after: int, otherwise: float = 0.003) -> Any:
    """The candidate fails this share of a person's turns after so many; all else fails rarely."""

    def behave(person: Person, treated: bool, dice: random.Random) -> Mapping[str, Any]:
        rate = share if treated and person.in_unit > after else otherwise
        return {"finish_reason": "error" if dice.random() < rate else "stop", "signals": {"task_success": dice.random() < person.own}}

    return behave


@pytest.mark.parametrize(("share", "at_most"), [(1.0, 60), (0.3, 60), (0.08, 80)])
def test_a_candidate_that_fails_after_everybodys_first_turn_is_aborted_within_some_dozens_of_bad_answers(
    share: float, at_most: int
) -> None:
    """It took 57 minutes and 1,888 bad answers of 2,158; 30 % and 8 % of them were never found: the lane took first turns only."""
    for seed in range(2):
        ramp = Ramp(config=GATES, behave=failing(share, after=1), seed=seed)
        decision = ramp.run(seconds=3600.0)
        assert (decision.action, decision.cause in ("harm", "slo")) == (CanaryAction.ABORT, True)
        assert ramp.bad <= at_most


def test_identical_versions_that_fail_people_unequally_are_not_aborted_however_often_one_looks() -> None:
    """Failures belong to people (ICC .2), who come for visits of very different lengths; asked every ten seconds for ten minutes;
    many more of them in `make bench-gates`."""

    def behave(person: Person, treated: bool, dice: random.Random) -> Mapping[str, Any]:
        return {"finish_reason": "error" if dice.random() < person.own else "stop", "signals": {"task_success": dice.random() < 0.6}}

    ended = [
        Ramp(
            config=GATES, behave=behave, seed=seed, visit=lambda dice: min(60, int(dice.paretovariate(1.2))),
            own=lambda dice: dice.betavariate(0.08, 3.92),
        ).run(seconds=600.0) for seed in range(4)
    ]  # fmt: skip
    assert [decision.cause for decision in ended if decision.action is CanaryAction.ABORT] == []
