"""Metrics whose baseline is small: a margin is no wider than a share of what the champion does, and silence is no evidence."""

import random
from datetime import timedelta

import msgspec

from app.domain.release.gates import CanaryAction
from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, MetricConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.references import Reference, bounded, references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.decide import decide
from tests.fakes.evidence import counted
from tests.fakes.sessions import session
from tests.fakes.watching import small_gates

CONFIG = small_gates(metrics=tuple(m for m in small_gates().metrics if m.name != "reward"))
GOLD = next(m for m in CONFIG.metrics if m.name == "task_success")


def _session(number: int, arm: str, rate: float, dice: random.Random) -> Session:
    return session(number, arm=arm, signals={"task_success": dice.random() < rate})


def _evidence(candidate: float, champion: float, *, people: int, seed: int) -> Evidence:
    dice = random.Random(seed)
    references = references_of(CONFIG, [_session(n, "champion", champion, dice) for n in range(2000)])
    book = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references)
    rates = {"candidate": candidate, "champion": champion}
    arms = [dice.choice(("candidate", "champion")) for _ in range(people)]
    sessions = [_session(n, arm, rates[arm], dice) for n, arm in enumerate(arms)]
    now = sessions[-1].exposed_at + timedelta(seconds=60)
    book.update(sessions, now=now)
    last = book.last_session_at
    assert last is not None
    return counted(book, references, at=micros(now), last_session_at=micros(last), n_max={"task_success": people})


def test_a_candidate_that_never_succeeds_is_not_ready_because_the_champion_seldom_does() -> None:
    """A champion at .6 % and a candidate at 0 were READY 59 times of 60."""
    decisions = [decide(CONFIG, _evidence(0.0, 0.006, people=2000, seed=seed)) for seed in range(4)]
    assert CanaryAction.READY not in {decision.action for decision in decisions}
    assert decisions[0].numbers["required"][0]["margin"] <= 0.25 * 0.012


def test_a_margin_is_at_most_a_share_of_what_was_measured_and_a_prior_bounds_nothing() -> None:
    rare, usual, guessed = (Reference(mean=mean, variance=0.01, units=units) for mean, units in ((0.006, 500), (0.6, 500), (0.006, 0)))
    assert bounded(CONFIG, GOLD, 0.10, rare) == 0.25 * 0.006
    assert bounded(CONFIG, GOLD, 0.10, usual) == 0.10
    assert bounded(CONFIG, GOLD, 0.10, guessed) == 0.10
    wide: GatesConfig = msgspec.structs.replace(CONFIG, margin_share_max=1.0)
    assert bounded(wide, GOLD, 0.10, rare) == 0.006
    free: GatesConfig = msgspec.structs.replace(CONFIG, margin_share_max=0.0)
    assert bounded(free, GOLD, 0.10, rare) == 0.10
    errors: MetricConfig = next(m for m in CONFIG.metrics if m.name == "fault")
    assert bounded(CONFIG, errors, 0.01, Reference(mean=0.999, variance=0.01, units=500)) == 0.01
