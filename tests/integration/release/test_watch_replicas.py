"""Two replicas of the watch at the same moment: each act names the state and stage that it was decided for, so one of them acts."""

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from app.db.release.evidence import SqlEvidenceBook
from app.db.release.releases import SqlReleaseLedger
from app.domain.errors import StaleGeneration
from app.domain.release.gates import GateName
from app.domain.release.releases import Release, ReleaseState
from tests.fakes.releases import ADA, POLICY, answer
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import WatchedRoom, new_watch, watched_room

S = ReleaseState


class Together:
    """A list of releases that both replicas have read before either goes on."""

    def __init__(self, ledger: SqlReleaseLedger) -> None:
        self._ledger = ledger
        self._gate = threading.Barrier(2)

    def list(self, *, policy: str | None = None, states: Collection[ReleaseState] = (), limit: int = 100) -> list[Release]:
        found = self._ledger.list(policy=policy, states=states, limit=limit)
        if S.CANARY in states and S.READY in states:
            self._gate.wait(timeout=60)
        return found


def _tick_together(engine: Engine, world: WatchedRoom) -> None:
    releases = Together(world.room.ledger)
    watches = [new_watch(engine, world.room, world.config) for _ in range(2)]
    for watch in watches:
        watch.ports = replace(watch.ports, releases=releases)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(watch.tick) for watch in watches]:
            done.result()


def test_two_replicas_ramp_once(engine: Engine) -> None:
    """12 of 12 times they ramped twice: from stage 0 to 2, past a stage that nobody was seen in."""
    world = watched_room(engine)
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    while world.room.desk.find(release.id).stage == 0:
        world.traffic.serve(100)
        _tick_together(engine, world)
    assert world.room.desk.find(release.id).stage == 1
    ramps = [row for row in SqlEvidenceBook(engine).decisions(release.id) if row["action"] == "ramp"]
    assert len(ramps) == 1, "and the decision is on record once"


def test_two_replicas_roll_back_once(engine: Engine) -> None:
    world = watched_room(engine)
    release = world.room.champion("v2")
    world.traffic.behaviours["v2"] = Behaviour(fault=0.9)
    world.traffic.engines_hold("v2")
    while world.room.desk.find(release.id).state is S.CHAMPION:
        world.traffic.serve(100)
        _tick_together(engine, world)
    history = [row for row in SqlEvidenceBook(engine).eras(POLICY) if row.action == "rollback"]
    assert len(history) == 1


@pytest.mark.parametrize("act", ["ramp", "ready", "stop", "abort", "void"])
def test_an_act_decided_for_another_stage_changes_nothing(engine: Engine, act: str) -> None:
    world = watched_room(engine)
    desk, seen = world.room.desk, world.room.canary("v2")
    before = desk.ramp(seen.id, reason="done", seen=seen)
    acts = {
        "ramp": lambda: desk.ramp(seen.id, reason="done", seen=seen, because=answer(GateName.CANARY, "v2")),
        "ready": lambda: desk.mark_ready(seen.id, answer(GateName.CANARY, "v2"), seen=seen),
        "stop": lambda: desk.stop(seen.id, to=S.INCONCLUSIVE, reason="late", seen=seen),
        "abort": lambda: desk.abort(seen.id, actor="system:watch", reason="harm", seen=seen),
        "void": lambda: desk.void(seen.id, reason="doubt", seen=seen),
    }
    with pytest.raises(StaleGeneration, match="at stage 1, not CANARY at stage 0"):
        acts[act]()
    assert desk.find(seen.id) == before
    assert GateName.CANARY not in desk.recorded(seen.id)
    assert desk.abort(seen.id, actor=ADA, reason="people say what they want of the release as it is").state is S.ABORTED
