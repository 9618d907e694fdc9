"""A release whose approvals were taken back asks people anew: how many, until when, and who hears of it. On SQLite alone."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine

from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.releases import Release, ReleaseState
from tests.fakes.releases import ADA, BOB, ReleaseRoom, answer, release_room

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
