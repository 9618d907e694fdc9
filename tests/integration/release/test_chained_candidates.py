"""Candidates that continue from one another while a canary runs: what is no good ends what continues from it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from app.db.engine import open_engine
from app.domain.release.gates import GateName
from app.domain.release.releases import Release, ReleaseState
from tests.fakes.releases import ADA, ReleaseRoom, answer, release_room, version

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
        ready = desk.mark_ready(first.id, answer(GateName.CANARY, "v2"))
        desk.approve(first.id, approver=ADA, evidence=ready.evidence_digest or "")
        desk.promote(desk.begin_promotion(first.id).id)
        if end.endswith("rolled back"):
            desk.roll_back(first.id, actor=ADA, reason="harm")
    found = desk.find(third.id)
    if end in ("inconclusive", "promoted"):
        assert found.state is S.QUEUED
        assert desk.start_canary(third.id).champion_digest == ("v2" if end == "promoted" else "v1")
    else:
        assert found.state is S.ABORTED
        assert "continues from it" in (found.reason or "")
