"""The release desk on both databases: every transition, who may make it, and what it leaves behind."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine, func, select

from app.db.engine import open_engine, reading
from app.db.release import audit
from app.db.release.pointer import SqlRoutes
from app.db.tables import outbox, release_history
from app.domain.errors import Quarantined, Refused
from app.domain.release.alarms import AlarmKind
from app.domain.release.gates import GateName, Verdict
from app.domain.release.releases import ReleaseState
from app.domain.release.terms import Terms
from tests.fakes.releases import ADA, BOB, EVE, POLICY, ReleaseRoom, answer, release_room, version

S = ReleaseState


@pytest.fixture
def room(engine: Engine) -> ReleaseRoom:
    return release_room(engine)


@pytest.fixture
def quick(sqlite_engine: Engine) -> ReleaseRoom:
    """For rules that do not depend on the database: on SQLite alone."""
    return release_room(sqlite_engine)


def test_a_candidate_goes_all_the_way_and_the_champion_before_it_keeps_the_holdback(room: ReleaseRoom) -> None:
    promoted = room.champion("v2")
    pointer = room.desk.pointer(POLICY)
    assert promoted.state is S.CHAMPION
    assert (pointer.digest, pointer.previous, pointer.generation, pointer.holdback) == ("v2", "v1", 2, 0.1)
    assert pointer.release_id == promoted.id
    assert room.states() == {"v1": S.SUPERSEDED, "v2": S.CHAMPION}


def test_every_transition_leaves_history_an_audit_entry_and_an_outbox_row(room: ReleaseRoom, engine: Engine) -> None:
    release = room.champion("v2")
    with reading(engine) as connection:
        path = connection.execute(
            select(release_history.c.to_state).where(release_history.c.release_id == release.id).order_by(release_history.c.generation)
        ).scalars().all()  # fmt: skip
        assert path == ["TRAINED", "OFFLINE", "QUEUED", "CANARY", "READY", "APPROVED", "PROMOTING", "CHAMPION"]
        checked = audit.verify(connection)
        assert checked.problem is None
        assert connection.execute(select(func.count()).select_from(outbox)).scalar_one() == checked.entries


def test_the_first_version_is_deployed_once(room: ReleaseRoom) -> None:
    again = room.desk.bootstrap(version("v9"), actor="system:loop")
    assert (again.digest, again.generation) == ("v1", 1)


def test_opening_again_after_a_crash_finds_the_same_release(quick: ReleaseRoom) -> None:
    first = quick.desk.open(version("v2"), initiator="system:loop")
    assert quick.desk.open(version("v2"), initiator="system:loop").id == first.id
    quick.desk.stop(first.id, to=S.REJECTED, reason="g0")
    assert quick.desk.open(version("v2"), initiator="system:loop").id == first.id


def test_a_result_about_other_weights_is_refused(quick: ReleaseRoom) -> None:
    """argo-rollouts#1700: an analysis of the wrong pods promoted a bad version."""
    release = quick.desk.open(version("v2"), initiator="system:loop")
    with pytest.raises(Refused, match="judge the right version"):
        quick.desk.record(release.id, answer(GateName.TRAINING_HEALTH, "v3"))


@pytest.mark.parametrize("gates", [(), (GateName.TRAINING_HEALTH,), (GateName.OFFLINE,)])
def test_a_candidate_without_every_explicit_offline_pass_never_reaches_the_queue(quick: ReleaseRoom, gates: tuple[GateName, ...]) -> None:
    release = quick.desk.start_offline(quick.desk.open(version("v2"), initiator="system:loop").id)
    for gate in gates:
        quick.desk.record(release.id, answer(gate, "v2"))
    with pytest.raises(Refused, match="no explicit pass"):
        quick.desk.queue(release.id)


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_only_a_pass_queues_and_an_off_policy_veto_stops(quick: ReleaseRoom, verdict: Verdict) -> None:
    release = quick.desk.start_offline(quick.desk.open(version("v2"), initiator="system:loop").id)
    quick.desk.record(release.id, answer(GateName.TRAINING_HEALTH, "v2"))
    quick.desk.record(release.id, answer(GateName.OFFLINE, "v2", verdict))
    with pytest.raises(Refused):
        quick.desk.queue(release.id)
    quick.desk.record(release.id, answer(GateName.OFFLINE, "v2"))
    quick.desk.record(release.id, answer(GateName.OFF_POLICY, "v2", verdict))
    if verdict is Verdict.FAIL:
        with pytest.raises(Refused, match="g2_off_policy"):
            quick.desk.queue(release.id)
    else:
        assert quick.desk.queue(release.id).state is S.QUEUED


def test_the_newest_candidate_wins_the_queue(room: ReleaseRoom) -> None:
    room.queued("v2")
    room.queued("v3")
    assert room.states() == {"v1": S.CHAMPION, "v2": S.SUPERSEDED_BY_NEWER, "v3": S.QUEUED}


def test_one_canary_at_a_time(room: ReleaseRoom) -> None:
    room.canary("v2")
    waiting = room.queued("v3")
    with pytest.raises(Refused, match="one at a time"):
        room.desk.start_canary(waiting.id)


def test_a_canary_ramps_through_its_stages_and_no_further(room: ReleaseRoom, engine: Engine) -> None:
    release = room.canary("v2")
    routes = SqlRoutes(engine, max_age_s=0.0)
    shares = [routes.route(POLICY).canary_share]
    for _ in range(2):
        release = room.desk.ramp(release.id, reason="500 units")
        shares.append(routes.route(POLICY).canary_share)
    assert shares == [0.05, 0.25, 0.5]
    with pytest.raises(Refused, match="no further stage"):
        room.desk.ramp(release.id, reason="again")
    assert release.state is S.CANARY


def test_a_ready_release_keeps_its_traffic_while_it_waits_for_people(room: ReleaseRoom, engine: Engine) -> None:
    """flagger#1801: harm has to be measured, and acted on, during every wait."""
    release = room.ready("v2")
    route = SqlRoutes(engine, max_age_s=0.0).route(POLICY)
    assert route.canary_release == release.id
    room.desk.roll_back(release.id, actor="system:watch", reason="harm")
    assert SqlRoutes(engine, max_age_s=0.0).route(POLICY).canary_digest is None


def test_nothing_but_a_passing_canary_makes_ready(quick: ReleaseRoom) -> None:
    release = quick.canary("v2")
    for result in (
        answer(GateName.CANARY, "v2", Verdict.INCONCLUSIVE), answer(GateName.CANARY, "v2", Verdict.FAIL), answer(GateName.CANARY, "v1"),
        answer(GateName.OFFLINE, "v2"),
    ):  # fmt: skip
        with pytest.raises(Refused, match="only an explicit pass promotes"):
            quick.desk.mark_ready(release.id, result)


# --- people


def test_the_initiator_may_not_approve(quick: ReleaseRoom) -> None:
    release = quick.ready("v2", initiator=EVE)
    with pytest.raises(Refused, match="asked for release"):
        quick.desk.approve(release.id, approver=EVE, evidence=release.evidence_digest or "")


@pytest.mark.parametrize("bot", ["system:watch", "key:abcd", "user:deploy-bot", "user:renovate[bot]", "user:", "ada"])
def test_a_program_never_approves_but_may_abort(quick: ReleaseRoom, bot: str) -> None:
    release = quick.ready("v2")
    with pytest.raises(Refused, match="takes a person"):
        quick.desk.approve(release.id, approver=bot, evidence=release.evidence_digest or "")
    assert quick.desk.abort(release.id, actor=bot, reason="felt off").state is S.ABORTED


def test_the_last_editor_of_the_gates_may_not_approve(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine, terms=Terms(config_hash="config", edited_by=EVE))
    release = room.ready("v2")
    with pytest.raises(Refused, match="last edited"):
        room.desk.approve(release.id, approver=EVE, evidence=release.evidence_digest or "")
    engine.dispose()


def test_two_approvals_come_from_two_people(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine, terms=Terms(config_hash="config", high_tier=True))
    release = room.ready("v2")
    assert release.approvals_needed == 2
    evidence = release.evidence_digest or ""
    assert room.desk.approve(release.id, approver=ADA, evidence=evidence).state is S.READY
    with pytest.raises(Refused, match="somebody else"):
        room.desk.approve(release.id, approver=ADA, evidence=evidence)
    assert room.desk.approve(release.id, approver=BOB, evidence=evidence).state is S.APPROVED
    engine.dispose()


def test_a_high_tier_lowers_no_other_number(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine, terms=Terms(config_hash="config", high_tier=True, approvals_in_doubt=3))
    assert room.ready("v2").approvals_needed == 3


def test_a_high_tier_takes_two_whatever_else_is_said(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine, terms=Terms(config_hash="config", high_tier=True, approvals_in_doubt=1))
    assert room.ready("v2").approvals_needed == 2


def test_two_people_are_needed_after_an_automatic_rollback(quick: ReleaseRoom) -> None:
    promoted = quick.champion("v2")
    quick.desk.roll_back(promoted.id, actor="system:watch", reason="harm")
    assert quick.ready("v3").approvals_needed == 2


def test_two_people_are_needed_when_the_gates_changed_since_the_last_promotion(quick: ReleaseRoom) -> None:
    from app.release import ReleaseDesk

    edited = ReleaseRoom(
        engine=quick.engine, desk=ReleaseDesk(quick.ledger, terms=Terms(config_hash="another"), clock=quick.clock), ledger=quick.ledger,
        clock=quick.clock, terms=quick.terms,
    )  # fmt: skip
    assert edited.ready("v2").approvals_needed == 2


def test_two_people_are_needed_where_the_reward_rose_alone(quick: ReleaseRoom) -> None:
    """GPT-4o's sycophancy was launched although testers felt that something was off."""
    passed = answer(GateName.CANARY, "v2")
    alarmed = replace(passed, evidence={"alarms": ["proxy_gold_gap"]})
    assert quick.desk.mark_ready(quick.canary("v2").id, alarmed).approvals_needed == 2


def test_an_approval_of_other_evidence_is_refused(quick: ReleaseRoom) -> None:
    release = quick.ready("v2")
    with pytest.raises(Refused, match="look at it again"):
        quick.desk.approve(release.id, approver=ADA, evidence="0" * 64)


def test_evidence_that_changes_after_the_approval_voids_it(quick: ReleaseRoom) -> None:
    release = quick.approved("v2")
    quick.desk.record(release.id, answer(GateName.OFFLINE, "v2", note="run again"))
    with pytest.raises(Refused, match="changed after it was approved"):
        quick.desk.begin_promotion(release.id)


def test_a_health_event_voids_approvals_and_new_ones_bind_to_new_evidence(quick: ReleaseRoom) -> None:
    release = quick.approved("v2")
    assert quick.desk.void(release.id, reason="feedback coverage differs").state is S.READY
    again = quick.desk.rebind(release.id, answer(GateName.CANARY, "v2", note="healthy again"))
    assert again.evidence_digest != release.evidence_digest
    with pytest.raises(Refused, match="look at it again"):
        quick.desk.approve(release.id, approver=BOB, evidence=release.evidence_digest or "")
    approved = quick.desk.approve(release.id, approver=ADA, evidence=again.evidence_digest or "")
    assert approved.state is S.APPROVED
    assert quick.desk.promote(quick.desk.begin_promotion(release.id).id).state is S.CHAMPION


def test_an_approval_expires(quick: ReleaseRoom) -> None:
    """flagger#1450: WaitingPromotion for ever."""
    release = quick.approved("v2")
    quick.clock.advance(4 * 3600)
    with pytest.raises(Refused, match="expired"):
        quick.desk.begin_promotion(release.id)
    assert quick.desk.expire(release.id).state is S.EXPIRED
    assert quick.desk.pointer(POLICY).digest == "v1"


def test_an_approval_does_not_restart_the_evidence(quick: ReleaseRoom) -> None:
    """flagger#1141: the approval restarts the whole analysis."""
    release = quick.ready("v2")
    approved = quick.desk.approve(release.id, approver=ADA, evidence=release.evidence_digest or "")
    assert (approved.evidence_digest, approved.stage, approved.stage_since) == (release.evidence_digest, release.stage, release.stage_since)


def test_the_next_ready_release_ends_the_wait_of_the_one_before(quick: ReleaseRoom) -> None:
    quick.ready("v2")
    quick.ready("v3")
    assert quick.states() == {"v1": S.CHAMPION, "v2": S.SUPERSEDED_BY_NEWER, "v3": S.READY}


def test_any_person_rejects_with_a_reason(quick: ReleaseRoom) -> None:
    release = quick.approved("v2")
    with pytest.raises(Refused, match="needs a reason"):
        quick.desk.reject(release.id, approver=EVE, reason=" ")
    assert quick.desk.reject(release.id, approver=EVE, reason="too chatty").state is S.REJECTED
    with pytest.raises(Refused):
        quick.desk.begin_promotion(release.id)


# --- promotion and rollback


def test_an_abort_after_the_promotion_was_asked_for_wins(room: ReleaseRoom) -> None:
    """argo-rollouts#4461: abort ignored once a full promote was requested."""
    release = room.desk.begin_promotion(room.approved("v2").id)
    room.desk.abort(release.id, actor=EVE, reason="stop")
    with pytest.raises(Refused, match="ABORTED"):
        room.desk.promote(release.id)
    assert room.desk.pointer(POLICY).digest == "v1"


def test_promotion_asked_for_twice_moves_the_pointer_once(room: ReleaseRoom) -> None:
    release = room.champion("v2")
    assert room.desk.promote(release.id).state is S.CHAMPION
    assert room.desk.pointer(POLICY).generation == 2


def test_nobody_is_promoted_without_approval(quick: ReleaseRoom) -> None:
    release = quick.ready("v2")
    with pytest.raises(Refused, match="0 of 1 approvals"):
        quick.desk.begin_promotion(release.id)
    with pytest.raises(Refused, match="READY"):
        quick.desk.promote(release.id)


def test_a_champion_that_changed_meanwhile_voids_the_comparison(quick: ReleaseRoom) -> None:
    waiting = quick.approved("v2")
    quick.canary("v3")
    quick.desk.promote(quick.desk.begin_promotion(waiting.id).id)
    assert quick.states()["v3"] is S.ABORTED


def test_a_rollback_brings_the_previous_champion_back_and_quarantines(room: ReleaseRoom) -> None:
    promoted = room.champion("v2")
    running = room.canary("v3")
    gone = room.desk.roll_back(promoted.id, actor="system:watch", reason="harm")
    pointer = room.desk.pointer(POLICY)
    assert gone.state is S.ROLLED_BACK
    assert (pointer.digest, pointer.generation, pointer.holdback) == ("v1", 3, 0.0)
    assert room.states() == {"v1": S.CHAMPION, "v2": S.ROLLED_BACK, "v3": S.ABORTED}
    assert room.desk.roll_back(promoted.id, actor="system:watch", reason="harm").generation == gone.generation
    assert room.desk.pointer(POLICY).generation == 3
    assert room.desk.find(running.id).state is S.ABORTED


def test_a_quarantined_version_is_never_opened_planted_or_promoted_again(quick: ReleaseRoom) -> None:
    promoted = quick.champion("v2")
    quick.desk.roll_back(promoted.id, actor=ADA, reason="rude")
    for act in (
        lambda: quick.desk.open(version("v2"), initiator="user:eve"),
        lambda: quick.desk.plant(version("v2"), actor=EVE, reason="again"),
    ):
        with pytest.raises(Quarantined, match="train a new one"):
            act()


def test_a_version_quarantined_while_it_waits_is_not_promoted(quick: ReleaseRoom) -> None:
    release = quick.approved("v2")
    quick.desk.roll_back(release.id, actor="system:watch", reason="harm")
    with pytest.raises(Refused):
        quick.desk.begin_promotion(release.id)
    assert quick.states()["v2"] is S.ABORTED


@pytest.mark.parametrize("state", ["queued", "canary", "ready", "approved"])
def test_rollback_works_from_every_state_on_the_way(quick: ReleaseRoom, state: str) -> None:
    release = getattr(quick, state)("v2")
    assert quick.desk.roll_back(release.id, actor="system:watch", reason="harm").state is S.ABORTED
    with pytest.raises(Quarantined):
        quick.desk.open(version("v2"), initiator="system:loop")
    assert quick.desk.pointer(POLICY).digest == "v1"


def test_a_superseded_version_that_is_taken_back_leaves_the_holdback(quick: ReleaseRoom) -> None:
    quick.champion("v2")
    superseded = next(r for r in quick.ledger.list(policy=POLICY) if r.digest == "v1")
    assert quick.desk.roll_back(superseded.id, actor=ADA, reason="leaks").state is S.ROLLED_BACK
    pointer = quick.desk.pointer(POLICY)
    assert (pointer.digest, pointer.previous, pointer.holdback) == ("v2", None, 0.0)


def test_the_only_version_cannot_be_rolled_back(quick: ReleaseRoom) -> None:
    first = next(r for r in quick.ledger.list(policy=POLICY) if r.digest == "v1")
    with pytest.raises(Refused, match="no earlier good version"):
        quick.desk.roll_back(first.id, actor=ADA, reason="bad")
    assert quick.states() == {"v1": S.CHAMPION}


def test_two_rollbacks_in_a_day_freeze_promotions_until_two_people_free_them(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine, terms=Terms(config_hash="config", breaker_rollbacks=2))
    for digest in ("v2", "v3"):
        room.desk.roll_back(room.champion(digest).id, actor="system:watch", reason="harm")
    release = room.approved("v4")
    with pytest.raises(Refused, match="frozen"):
        room.desk.begin_promotion(release.id)
    with pytest.raises(Refused, match="takes a person"):
        room.desk.unfreeze(POLICY, actor="system:watch")
    assert room.desk.unfreeze(POLICY, actor=ADA) is False
    assert room.desk.unfreeze(POLICY, actor=ADA) is False
    assert room.desk.unfreeze(POLICY, actor=BOB) is True
    assert room.desk.begin_promotion(release.id).state is S.PROMOTING
    engine.dispose()


def test_rollbacks_on_two_days_do_not_freeze(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    room = release_room(engine, terms=Terms(config_hash="config", breaker_rollbacks=2))
    room.desk.roll_back(room.champion("v2").id, actor=ADA, reason="harm")
    room.clock.advance(86_401)
    room.desk.roll_back(room.champion("v3").id, actor=ADA, reason="harm")
    assert room.desk.begin_promotion(room.approved("v4").id).state is S.PROMOTING
    engine.dispose()


def test_the_anchor_moves_only_by_a_person(quick: ReleaseRoom) -> None:
    quick.champion("v2")
    with pytest.raises(Refused, match="takes a person"):
        quick.desk.renew_anchor(POLICY, actor="system:watch")
    assert quick.desk.renew_anchor(POLICY, actor=ADA).anchor == "v2"


def test_an_anchor_alarm_goes_back_to_the_anchor_and_freezes(quick: ReleaseRoom) -> None:
    quick.champion("v2")
    promoted = quick.champion("v3")
    quick.desk.roll_back(promoted.id, actor="system:watch", reason="below the anchor", to="v1", alarm=AlarmKind.ANCHOR)
    assert quick.desk.pointer(POLICY).digest == "v1"
    with pytest.raises(Refused, match="below the anchor"):
        quick.desk.begin_promotion(quick.approved("v4").id)


def test_a_planted_version_is_marked_as_forced_and_needs_two_people(quick: ReleaseRoom, sqlite_url: str) -> None:
    release = quick.desk.plant(version("v2"), actor=EVE, reason="demo: a harmful candidate")
    assert release.state is S.QUEUED
    assert release.config["forced"] == "demo: a harmful candidate"
    ready = quick.desk.mark_ready(quick.desk.start_canary(release.id).id, answer(GateName.CANARY, "v2"))
    assert ready.approvals_needed == 2
    engine = open_engine(sqlite_url)
    with reading(engine) as connection:
        assert "release.forced" in [entry.action for entry in audit.entries(connection, subject=release.id)]
    engine.dispose()


def test_consecutive_canaries_leave_no_route_behind(quick: ReleaseRoom, sqlite_url: str) -> None:
    """kserve#2130: a canary's route outlives it."""
    engine = open_engine(sqlite_url)
    for number in range(2, 7):
        release = quick.canary(f"v{number}")
        quick.desk.abort(release.id, actor="system:watch", reason="harm")
        route = SqlRoutes(engine, max_age_s=0.0).route(POLICY)
        assert (route.canary_digest, route.canary_release, route.canary_share) == (None, None, 0.0)
    engine.dispose()
