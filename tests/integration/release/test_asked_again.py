"""A release whose approvals were taken back asks people anew: how many, until when, and who hears of it. On SQLite alone."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from app.db.release.pairs import SqlPairs
from app.db.release.release_views import SqlReleaseViews
from app.domain.errors import Refused
from app.domain.release.alarms import AlarmKind
from app.domain.release.by_people import PeopleTerms
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.pairs import BlindPair, Choice
from app.domain.release.releases import Release, ReleaseState
from app.domain.release.terms import Terms
from app.release.jury import ReleaseJury
from tests.fakes.releases import ADA, BOB, EVE, POLICY, ReleaseRoom, answer, release_room

S = ReleaseState


@pytest.fixture
def room(sqlite_engine: Engine) -> ReleaseRoom:
    return release_room(sqlite_engine)


def passed(note: str, *alarms: str) -> GateResult:
    return replace(answer(GateName.CANARY, "v2", note=note), evidence={"note": note, "alarms": list(alarms)})


def doubted(room: ReleaseRoom, release: Release) -> None:
    held = replace(answer(GateName.CANARY, "v2", Verdict.INCONCLUSIVE, note="lag"), decided_at=room.clock())
    room.desk.void(release.id, reason="labels are 400 s overdue", because=held)


def test_evidence_that_was_taken_again_asks_as_many_people_as_it_calls_for_and_never_fewer(room: ReleaseRoom) -> None:
    release = room.ready("v2")
    assert release.approvals_needed == 1
    doubted(room, release)
    again = room.desk.rebind(release.id, passed("asks", "behaviour: asks"))
    assert again.approvals_needed == 2
    assert again.reason == (
        "ready again: the evidence was taken again, 2 approvals needed (the reward rose alone, its behaviour changed, or a monitor alerts)"
    )
    assert room.desk.approve(release.id, approver=ADA, evidence=again.evidence_digest or "").state is S.READY
    assert room.desk.approve(release.id, approver=BOB, evidence=again.evidence_digest or "").state is S.APPROVED
    doubted(room, release)
    calm = room.desk.rebind(release.id, passed("calm"))
    assert (calm.approvals_needed, calm.reason) == (2, "ready again: the evidence was taken again, 2 approvals needed (as before)")


def judged_by_people(room: ReleaseRoom) -> Release:
    """A release that ada and bob preferred in twenty pairs: READY."""
    release = room.queued("v2")
    pairs = [
        BlindPair(
            id=f"{release.id}-{n:02}", release_id=release.id, policy=POLICY, suite="s", task=f"t{n}", cluster="", messages=[],
            champion_answer="old", candidate_answer="new", champion_score=0.0, candidate_score=0.0, salt=str(n),
        )
        for n in range(20)
    ]  # fmt: skip
    SqlPairs(room.engine).keep(pairs, at=room.clock())
    room.desk.ask_people(release.id, because="too few people")
    for n, pair in enumerate(pairs):
        by = (ADA, BOB)[n % 2]
        choice = Choice.LEFT if pair.candidate_is_left(by) else Choice.RIGHT
        ReleaseJury(room.ledger).vote(release.id, pair.id, choice, voter=by, shown_to=by, proven=True)
    room.desk.count_votes(release.id)
    return room.desk.find(release.id)


@pytest.mark.parametrize(("ended_by", "season_h", "lost_h"), [("watch", 0, 5), ("people", 0, 5), ("watch", 24, 24), ("people", 24, 5)])
def test_people_have_the_time_on_top_in_which_an_incident_let_them_decide_nothing(
    sqlite_engine: Engine, ended_by: str, season_h: int, lost_h: int
) -> None:
    terms = Terms(config_hash="config", people=PeopleTerms(enabled=True, votes=20, judges=2), reentry_season_s=season_h * 3600.0)
    room = release_room(sqlite_engine, terms=terms)
    ready = judged_by_people(room)
    assert ready.approval_expires_at is not None
    assert ready.approval_expires_at == room.clock() + timedelta(hours=4)
    room.clock.advance(3600)
    room.desk.raise_incident(POLICY, release_id=None, reason="limits are burnt")
    room.clock.advance(5 * 3600)
    with pytest.raises(Refused, match="an incident of tab is open"):
        room.desk.expire(ready.id)
    if ended_by == "watch":
        room.desk.end_incident(POLICY, reason="kept again")
    else:
        assert [room.desk.unfreeze(POLICY, actor=who) for who in (ADA, BOB)] == [False, True]
    found = room.desk.find(ready.id)
    until = ready.approval_expires_at + timedelta(hours=lost_h)
    assert (found.state, found.approval_expires_at, found.evidence_digest) == (S.READY, until, ready.evidence_digest)
    assert f"nothing could be decided for {lost_h:.1f} h: people have until {until:%Y-%m-%d %H:%M} UTC" in (found.reason or "")
    room.clock.advance((lost_h - 5) * 3600 + 3 * 3600 - 1)
    assert room.desk.expire(ready.id).state is S.READY
    assert room.desk.approve(ready.id, approver=EVE, evidence=ready.evidence_digest or "").state is S.APPROVED


def test_an_incident_gives_no_time_to_what_was_late_before_it_or_what_traffic_judged(sqlite_engine: Engine) -> None:
    """What traffic judged is bound anew when the incident is over, with the whole time."""
    room = release_room(sqlite_engine, terms=Terms(config_hash="config", people=PeopleTerms(enabled=True, votes=20, judges=2)))
    late = judged_by_people(room)
    room.clock.advance(4 * 3600)
    room.desk.raise_incident(POLICY, release_id=None, reason="limits are burnt")
    room.clock.advance(3600)
    room.desk.end_incident(POLICY, reason="kept again")
    assert room.desk.expire(late.id).state is S.EXPIRED
    ready = room.ready("v3")
    room.desk.raise_incident(POLICY, release_id=None, reason="limits are burnt")
    room.clock.advance(3600)
    room.desk.end_incident(POLICY, reason="kept again")
    assert room.desk.find(ready.id).approval_expires_at == ready.approval_expires_at


def test_a_vote_frees_what_was_found_before_it_alone(room: ReleaseRoom) -> None:
    desk, champion = room.desk, room.champion("v2")
    desk.freeze(POLICY, AlarmKind.MONITORS, actor="system:watch", reason="saturation", release_id=champion.id)
    assert desk.unfreeze(POLICY, actor=ADA) is False
    assert not desk.freeze(POLICY, AlarmKind.MONITORS, actor="system:watch", reason="saturation", release_id=champion.id)
    assert SqlReleaseViews(room.engine).deployment(POLICY)["unfreeze_votes"] == [ADA], "what is seen again is nothing new"
    assert desk.freeze(POLICY, AlarmKind.ANCHOR, actor="system:watch", reason="worse than the anchor", release_id=champion.id)
    assert SqlReleaseViews(room.engine).deployment(POLICY)["unfreeze_votes"] == []
    assert desk.unfreeze(POLICY, actor=BOB) is False, "ada knew nothing of the anchor"
    assert desk.raise_incident(POLICY, release_id=champion.id, reason="limits are burnt")
    assert [desk.unfreeze(POLICY, actor=who) for who in (BOB, ADA)] == [False, True]


def test_a_vote_lifts_a_quarantine_for_the_reason_that_was_known_then_alone(room: ReleaseRoom) -> None:
    desk, release = room.desk, room.canary("v2")
    desk.abort(release.id, actor="system:watch", reason="harm", quarantine=True)
    assert desk.lift(POLICY, "v2", actor=ADA, reason="the place had failed") is False
    desk.roll_back(release.id, actor=EVE, reason="harm")
    assert SqlReleaseViews(room.engine).deployment(POLICY)["quarantine"][0]["lift_votes"] == [ADA], "that was known"
    desk.roll_back(release.id, actor=EVE, reason="it leaks keys")
    assert SqlReleaseViews(room.engine).deployment(POLICY)["quarantine"][0]["lift_votes"] is None
    assert desk.lift(POLICY, "v2", actor=BOB, reason="ada is right") is False, "ada knew nothing of the keys"
    assert desk.lift(POLICY, "v2", actor=ADA, reason="the keys were never real") is True
