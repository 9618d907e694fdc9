"""Seconds and tokens: guards with bounded values, held against what the champion's were before the canary."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from app.domain.release.gates import CanaryAction
from pipelines.evaluation.config import GatesConfig, MetricClass, StageConfig
from pipelines.evaluation.counting.measures import measured
from pipelines.evaluation.counting.references import references_of
from tests.fakes.ramps import Person, Ramp
from tests.fakes.sessions import session

COSTS = tuple(metric for metric in GatesConfig().metrics if metric.kind is MetricClass.COST)
GOLD = next(metric for metric in GatesConfig().metrics if metric.name == "task_success")
ONCE = GatesConfig(
    metrics=(GOLD, *COSTS), slos=(), stages=(StageConfig(share=0.5, units=0, minutes=0.0),), lasting_share=0.0, window_s=120.0
)  # fmt: skip
BEFORE = [
    session(n, total_s=1.0 + n % 10, time_to_first_token_s=0.1 + n % 10 / 10, prompt_tokens=100, completion_tokens=40) for n in range(200)
]


def test_a_typical_answer_counts_half_and_one_of_twice_the_time_two_thirds() -> None:
    """Champion's median 5.5 s: 5.5/(5.5 + 5.5), 11/(11 + 5.5); good is up. A price is 100/4 + 40 tokens of the answer."""
    references = references_of(ONCE, BEFORE)
    thresholds = {name: r.threshold for name, r in references.items() if r.threshold is not None}
    by_name = {metric.name: metric for metric in COSTS}
    assert measured(by_name["total_time"], session(0, total_s=5.5), thresholds) == pytest.approx(0.5)
    assert measured(by_name["total_time"], session(0, total_s=11.0), thresholds) == pytest.approx(1 / 3)
    assert measured(by_name["total_time_over_p95"], session(0, total_s=10.0), thresholds) == 0.0
    assert references["price"].threshold == 65.0
    assert measured(by_name["price"], session(0), {}) is None  # nothing to refer to


def answers(*, seconds: float = 1.0, tokens: float = 1.0) -> Any:
    """The candidate takes so many times the champion's time and tokens."""

    def behave(person: Person, treated: bool, dice: random.Random) -> Mapping[str, Any]:
        took, wrote = dice.lognormvariate(1.5, 0.6), dice.lognormvariate(3.7, 0.5)
        return {
            "total_s": took * (seconds if treated else 1.0), "time_to_first_token_s": took / 10 * (seconds if treated else 1.0),
            "prompt_tokens": 100, "completion_tokens": int(wrote * (tokens if treated else 1.0)),
            "signals": {"task_success": dice.random() < person.own},
        }  # fmt: skip

    return behave


def rambles(person: Person, treated: bool, dice: random.Random) -> Mapping[str, Any]:
    """One of the candidate's answers in six is five times as long, and the others are the champion's."""
    return answers(tokens=5.0 if dice.random() < 1 / 6 else 1.0)(person, treated, dice)


@pytest.mark.parametrize(
    ("behave", "causes"),
    [
        (answers(seconds=1.6), {"total_time", "time_to_first_token", "total_time_over_p95", "first_token_over_p95"}),
        (answers(tokens=2.0), {"tokens", "price", "tokens_over_p95", "price_over_p95"}),
        (rambles, {"tokens_over_p95", "price_over_p95"}),
        (answers(seconds=1.05, tokens=1.05), set[str]()),
        (answers(), set[str]()),
    ],
    ids=["60 % slower", "twice the tokens", "some ramble", "5 % slower and longer", "identical"],
)
def test_answers_much_slower_or_dearer_are_harm_and_a_little_more_is_not(behave: Any, causes: set[str]) -> None:
    history = [session(n, **behave(Person(name="p", own=0.6, visit=1), False, random.Random(n))) for n in range(400)]
    ramp = Ramp(config=ONCE, behave=behave, seed=9, history=history, visit=lambda _: 3)
    decision = ramp.run(seconds=1500.0, every_s=300.0)
    assert (decision.action is CanaryAction.ABORT) is bool(causes)
    assert not causes or any(f"harm on {cause}:" in decision.reason for cause in causes)
