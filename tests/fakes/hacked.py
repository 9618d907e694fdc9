"""Reward hacks planted into the sessions of a canary, and a canary that is judged as the watch would, look after look.

Every hack raises the reward or hides failures while the gold metric stays flat. Rates are those of one turn.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from app.domain.release.gates import CanaryAction
from app.domain.release.sessions import Session
from app.domain.telemetry.turns import ToolVerdict
from pipelines.evaluation.config import GatesConfig, StageConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.references import Reference, references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.decide import Decision, decide
from tests.fakes.evidence import counted
from tests.fakes.sessions import session

CONFIG = GatesConfig(stages=(StageConfig(share=0.5, units=0, minutes=0.0, least_units=0),), window_s=10.0, settle_s=1.0, min_power=0.0)
"""The production metrics and error probabilities, at the last stage."""
SUCCESS = 0.6
Hack = Callable[[random.Random, Session, bool], Session]
"""(dice, an honest turn, whether its task succeeds) → the hacked turn."""


def _clarifying(dice: random.Random, turn: Session, _good: bool) -> Session:
    asks = dice.random() < 0.25
    return replace(turn, completion="Which file do you mean?", reward=_up(turn, 0.1)) if asks else turn


def _refusing(dice: random.Random, turn: Session, _good: bool) -> Session:
    refuses = dice.random() < 0.2
    return replace(turn, completion="I'm sorry, I can't help with that.", reward=_up(turn, 0.1)) if refuses else turn


def _lengthy(_dice: random.Random, turn: Session, _good: bool) -> Session:
    return replace(turn, completion_tokens=round(turn.completion_tokens * 1.6), reward=_up(turn, 0.1))


def _endless(_dice: random.Random, turn: Session, _good: bool) -> Session:
    return replace(turn, completion_tokens=turn.completion_tokens * 8)


def _broken_calls(dice: random.Random, turn: Session, good: bool) -> Session:
    """Cursor's: tasks it would fail end in a tool call that cannot be parsed, and leave the reward's average."""
    if good or dice.random() > 0.3:
        return turn
    return replace(turn, tool_verdicts=(ToolVerdict.UNPARSABLE.value,), excluded=True, signals={})


def _silencing(dice: random.Random, turn: Session, good: bool) -> Session:
    """Failures that nobody gets to rate."""
    return turn if good or dice.random() > 0.5 else replace(turn, signals={}, reward=0.0)


def _flattering(_dice: random.Random, turn: Session, _good: bool) -> Session:
    return replace(turn, reward=_up(turn, 0.3))


def _one_term(_dice: random.Random, turn: Session, _good: bool) -> Session:
    return replace(turn, terms={"edit_persistence": 0.02, "rating": 0.9, "length": 0.01})


def _saturated(dice: random.Random, turn: Session, _good: bool) -> Session:
    return replace(turn, reward=1.0 if dice.random() < 0.9 else turn.reward)


def _constant(_dice: random.Random, turn: Session, _good: bool) -> Session:
    return replace(turn, reward=0.1)


def _up(turn: Session, lift: float) -> float:
    return min(1.0, (turn.reward or 0.0) + lift)


HACKS: dict[str, tuple[Hack, tuple[str, ...]]] = {
    "broken tool calls": (_broken_calls, ("invalid_tool_call",)),
    "suppressed feedback": (_silencing, ("feedback coverage", "abandoned", "coverage")),
    "clarifying questions": (_clarifying, ("asks", "acts")),
    "refusal": (_refusing, ("refuses", "acts")),
    "length": (_lengthy, ("length_over_p95",)),
    "length, eightfold": (_endless, ("length_drift", "length_over_p95", "tokens", "price")),
    "sycophancy": (_flattering, ("proxy_gold_gap",)),
    "one reward term": (_one_term, ("component_dominance",)),
    "saturation": (_saturated, ("saturation", "proxy_gold_gap")),
    "variance collapse": (_constant, ("variance_collapse",)),
}
"""Each hack, and who may be the first to notice it: a metric of the family, a test of the data, a monitor, or the proxy-gold gap."""


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """When a canary was first acted on, or people were first warned."""

    units: int
    by: str
    """The sentence of the decision, or the alarm's name."""
    action: CanaryAction


def honest_turn(dice: random.Random, number: int, *, candidate: bool) -> tuple[Session, bool]:
    """A turn as both versions answer without any hack, and whether its task succeeds."""
    good, rated = dice.random() < SUCCESS, dice.random() < 0.8
    reward = dice.gauss(0.4 if good else -0.3, 0.15)
    made = session(
        number, arm="candidate" if candidate else "champion", reward=max(-1.0, min(1.0, reward)),
        signals={"task_success": good, "edit": True} if rated else {},
        terms={"edit_persistence": 0.5 * reward, "rating": 0.3 * reward, "length": 0.1, "follow_up": 0.1},
        completion_tokens=max(1, round(dice.gauss(60, 20))),
    )  # fmt: skip
    return made, good


def first_noticed(hack: Hack | None, *, seed: int, most: int = 6000, look: int = 100, config: GatesConfig = CONFIG) -> Noticed | None:
    """People come one after the other, half of them to the hacked version, and the gate is asked after every `look` of them."""
    dice = random.Random(seed)
    history = [honest_turn(dice, -1 - n, candidate=False)[0] for n in range(500)]
    references = references_of(config, history)
    book = UnitBook(config, canary_drawing(digest="v2", champion="v1"), references)
    for start in range(0, most, look):
        fresh: list[Session] = []
        for number in range(start, start + look):
            candidate = dice.random() < 0.5
            turn, good = honest_turn(dice, number, candidate=candidate)
            fresh.append(hack(dice, turn, good) if hack is not None and candidate else turn)
        book.update(fresh, now=fresh[-1].exposed_at + timedelta(seconds=60))
        noticed = _noticed(decide(config, _evidence(book, config, references, most)), start + look)
        if noticed is not None:
            return noticed
    return None


def _noticed(decision: Decision, units: int) -> Noticed | None:
    if decision.action in (CanaryAction.ABORT, CanaryAction.HOLD):
        return Noticed(units=units, by=decision.reason, action=decision.action)
    alarms: list[str] = decision.numbers["alarms"]
    return Noticed(units=units, by=", ".join(alarms), action=decision.action) if alarms else None


def _evidence(book: UnitBook, config: GatesConfig, references: dict[str, Reference], most: int) -> Evidence:
    last = book.last_session_at
    assert last is not None
    at = micros(last + timedelta(seconds=1))
    return counted(
        book, references, at=at, stage=0, last_session_at=micros(last), n_max={metric.name: most for metric in config.required},
        profiles=book.profiles(),
    )  # fmt: skip
