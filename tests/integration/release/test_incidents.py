"""When the place fails and not a version: an alarm, nothing moves, nothing is quarantined; and what people can undo."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, update

from app.db.engine import writing
from app.db.release.evidence import SqlEvidenceBook
from app.db.release.release_views import SqlReleaseViews
from app.db.tables import turns
from app.domain.errors import NotFound, Quarantined, Refused
from app.domain.release.alarms import Alarm, AlarmKind, calm_again
from app.domain.release.gates import GateName
from app.domain.release.releases import ReleaseState
from app.domain.release.terms import Terms
from pipelines.evaluation.config import ApprovalConfig, SloConfig
from pipelines.evaluation.live.explain import explain
from tests.fakes.releases import ADA, BOB, POLICY, release_room
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import DECIDED, WatchedRoom, alarms, promoted, serve, small_gates, watched_room

S = ReleaseState


def _all_fail(world: WatchedRoom, rate: float) -> None:
    for digest in world.traffic.behaviours:
        world.traffic.behaviours[digest] = Behaviour(fault=rate)


@pytest.mark.parametrize("holdback", [0.1, 0.0], ids=["holdback", "no holdback"])
def test_an_infrastructure_incident_rolls_nothing_back_and_ends_by_itself(sqlite_engine: Engine, holdback: float) -> None:
    """40 % faults on all versions rolled v5 back to v1 and quarantined all of them within 190 seconds."""
    world = watched_room(sqlite_engine, config=small_gates(holdback_first=holdback))
    release = promoted(world, "v2")
    _all_fail(world, 0.4)
    serve(world, 12)
    assert world.room.desk.pointer(POLICY).digest == "v2"
    assert world.room.desk.find(release).state is S.CHAMPION
    assert SqlReleaseViews(sqlite_engine).deployment(POLICY)["quarantine"] == []
    [incident] = alarms(world, AlarmKind.INCIDENT)
    assert (incident.release_id, incident.raised_by, incident.ended_at) == (release, "system:watch", None)
    assert incident.until.startswith("the champion keeps its limits again and engines hold it, or two people end it")
    waiting = world.queue("v3", Behaviour(fault=0.4))
    world.watch.tick()
    assert world.room.desk.find(waiting.id).state is S.QUEUED, "nothing moves forward in an incident"

    _all_fail(world, 0.0)
    serve(world, 6)
    [incident] = alarms(world, AlarmKind.INCIDENT)
    assert incident.ended_by == "system:watch"
    assert world.room.desk.find(waiting.id).state is S.CANARY
    assert SqlReleaseViews(sqlite_engine).release(release)["alarms"][0]["end_reason"] == "tiny-v2 keeps its limits again"
    champions = [one for one in explain(world.room.desk.find(release), SqlEvidenceBook(sqlite_engine)) if one.gate == GateName.HOLDBACK]
    assert [(one.action, one.numbers["cause"], one.differences) for one in champions] == [
        ("hold", "incident", ()), ("continue", "watched", ()),
    ], "what raised the incident and what ended it can be decided again"  # fmt: skip


def test_a_healthy_candidate_survives_an_incident(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine)
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    serve(world, 3)
    _all_fail(world, 0.5)
    serve(world, 4)
    assert world.room.desk.find(release.id).state is S.CANARY
    with pytest.raises(Refused, match="an incident of tab is open"):
        world.room.desk.start_canary(world.room.queued("v3").id)
    _all_fail(world, 0.0)
    assert world.run(release, until=DECIDED).state is S.READY


def test_a_limit_on_a_signal_that_traffic_lacks_keeps_no_incident_open(sqlite_engine: Engine) -> None:
    limits = (SloConfig(source="fault", limit=0.10), SloConfig(source="observation:never_told", limit=0.10, threshold=0.5))
    world = watched_room(sqlite_engine, config=small_gates(holdback_first=0.0, slos=limits))
    promoted(world, "v2")
    _all_fail(world, 0.4)
    serve(world, 12)
    assert alarms(world, AlarmKind.INCIDENT)[0].ended_at is None
    _all_fail(world, 0.0)
    serve(world, 6)
    assert alarms(world, AlarmKind.INCIDENT)[0].end_reason == "tiny-v2 keeps its limits again"


@pytest.mark.parametrize("slos", [(), (SloConfig(source="observation:never_told", limit=0.10, threshold=0.5),)], ids=["none", "unseen"])
def test_an_incident_of_the_engines_ends_when_they_hold_the_champion_again_whatever_limits_there_are(
    sqlite_engine: Engine, slos: tuple[SloConfig, ...]
) -> None:
    world = watched_room(sqlite_engine, config=small_gates(holdback_first=0.0, slos=slos))
    release = promoted(world, "v2")
    for digest in ("v1", "v2"):
        world.traffic.engines_hold_no_more(digest)
    world.traffic.engines_hold("v2", state="failed", detail="the disk is broken")
    serve(world, 2)
    [incident] = alarms(world, AlarmKind.INCIDENT)
    assert "the disk is broken, and no engine holds another version either" in incident.reason
    world.traffic.engines_hold_no_more("v2")
    serve(world, 3)
    assert alarms(world, AlarmKind.INCIDENT)[0].ended_at is None, "an engine that says nothing holds nothing"
    world.traffic.engines_hold("v2")
    serve(world, 1)
    ended = alarms(world, AlarmKind.INCIDENT)[0]
    assert (ended.ended_by, ended.end_reason) == ("system:watch", "engines hold tiny-v2 again")
    assert world.room.desk.find(release).state is S.CHAMPION


def test_two_people_end_an_incident_and_what_comes_after_it_counts(engine: Engine) -> None:
    world = watched_room(engine, config=small_gates(holdback_first=0.0))
    release = promoted(world, "v2")
    _all_fail(world, 0.4)
    serve(world, 12)
    desk, generation = world.room.desk, world.room.desk.pointer(POLICY).generation
    assert (desk.unfreeze(POLICY, actor=ADA), desk.unfreeze(POLICY, actor=ADA)) == (False, False)
    with pytest.raises(Refused, match="person"):
        desk.unfreeze(POLICY, actor="system:watch")
    assert alarms(world, AlarmKind.INCIDENT)[0].ended_at is None, "one vote, said twice"
    assert desk.unfreeze(POLICY, actor=BOB)
    ended = alarms(world, AlarmKind.INCIDENT)[0]
    assert (ended.ended_by, ended.end_reason) == (f"{ADA}, {BOB}", "two people freed the promotions")
    assert desk.pointer(POLICY).generation > generation
    assert desk.unfreeze(POLICY, actor=ADA), "nothing is stopped any more"
    world.watch.tick()
    assert [alarm.ended_at is None for alarm in alarms(world, AlarmKind.INCIDENT)] == [False], "what they looked at is used up"
    serve(world, 12)
    again = alarms(world, AlarmKind.INCIDENT)[0]
    assert again.ended_at is None, "and what goes on failing is found again"
    assert desk.unfreeze(POLICY, actor=ADA) is False, "votes were about the one before"
    assert desk.find(release).state is S.CHAMPION


def test_after_an_incident_a_product_with_a_daily_peak_waits_for_its_hour_to_come_again(engine: Engine) -> None:
    room = release_room(engine, terms=Terms(config_hash="config", reentry_season_s=86_400.0))
    approved, waiting, began = room.approved("v2"), room.queued("v3"), room.clock.now
    assert room.desk.raise_incident(POLICY, release_id=None, reason="all versions fail")
    room.clock.advance(7200)
    assert room.desk.end_incident(POLICY, reason="the night came")
    for act in (lambda: room.desk.start_canary(waiting.id), lambda: room.desk.begin_promotion(approved.id)):
        with pytest.raises(Refused, match=f"until that hour has come again, at {began + timedelta(days=1):%Y-%m-%d %H:%M} UTC"):
            act()
    assert room.desk.roll_back(approved.id, actor="system:watch", reason="harm").state is S.ABORTED, "what takes back never waits"
    room.clock.now = began + timedelta(days=1)
    assert room.desk.start_canary(room.queued("v4").id).state is S.CANARY


@pytest.mark.parametrize(("lasted_h", "season_h", "again_h"), [(2, 24, 24), (25, 24, 48), (2, 168, 168), (2, 0, None)])
def test_the_hour_of_an_incident_comes_again_after_its_end(lasted_h: float, season_h: float, again_h: float | None) -> None:
    began = datetime(2026, 11, 22, 9, tzinfo=UTC)
    alarm = Alarm(
        id="a", policy=POLICY, kind=AlarmKind.INCIDENT, release_id=None, generation=1, reason="r", raised_at=began, raised_by="watch",
        until="calm", ended_at=began + timedelta(hours=lasted_h),
    )  # fmt: skip
    assert calm_again(alarm, season_s=3600 * season_h) == (None if again_h is None else began + timedelta(hours=again_h))
    assert calm_again(replace(alarm, ended_at=None), season_s=3600 * season_h) is None
    assert calm_again(replace(alarm, ended_by=f"{ADA}, {BOB}"), season_s=3600 * season_h) is None


def test_programs_roll_back_three_times_a_day_and_then_people_are_called(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine, config=small_gates(rollbacks_max=1, breaker_rollbacks=50, holdback_first=0.1))
    first = promoted(world, "v2")
    world.traffic.behaviours["v2"] = Behaviour(fault=0.9)
    assert world.run(world.room.desk.find(first), until=frozenset({S.ROLLED_BACK})).state is S.ROLLED_BACK
    second = promoted(world, "v3")
    world.traffic.behaviours["v3"] = Behaviour(fault=0.9)
    serve(world, 6)
    assert world.room.desk.find(second).state is S.CHAMPION, "one automatic rollback was all that this day may have"
    [call] = alarms(world, AlarmKind.ROLLBACK_CAP)
    assert "1 automatic rollbacks within 24 h, and now tiny-v3" in call.reason
    assert world.room.desk.roll_back(second, actor=ADA, reason="it fails").state is S.ROLLED_BACK, "a person always may"
    assert world.room.desk.pointer(POLICY).digest == "v1"


def test_a_quarantine_is_lifted_by_two_people_and_the_version_is_a_target_of_rollbacks_again(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine)
    desk = world.room.desk
    release = promoted(world, "v2")
    desk.roll_back(release, actor=ADA, reason="it was the network after all")
    with pytest.raises(Refused, match="takes a person"):
        desk.lift(POLICY, "v2", actor="system:watch", reason="x")
    with pytest.raises(NotFound, match="is not quarantined"):
        desk.lift(POLICY, "v1", actor=ADA, reason="x")
    assert desk.lift(POLICY, "v2", actor=ADA, reason="the network") is False
    assert desk.lift(POLICY, "v2", actor=ADA, reason="the network") is False, "twice the same person is one person"
    with pytest.raises(Quarantined):
        world.room.queued("v2")
    assert desk.lift(POLICY, "v2", actor=BOB, reason="the network") is True
    assert desk.find(release).state is S.SUPERSEDED
    views = SqlReleaseViews(sqlite_engine)
    assert views.deployment(POLICY)["quarantine"] == []
    actions = [entry.action for entry in views.audit(subject="v2")]
    assert actions.count("version.lift_vote") == 3
    assert actions[0] == "version.quarantine_lifted"
    champion = promoted(world, "v3")
    assert desk.roll_back(champion, actor=ADA, reason="harm").state is S.ROLLED_BACK
    assert desk.pointer(POLICY).digest == "v1", "the newest good champion"


def test_a_freeze_that_people_lifted_does_not_come_back_for_the_same_finding(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine)
    desk, release = world.room.desk, promoted(world, "v2")
    assert desk.freeze(POLICY, AlarmKind.MONITORS, actor="system:watch", reason="saturation", release_id=release)
    assert not desk.freeze(POLICY, AlarmKind.MONITORS, actor="system:watch", reason="saturation", release_id=release)
    assert desk.unfreeze(POLICY, actor=ADA) is False
    assert desk.unfreeze(POLICY, actor=BOB) is True
    [ended] = alarms(world, AlarmKind.MONITORS)
    assert ended.ended_by == f"{ADA}, {BOB}"
    assert ended.ended_at is not None
    assert not desk.freeze(POLICY, AlarmKind.MONITORS, actor="system:watch", reason="saturation", release_id=release)
    assert desk.freeze(POLICY, AlarmKind.MONITORS, actor="system:watch", reason="saturation", release_id="another release")


def test_an_alarm_of_the_anchor_is_used_up_and_the_next_champion_starts_afresh(sqlite_engine: Engine) -> None:
    """After an anchor alarm three candidates 30 points better were each rolled back 30 seconds after their promotion."""
    world = watched_room(
        sqlite_engine,
        config=small_gates(holdback_s=600.0, anchor_share=0.3, anchor_run_length_slots=50, units_per_look=50, post_margin=0.5),
    )
    promoted(world, "v2")
    fallen = promoted(world, "v3")
    world.room.clock.advance(601)
    world.watch.tick()
    world.traffic.behaviours |= {"v3": Behaviour(success=0.2)}
    assert world.run(world.room.desk.find(fallen), until=frozenset({S.ROLLED_BACK}), people=200, rounds=40).state is S.ROLLED_BACK
    for person in (ADA, BOB):
        world.room.desk.unfreeze(POLICY, actor=person)
    better = promoted(world, "v4", Behaviour(success=0.9))
    world.room.clock.advance(601)
    serve(world, 8)
    assert world.room.desk.find(better).state is S.CHAMPION
    assert len(alarms(world, AlarmKind.ANCHOR)) == 1


def test_a_release_that_waits_for_people_keeps_its_evidence_while_the_next_canary_runs(sqlite_engine: Engine) -> None:
    """It got no units, was voided after eleven minutes, and an approval given later never promoted."""
    world = watched_room(sqlite_engine, config=small_gates(no_data_hold_s=120.0))
    release = world.run(world.queue("v2", Behaviour()), until=DECIDED)
    assert release.state is S.READY
    world.queue("v3", Behaviour())
    serve(world, 5, people=10)
    assert {r.digest for r in world.room.ledger.list(policy=POLICY, states=(S.CANARY,))} == {"v3"}
    kept = world.room.desk.find(release.id)
    assert (kept.state, kept.evidence_digest) == (S.READY, release.evidence_digest)
    world.room.desk.approve(release.id, approver=ADA, evidence=kept.evidence_digest or "")
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).digest == "v2"


def test_three_hundred_people_who_are_always_there_are_no_doubt_about_the_data(sqlite_engine: Engine) -> None:
    """Everybody was seen, so no new unit came, and the canary ended in ABORT(data)."""
    world = watched_room(sqlite_engine, config=small_gates(hold_max_s=900.0, canary_max_s=3600.0))
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    for _ in range(40):
        world.traffic.serve(60, known=30)
        world.watch.tick()
        release = world.room.desk.find(release.id)
        if release.state is not S.CANARY:
            break
    assert release.state in (S.CANARY, S.INCONCLUSIVE, S.READY), release.reason


def test_no_traffic_at_all_still_holds(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine)
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    world.traffic.serve(50)
    world.watch.tick()
    world.room.clock.now += timedelta(seconds=700)
    world.watch.tick()
    assert any("is there traffic" in result.reason for result in world.room.desk.recorded(release.id).values())


def test_a_gap_between_reward_and_gold_freezes_once_and_not_again_after_two_people_lifted_it(sqlite_engine: Engine) -> None:
    """Two champions running that earn more and are no better; the freeze came back one tick after two people had lifted it."""
    world = watched_room(
        sqlite_engine, config=small_gates(holdback_s=3600.0, holdback_first=0.4, anchor_share=0.4, anchor_run_length_slots=10_000)
    )
    flattering = Behaviour(reward_if_good=0.95, reward_if_bad=0.3)
    promoted(world, "v2", flattering)
    serve(world, 12, people=200)
    assert alarms(world, AlarmKind.GAP) == [], "one champion is no two running"
    promoted(world, "v3", flattering)
    world.room.clock.advance(3601)
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).reference == "v1"
    serve(world, 12, people=200)
    [gap] = alarms(world, AlarmKind.GAP)
    assert gap.ended_at is None
    approved = world.room.approved("v4")
    with pytest.raises(Refused, match="frozen"):
        world.room.desk.begin_promotion(approved.id)
    world.room.desk.abort(approved.id, actor=ADA, reason="it was here to be refused")
    for person in (ADA, BOB):
        world.room.desk.unfreeze(POLICY, actor=person)
    world.room.clock.advance(31)
    serve(world, 2)
    [gap] = alarms(world, AlarmKind.GAP)
    assert gap.ended_by == f"{ADA}, {BOB}"
    assert SqlReleaseViews(sqlite_engine).deployment(POLICY)["frozen"] is None


def test_nobody_stays_on_a_reference_that_burns_while_the_champion_is_healthier(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine)
    promoted(world, "v2")
    promoted(world, "v3")
    world.traffic.behaviours["v2"] = Behaviour(fault=0.8)
    serve(world, 10)
    pointer = world.room.desk.pointer(POLICY)
    assert (pointer.digest, pointer.holdback, pointer.previous) == ("v3", 0.0, "v1")
    assert world.room.states()["v2"] is S.ROLLED_BACK
    assert world.traffic.serve(100) == {"v3": 100}


def test_an_anchor_that_is_barred_is_anchor_no_more(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine)
    desk, release = world.room.desk, promoted(world, "v2")
    desk.renew_anchor(POLICY, actor=ADA)
    desk.roll_back(release, actor=ADA, reason="harm")
    assert desk.pointer(POLICY).anchor == "v1", "nothing is held against a version that was rolled back"
    former = next(r for r in world.room.ledger.list(policy=POLICY, states=(S.CHAMPION,)) if r.digest == "v1")
    promoted(world, "v3")
    desk.roll_back(former.id, actor=ADA, reason="it leaks, says its maker")
    assert (desk.pointer(POLICY).digest, desk.pointer(POLICY).anchor) == ("v3", "v3")


def test_a_doubt_takes_approvals_back_and_its_end_asks_for_new_ones(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine, config=small_gates(approval=ApprovalConfig(n=2, ttl_s=36_000.0)))
    desk = world.room.desk
    release = world.run(world.queue("v2", Behaviour()), until=DECIDED)
    assert (release.state, release.approvals_needed) == (S.READY, 2)
    desk.approve(release.id, approver=ADA, evidence=release.evidence_digest or "")
    world.traffic.delivered = False
    serve(world, 1)
    world.room.clock.advance(400)
    world.watch.tick()
    assert SqlReleaseViews(sqlite_engine).release(release.id)["approvals"] == [], "labels are overdue: what was approved is in doubt"
    assert desk.find(release.id).state is S.READY
    with writing(sqlite_engine) as connection:
        connection.execute(update(turns).where(turns.c.labelled_at.is_(None)).values(labelled_at=world.room.clock()))
    world.traffic.delivered = True
    serve(world, 6)
    asked = desk.find(release.id)
    assert (asked.state, asked.evidence_digest != release.evidence_digest) == (S.READY, True), "on what was found out since"
