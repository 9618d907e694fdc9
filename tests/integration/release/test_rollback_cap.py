"""After a day's last automatic rollback people are called; what they said has an end, and what comes after it counts."""

import pytest
from sqlalchemy import Engine

from app.db.release.evidence import SqlEvidenceBook
from app.domain.release.alarms import AlarmKind
from app.domain.release.gates import GateName
from app.domain.release.releases import ReleaseState
from app.domain.release.terms import Terms
from pipelines.evaluation.live.explain import explain
from tests.fakes.releases import ADA, BOB, POLICY, release_room
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import WatchedRoom, alarms, free, serve, small_gates, watched_room

S = ReleaseState
DAY = 86_400.0


def capped(engine: Engine, **changes: object) -> tuple[WatchedRoom, str]:
    """A world whose one automatic rollback of the day is used up; and the release of v3, champion since."""
    world = watched_room(engine, config=small_gates(rollbacks_max=1, breaker_rollbacks=50, holdback_first=0.1, **changes))
    for digest in ("v2", "v3"):
        world.traffic.behaviours[digest] = Behaviour()
        world.traffic.engines_hold(digest)
    world.room.desk.roll_back(world.room.champion("v2").id, actor="system:watch", reason="it failed")
    return world, world.room.champion("v3").id


@pytest.fixture
def called(sqlite_engine: Engine) -> tuple[WatchedRoom, str]:
    """v3 fails, and people were called."""
    world, release = capped(sqlite_engine)
    world.traffic.behaviours["v3"] = Behaviour(fault=0.9)
    serve(world, 6)
    [call] = alarms(world, AlarmKind.ROLLBACK_CAP)
    assert call.ended_at is None
    return world, release


def test_a_champion_that_people_freed_is_rolled_back_when_it_fails_days_later(called: tuple[WatchedRoom, str]) -> None:
    """It was immune for ever: 90 % faults, the decision said to take it back, and nothing happened and nobody was called."""
    world, release = called
    free(world)
    world.traffic.behaviours["v3"] = Behaviour()
    serve(world, 10)
    assert world.room.desk.find(release).state is S.CHAMPION
    assert len(alarms(world, AlarmKind.ROLLBACK_CAP)) == 1, "what people freed is not found again while it is healthy"
    world.room.clock.advance(3 * DAY)
    world.traffic.behaviours["v3"] = Behaviour(fault=0.9)
    assert world.run(world.room.desk.find(release), until=frozenset({S.ROLLED_BACK}), rounds=8).state is S.ROLLED_BACK
    assert world.room.desk.pointer(POLICY).digest == "v1"


def test_people_are_called_again_where_it_goes_on_failing_after_they_freed_it(called: tuple[WatchedRoom, str]) -> None:
    world, release = called
    free(world)
    world.watch.tick()
    assert len(alarms(world, AlarmKind.ROLLBACK_CAP)) == 1, "not for what they have looked at"
    serve(world, 6)
    calls = alarms(world, AlarmKind.ROLLBACK_CAP)
    assert [call.ended_at is None for call in calls] == [True, False], "what came after it calls them again"
    assert world.room.desk.find(release).state is S.CHAMPION, "the day is not over"


def test_nobody_is_called_twice_while_they_were_not_answered(called: tuple[WatchedRoom, str]) -> None:
    world, release = called
    serve(world, 4)
    world.room.clock.advance(DAY + 1)
    serve(world, 4)
    assert len(alarms(world, AlarmKind.ROLLBACK_CAP)) == 1
    assert world.room.desk.find(release).state is S.CHAMPION, "people were called: they decide"


def test_a_version_that_came_back_and_fails_too_calls_people_for_itself(called: tuple[WatchedRoom, str]) -> None:
    world, release = called
    world.room.desk.roll_back(release, actor="user:ada", reason="it fails")
    assert world.room.desk.pointer(POLICY).digest == "v1"
    world.traffic.behaviours["v2"] = Behaviour()
    for person in ("user:ada", "user:bob"):
        world.room.desk.lift(POLICY, "v2", actor=person, reason="mended from outside")
    world.traffic.behaviours["v1"] = Behaviour(fault=0.9)
    pointer = world.room.desk.pointer(POLICY)
    world.room.desk.hold_back(POLICY, share=0.1, digest="v2", reason="somebody to be held against", seen=pointer)
    serve(world, 8)
    open_ = [call for call in alarms(world, AlarmKind.ROLLBACK_CAP) if call.ended_at is None]
    assert [call.release_id for call in open_] == [world.room.desk.pointer(POLICY).release_id]


def test_what_called_people_can_be_decided_again(called: tuple[WatchedRoom, str], sqlite_engine: Engine) -> None:
    world, release = called
    found = [one for one in explain(world.room.desk.find(release), SqlEvidenceBook(sqlite_engine)) if one.gate == GateName.HOLDBACK]
    assert [(one.verdict, one.differences) for one in found] == [("fail", ())]


def test_an_anchor_finding_that_was_capped_is_used_up_when_people_freed_it(sqlite_engine: Engine) -> None:
    """The guard called for a rollback every half minute, and got it when the day was over, although two people had freed the champion."""
    world, release = capped(
        sqlite_engine, holdback_s=600.0, anchor_share=0.3, anchor_run_length_slots=50, units_per_look=50, post_margin=0.5
    )
    world.room.clock.advance(601)
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).reference == "v1"
    world.traffic.behaviours["v3"] = Behaviour(success=0.2)
    for _ in range(40):
        serve(world, 1, people=200)
        if alarms(world, AlarmKind.ROLLBACK_CAP):
            break
    [found] = alarms(world, AlarmKind.ANCHOR)
    assert found.ended_at is None, "people see what it was about"
    free(world)
    world.traffic.behaviours["v3"] = Behaviour(success=0.6)
    world.room.clock.advance(DAY + 1)
    serve(world, 4, people=200)
    assert world.room.desk.find(release).state is S.CHAMPION


def test_what_a_user_that_is_a_program_takes_back_counts_as_a_program_s(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine, terms=Terms(config_hash="config", breaker_rollbacks=9, rollbacks_max=1))
    for digest in ("v2", "v3"):
        room.champion(digest)
    for state in (S.ROLLED_BACK, S.CHAMPION):
        release_id = room.desk.pointer(POLICY).release_id or ""
        assert room.desk.roll_back(release_id, actor="user:deploy-bot", reason="harm").state is state
    assert [alarm.kind for alarm in room.desk.alarms(POLICY)] == [AlarmKind.ROLLBACK_CAP]
    room.desk.unfreeze(POLICY, actor=ADA)
    room.desk.unfreeze(POLICY, actor=BOB)
    assert room.ready("v4").approvals_needed == 2, "the last champion was taken back by a program"
