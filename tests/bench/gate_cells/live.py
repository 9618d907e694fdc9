"""People who come back, incidents and replicas: what happens around the statistics, with nothing but production code."""

from __future__ import annotations

import math
import random
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from app.db.engine import open_engine
from app.db.migrate import upgrade
from app.domain.errors import StaleGeneration
from app.domain.release.gates import CanaryAction
from app.domain.release.releases import Release
from app.domain.release.sessions import Era, Session
from pipelines.evaluation.config import GatesConfig, SloConfig
from pipelines.evaluation.counting.drawings import era_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.references import Reference, references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.absolute_limits import LimitBook
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import Decision
from pipelines.evaluation.live.slo import LEAST_PEOPLE
from tests.bench.common.sections import Section, error_of, repetitions_of
from tests.bench.gate_cells.harm import ALPHA, harm_found, plain_units
from tests.fakes.evidence import counted
from tests.fakes.releases import ReleaseRoom, release_room

AT = datetime(2026, 11, 21, tzinfo=UTC)
LIMIT = 0.10
RACES = 12


def returning_people(scale: float, seed: int) -> Section:
    """V1, 600 people who come on most of ten days and differ for good (ICC 0.5): one unit per person and day, drawn anew each day."""
    section = Section(title="V1 people who come back: 600 people, 10 days, ICC 0.5, identical versions, then -10 pp")
    section.header("unit", "false abort", "-10 pp found")
    rng, n = np.random.default_rng([seed, 1000]), repetitions_of(1000, scale)
    few = repetitions_of(200, scale)
    drawn = float(np.mean([_days_abort(rng, anew=True) for _ in range(n)]))
    section.row("person-day, drawn anew (ours)", drawn, float(np.mean([_days_abort(rng, anew=True, effect=-0.1) for _ in range(few)])))
    kept = float(np.mean([_days_abort(rng, anew=False) for _ in range(few)]))
    once = float(np.mean([_days_abort(rng, anew=True, effect=-0.1, days=1) for _ in range(few)]))
    section.row("person-day, arm kept", kept, "")
    section.row("person, once for ever", "", once)
    section.numbers["aa_returning_people"] = drawn
    section.require("false abort <= 0.05 + 3 SE", drawn <= ALPHA + 3 * error_of(ALPHA, n))
    return section


def _days_abort(rng: np.random.Generator, *, anew: bool, effect: float = 0.0, people: int = 600, days: int = 10) -> bool:
    rate, first = rng.beta(0.6, 0.4, people), rng.random(people) < 0.5  # ICC 1/(1 + 1) = 0.5
    outcome, treated = list[np.ndarray](), list[np.ndarray]()
    for _ in range(days):
        came = rng.permutation(np.flatnonzero(rng.random(people) < 0.7))
        arm = rng.random(len(came)) < 0.5 if anew else first[came]
        outcome.append(rng.binomial(5, np.clip(rate[came] + effect * arm, 0.0, 1.0)) / 5)
        treated.append(arm)
    units = plain_units(np.concatenate(outcome), np.concatenate(treated))
    return harm_found(units, people * days)


def absolute_limits(scale: float, seed: int) -> Section:
    """All turns against a limit of 10 %, looked at after each: 200 people by Zipf who fail at 5 % on average, differing for good; and
    people who are alike and fail at exactly the limit, where the level is promised to the letter."""
    section = Section(title="V1 absolute limits, peeking at every turn, 200 people by Zipf, 10,000 turns, 10 % limit")
    section.header("true rate", "people's ICC", "alarms")
    n, worst = repetitions_of(200, scale, least=20), 0.0
    for rate, icc in ((0.05, 0.05), (0.05, 0.3), (LIMIT, 0.0)):
        alarms = float(np.mean([_limit_alarms(random.Random(f"{seed}-{icc}-{k}"), rate=rate, icc=icc) for k in range(n)]))
        section.row(f"{rate:.0%}", f"{icc:g}", alarms)
        worst = max(worst, alarms)
    section.numbers["aa_limits"] = worst
    section.require("alarms <= 0.01 + 3 SE", worst <= 0.01 + 3 * error_of(0.01, n))
    return section


def _limit_alarms(dice: random.Random, *, rate: float, icc: float, people: int = 200, turns: int = 10_000) -> bool:
    """Three seconds between turns: some eight hours of them."""
    spread = (1.0 - icc) / max(icc, 1e-9)
    fails = [rate if icc == 0.0 else dice.betavariate(rate * spread, (1.0 - rate) * spread) for _ in range(people)]
    weights = [1.0 / (k + 1) for k in range(people)]
    book, config = LimitBook(slos=[SloConfig(source="fault", limit=LIMIT)]), GatesConfig()
    for n, person in enumerate(dice.choices(range(people), weights, k=turns)):
        book.count(_turn(n, person, "champion", bad=dice.random() < fails[person], every_s=3.0), treated=True)
        if n % 50 == 0:
            count = book.counts()[0]
            if count.log_e >= -math.log(config.alpha_slo) and count.people >= LEAST_PEOPLE:
                return True
    return False


def incidents(scale: float, seed: int) -> Section:
    """A champion with a holdback of 10 %: an incident of the place rolls nothing back, whoever burns first; its own failure does, soon."""
    section = Section(title="Incidents: 300 healthy turns of 200 people, then 600 others; holdback 10 %")
    section.header("what fails", "rolled back", "incident said", "turns to the rollback, median")
    n = repetitions_of(40, scale, least=12)
    cases: dict[str, Callable[[str], float]] = {
        "40 % of all answers": lambda _arm: 0.4,
        "15 % of all answers": lambda _arm: 0.15,
        "40 % of the champion's": lambda arm: 0.4 if arm == "champion" else 0.005,
        "all of the champion's": lambda arm: float(arm == "champion"),
        "40 % of the reference's": lambda arm: 0.4 if arm == "previous" else 0.005,
    }
    for name, fails in cases.items():
        found = [_incident(random.Random(f"{seed}-{name}-{k}"), fails) for k in range(n)]
        taken = [turns for turns, decision in found if decision.action is CanaryAction.ABORT]
        said = sum(decision.cause == "incident" for _, decision in found) / n
        section.row(name, len(taken) / n, said, f"{np.median(taken):.0f}" if taken else "-")
        if "champion's" in name:
            section.numbers[f"found: {name}"] = float(np.median(taken)) if taken else math.inf
            soon, power = (150, 1.0) if name.startswith("all") else (400, 0.8)
            found_enough = len(taken) / n >= power - 3 * error_of(power, n)
            section.require(f"{name}: rolled back, in the median within {soon} turns", found_enough and float(np.median(taken)) <= soon)
        else:
            wrong = len(taken) / n
            section.numbers["incident_rollbacks"] = max(wrong, section.numbers.get("incident_rollbacks", 0.0))
            section.require(f"{name}: rolled back <= 0.02 + 3 SE", wrong <= 0.02 + 3 * error_of(0.02, n))
    return section


def _incident(dice: random.Random, fails: Callable[[str], float]) -> tuple[int, Decision]:
    """Turns after the beginning, and what was decided last."""
    config = GatesConfig(settle_s=1.0)
    era = Era(
        generation=2, since=AT, until=None, champion="v2", reference="v1", holdback=0.1, anchor="v1", action="promote", release_id="r"
    )
    references = references_of(config, [])
    book, arms = UnitBook(config, era_drawing(era), references), ["previous" if dice.random() < 0.1 else "champion" for _ in range(200)]
    decision: Decision | None = None
    for n in range(900):
        person = dice.randrange(200)
        bad = dice.random() < (fails(arms[person]) if n >= 300 else 0.005)
        book.update([_turn(n, person, arms[person], bad=bad)], now=AT + timedelta(seconds=n))
        if n % 20 == 0:
            decision = decide_champion(config, _evidence(book, references, seconds=n))
            if decision.action is CanaryAction.ABORT:
                return n - 300, decision
    assert decision is not None
    return 600, decision


def _evidence(book: UnitBook, references: dict[str, Reference], *, seconds: int) -> Evidence:
    now = micros(AT + timedelta(seconds=seconds))
    return counted(book, references, at=now, state="CHAMPION", stage=0, stage_since=micros(AT), since=micros(AT))


def _turn(number: int, person: int, arm: str, *, bad: bool, every_s: float = 1.0) -> Session:
    return Session(
        inference_id=f"i-{number}", actor=f"person-{person}", episode_id=f"e-{number}", release_id="r", stage="holdback.20000", arm=arm,
        probability=0.9, share=0.0, holdback=0.1, digest="v2" if arm == "champion" else "v1",
        exposed_at=AT + timedelta(seconds=number * every_s), served=True, finish_reason="error" if bad else "stop", completion_tokens=0,
    )  # fmt: skip


def replicas(_scale: float, _seed: int) -> Section:
    """Two replicas of the watch that decided the same ramp at the same moment, a dozen times, on a database file."""
    section = Section(title=f"Replicas: two decide the same ramp at once, {RACES} times")
    section.header("ramped once", "ramped twice")
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'races.db'}"
        upgrade(url)
        engine = open_engine(url)
        room = release_room(engine)
        stages = [_race(room, number) for number in range(RACES)]
        engine.dispose()
    section.row(stages.count(1), stages.count(2))
    section.numbers["replica_double_ramps"] = float(stages.count(2))
    section.require("no stage is skipped", stages == [1] * RACES)
    return section


def _race(room: ReleaseRoom, number: int) -> int | None:
    seen = room.canary(f"race-{number}")
    gate = threading.Barrier(2)

    def ramp(release: Release) -> None:
        gate.wait()
        try:
            room.desk.ramp(release.id, reason="the stage is done", seen=release)
        except StaleGeneration:
            return

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ramp, [seen, seen]))
    stage = room.desk.find(seen.id).stage
    room.desk.abort(seen.id, actor="system:bench", reason="the race is over")
    return stage
