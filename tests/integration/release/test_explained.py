"""`ratchet release explain`: every rule there is, of a canary and of a champion, comes out again from what was stored; and every alarm."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, update

from app.db.engine import writing
from app.db.release.evidence import SqlEvidenceBook
from app.db.tables import gate_results
from app.domain.release.alarms import AlarmKind
from app.domain.release.gates import GateName, GateResult
from app.domain.release.releases import Release
from app.domain.release.sessions import Session
from pipelines.__main__ import ratchet
from pipelines.evaluation.config import terms_of
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros, packed
from pipelines.evaluation.counting.profiles import ArmProfile
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.absolute_limits import SloCount
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import Cause, decide
from tests.fakes.evidence import counted
from tests.fakes.releases import ADA, POLICY, ReleaseRoom, release_room
from tests.fakes.sessions import AT, people
from tests.fakes.watching import small_gates

CONFIG = small_gates()
TWO_HOURS = int(7200e6)
BURNT = SloCount(source="fault", arm="treated", limit=0.1, bad=40, total=80, people=30, log_e=20.0, beside=5.0)
TURNS = ArmProfile(
    arm="control", turns=400, labelled=400, excluded=4, covered=320, rewarded=396, reward=40.0, reward_squared=60.0, at_ceiling=10,
    tokens=400 * 60.0, tokens_squared=400 * (60.0**2 + 20.0**2), terms={"edit_persistence": 60.0, "rating": 40.0},
)  # fmt: skip
SATURATED = msgspec.structs.replace(TURNS, arm="treated", at_ceiling=390)


def _evidence(sessions: list[Session], *, stage: int = 2, **changes: object) -> Evidence:
    """Evidence from these sessions, taken when all of them are complete."""
    references = references_of(CONFIG, [])
    book = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references)
    now = (sessions[-1].exposed_at if sessions else AT) + timedelta(seconds=60)
    book.update(sessions, now=now)
    values: dict[str, object] = {"policy": POLICY, "stage": stage, "n_max": {"task_success": 1500, "reward": 1500}, **changes}
    return counted(book, references, **{"at": micros(now), **values})


def _early() -> list[Session]:
    return people(600, stage="canary-1", share=0.25)


def _fell() -> list[Session]:
    """Better than the version before, for long, and then worse: what was good early does not mask it."""
    good, bad = people(2000, candidate=0.9, champion=0.5), people(800, candidate=0.3, champion=0.7, seed=2)
    return [*good, *(replace(one, actor=f"later-{n}", exposed_at=good[-1].exposed_at + timedelta(seconds=n)) for n, one in enumerate(bad))]


def _coarse() -> list[Session]:
    """Rewards that are all or nothing, so that two hundred people show nothing."""
    return [replace(one, reward=math.copysign(1.0, one.reward or 0.0)) for one in people(300)]


CANARY: dict[Cause, Callable[[], Evidence]] = {
    Cause.HARD: lambda: _evidence(people(30), hard=("no engine can load it",)),
    Cause.SLO: lambda: _evidence(people(30), slos=(BURNT,)),
    Cause.HARM: lambda: _evidence(people(1500, candidate=0.3)),
    Cause.INCIDENT: lambda: _evidence(people(30), slos=(msgspec.structs.replace(BURNT, beside=0.0),)),
    Cause.DATA: lambda: _evidence(people(1500, candidate=0.65), duplicates=200),
    Cause.REQUIRED: lambda: _evidence(people(1500, candidate=0.65)),
    Cause.DEADLINE: lambda: _evidence([], at=micros(AT) + TWO_HOURS + 1, last_session_at=micros(AT) + TWO_HOURS),
    Cause.DWELL: lambda: _evidence(people(30, stage="canary-0", share=0.05), stage=0),
    Cause.STAGE: lambda: _evidence(_early(), stage=1),
    Cause.N_MAX: lambda: _evidence(_coarse(), n_max={"task_success": 200, "reward": 200}),
}
CHAMPION: dict[Cause, Callable[[], Evidence]] = {
    Cause.HARD: lambda: _evidence(people(30), hard=("its weights are gone",), state="CHAMPION"),
    Cause.SLO: lambda: _evidence(people(30), slos=(BURNT,), state="CHAMPION"),
    Cause.HARM: lambda: _evidence(people(1500, candidate=0.3), state="CHAMPION"),
    Cause.FALL: lambda: _evidence(_fell(), state="CHAMPION"),
    Cause.INCIDENT: lambda: _evidence(people(30), slos=(msgspec.structs.replace(BURNT, beside=0.0),), state="CHAMPION"),
    Cause.MONITORS: lambda: _evidence(people(30), profiles=(SATURATED, TURNS), state="CHAMPION"),
    Cause.WATCHED: lambda: _evidence(people(300), state="CHAMPION"),
}


@pytest.fixture
def room(sqlite_engine: Engine) -> ReleaseRoom:
    return release_room(sqlite_engine, terms=terms_of(CONFIG))


@pytest.fixture
def explained(sqlite_url: str, tmp_path: Path) -> Callable[[Release], Result]:
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "COLUMNS": "300"}
    return lambda release: CliRunner(env=environment).invoke(ratchet, ["release", "explain", release.id], catch_exceptions=False)


def _record(engine: Engine, room: ReleaseRoom, release: Release, gate: GateName, evidence: Evidence) -> GateResult:
    """As the watch does it."""
    decision = (decide if gate is GateName.CANARY else decide_champion)(CONFIG, evidence)
    SqlEvidenceBook(engine).keep(release.id, decision.evidence_hash, packed(evidence), now=room.clock())
    result = GateResult(
        gate=gate, digest=release.digest, verdict=decision.verdict, reason=decision.reason,
        evidence={"cause": decision.cause, **decision.numbers}, config_hash=decision.config_hash, evidence_hash=decision.evidence_hash,
        decided_at=room.clock(),
    )  # fmt: skip
    room.desk.record_live(release.id, result, action=decision.action)
    return result


def test_every_rule_is_among_these() -> None:
    assert CANARY.keys() | CHAMPION.keys() == set(Cause)


@pytest.mark.parametrize(("gate", "rules"), [(GateName.CANARY, CANARY), (GateName.HOLDBACK, CHAMPION)], ids=["canary", "champion"])
def test_every_rule_is_explained_and_comes_out_the_same_again(
    sqlite_engine: Engine, room: ReleaseRoom, explained: Callable[[Release], Result], gate: GateName,
    rules: dict[Cause, Callable[[], Evidence]],
) -> None:  # fmt: skip
    release = room.canary("v2")
    results = {cause: _record(sqlite_engine, room, release, gate, made()) for cause, made in rules.items()}
    assert {cause: result.evidence["cause"] for cause, result in results.items()} == {cause: cause for cause in rules}
    told = explained(release)
    assert told.exit_code == 0, told.output
    assert told.output.count(" same again") == len(rules)
    for cause, result in results.items():
        assert f'  cause: "{cause}"' in told.output
        assert f"  {result.reason}\n" in told.output
    with writing(sqlite_engine) as connection:
        connection.execute(update(gate_results).where(gate_results.c.gate == gate).values(reason="because I say so"))
    made_up = explained(release)
    assert (made_up.exit_code, made_up.output.count(" differs")) == (1, len(rules))


@pytest.mark.parametrize("kind", AlarmKind)
def test_every_alarm_is_told_with_who_raised_it_and_until_when(
    room: ReleaseRoom, explained: Callable[[Release], Result], kind: AlarmKind
) -> None:
    release = room.champion("v2")
    if kind is AlarmKind.INCIDENT:
        room.desk.raise_incident(POLICY, release_id=release.id, reason="all of them fail")
    else:
        room.desk.freeze(POLICY, kind, actor="system:watch", reason="all of them fail", release_id=release.id)
    told = explained(release).output
    assert f"an alarm was raised ({kind}): all of them fail" in told
    assert next(alarm.until for alarm in room.desk.alarms(POLICY) if alarm.kind is kind) in told


def test_what_people_undid_is_told(room: ReleaseRoom, explained: Callable[[Release], Result]) -> None:
    release = room.champion("v2")
    room.desk.roll_back(release.id, actor="system:watch", reason="it failed")
    for person in (ADA, "user:bob"):
        room.desk.lift(POLICY, "v2", actor=person, reason="it was the network")
    assert "it is barred no more: its quarantine was lifted by two people: it was the network" in explained(release).output
