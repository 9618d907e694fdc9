"""A canary from its first stage on with people who come and go: the real draws, units, looks and decide(), without a database."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from app.domain.release.assignment import assign
from app.domain.release.gates import CanaryAction
from app.domain.release.releases import Pointer, Route
from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.habits import habits_of, with_explained
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.decide import Decision, decide
from tests.fakes.evidence import counted

BEGINS = datetime(2026, 11, 21, 6, tzinfo=UTC)
ENDS = frozenset({CanaryAction.ABORT, CanaryAction.READY, CanaryAction.INCONCLUSIVE})


@dataclass(kw_only=True)
class Person:
    """Somebody who uses the product."""

    name: str
    own: float
    """A rate of their own, that of their tasks' successes with the champion."""
    visit: int
    """Turns of one visit."""
    turns: int = 0
    left: int = 0
    in_unit: int = 0
    """Turns under the present draw, this one included."""
    treated: int = 0
    """Turns with the candidate so far."""
    drawn: str = ""


Behaviour = Callable[[Person, bool, random.Random], Mapping[str, Any]]
"""What becomes of a person's turn, with the candidate or not: changes to its session."""


@dataclass(kw_only=True)
class Ramp:
    """One canary. Everybody is drawn by the production hash, under a release of its own name."""

    config: GatesConfig
    behave: Behaviour
    seed: int
    turns_a_second: float = 6.0
    here: int = 200
    """People who are here at the same time."""
    pool: list[Person] | None = None
    """Whoever may come; unset, everybody who comes is new."""
    visit: Callable[[random.Random], int] = lambda dice: 8
    own: Callable[[random.Random], float] = lambda dice: dice.betavariate(0.6, 0.4)  # ICC 1/(1 + 1) = 0.5
    history: list[Session] = field(default_factory=list[Session])
    answers: int = 0
    treated: int = 0
    bad: int = 0
    """Faults of the candidate that people met."""
    stage: int = 0
    decision: Decision | None = None

    def run(self, *, seconds: float, every_s: float = 10.0) -> Decision:
        """People come until it is decided, or time is over."""
        dice, at, asked, stage_since = random.Random(f"ramp {self.seed}"), 0.0, 0.0, BEGINS
        references = with_explained(self.config, self.history)
        habits = habits_of(self.config, self.history, {})
        drawing = canary_drawing(digest="v2", champion="v1")
        book = UnitBook(self.config, drawing, references, habits=habits, lasting=self.config.lasting_share)
        active, fresh = list[Person](), list[Session]()
        while at < seconds:
            at += dice.expovariate(self.turns_a_second)
            fresh.append(self._turn(active, BEGINS + timedelta(seconds=at), dice))
            if at - asked < every_s:
                continue
            asked, now = at, BEGINS + timedelta(seconds=at)
            book.update(fresh, now=now)
            fresh.clear()
            self.decision = decide(self.config, self._evidence(book, references, now=now, stage_since=stage_since))
            if self.decision.action in ENDS:
                return self.decision
            if self.decision.action is CanaryAction.RAMP:
                self.stage, stage_since = self.stage + 1, now
        assert self.decision is not None
        return self.decision

    def _turn(self, active: list[Person], at: datetime, dice: random.Random) -> Session:
        while len(active) < self.here:
            active.append(self._arrival(dice))
        place = dice.randrange(len(active))
        person = active[place]
        person.left -= 1
        if person.left <= 0:
            active.pop(place)
        arm = assign(self._route(), person.name, at=at)
        treated = arm.arm == "candidate"
        person.in_unit = person.in_unit + 1 if person.drawn == arm.stage else 1
        person.drawn, person.turns, person.treated = arm.stage, person.turns + 1, person.treated + treated
        self.answers, self.treated = self.answers + 1, self.treated + treated
        changes = self.behave(person, treated, dice)
        self.bad += treated and changes.get("finish_reason") == "error"
        return Session(**{
            "inference_id": f"i-{self.answers}", "actor": person.name, "episode_id": f"e-{self.answers}", "release_id": arm.release_id,
            "stage": arm.stage, "arm": arm.arm, "probability": arm.probability, "share": arm.share, "holdback": arm.holdback,
            "digest": arm.digest, "exposed_at": at, "served": True, "finish_reason": "stop", "completion": "```x```",
            "completion_tokens": 40, "labelled": True, "reward": 0.2, "terms": {}, "signals": {"task_success": True}, **changes,
        })  # fmt: skip

    def _arrival(self, dice: random.Random) -> Person:
        if self.pool is not None:
            person = dice.choice(self.pool)
            person.left += person.visit
            return person
        visit = self.visit(dice)
        return Person(name=f"p-{self.seed}-{dice.getrandbits(48)}", own=self.own(dice), visit=visit, left=visit)

    def _route(self) -> Route:
        pointer = Pointer(
            policy="tab", digest="v1", generation=1, previous=None, anchor="v1", holdback=0.0, release_id="r0", changed_at=BEGINS
        )
        return Route(
            policy="tab", pointer=pointer, canary_digest="v2", canary_release=f"r-{self.seed}", canary_stage=self.stage,
            canary_share=self.config.stages[self.stage].share, canary_lasting=self.config.lasting_share,
        )  # fmt: skip

    def _evidence(self, book: UnitBook, references: dict[str, Any], *, now: datetime, stage_since: datetime) -> Evidence:
        return counted(
            book, references, at=micros(now), stage=self.stage, stage_since=micros(stage_since), since=micros(BEGINS),
            n_max=dict.fromkeys(references, 1_000_000), turn_looks=book.turn_looks(),
        )  # fmt: skip
