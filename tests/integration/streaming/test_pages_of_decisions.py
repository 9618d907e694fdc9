"""Decisions are read a page at a time, and a page may end amid turns that ended at the same moment."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine

from app.db.learning.decisions import PAGE, read_decisions
from tests.fakes.releases import POLICY, release_room
from tests.fakes.traffic import Behaviour, Traffic


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["all at one moment", "one after the other"])
def test_every_turn_is_read_once_across_pages(sqlite_engine: Engine, seconds: float) -> None:
    room = release_room(sqlite_engine)
    traffic = Traffic(engine=sqlite_engine, clock=room.clock, behaviours={"v1": Behaviour()})
    began = room.clock.now
    traffic.serve(PAGE + PAGE // 2, seconds=seconds)
    found = list(read_decisions(sqlite_engine, policy=POLICY, since=None, until=None))
    assert len(found) == len({decision.inference_id for decision in found}) == PAGE + PAGE // 2
    assert found == sorted(found, key=lambda decision: (decision.finished_at, decision.inference_id))
    assert list(read_decisions(sqlite_engine, policy=POLICY, since=None, until=began)) == []
    assert list(read_decisions(sqlite_engine, policy=POLICY, since=began + timedelta(seconds=1), until=None)) == []
    assert list(read_decisions(sqlite_engine, policy="other", since=None, until=None)) == []
