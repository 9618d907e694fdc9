"""The watch on a real database with simulated people: promotes what is fine, takes back what is not, and survives being killed."""

import msgspec
import pytest
from sqlalchemy import Engine

from app.db.release.evidence import SqlEvidenceBook
from app.domain.release.assignment import is_lasting
from app.domain.release.gates import GateName, Verdict
from app.domain.release.releases import IN_FLIGHT, ReleaseState
from pipelines.evaluation.live.explain import explain
from tests.fakes.releases import ADA, BOB, POLICY
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import WatchedRoom, new_watch, small_gates, watched_room

S = ReleaseState
DECIDED = frozenset(S) - IN_FLIGHT | {S.READY}


@pytest.fixture
def world(sqlite_engine: Engine) -> WatchedRoom:
    return watched_room(sqlite_engine)


def _promote(world: WatchedRoom, digest: str, behaviour: Behaviour) -> None:
    release = world.run(world.queue(digest, behaviour), until=DECIDED)
    assert release.state is S.READY
    for person in (ADA, BOB)[: release.approvals_needed]:
        world.room.desk.approve(release.id, approver=person, evidence=release.evidence_digest or "")
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).digest == digest


def test_a_candidate_that_is_as_good_goes_from_the_queue_to_champion_and_is_explained(world: WatchedRoom, sqlite_engine: Engine) -> None:
    release = world.run(world.queue("v2", Behaviour()), until=DECIDED)
    assert release.state is S.READY, release.reason
    result = world.room.desk.recorded(release.id)[GateName.CANARY]
    assert result.verdict is Verdict.PASS
    assert {r["metric"] for r in result.evidence["required"] if r["non_inferior"]} == {"task_success", "reward"}
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).digest == "v1", "nobody approved it"
    world.room.desk.approve(release.id, approver=ADA, evidence=release.evidence_digest or "")
    world.watch.tick()
    pointer = world.room.desk.pointer(POLICY)
    assert (pointer.digest, pointer.previous, pointer.holdback) == ("v2", "v1", 0.1)
    explained = explain(world.room.desk.find(release.id), SqlEvidenceBook(sqlite_engine))
    assert [one.action for one in explained if one.replayed and one.action != "continue"] == ["ramp", "ramp", "ready"]
    assert [one.differences for one in explained] == [()] * len(explained)


def test_what_was_read_of_a_canary_is_kept_while_it_is_judged_and_let_go_with_it(world: WatchedRoom) -> None:
    """One that was forgotten between two looks is read from its beginning again: a look would cost as much as all turns so far."""
    release = world.run(world.queue("v2", Behaviour(success=0.2)), until=frozenset({S.CANARY}))
    world.traffic.serve(20)
    world.watch.tick()
    kept = world.watch._canaries[release.id]
    world.traffic.serve(20)
    world.watch.tick()
    assert world.watch._canaries == {release.id: kept}
    assert world.run(release, until=frozenset({S.ABORTED}), rounds=40).state is S.ABORTED
    world.watch.tick()
    assert world.watch._canaries == {}


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [(Behaviour(asks=0.35), ("asks", "acts")), (Behaviour(refuses=0.25), ("refuses", "acts"))],
    ids=["clarifying questions", "refusal"],
)
def test_a_candidate_that_only_answers_otherwise_asks_two_people(world: WatchedRoom, behaviour: Behaviour, cause: tuple[str, ...]) -> None:
    release = world.run(world.queue("v2", behaviour), until=DECIDED)
    assert release.state is S.READY, release.reason
    assert release.approvals_needed == 2
    alarms = world.room.desk.recorded(release.id)[GateName.CANARY].evidence["alarms"]
    assert alarms[0].removeprefix("behaviour: ") in cause


def test_a_candidate_whose_answers_grew_far_longer_is_held(sqlite_engine: Engine) -> None:
    narrow = tuple(m if m.margin is None else msgspec.structs.replace(m, margin=0.03) for m in small_gates().metrics)
    # so that both arms have their 200 turns before it could be READY
    world = watched_room(sqlite_engine, config=small_gates(metrics=narrow))
    release = world.run(world.queue("v2", Behaviour(length=75)), until=DECIDED, rounds=15)
    assert release.state is S.CANARY
    held = SqlEvidenceBook(sqlite_engine).decisions(release.id)[-1]
    assert (held["action"], "length_drift" in held["reason"]) == ("hold", True)


@pytest.mark.parametrize(
    ("hack", "cause"),
    [
        (Behaviour(success=0.3), ("task_success", "reward")),
        (Behaviour(fault=0.10), ("fault",)),
        (Behaviour(undo=0.35), ("undone",)),
    ],
    ids=["worse", "broken", "undone"],
)
def test_a_harmful_candidate_is_caught_and_quarantined(world: WatchedRoom, hack: Behaviour, cause: tuple[str, ...]) -> None:
    before = world.traffic.people
    release = world.run(world.queue("v2", hack), until=DECIDED)
    assert release.state is S.ABORTED
    assert release.reason is not None
    assert any(f"harm on {name}" in release.reason for name in cause), release.reason
    assert world.traffic.people - before <= 3000  # the delay, in people served while it ran
    assert world.traffic.serve(50) == {"v1": 50}
    with pytest.raises(Exception, match="may never be released again"):
        world.room.queued("v2")


def test_a_flattering_candidate_needs_two_people_and_they_are_told(world: WatchedRoom) -> None:
    """GPT-4o's sycophancy: the reward rises, what it stands for does not; numbers alone would promote it (proxy up, gold flat)."""
    release = world.run(world.queue("v2", Behaviour(reward_if_good=0.95, reward_if_bad=0.3)), until=DECIDED)
    assert release.state is S.READY, release.reason
    live = world.room.desk.recorded(release.id)[GateName.CANARY]
    assert live.evidence["alarms"] == ["proxy_gold_gap"]
    assert release.approvals_needed == 2
    world.room.desk.approve(release.id, approver=ADA, evidence=release.evidence_digest or "")
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).digest == "v1"


def test_suppressed_feedback_holds_and_then_aborts(sqlite_engine: Engine) -> None:
    """Cursor's broken tool call: failures that nobody can rate raise the mean of the ratings (sheet S11)."""
    world = watched_room(sqlite_engine, config=small_gates(hold_max_s=600.0))
    release = world.run(world.queue("v2", Behaviour(hides_failures=0.9)), until=frozenset({S.ABORTED}), rounds=40)
    assert release.state is S.ABORTED
    assert "feedback coverage" in str(release.reason) or "harm" in str(release.reason)


def test_a_dark_canary_holds_and_is_never_promoted(world: WatchedRoom) -> None:
    """argo-rollouts#1905, flagger#1005: no data holds, then ends; it never passes."""
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    seen: list[str] = []
    for _ in range(60):
        world.room.clock.advance(180)
        world.watch.tick()
        release = world.room.desk.find(release.id)
        seen.append(release.state)
        if release.state is not S.CANARY:
            break
    assert release.state in (S.ABORTED, S.INCONCLUSIVE)
    assert world.room.desk.pointer(POLICY).digest == "v1"


def test_labels_that_do_not_come_hold_the_canary(world: WatchedRoom) -> None:
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    world.traffic.delivered = False
    for _ in range(12):
        world.traffic.serve(20)
        world.watch.tick()
    assert world.room.desk.find(release.id).state is S.CANARY
    live = world.room.desk.recorded(release.id)[GateName.CANARY]
    assert live.verdict is Verdict.INCONCLUSIVE
    assert "overdue" in live.reason


def test_an_inconclusive_canary_never_promotes(sqlite_engine: Engine) -> None:
    """argo-rollouts#3850: an inconclusive analysis was run again until it promoted; GrowthBook ships at the end."""
    world = watched_room(sqlite_engine, config=small_gates(canary_max_s=900.0, metrics=tuple(
        metric if metric.margin is None else type(metric)(**{**{f: getattr(metric, f) for f in metric.__struct_fields__}, "margin": 0.005})
        for metric in small_gates().metrics
    )))  # fmt: skip
    release = world.run(world.queue("v2", Behaviour()), until=DECIDED, people=60, rounds=40)
    assert release.state is S.INCONCLUSIVE
    assert world.room.desk.pointer(POLICY).digest == "v1"


def test_harm_is_acted_on_while_people_are_waited_for(world: WatchedRoom) -> None:
    """flagger#1801: no rollback while waiting for an approval."""
    release = world.run(world.queue("v2", Behaviour()), until=DECIDED)
    assert release.state is S.READY
    world.traffic.behaviours["v2"] = Behaviour(fault=0.5)
    release = world.run(release, until=frozenset({S.ABORTED}))
    assert release.state is S.ABORTED
    assert "fault" in str(release.reason)


def test_harm_wins_over_a_promotion_that_is_under_way(world: WatchedRoom) -> None:
    release = world.run(world.queue("v2", Behaviour()), until=DECIDED)
    world.room.desk.approve(release.id, approver=ADA, evidence=release.evidence_digest or "")
    world.room.desk.begin_promotion(release.id)
    world.traffic.behaviours["v2"] = Behaviour(fault=0.9)
    world.traffic.serve(400)
    world.room.clock.advance(5)
    world.watch.tick()
    assert world.room.desk.find(release.id).state is S.ABORTED
    assert world.room.desk.pointer(POLICY).digest == "v1"


def test_a_champion_that_turns_bad_is_rolled_back_from_its_holdback(world: WatchedRoom, sqlite_engine: Engine) -> None:
    """flagger#616: nothing rolls back after the promotion."""
    _promote(world, "v2", Behaviour())
    promoted = next(r for r in world.room.ledger.list(policy=POLICY) if r.digest == "v2")
    world.traffic.behaviours["v2"] = Behaviour(success=0.1, fault=0.05)
    release = world.run(promoted, until=frozenset({S.ROLLED_BACK}), people=200)
    assert release.state is S.ROLLED_BACK
    assert world.room.desk.pointer(POLICY).digest == "v1"
    last = explain(release, SqlEvidenceBook(sqlite_engine))[-1]
    assert (last.gate, last.action, last.differences) == (GateName.HOLDBACK, "abort", ())
    assert "the champion against itself" in last.numbers["live_aa"]["told"]


def test_a_broken_champion_is_taken_back_by_its_limits_even_without_a_holdback(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine, config=small_gates(holdback_first=0.0))
    _promote(world, "v2", Behaviour())
    world.traffic.behaviours["v2"] = Behaviour(fault=0.6)
    promoted = next(r for r in world.room.ledger.list(policy=POLICY) if r.digest == "v2")
    assert world.run(promoted, until=frozenset({S.ROLLED_BACK}), people=100).state is S.ROLLED_BACK


def test_after_its_slot_the_holdback_moves_to_the_anchor(world: WatchedRoom) -> None:
    _promote(world, "v2", Behaviour())
    _promote(world, "v3", Behaviour())
    world.room.clock.advance(3601)
    world.watch.tick()
    pointer = world.room.desk.pointer(POLICY)
    assert (pointer.holdback_digest, pointer.holdback, pointer.previous) == ("v1", 0.03, "v2")


def test_a_canary_waits_for_an_engine_that_holds_it(world: WatchedRoom) -> None:
    release = world.room.queued("v2")
    world.watch.tick()
    assert world.room.desk.find(release.id).state is S.QUEUED
    world.traffic.engines_hold("v2")
    world.watch.tick()
    assert world.room.desk.find(release.id).state is S.CANARY


def test_weights_that_no_engine_can_load_end_the_release(world: WatchedRoom) -> None:
    release = world.room.queued("v2")
    world.traffic.engines_hold("v2", state="failed", detail="digest differs")
    world.watch.tick()
    ended = world.room.desk.find(release.id)
    assert ended.state is S.ABORTED
    assert "digest differs" in str(ended.reason)


def test_a_config_that_traffic_cannot_power_is_refused_with_alternatives(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine, config=small_gates(min_power=0.6, traffic_days=0.01, canary_max_s=60.0, canary_longest_s=60.0))
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    refused = world.room.desk.find(release.id)
    assert refused.state is S.REJECTED
    assert "set a margin of at least" in str(refused.reason)
    assert "times as many people" in str(refused.reason)


def test_a_watch_killed_after_every_tick_still_comes_to_its_end(world: WatchedRoom, sqlite_engine: Engine) -> None:
    release = world.queue("v2", Behaviour())
    for _ in range(40):
        world.watch = new_watch(sqlite_engine, world.room, world.config)
        release = world.run(release, until=DECIDED, rounds=1)
        if release.state is S.READY:
            break
    assert release.state is S.READY
    steps = [one.action for one in explain(release, SqlEvidenceBook(sqlite_engine)) if one.replayed and one.action != "continue"]
    assert steps == ["ramp", "ramp", "ready"]


def test_champions_that_fall_behind_the_anchor_step_by_step_go_back_to_it(sqlite_engine: Engine) -> None:
    """Each version is non-inferior to the one before it; together they are worse than what people agreed to (sheet S6)."""
    world = watched_room(
        sqlite_engine,
        config=small_gates(holdback_s=600.0, anchor_share=0.3, anchor_run_length_slots=50, units_per_look=50, post_margin=0.5),
    )
    _promote(world, "v2", Behaviour(success=0.57))
    _promote(world, "v3", Behaviour(success=0.57))
    world.room.clock.advance(601)
    world.watch.tick()
    assert world.room.desk.pointer(POLICY).holdback_digest == "v1"
    world.traffic.behaviours |= {"v3": Behaviour(success=0.2)}
    promoted = next(r for r in world.room.ledger.list(policy=POLICY) if r.digest == "v3")
    assert world.run(promoted, until=frozenset({S.ROLLED_BACK}), people=200, rounds=40).state is S.ROLLED_BACK
    assert world.room.desk.pointer(POLICY).digest == "v1"


def test_a_ramp_with_a_lasting_cohort_is_decided_and_explained_with_the_champion_held_against_itself(sqlite_engine: Engine) -> None:
    """A fifth of the people never gets it, in no stage; the verdict says how often the champion was harm to itself."""
    world = watched_room(sqlite_engine, config=small_gates(lasting_share=0.2))
    release = world.run(world.queue("v2", Behaviour()), until=DECIDED)
    assert release.state is S.READY, release.reason
    sessions = SqlEvidenceBook(sqlite_engine).canary_sessions(release.id)
    kept = [session for session in sessions if is_lasting(session.stage)]
    assert {session.digest for session in kept} == {"v1"}
    assert abs(len(kept) / len(sessions) - 0.2) < 0.05
    numbers = world.room.desk.recorded(release.id)[GateName.CANARY].evidence
    assert "task_success, lasting cohort" in numbers["harm"]["effects"]
    assert numbers["live_aa"]["comparisons"] > 0
    assert "the champion against itself" in numbers["live_aa"]["told"]
    assert all(one.differences == () for one in explain(world.room.desk.find(release.id), SqlEvidenceBook(sqlite_engine)))
