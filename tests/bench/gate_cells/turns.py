"""V1, all turns: people who come back many times in one canary, judged by the real draws, units, looks and decide()."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from app.domain.release.gates import CanaryAction
from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig, StageConfig
from pipelines.evaluation.live.turn_tests import Whose, alpha_of_a_look
from pipelines.evaluation.statistics.power import time_to_detect
from tests.bench.common.sections import Section, error_of, repetitions_of
from tests.fakes.ramps import BEGINS, Behaviour, Person, Ramp
from tests.fakes.sessions import session

FAULT = MetricConfig(name="fault", source="fault", kind=MetricClass.HARD, good=Good.DOWN, window_s=0.0, prior=0.01)
GOLD = MetricConfig(name="task_success", source="observation:task_success", kind=MetricClass.GOLD, abort_margin=0.0, margin=0.015)
TURNS = MetricConfig(name="failed_turns", source="observation:task_success", kind=MetricClass.GOLD, by_turns=True)
STAGES = (
    StageConfig(share=0.05, units=200, minutes=5.0), StageConfig(share=0.25, units=400, minutes=10.0),
    StageConfig(share=0.5, units=0, minutes=0.0),
)  # fmt: skip
RAMP = GatesConfig(metrics=(FAULT, GOLD, TURNS), stages=STAGES, window_s=300.0)
ONCE = GatesConfig(metrics=(FAULT, GOLD, TURNS), stages=STAGES[2:], lasting_share=0.0, window_s=300.0)
ALPHA = 0.05
SMALL = 1500
"""People of the smaller product: 8 turns a second, 100 of them here at a time."""
LASTING_EFFECT, LASTING_VARIANCE = 0.059, 0.039


def all_turns(scale: float, seed: int) -> Section:
    """Failures that begin with a person's second turn, at a share of 5 %: bad answers until the abort; identical versions beside them."""
    section = Section(title="V1 fast lane over all turns: 6 turns a second, visits of 8, first stage at 5 %")
    section.header("the candidate", "aborted", "bad answers, median", "answers, median")
    n = repetitions_of(20, scale, least=4)
    for share in (1.0, 0.3, 0.08):
        ramps = [Ramp(config=RAMP, behave=_fails(share, after=1), seed=seed + k) for k in range(n)]
        ended = [ramp.run(seconds=2400.0).action is CanaryAction.ABORT for ramp in ramps]
        bad, answers = (float(np.median([getattr(ramp, name) for ramp in ramps])) for name in ("bad", "answers"))
        section.row(f"fails {share:.0%} of the turns after the first", float(np.mean(ended)), bad, answers)
        section.numbers[f"bad_answers_later_turns_{share:g}"] = bad
        section.require(f"{share:.0%} after the first turn: aborted within 80 bad answers", all(ended) and bad <= 80)
    return section


def _fails(share: float, *, after: int) -> Behaviour:
    def behave(person: Person, treated: bool, dice: random.Random) -> Mapping[str, Any]:
        rate = share if treated and person.in_unit > after else 0.003
        return {"finish_reason": "error" if dice.random() < rate else "stop", "signals": {"task_success": dice.random() < person.own}}

    return behave


def identical_people(scale: float, seed: int) -> Section:
    """The whole ramp with identical versions: faults and successes belong to people, who come back for visits by Zipf's law."""
    section = Section(title="V1 whole ramps of identical versions, 800 people who come back (Zipf, ICC .2 and .5), asked every 20 seconds")
    section.header("ramps", "false abort", "held for its data")
    n = repetitions_of(200, scale, least=20)
    ended = [_identical(seed * 1000 + k) for k in range(n)]
    aborted = sum(action is CanaryAction.ABORT for action in ended) / n
    section.row(n, aborted, sum(action is CanaryAction.HOLD for action in ended) / n)
    section.numbers["aa_all_turns"] = aborted
    section.require("false abort <= 0.05 + 3 SE", aborted <= ALPHA + 3 * error_of(ALPHA, n))
    return section


def _identical(seed: int) -> CanaryAction:
    dice = random.Random(seed)
    pool = [Person(name=f"p-{k}", own=dice.betavariate(0.6, 0.4), visit=min(60, int(dice.paretovariate(1.2)))) for k in range(800)]
    faulty = {person.name: dice.betavariate(0.08, 3.92) for person in pool}

    def behave(person: Person, treated: bool, dice: random.Random) -> Mapping[str, Any]:
        failed = dice.random() < faulty[person.name]
        return {"finish_reason": "error" if failed else "stop", "signals": {"task_success": dice.random() < person.own}}

    return (
        Ramp(config=RAMP, behave=behave, seed=seed, pool=pool, history=past(pool, dice), here=60).run(seconds=1500.0, every_s=20.0).action
    )


def who_is_hurt(scale: float, seed: int) -> Section:
    """Harm that the mean over people hides: found, and by which test."""
    section = Section(title="Who is hurt: one stage at 50 %, or a ramp with a lasting cohort of 20 %; found within two hours")
    section.header("who", "people", "aborted", "by")
    n = repetitions_of(40, scale, least=6)  # of three, three standard errors allow that none is found
    people = lasting_people()
    lasts = "90 pp from the next stage on, once somebody had it"
    cases = {
        "heaviest 2 % lose 30 pp": ("6000", lambda k: _heavies(seed + k)),
        "30 pp from the 11th turn on": ("new ones", lambda k: _eleventh(seed + k)),
        lasts: (people, lambda k: _spoiled(seed + k, people)),
        "the same in a product too small for it (asks nothing)": (SMALL, lambda k: _spoiled(seed + k, SMALL)),
    }
    for name, (many, case) in cases.items():
        ended = [case(k) for k in range(n)]
        found = [ramp.decision for ramp in ended if ramp.decision is not None and ramp.decision.action is CanaryAction.ABORT]
        causes = sorted({decision.reason.partition(":")[0].removeprefix("harm on ") for decision in found})
        section.row(name, many, len(found) / n, "; ".join(causes))
        section.numbers[f"found: {name}"] = len(found) / n
        if many != SMALL:
            section.require(f"{name}: found in 3 of 4", len(found) / n >= 0.75 - 3 * error_of(0.75, n))
    return section


def lasting_people(power: float = 0.9) -> int:
    """People with whom the lasting cohort's comparison finds this section's lasting harm in two hours with this power: 2,949.

    The sheet's formula (3.7), N = 2 g s^2 / (pi (1 - pi) d^2), with g from the power and from the evidence that is asked for: ln 1/.025
    of the family, ln 1/.03 of the test's weight in it, ln 64 of one look among 64, ln 4 of one target among four. pi = .8 may get the
    candidate. d = 5.9 points: one in nine of them had it before the last stage and from then on loses all of their 60 %. s^2 = .039 is
    1 - pi of their variance about what is usual for each (.063) plus pi of the cohort's (.033). Both as met in eight ramps with 1,500
    people; the stages' numbers of people grow with everybody's, so that d stays.
    """
    alpha = alpha_of_a_look(RAMP, GOLD, Whose.LASTING)
    share = 1.0 - RAMP.lasting_share
    return math.ceil(time_to_detect(effect=LASTING_EFFECT, variance=LASTING_VARIANCE, share=share, alpha=alpha, power=power))


def _heavies(seed: int) -> Ramp:
    dice = random.Random(seed)
    pool = [Person(name=f"p-{k}", own=dice.betavariate(0.6, 0.4), visit=30 if k % 50 == 0 else 2) for k in range(6000)]
    behave = losing(lambda person, treated: 0.3 * (treated and person.visit == 30))
    return _run(Ramp(config=ONCE, behave=behave, seed=seed, pool=pool, history=past(pool, dice), turns_a_second=8.0, here=60))


def _eleventh(seed: int) -> Ramp:
    behave = losing(lambda person, treated: 0.3 * (treated and person.in_unit > 10))
    return _run(Ramp(config=ONCE, behave=behave, seed=seed, visit=lambda _: 25, own=lambda _: 0.6, turns_a_second=8.0, here=260))


def _spoiled(seed: int, people: int) -> Ramp:
    """Traffic, and what a stage waits for, are in proportion to the people: as many of them are met by the candidate in either product."""
    dice, met, times = random.Random(seed), dict[str, str](), people / SMALL
    pool = [Person(name=f"p-{k}", own=dice.betavariate(0.6, 0.4), visit=3) for k in range(people)]
    stages = tuple(msgspec.structs.replace(stage, units=round(stage.units * times)) for stage in STAGES)
    config = msgspec.structs.replace(RAMP, stages=stages)

    def harm(person: Person, treated: bool) -> float:
        first = met.setdefault(person.name, person.drawn) if treated else met.get(person.name, person.drawn)
        return 0.0 if person.drawn == first else 0.9

    return _run(
        Ramp(
            config=config, behave=losing(harm), seed=seed, pool=pool, history=past(pool, dice), turns_a_second=8.0 * times,
            here=round(100 * times),
        )
    )  # fmt: skip


def _run(ramp: Ramp) -> Ramp:
    ramp.run(seconds=7200.0, every_s=150.0)
    return ramp


def losing(harm: Any) -> Behaviour:
    """Tasks succeed at a person's own rate, less what `harm(person, treated)` takes away."""

    def behave(person: Person, treated: bool, dice: random.Random) -> Mapping[str, Any]:
        return {"signals": {"task_success": dice.random() < person.own - harm(person, treated)}}

    return behave


def past(pool: list[Person], dice: random.Random) -> list[Session]:
    """What the champion did for these people the day before: one visit each."""
    owners = [person for person in pool for _ in range(person.visit)]
    return [
        session(
            n, inference_id=f"past-{n}", actor=person.name, stage="champion", exposed_at=BEGINS - timedelta(days=1),
            signals={"task_success": dice.random() < person.own},
        ) for n, person in enumerate(owners)
    ]  # fmt: skip
