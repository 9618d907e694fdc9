"""Whatever sequence of acts comes, and however many people and replicas of the watch act at once: the states move along MOVES, one is
judged at a time (by traffic or by people) and no stage skipped, no quarantined version comes back unless two people lifted it, nothing
moves forward in an incident, programs roll back no more often than a day may have it, nothing is let through without its own pass, and
the pointer is always somewhere good with the right predecessor. And all of that happens: of acts that are all refused nothing can break."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
from msgspec.structs import replace
from sqlalchemy import Engine, select

from app.db.engine import reading
from app.db.release import audit
from app.db.release.alarms import read_alarms
from app.db.release.holdouts import SqlHoldoutBook
from app.db.release.pairs import SqlPairs
from app.db.release.pointer import quarantined, read_history
from app.db.tables import release_history
from app.domain.errors import DoneAlready, RatchetError, Refused, StaleGeneration
from app.domain.release.alarms import FREEZING, Alarm, AlarmKind
from app.domain.release.by_people import PeopleTerms
from app.domain.release.gates import GateName, Verdict
from app.domain.release.pairs import BlindPair, Choice
from app.domain.release.releases import IN_FLIGHT, MOVES, AuditEntry, Release, ReleaseState
from app.domain.release.terms import Terms
from app.release.jury import ReleaseJury
from tests.fakes.releases import ADA, BOB, EVE, POLICY, ReleaseRoom, answer, release_room, version

S = ReleaseState
PEOPLE = PeopleTerms(enabled=True, votes=20, judges=2)
PAIRS = 24
TERMS = Terms(config_hash="config", breaker_rollbacks=50, people=PEOPLE)
DIGESTS = [f"v{n}" for n in range(2, 8)]
HAPPENS = {
    "release.canary", "release.ramped", "release.ready", "release.approved", "release.promoting", "release.champion", "release.rolled_back",
    "release.judged", "release.judging", "version.quarantined", "version.quarantine_lifted", "alarm.raised", "alarm.ended",
    "promotions.frozen", "promotions.unfrozen", "two replicas", "holdout.began", "holdout.ended",
}  # fmt: skip


def pair_of(release: Release, number: int) -> BlindPair:
    return BlindPair(
        id=f"{release.id}-{number:02}", release_id=release.id, policy=POLICY, suite="s", task=f"t{number}", cluster="", messages=[],
        champion_answer="old", candidate_answer="new", champion_score=0.0, candidate_score=0.0, salt=str(number),
    )  # fmt: skip


def _next(room: ReleaseRoom, dice: random.Random) -> None:
    """What whoever works here would do next: the cure where something stands still, else one step of a release on its way."""
    desk = room.desk
    trouble = any(alarm.kind is AlarmKind.INCIDENT and alarm.ended_at is None for alarm in desk.alarms(POLICY))
    if trouble and dice.random() < 0.15:
        desk.end_incident(POLICY, reason="calm")
    if not trouble or dice.random() < 0.15:
        for person in (ADA, BOB):
            desk.unfreeze(POLICY, actor=person)
    on_its_way = [r for r in room.ledger.list(policy=POLICY, limit=1000) if r.state in STEPS]
    serving = [r for r in on_its_way if r.state is S.CHAMPION]
    waiting = [r for r in on_its_way if r.state is not S.CHAMPION]
    release = dice.choice(serving if not waiting or dice.random() < 0.1 else waiting)
    dice.choice(STEPS[release.state])(room, release)


def _approved(room: ReleaseRoom, release: Release) -> None:
    for person in (ADA, BOB)[: release.approvals_needed]:
        room.desk.approve(release.id, approver=person, evidence=release.evidence_digest or "")


def _quarantined(room: ReleaseRoom, release: Release) -> None:
    """Taken back, and lifted by two."""
    room.desk.roll_back(release.id, actor=EVE, reason="harm")
    for person in (ADA, BOB):
        room.desk.lift(POLICY, release.digest, actor=person, reason="the network")


def _act(room: ReleaseRoom, dice: random.Random) -> None:
    """One random act on a random release; most of them are refused, which is the point."""
    digest = dice.choice(DIGESTS)
    found = [r for r in room.ledger.list(policy=POLICY) if r.digest == digest]
    release = dice.choice(found) if found else None
    desk = room.desk
    if release is None or dice.random() < 0.15:
        opened = room.queued(digest)
        SqlPairs(room.engine).keep([pair_of(opened, n) for n in range(PAIRS)], at=room.clock())
        return
    evidence, person = release.evidence_digest or "", dice.choice([ADA, BOB, EVE, "system:bot"])
    acts: list[Callable[[], object]] = [
        lambda: desk.start_canary(release.id),
        lambda: desk.start_canary(release.id),
        lambda: desk.ramp(release.id, reason="units"),
        lambda: desk.mark_ready(release.id, answer(GateName.CANARY, digest)),
        lambda: desk.mark_ready(release.id, answer(GateName.CANARY, digest, dice.choice(list(Verdict)))),
        lambda: desk.approve(release.id, approver=person, evidence=evidence),
        lambda: desk.approve(release.id, approver=ADA, evidence=evidence),
        lambda: desk.approve(release.id, approver=BOB, evidence=evidence),
        lambda: desk.begin_promotion(release.id),
        lambda: desk.begin_promotion(release.id),
        lambda: desk.promote(release.id),
        lambda: desk.promote(release.id),
        lambda: desk.void(release.id, reason="doubt"),
        lambda: desk.expire(release.id),
        lambda: desk.reject(release.id, approver=person, reason="no"),
        lambda: desk.abort(release.id, actor=person, reason="stop"),
        lambda: desk.roll_back(release.id, actor=person, reason="harm"),
        lambda: desk.renew_anchor(POLICY, actor=person),
        lambda: desk.unfreeze(POLICY, actor=person),
        lambda: desk.plant(version(digest), actor=EVE, reason="forced"),
        lambda: desk.roll_back(release.id, actor="system:watch", reason="harm", seen=release),
        lambda: desk.abort(release.id, actor="system:watch", reason="harm", quarantine=True, seen=release),
        lambda: desk.raise_incident(POLICY, release_id=release.id, reason="all fail"),
        lambda: desk.end_incident(POLICY, reason="calm"),
        lambda: desk.end_incident(POLICY, reason="calm"),
        lambda: desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="gap", release_id=release.id),
        lambda: desk.lift(POLICY, digest, actor=person, reason="the network"),
        lambda: desk.lift(POLICY, digest, actor=dice.choice([ADA, BOB]), reason="the network"),
        lambda: _two_replicas(room, release),
        *[lambda: _held(room)] * 2,
        lambda: desk.ask_people(release.id, because="too few people"),
        lambda: desk.count_votes(release.id),
        *[lambda: _judged(room, release, dice)] * 4,
    ]
    dice.choice(acts)()


def _held(room: ReleaseRoom) -> None:
    """A long-term holdout begins where none is open, else it ends; who comes second is refused."""
    open_ = SqlHoldoutBook(room.engine).open(POLICY)
    if open_ is not None:
        room.desk.end_holdout(open_, reason="over")
        return
    room.desk.begin_holdout(POLICY, share=0.02, lasts=timedelta(days=90), thresholds={})


def _judged(room: ReleaseRoom, release: Release, dice: random.Random) -> None:
    """Some people judge its pairs, then the watch counts."""
    if release.state is S.QUEUED:
        room.desk.ask_people(release.id, because="too few people")
    jury, wanted = ReleaseJury(room.ledger), dice.choice([("candidate", 1.0), ("candidate", 0.9), ("champion", 0.9)])
    people = dice.choice([(ADA,), (ADA, BOB), (ADA, BOB, EVE)])
    for number in range(PAIRS):
        by, kind = people[number % len(people)], wanted[0] if dice.random() < wanted[1] else "same"
        left = pair_of(release, number).candidate_is_left(by) is (kind == "candidate")
        choice = Choice.SAME if kind == "same" else Choice.LEFT if left else Choice.RIGHT
        try:
            jury.vote(release.id, pair_of(release, number).id, choice, voter=by, shown_to=by, proven=True)
        except DoneAlready:
            continue
    room.desk.count_votes(release.id)


def _two_replicas(room: ReleaseRoom, seen: Release) -> None:
    """Both decided to ramp from what they saw at the same moment: the second one is told so."""
    room.desk.ramp(seen.id, reason="units", seen=seen)
    with pytest.raises(StaleGeneration):
        room.desk.ramp(seen.id, reason="units", seen=seen)
    with room.ledger.transaction(POLICY) as tx:
        tx.note(actor="system:test", action="two replicas", subject=seen.id, detail={})


Step = Callable[[ReleaseRoom, Release], object]
STEPS: dict[ReleaseState, list[Step]] = {
    S.QUEUED: [lambda room, r: room.desk.start_canary(r.id)] * 3 + [lambda room, r: room.desk.ask_people(r.id, because="too few people")],
    S.CANARY: [_two_replicas, lambda room, r: room.desk.mark_ready(r.id, answer(GateName.CANARY, r.digest))],
    S.JUDGING: [lambda room, r: _judged(room, r, random.Random(r.id))],
    S.READY: [_approved], S.APPROVED: [lambda room, r: room.desk.begin_promotion(r.id)],
    S.PROMOTING: [lambda room, r: room.desk.promote(r.id)],
    S.CHAMPION: [_quarantined, lambda room, r: room.desk.roll_back(r.id, actor="system:watch", reason="harm", seen=r)],
}  # fmt: skip


def _acts(room: ReleaseRoom, seed: int, count: int) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        try:
            (_act if dice.random() < 0.5 else _next)(room, dice)
        except RatchetError:
            continue  # refused: nothing may have changed


def _check(room: ReleaseRoom, engine: Engine) -> None:
    with reading(engine) as connection:
        for row in connection.execute(select(release_history)):
            moved = row.from_state is not None and row.from_state != row.to_state
            assert not moved or S(row.to_state) in MOVES[S(row.from_state)], (row.from_state, row.to_state)
        for before, after in pairwise(
            connection.execute(select(release_history).order_by(release_history.c.release_id, release_history.c.generation))
        ):
            ramped = before.release_id == after.release_id and before.to_state == after.to_state == S.CANARY
            assert not ramped or after.stage in (before.stage, before.stage + 1), "no stage is skipped"
        lifted = {entry.subject for entry in audit.entries(connection, newest=10_000) if entry.action == "version.quarantine_lifted"}
        raised = read_alarms(connection, POLICY)
        history = list(reversed(read_history(connection, POLICY, newest=10_000)))
        barred = quarantined(connection, POLICY)
        assert audit.verify(connection).problem is None
        _check_chain(audit.entries(connection))
    assert [row.generation for row in history] == list(range(1, len(history) + 1))
    for before, after in pairwise(history):
        if after.action == "promote":
            assert after.previous == before.digest, "the predecessor of a promotion is the champion before it"
    held = SqlHoldoutBook(room.engine).newest(POLICY, limit=1000)
    assert sum(holdout.ended_at is None for holdout in held) <= 1
    assert {holdout.digest for holdout in held} <= {row.digest for row in history}, "nobody is held on what was never champion"
    pointer = room.desk.pointer(POLICY)
    assert pointer.digest not in barred
    assert pointer.anchor not in barred
    by_programs = [row for row in history if row.action == "rollback" and not row.actor.startswith("user:")]
    assert len(by_programs) <= room.terms.rollbacks_max, "the clock stands still: all of it is one day"
    _check_alarms(raised, lifted)
    known = room.ledger.list(policy=POLICY, limit=1000)
    assert not [r.id for r in known if r.state in IN_FLIGHT and r.digest in barred], "nothing of a version that is quarantined goes on"
    states = [r.state for r in known]
    assert states.count(S.CANARY) + states.count(S.JUDGING) <= 1, "one is judged at a time"
    _check_judged(room)
    assert states.count(S.CHAMPION) == 1
    champion = next(r for r in known if r.state is S.CHAMPION)
    assert champion.digest == pointer.digest


FORWARDS = {f"release.{state}" for state in ("canary", "ramped", "judging", "ready", "approved", "promoting", "champion")}


def _check_chain(chain: Iterable[AuditEntry]) -> None:
    """The audit in its order: what was allowed at each moment by what had happened before it."""
    incident, barred, said = False, set[str](), defaultdict[str, set[str]](set)
    for entry in chain:
        if entry.action == "alarm.raised":
            said.pop("frozen", None)
        match entry.action:
            case "alarm.raised" | "alarm.ended" if entry.detail["kind"] == AlarmKind.INCIDENT:
                incident = entry.action == "alarm.raised"
            case "version.quarantined":
                barred.add(entry.subject)
                said.pop(entry.subject, None)
            case "version.lift_vote":
                said[entry.subject].add(entry.actor)
            case "version.quarantine_lifted":
                assert len(said.pop(entry.subject)) == 2, "by two people, each once"
                barred.remove(entry.subject)
            case "promotions.frozen":
                said.pop("frozen", None)
            case "promotions.unfreeze_vote":
                said["frozen"].add(entry.actor)
            case "promotions.unfrozen":
                assert len(said.pop("frozen")) == 2, "by two people, each once"
            case "release.ready" if entry.detail["from"] == S.APPROVED:
                pass  # its approvals were taken back, which may happen at any time
            case action if action in FORWARDS and entry.detail["from"] not in (S.SUPERSEDED, S.CHAMPION):
                assert not incident, f"{action} in an incident"
                assert entry.detail["digest"] not in barred, f"{action} of a version that is quarantined"
            case _:
                pass


def _check_judged(room: ReleaseRoom) -> None:
    """What people let through had enough votes of enough people, and a canary's pass never stood in for them, nor theirs for it."""
    for release in room.ledger.list(policy=POLICY, limit=1000):
        results = room.desk.recorded(release.id)
        by_people = release.config["by_people"] is not None
        if release.state in (S.READY, S.APPROVED, S.PROMOTING, S.CHAMPION, S.SUPERSEDED) and release.digest != "v1":
            assert results[GateName.PEOPLE if by_people else GateName.CANARY].verdict is Verdict.PASS
        if by_people and (found := results.get(GateName.PEOPLE)) is not None and found.verdict is Verdict.PASS:
            assert len(found.evidence["said"]) >= PEOPLE.votes
            assert found.evidence["people"] >= PEOPLE.judges
            assert found.evidence["low"] > 0.0


def _check_alarms(raised: list[Alarm], lifted: set[str]) -> None:
    """One of a kind at a time; a freeze is ended by two people, or gives way to the same call about another champion."""
    still_open = [alarm.kind for alarm in raised if alarm.ended_at is None]
    assert len(still_open) == len(set(still_open))
    for alarm in raised:
        if alarm.ended_by == "system:watch" and alarm.kind is AlarmKind.ROLLBACK_CAP:
            calls = [other for other in raised if other.kind is alarm.kind and other.release_id != alarm.release_id]
            assert any(other.raised_at == alarm.ended_at for other in calls)
        elif alarm.ended_by is not None and alarm.kind in FREEZING:
            assert len(alarm.ended_by.split(", ")) == 2
    assert lifted <= set(DIGESTS) | {"v1"}


Forward = Callable[[ReleaseRoom], Callable[[], object]]
FORWARD: dict[str, Forward] = {
    "start_canary": lambda room: partial(room.desk.start_canary, room.queued("v2").id),
    "ask_people": lambda room: partial(room.desk.ask_people, _queued_with_pairs(room, "v2").id, because="too few people"),
    "ramp": lambda room: partial(room.desk.ramp, room.canary("v2").id, reason="units"),
    "mark_ready": lambda room: partial(room.desk.mark_ready, room.canary("v2").id, answer(GateName.CANARY, "v2")),
    "rebind": lambda room: partial(room.desk.rebind, room.ready("v2").id, answer(GateName.CANARY, "v2", note="again")),
    "count_votes": lambda room: partial(room.desk.count_votes, _voted(room, "v2").id),
    "approve": lambda room: partial(_approve, room, room.ready("v2")),
    "begin_promotion": lambda room: partial(room.desk.begin_promotion, room.approved("v2").id),
    "promote": lambda room: partial(room.desk.promote, room.desk.begin_promotion(room.approved("v2").id).id),
}
"""Every act that moves a release forward, one step before it."""


def _approve(room: ReleaseRoom, release: Release) -> Release:
    return room.desk.approve(release.id, approver=ADA, evidence=str(release.evidence_digest))


def _queued_with_pairs(room: ReleaseRoom, digest: str) -> Release:
    release = room.queued(digest)
    SqlPairs(room.engine).keep([pair_of(release, n) for n in range(PAIRS)], at=room.clock())
    return release


def _voted(room: ReleaseRoom, digest: str) -> Release:
    """Everybody favours it, and nobody has counted."""
    release = room.desk.ask_people(_queued_with_pairs(room, digest).id, because="too few people")
    for number in range(PAIRS):
        by = (ADA, BOB, EVE)[number % 3]
        choice = Choice.LEFT if pair_of(release, number).candidate_is_left(by) else Choice.RIGHT
        ReleaseJury(room.ledger).vote(release.id, pair_of(release, number).id, choice, voter=by, shown_to=by, proven=True)
    return release


@pytest.mark.parametrize("act", FORWARD)
@pytest.mark.parametrize("season_s", [0.0, 86_400.0], ids=["any time", "a daily peak"])
def test_nothing_moves_forward_in_an_incident(sqlite_engine: Engine, act: str, season_s: float) -> None:
    """With an incident open a canary went from stage 0 to 1 and became READY: nobody had asked in those acts."""
    room = release_room(sqlite_engine, terms=replace(TERMS, reentry_season_s=season_s, approval_ttl_s=200_000.0))
    began, forward = room.clock.now, FORWARD[act](room)
    room.desk.raise_incident(POLICY, release_id=None, reason="all versions fail")
    with pytest.raises(Refused, match="an incident of tab is open"):
        forward()
    room.clock.advance(600)
    assert room.desk.end_incident(POLICY, reason="calm")
    if season_s:
        with pytest.raises(Refused, match="nothing moves forward until that hour has come again"):
            forward()
        room.clock.now = began + timedelta(seconds=season_s)
    forward()


@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_of_acts_keep_every_invariant(engine: Engine, seed: int) -> None:
    room = release_room(engine, terms=TERMS)
    for part in range(4):
        _acts(room, seed * 10 + part, 40)
        _check(room, engine)
    with reading(engine) as connection:
        done = {entry.action for entry in audit.entries(connection, newest=10_000)}
    assert done >= HAPPENS, "in eighty acts of a kind all of it was refused, and every invariant held of nothing"


def test_eight_people_acting_at_once_keep_every_invariant(engine: Engine) -> None:
    room = release_room(engine, terms=TERMS)
    gate = threading.Barrier(8)

    def act(seed: int) -> None:
        gate.wait()
        _acts(room, 100 + seed, 15)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(act, range(8))) == [None] * 8
    _check(room, engine)
