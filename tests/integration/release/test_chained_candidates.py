"""Candidates that continue from one another while a canary runs: what is no good ends what continues from it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Engine, select

from app.db.engine import open_engine, reading
from app.db.release import audit
from app.db.release.releases import read_approvals
from app.db.tables import quarantine
from app.domain.errors import Quarantined
from app.domain.release.gates import GateName
from app.domain.release.releases import Release, ReleaseState
from tests.fakes.releases import ADA, BOB, EVE, POLICY, ReleaseRoom, answer, release_room, version

S = ReleaseState


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    opened = open_engine(database_url)
    yield opened
    opened.dispose()


def _chained(room: ReleaseRoom, digest: str, parent: str) -> Release:
    release = room.desk.start_offline(room.desk.open(replace(version(digest), parent=parent), initiator="system:loop").id)
    for gate in (GateName.TRAINING_HEALTH, GateName.OFFLINE):
        room.desk.record(release.id, answer(gate, digest))
    return room.desk.queue(release.id)


def _promoted(room: ReleaseRoom, canary: Release) -> None:
    """A canary that passes, to the top."""
    ready = room.desk.mark_ready(canary.id, answer(GateName.CANARY, canary.digest))
    room.desk.approve(ready.id, approver=ADA, evidence=ready.evidence_digest or "")
    room.desk.promote(room.desk.begin_promotion(ready.id).id)


@pytest.mark.parametrize("end", ["harm", "rejected", "inconclusive", "promoted", "promoted and rolled back"])
def test_what_continues_from_a_candidate_ends_with_it_where_it_is_no_good(engine: Engine, end: str) -> None:
    """v2 in its canary, v3 made room for v4: v4 holds what v2 learned."""
    room = release_room(engine)
    desk, first = room.desk, room.desk.start_canary(_chained(room, "v2", "v1").id)
    second, third = _chained(room, "v3", "v2"), _chained(room, "v4", "v3")
    assert desk.find(second.id).state is S.SUPERSEDED_BY_NEWER
    if end == "harm":
        desk.abort(first.id, actor="system:watch", reason="harm", quarantine=True)
    elif end == "rejected":
        desk.reject(first.id, approver=ADA, reason="its tone")
    elif end == "inconclusive":
        desk.stop(first.id, to=S.INCONCLUSIVE, reason="no answer")
    else:
        _promoted(room, first)
        if end.endswith("rolled back"):
            desk.roll_back(first.id, actor=ADA, reason="harm")
    found = desk.find(third.id)
    if end in ("inconclusive", "promoted"):
        assert found.state is S.QUEUED
        assert desk.start_canary(third.id).champion_digest == ("v2" if end == "promoted" else "v1")
    else:
        assert found.state is S.ABORTED
        assert "continues from it" in (found.reason or "")


@pytest.mark.parametrize("end", ["inconclusive", "expired", "superseded by newer", "superseded"])
def test_a_version_taken_back_after_its_release_is_barred_and_ends_what_continues_from_it(sqlite_engine: Engine, end: str) -> None:
    room = release_room(sqlite_engine)
    desk, first = room.desk, _chained(room, "v2", "v1")
    if end != "superseded by newer":
        desk.start_canary(first.id)
    if end in ("expired", "superseded"):
        desk.mark_ready(first.id, answer(GateName.CANARY, "v2"))
    if end == "superseded":
        desk.approve(first.id, approver=ADA, evidence=desk.find(first.id).evidence_digest or "")
        desk.promote(desk.begin_promotion(first.id).id)
        room.champion("v3")
    child = _chained(room, "v4", "v2")
    if end == "inconclusive":
        desk.stop(first.id, to=S.INCONCLUSIVE, reason="no answer")
    elif end == "expired":
        room.clock.advance(5 * 3600)
        desk.expire(first.id)
    desk.start_canary(child.id)
    before = desk.find(first.id).state
    assert before.lower() == end.replace(" ", "_")
    pointer = desk.pointer(POLICY)
    gone = desk.roll_back(first.id, actor=ADA, reason="poisoned turns")
    assert gone.state is (S.ROLLED_BACK if before is S.SUPERSEDED else before)
    found = desk.find(child.id)
    assert found.state is S.ABORTED
    assert found.reason == "tiny-v2 was taken back, and it continues from it"
    assert desk.pointer(POLICY).digest == pointer.digest
    with pytest.raises(Quarantined, match="tiny-v2 was rolled back"):
        desk.plant(version("v2"), actor=BOB, reason="again")


@pytest.mark.parametrize("far", ["queued", "canary", "ready", "approved", "promoting"])
def test_a_version_that_is_taken_back_ends_every_release_of_it(sqlite_engine: Engine, far: str) -> None:
    """v2 was champion once and is on its way again: who takes back the first release takes back the second."""
    room = release_room(sqlite_engine)
    desk, first = room.desk, room.champion("v2")
    room.champion("v3")
    again = desk.plant(version("v2"), actor=EVE, reason="v3 is slow")
    if far != "queued":
        again = desk.start_canary(again.id)
    if far in ("ready", "approved", "promoting"):
        again = desk.mark_ready(again.id, answer(GateName.CANARY, "v2"))
    if far in ("approved", "promoting"):
        for person in (ADA, BOB):
            desk.approve(again.id, approver=person, evidence=again.evidence_digest or "")
    if far == "promoting":
        desk.begin_promotion(again.id)
    assert desk.find(again.id).state.lower() == far
    desk.roll_back(first.id, actor=ADA, reason="poisoned turns")
    ended = desk.find(again.id)
    assert (ended.state, ended.stage) == (S.ABORTED, None)
    assert ended.reason == "tiny-v2 was taken back: poisoned turns"
    with sqlite_engine.connect() as connection:
        assert read_approvals(connection, again.id) == []
    assert desk.pointer(POLICY).digest == "v3"


def test_a_champion_that_is_rolled_back_ends_other_releases_of_it(sqlite_engine: Engine) -> None:
    """v2 waits in the queue when it comes back as champion, and goes with it."""
    room = release_room(sqlite_engine)
    first = room.champion("v2")
    room.champion("v3")
    fourth = room.canary("v4")
    again = room.desk.plant(version("v2"), actor=EVE, reason="v3 is slow")
    _promoted(room, fourth)
    room.desk.roll_back(fourth.id, actor=ADA, reason="slow", to="v2")
    assert room.desk.find(first.id).state is S.CHAMPION
    assert room.desk.find(again.id).state is S.QUEUED
    room.desk.roll_back(first.id, actor=ADA, reason="rude")
    assert room.desk.pointer(POLICY).digest == "v3"
    assert room.desk.find(again.id).state is S.ABORTED
    assert room.desk.find(again.id).reason == "tiny-v2 was taken back: rude"


def test_what_continues_from_a_champion_goes_on_when_the_one_before_it_is_taken_back(sqlite_engine: Engine) -> None:
    """The champion was judged good itself: its line stays, whatever it was trained from."""
    room = release_room(sqlite_engine)
    first = room.champion("v2")
    _promoted(room, room.desk.start_canary(_chained(room, "v3", "v2").id))
    third = _chained(room, "v4", "v3")
    room.desk.roll_back(first.id, actor=ADA, reason="poisoned turns")
    assert room.states() == {"v1": S.SUPERSEDED, "v2": S.ROLLED_BACK, "v3": S.CHAMPION, "v4": S.QUEUED}
    assert room.desk.find(third.id).state is S.QUEUED


def test_a_new_reason_against_a_barred_version_is_kept_and_the_same_one_again_is_not(engine: Engine) -> None:
    room = release_room(engine)
    release = room.canary("v2")
    for actor, reason in (("system:watch", "harm"), (EVE, "it leaks keys"), (EVE, "it leaks keys")):
        room.desk.roll_back(release.id, actor=actor, reason=reason)
    with reading(engine) as connection:
        entries = audit.entries(connection, subject="v2")
        told = [(entry.actor, entry.detail["reason"]) for entry in entries if entry.action == "version.quarantined"]
        assert connection.execute(select(quarantine.c.reason)).scalars().all() == ["it leaks keys"]
    assert sorted(told) == [("system:watch", "harm"), (EVE, "it leaks keys")]
