"""What each act of the desk leaves behind and from which moment on it is refused, to the second; on SQLite alone."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, delete, update

from app.db.engine import reading, writing
from app.db.release import audit
from app.db.tables import gate_results
from app.domain.errors import NotFound, Refused, StaleGeneration
from app.domain.release.alarms import AlarmKind
from app.domain.release.gates import GateName, Verdict
from app.domain.release.releases import Approval, Release, ReleaseState
from app.domain.release.terms import Terms
from tests.fakes.releases import ADA, BOB, EVE, POLICY, ReleaseRoom, answer, release_room, version

S = ReleaseState
WATCH = "system:watch"
TTL_S = 14_400


@pytest.fixture
def room(sqlite_engine: Engine) -> ReleaseRoom:
    return release_room(sqlite_engine)


def with_terms(engine: Engine, **terms: Any) -> ReleaseRoom:
    return release_room(engine, terms=Terms(**{"config_hash": "config", "breaker_rollbacks": 3} | terms))


def noted(room: ReleaseRoom, release: Release, action: str) -> list[dict[str, Any]]:
    """Details of the audit's entries about a release, by what was done."""
    with reading(room.engine) as connection:
        return [dict(entry.detail) for entry in audit.entries(connection, subject=release.id) if entry.action == action]


def words(room: ReleaseRoom, release: Release) -> list[Approval]:
    with room.ledger.transaction(POLICY) as tx:
        return list(tx.approvals(release.id))


def moved(room: ReleaseRoom, digest: str) -> Release:
    return next(release for release in room.ledger.list(policy=POLICY) if release.digest == digest)


@pytest.mark.parametrize(("seconds", "late"), [(TTL_S - 1, False), (TTL_S, True)])
def test_an_approval_comes_and_counts_until_the_second_at_which_it_expires(room: ReleaseRoom, seconds: int, late: bool) -> None:
    release = room.ready("v2")
    evidence = release.evidence_digest or ""
    room.clock.advance(seconds)
    if late:
        with pytest.raises(Refused, match=r"time to approve release .* is over"):
            room.desk.approve(release.id, approver=ADA, evidence=evidence)
        gone = room.desk.expire(release.id)
        assert (gone.state, gone.reason, gone.stage) == (S.EXPIRED, "nobody approved it in time", None)
        assert room.desk.expire(release.id).state is S.EXPIRED
        return
    assert room.desk.expire(release.id).state is S.READY
    room.desk.approve(release.id, approver=ADA, evidence=evidence)
    assert room.desk.begin_promotion(release.id).state is S.PROMOTING
    room.clock.advance(1)
    with pytest.raises(Refused, match=r"approval of release .* has expired"):
        room.desk.promote(release.id)
    assert room.desk.expire(release.id).reason == "it was approved, and could not be promoted in time"


def test_the_next_release_that_will_be_ready_ends_the_time_of_this_one(room: ReleaseRoom) -> None:
    now = room.clock()
    for hours, until in ((3, timedelta(hours=3)), (5, timedelta(seconds=TTL_S))):
        release = room.canary(f"v{hours}")
        ready = room.desk.mark_ready(release.id, answer(GateName.CANARY, f"v{hours}"), next_ready_at=now + timedelta(hours=hours))
        assert ready.approval_expires_at == now + until
        assert (ready.approvals_needed, ready.reason) == (1, "1 approvals needed (configured)")


def test_a_release_that_is_ready_gives_way_to_a_newer_one_and_an_approved_one_expires(room: ReleaseRoom) -> None:
    room.approved("v2")
    room.ready("v3")
    assert (moved(room, "v2").state, moved(room, "v2").stage) == (S.EXPIRED, None)
    room.ready("v4")
    assert (moved(room, "v3").state, moved(room, "v3").reason) == (S.SUPERSEDED_BY_NEWER, "tiny-v4 is ready")


@pytest.mark.parametrize("state", ["ready", "approved"])
def test_evidence_that_was_taken_again_asks_people_anew_with_their_whole_time(room: ReleaseRoom, state: str) -> None:
    release = getattr(room, state)("v2")
    room.clock.advance(3600)
    with pytest.raises(Refused, match="only a pass makes it ready again"):
        room.desk.rebind(release.id, answer(GateName.CANARY, "v2", Verdict.INCONCLUSIVE))
    again = room.desk.rebind(release.id, answer(GateName.CANARY, "v2", note="again"))
    assert (again.state, again.reason) == (S.READY, "ready again: the evidence was taken again, 1 approvals needed (configured)")
    assert again.approval_expires_at == room.clock() + timedelta(seconds=TTL_S)
    assert again.evidence_digest != release.evidence_digest
    approved = room.desk.approve(release.id, approver=ADA, evidence=again.evidence_digest or "")
    assert approved.state is S.APPROVED, "what was said of the older evidence counts no more"


def test_only_what_is_ready_or_approved_is_bound_again(room: ReleaseRoom) -> None:
    release = room.canary("v2")
    with pytest.raises(Refused, match="is CANARY and the result"):
        room.desk.rebind(release.id, answer(GateName.CANARY, "v2"))


def test_a_ramp_begins_its_stage_anew_and_keeps_why(room: ReleaseRoom) -> None:
    release = room.canary("v2")
    assert (release.stage, release.stage_since, release.reason) == (0, room.clock(), "canary starts at 5%")
    assert (release.champion_digest, release.champion_generation, release.config["plan"]) == ("v1", 1, {})
    room.clock.advance(60)
    ramped = room.desk.ramp(release.id, reason="enough", because=answer(GateName.CANARY, "v2", Verdict.INCONCLUSIVE))
    assert (ramped.stage, ramped.stage_since, ramped.state) == (1, room.clock(), S.CANARY)
    assert room.desk.recorded(release.id)[GateName.CANARY].verdict is Verdict.INCONCLUSIVE
    with pytest.raises(Refused, match="is QUEUED at stage None"):
        room.desk.ramp(room.queued("v3").id, reason="enough")


def test_a_canary_may_begin_at_a_later_stage_with_what_was_declared_before_it(room: ReleaseRoom) -> None:
    release = room.desk.start_canary(room.queued("v2").id, plan={"n_max": 10}, stage=2)
    assert (release.stage, release.reason, release.config["plan"]) == (2, "canary starts at 50%", {"n_max": 10})
    with pytest.raises(Refused, match="no further stage"):
        room.desk.ramp(release.id, reason="enough")


def test_whoever_saw_another_state_or_stage_decides_nothing(room: ReleaseRoom) -> None:
    seen = room.canary("v2")
    room.desk.ramp(seen.id, reason="enough", seen=seen)
    acts: list[Callable[[], object]] = [
        lambda: room.desk.ramp(seen.id, reason="again", seen=seen), lambda: room.desk.abort(seen.id, actor=WATCH, reason="x", seen=seen),
        lambda: room.desk.stop(seen.id, to=S.ABORTED, reason="x", seen=seen), lambda: room.desk.void(seen.id, reason="x", seen=seen),
        lambda: room.desk.roll_back(seen.id, actor=WATCH, reason="x", seen=seen),
        lambda: room.desk.mark_ready(seen.id, answer(GateName.CANARY, "v2"), seen=seen),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(StaleGeneration, match="is CANARY at stage 1, not CANARY at stage 0: read it again"):
            act()
    assert moved(room, "v2").stage == 1


@pytest.mark.parametrize("to", [S.REJECTED, S.INCONCLUSIVE, S.ABORTED])
def test_a_release_is_stopped_in_an_end_alone_with_its_decision_kept(room: ReleaseRoom, to: ReleaseState) -> None:
    release = room.canary("v2")
    with pytest.raises(Refused, match="READY is not an end"):
        room.desk.stop(release.id, to=S.READY, reason="x")
    told = list[tuple[ReleaseState, ReleaseState]]()
    room.desk.moved = lambda before, after: told.append((before.state, after.state))
    stopped = room.desk.stop(release.id, to=to, reason="no answer", because=answer(GateName.CANARY, "v2", Verdict.INCONCLUSIVE))
    assert (stopped.state, stopped.stage, stopped.reason) == (to, None, "no answer")
    assert told == [(S.CANARY, to)]
    assert room.desk.recorded(release.id)[GateName.CANARY].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("quarantine", [False, True])
def test_an_abort_bars_a_version_only_where_that_was_asked_for(room: ReleaseRoom, quarantine: bool) -> None:
    release = room.approved("v2")
    aborted = room.desk.abort(release.id, actor=WATCH, reason="felt off", quarantine=quarantine)
    assert (aborted.state, aborted.stage) == (S.ABORTED, None)
    assert words(room, release) == [], "nobody's yes is left"
    if quarantine:
        with pytest.raises(Refused):
            room.desk.open(version("v2"), initiator=WATCH)
    again = room.desk.abort(release.id, actor=WATCH, reason="again")
    assert again.reason == "felt off", "what is over stays as it is"


def test_a_champion_and_one_before_it_are_rolled_back_instead_of_aborted(room: ReleaseRoom) -> None:
    champion = room.champion("v2")
    assert room.desk.abort(champion.id, actor=ADA, reason="bad").state is S.ROLLED_BACK
    room.champion("v3")
    assert room.desk.abort(moved(room, "v1").id, actor=ADA, reason="leaks").state is S.ROLLED_BACK


@pytest.mark.parametrize(
    "spoiled", [None, {"verdict": Verdict.INCONCLUSIVE.value}, {"digest": "v1"}], ids=["gone", "no pass", "of another version"]
)
def test_without_a_passing_canary_of_its_own_nothing_is_promoted_whatever_was_approved(
    sqlite_engine: Engine, spoiled: dict[str, str] | None
) -> None:
    """As whoever changes a row of the database would have it."""
    room = with_terms(sqlite_engine, approvals=1)
    release = room.desk.begin_promotion(room.approved("v2").id)
    its_own = (gate_results.c.release_id == release.id) & (gate_results.c.gate == GateName.CANARY)
    with writing(sqlite_engine) as connection:
        connection.execute(delete(gate_results).where(its_own) if spoiled is None else update(gate_results).where(its_own).values(spoiled))
    with pytest.raises(Refused, match="has no passing g3_canary on record: only an explicit pass promotes"):
        room.desk.promote(release.id)
    assert room.desk.pointer(POLICY).digest == "v1"


def test_what_a_promotion_makes_of_the_pointer(room: ReleaseRoom) -> None:
    room.champion("v2")
    waiting, canary = room.ready("v3"), room.canary("v4")
    room.clock.advance(60)
    approved = room.desk.approve(waiting.id, approver=ADA, evidence=waiting.evidence_digest or "")
    promoted = room.desk.promote(room.desk.begin_promotion(approved.id).id)
    pointer = room.desk.pointer(POLICY)
    assert (pointer.digest, pointer.previous, pointer.anchor, pointer.generation) == ("v3", "v2", "v1", 3)
    assert (pointer.holdback, pointer.holdback_digest, pointer.changed_at) == (0.1, None, room.clock())
    assert (promoted.reason, promoted.stage) == ("promoted over v2 at generation 2", None)
    assert room.desk.promote(promoted.id).reason == promoted.reason, "asked twice"
    ended = room.desk.find(canary.id)
    assert (ended.state, ended.stage) == (S.ABORTED, None)
    assert ended.reason == "tiny-v3 became champion: its comparison no longer holds"
    assert moved(room, "v2").reason == "superseded by tiny-v3"


def test_what_a_rollback_makes_of_the_pointer(room: ReleaseRoom) -> None:
    room.champion("v2")
    room.desk.renew_anchor(POLICY, actor=ADA)
    third = room.champion("v3")
    room.clock.advance(60)
    room.desk.roll_back(third.id, actor=WATCH, reason="harm")
    pointer = room.desk.pointer(POLICY)
    assert (pointer.digest, pointer.previous, pointer.anchor) == ("v2", "v1", "v2")
    assert (pointer.holdback, pointer.holdback_digest, pointer.changed_at) == (0.0, None, room.clock())
    assert pointer.release_id == moved(room, "v2").id
    assert moved(room, "v2").reason == "came back when tiny-v3 was rolled back"
    again = room.desk.roll_back(third.id, actor=ADA, reason="again")
    assert (again.reason, room.desk.pointer(POLICY)) == ("harm", pointer), "asking again changes nothing"


def test_a_person_goes_back_to_what_they_name_and_a_program_to_what_there_is(room: ReleaseRoom) -> None:
    room.champion("v2")
    third = room.champion("v3")
    with pytest.raises(Refused, match="nothing was done"):
        room.desk.roll_back(third.id, actor=ADA, reason="bad", to="v9")
    assert room.desk.pointer(POLICY).digest == "v3"
    room.desk.roll_back(third.id, actor=WATCH, reason="bad", to="v9")
    assert room.desk.pointer(POLICY).digest == "v2"
    room.desk.roll_back(moved(room, "v2").id, actor=ADA, reason="bad", to="v1")
    assert room.desk.pointer(POLICY).digest == "v1"


def test_programs_take_three_back_within_a_day_and_people_any_number(sqlite_engine: Engine) -> None:
    room = with_terms(sqlite_engine, breaker_rollbacks=9, rollbacks_max=1)
    room.desk.roll_back(room.champion("v2").id, actor=WATCH, reason="harm")
    third = room.champion("v3")
    stays = room.desk.roll_back(third.id, actor=WATCH, reason="harm again")
    (alarm,) = room.desk.alarms(POLICY)
    assert (stays.state, alarm.kind) == (S.CHAMPION, AlarmKind.ROLLBACK_CAP)
    assert alarm.reason == "1 automatic rollbacks within 24 h, and now tiny-v3: harm again"
    assert room.desk.roll_back(third.id, actor=ADA, reason="bad").state is S.ROLLED_BACK


@pytest.mark.parametrize(("seconds", "frozen"), [(86_399, True), (86_401, False)])
def test_two_rollbacks_within_a_day_stop_promotions_and_say_how_many_there_were(sqlite_engine: Engine, seconds: int, frozen: bool) -> None:
    room = with_terms(sqlite_engine, breaker_rollbacks=2)
    room.desk.roll_back(room.champion("v2").id, actor=ADA, reason="harm")
    third = room.champion("v3")
    room.clock.advance(seconds)
    room.desk.roll_back(third.id, actor=ADA, reason="harm")
    assert [alarm.reason for alarm in room.desk.alarms(POLICY)] == (["2 rollbacks within 24 h"] if frozen else [])


def test_two_people_free_promotions_and_one_who_is_alone_waits(sqlite_engine: Engine) -> None:
    room = with_terms(sqlite_engine)
    assert room.desk.unfreeze(POLICY, actor=ADA) is True, "nothing holds them"
    assert room.desk.freeze(POLICY, AlarmKind.ANCHOR, actor=WATCH, reason="below the anchor", release_id=None) is True
    assert room.desk.freeze(POLICY, AlarmKind.ANCHOR, actor=WATCH, reason="below the anchor", release_id=None) is False
    before = room.desk.pointer(POLICY)
    assert [room.desk.unfreeze(POLICY, actor=who) for who in (ADA, BOB)] == [False, True]
    (alarm,) = room.desk.alarms(POLICY)
    assert (alarm.ended_by, alarm.ended_at) == (f"{ADA}, {BOB}", room.clock())
    assert room.desk.pointer(POLICY) == before, "the champion did nothing wrong: its era goes on"


def test_an_incident_that_people_end_begins_a_new_era(room: ReleaseRoom) -> None:
    assert room.desk.raise_incident(POLICY, release_id=None, reason="engines are away") is True
    assert room.desk.raise_incident(POLICY, release_id=None, reason="engines are away") is False
    with pytest.raises(Refused):
        room.desk.start_canary(room.queued("v2").id)
    before = room.desk.pointer(POLICY)
    room.clock.advance(60)
    assert [room.desk.unfreeze(POLICY, actor=who) for who in (ADA, BOB)] == [False, True]
    after = room.desk.pointer(POLICY)
    assert (after.generation, after.digest, after.changed_at) == (before.generation + 1, before.digest, room.clock())
    assert room.desk.end_incident(POLICY, reason="over") is False
    room.desk.raise_incident(POLICY, release_id=None, reason="again")
    assert room.desk.end_incident(POLICY, reason="over") is True
    assert room.desk.pointer(POLICY) == after, "one that ended by itself begins none"


def test_a_quarantine_is_lifted_with_a_reason_by_two_and_of_what_is_barred_alone(room: ReleaseRoom) -> None:
    bad = room.champion("v2")
    room.desk.roll_back(bad.id, actor=WATCH, reason="harm")
    with pytest.raises(Refused, match="needs a reason"):
        room.desk.lift(POLICY, "v2", actor=ADA, reason="  ")
    with pytest.raises(NotFound, match="v1 of tab is not quarantined"):
        room.desk.lift(POLICY, "v1", actor=ADA, reason="was not to blame")
    assert [room.desk.lift(POLICY, "v2", actor=who, reason="was not to blame") for who in (ADA, BOB)] == [False, True]
    assert (room.desk.find(bad.id).state, room.desk.find(bad.id).reason) == (
        S.SUPERSEDED, "its quarantine was lifted by two people: was not to blame",
    )  # fmt: skip


def test_the_holdback_moves_from_the_generation_that_was_seen_alone(room: ReleaseRoom) -> None:
    room.desk.roll_back(room.champion("v2").id, actor=WATCH, reason="harm")
    pointer = room.desk.pointer(POLICY)
    with pytest.raises(Refused, match="quarantined: nobody is held back"):
        room.desk.hold_back(POLICY, share=0.2, digest="v2", reason="x", seen=pointer)
    room.clock.advance(60)
    held = room.desk.hold_back(POLICY, share=0.2, digest="v1", reason="x", seen=pointer)
    assert (held.holdback, held.holdback_digest, held.generation, held.changed_at) == (0.2, "v1", pointer.generation + 1, room.clock())
    assert room.desk.pointer(POLICY) == held
    with pytest.raises(StaleGeneration, match="decide afresh"):
        room.desk.hold_back(POLICY, share=0.0, digest=None, reason="x", seen=pointer)


def test_people_are_held_on_the_champion_once_and_until_it_ends(room: ReleaseRoom) -> None:
    held = room.desk.begin_holdout(POLICY, share=0.02, lasts=timedelta(days=90), thresholds={"m": 1.0})
    assert (held.digest, held.began_at, held.counted_until) == ("v1", room.clock(), room.clock())
    assert (held.ends_at, held.share, held.thresholds) == (room.clock() + timedelta(days=90), 0.02, {"m": 1.0})
    with pytest.raises(Refused, match="runs since"):
        room.desk.begin_holdout(POLICY, share=0.02, lasts=timedelta(days=90), thresholds={})
    assert [room.desk.end_holdout(held, reason="over") for _ in range(2)] == [True, False]
    other = room.desk.begin_holdout(POLICY, share=0.02, lasts=timedelta(days=90), thresholds={})
    assert room.desk.end_holdout(held, reason="over") is False, "another one runs by now"
    assert room.desk.end_holdout(other, reason="over") is True


@pytest.mark.parametrize("needed", [1, 2])
def test_people_are_reminded_at_half_of_their_time_of_what_is_missing(sqlite_engine: Engine, needed: int) -> None:
    room = with_terms(sqlite_engine, approvals=needed)
    release = room.canary("v2")
    assert room.desk.remind(release.id) is False
    release = room.desk.mark_ready(release.id, answer(GateName.CANARY, "v2"))
    room.clock.advance(TTL_S // 2 - 1)
    assert room.desk.remind(release.id) is False
    room.clock.advance(1)
    assert [room.desk.remind(release.id) for _ in range(2)] == [True, False]
    (detail,) = noted(room, release, "release.waiting")
    count = "one approval" if needed == 1 else "2 approvals"
    assert detail["reason"] == f"it needs {count} until {release.approval_expires_at:%Y-%m-%d %H:%M} UTC, and expires then"
    assert (detail["version_name"], detail["evidence_digest"]) == ("tiny-v2", release.evidence_digest)


def test_the_anchor_is_renewed_once_and_nobody_is_held_back_on_the_champion(room: ReleaseRoom) -> None:
    before = room.desk.pointer(POLICY)
    assert room.desk.renew_anchor(POLICY, actor=ADA) == before, "it is the anchor already"
    room.champion("v2")
    room.desk.hold_back(POLICY, share=0.2, digest="v2", reason="x")
    room.clock.advance(60)
    after = room.desk.renew_anchor(POLICY, actor=ADA)
    assert (after.anchor, after.generation, after.changed_at) == ("v2", 4, room.clock())
    assert (after.holdback, after.holdback_digest, after.previous) == (0.0, None, "v1")
    room.champion("v3")
    kept = room.desk.renew_anchor(POLICY, actor=ADA)
    assert (kept.anchor, kept.holdback, kept.reference) == ("v3", 0.1, "v2"), "who is on another version stays there"


def test_the_anchor_moves_to_what_passed_the_sealed_split_where_that_is_asked_for(sqlite_engine: Engine) -> None:
    room = with_terms(sqlite_engine, sealed=True)
    release = room.champion("v2")
    with pytest.raises(Refused, match="sealed split was not read for it; run `ratchet suite sealed tab`"):
        room.desk.renew_anchor(POLICY, actor=ADA)
    for wrong in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        room.desk.record(release.id, answer(GateName.SEALED, "v2", wrong))
        with pytest.raises(Refused, match=f"sealed split says {wrong}: "):
            room.desk.renew_anchor(POLICY, actor=ADA)
    room.desk.record(release.id, answer(GateName.SEALED, "v2"))
    assert room.desk.renew_anchor(POLICY, actor=ADA).anchor == "v2"


def test_who_rejects_is_a_person_with_a_reason_and_what_is_live_is_not_rejected(room: ReleaseRoom) -> None:
    release = room.ready("v2")
    with pytest.raises(Refused, match="takes a person"):
        room.desk.reject(release.id, approver=WATCH, reason="bad")
    with pytest.raises(Refused, match="needs a reason"):
        room.desk.reject(release.id, approver=ADA, reason=" ")
    rejected = room.desk.reject(release.id, approver=ADA, reason="felt off")
    assert (rejected.state, rejected.stage, rejected.reason) == (S.REJECTED, None, "felt off")
    (word,) = words(room, release)
    assert (word.approver, word.approved, word.reason, word.decided_at) == (ADA, False, "felt off", room.clock())
    with pytest.raises(Refused, match="a champion is rolled back"):
        room.desk.reject(moved(room, "v1").id, approver=ADA, reason="felt off")


def test_an_approval_in_part_is_told_with_how_many_are_missing(sqlite_engine: Engine) -> None:
    room = with_terms(sqlite_engine, approvals=2)
    release = room.ready("v2")
    assert (release.approvals_needed, release.reason) == (2, "2 approvals needed (configured)")
    first = room.desk.approve(release.id, approver=ADA, evidence=release.evidence_digest or "")
    assert (first.state, first.reason) == (S.READY, "1 of 2 approvals")
    assert room.desk.approve(release.id, approver=EVE, evidence=release.evidence_digest or "").reason == "approved by 2 of 2"


def test_a_version_is_pinned_once_and_by_name(room: ReleaseRoom) -> None:
    with pytest.raises(NotFound, match="has no version v9"):
        room.desk.pin(POLICY, "v9", actor=ADA, reason="keep")
    with pytest.raises(Refused, match="v2 of tab is not pinned"):
        room.desk.unpin(POLICY, "v2", actor=ADA, reason="let go")
