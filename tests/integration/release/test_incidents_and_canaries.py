"""What an incident of the place does to candidates that are being judged: nothing, however long it lasts."""

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import groupby

import msgspec
import pytest
from sqlalchemy import Engine, update

from app.db.engine import writing
from app.db.release.evidence import SqlEvidenceBook
from app.db.tables import turns
from app.domain.errors import Refused
from app.domain.release.alarms import AlarmKind
from app.domain.release.gates import GateName
from app.domain.release.releases import Release, ReleaseState
from app.domain.release.sessions import Session
from app.domain.release.terms import Terms
from pipelines.evaluation.config import ApprovalConfig, GatesConfig
from pipelines.evaluation.live.explain import explain
from tests.fakes.releases import POLICY, answer, release_room
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import DECIDED, WatchedRoom, alarms, serve, small_gates, watched_room

S = ReleaseState


def patient(*, margin: float = 0.10, **changes: object) -> GatesConfig:
    """Bad data for ten minutes abort. Two points of margin take longer than any of these tests."""
    metrics = tuple(m if m.margin is None else msgspec.structs.replace(m, margin=margin) for m in small_gates().metrics)
    return small_gates(hold_max_s=600.0, approval=ApprovalConfig(ttl_s=36_000.0), metrics=metrics, **changes)


def lived_through(world: WatchedRoom, *, minutes: int) -> None:
    """Everything fails for so long, and is mended then."""
    for digest in world.traffic.behaviours:
        world.traffic.behaviours[digest] = Behaviour(fault=0.5)
    serve(world, minutes, people=40)
    assert [alarm.ended_at for alarm in alarms(world, AlarmKind.INCIDENT)] == [None]
    for digest in world.traffic.behaviours:
        world.traffic.behaviours[digest] = Behaviour(fault=0.0)
    serve(world, 6)
    assert all(alarm.ended_at is not None for alarm in alarms(world, AlarmKind.INCIDENT))


def overdue(world: WatchedRoom, engine: Engine) -> None:
    """The labels of a minute are late, and come then."""
    world.traffic.delivered = False
    serve(world, 1, people=20)
    world.room.clock.advance(400)
    world.watch.tick()
    world.traffic.delivered = True


class ReadBook(SqlEvidenceBook):
    """Counts how often somebody reads what the champion was like before."""

    reads = 0

    def history(
        self, policy: str, digest: str, *, since: datetime, until: datetime | None = None, newest: int = 5000
    ) -> list[Session]:  # fmt: skip
        self.reads += 1
        return super().history(policy, digest, since=since, until=until, newest=newest)


def come(world: WatchedRoom, engine: Engine) -> None:
    with writing(engine) as connection:
        connection.execute(update(turns).where(turns.c.labelled_at.is_(None)).values(labelled_at=world.room.clock()))


@pytest.mark.parametrize(("state", "margin"), [(S.CANARY, 0.02), (S.READY, 0.10)])
def test_an_incident_is_no_doubt_about_the_data_however_long_it_lasts(sqlite_engine: Engine, state: ReleaseState, margin: float) -> None:
    """The first label that was overdue after an incident of ten minutes: ABORTED, "the data have been in doubt for 24 min"."""
    world = watched_room(sqlite_engine, config=patient(margin=margin))
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    release = world.run(release, until=DECIDED) if state is S.READY else release
    serve(world, 2)
    lived_through(world, minutes=15)
    overdue(world, sqlite_engine)
    found = world.room.desk.find(release.id)
    assert found.state is state, found.reason
    rows = SqlEvidenceBook(sqlite_engine).decisions(release.id)
    assert [cause for cause, _ in groupby(row["evidence"]["cause"] for row in rows if row["action"] == "hold")] == ["incident", "data"]
    come(world, sqlite_engine)
    serve(world, 2)
    assert world.room.desk.find(release.id).state is state
    assert rows[-1] != SqlEvidenceBook(sqlite_engine).decisions(release.id)[-1], "and the doubt has an end"
    assert [one.differences for one in explain(found, SqlEvidenceBook(sqlite_engine)) if one.replayed if one.differences] == []


def test_data_that_stay_in_doubt_after_an_incident_still_abort(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine, config=patient(margin=0.02))
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    lived_through(world, minutes=15)
    overdue(world, sqlite_engine)
    assert world.room.desk.find(release.id).state is S.CANARY
    world.room.clock.advance(601)
    world.watch.tick()
    assert str(world.room.desk.find(release.id).reason).startswith("the data have been in doubt for 10 min")


def test_the_clock_of_a_canary_stands_still_while_an_incident_lasts(sqlite_engine: Engine) -> None:
    """Its deadline ran on: an hour of incident ended whatever was being judged."""
    world = watched_room(sqlite_engine, config=patient(canary_max_s=3600.0, canary_longest_s=3600.0))
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    serve(world, 2)
    lived_through(world, minutes=75)
    assert world.run(release, until=DECIDED).state is S.READY


def test_the_hour_that_has_to_come_again_is_not_the_canary_s_either(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine, config=patient(reentry_season_s=14_400.0, canary_max_s=7200.0, no_data_hold_s=1e6))
    release = world.queue("v2", Behaviour())
    world.watch.tick()
    serve(world, 2)
    lived_through(world, minutes=15)
    [incident] = alarms(world, AlarmKind.INCIDENT)
    waiting = world.room.desk.find(release.id)
    serve(world, 3, people=300)
    held: Release = world.room.desk.find(release.id)
    assert (held.state, held.stage) == (S.CANARY, waiting.stage), "nothing moves before that hour"
    reason = [row["reason"] for row in SqlEvidenceBook(sqlite_engine).decisions(release.id)][-1]
    assert "nothing moves forward until that hour has come again" in reason
    world.room.clock.advance(14_400.0 - (world.room.clock() - incident.raised_at).total_seconds())
    assert world.run(held, until=DECIDED).state is S.READY


def test_nobody_is_too_late_in_an_incident_and_is_asked_anew_after_it(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine, terms=Terms(config_hash="config", approval_ttl_s=3600.0))
    release = room.ready("v2")
    room.desk.raise_incident(POLICY, release_id=None, reason="all versions fail")
    room.clock.advance(3601)
    with pytest.raises(Refused, match="an incident of tab is open"):
        room.desk.expire(release.id)
    room.desk.end_incident(POLICY, reason="calm")
    again = room.desk.rebind(release.id, answer(GateName.CANARY, "v2", note="after it"))
    assert again.approval_expires_at == room.clock() + timedelta(hours=1)
    assert room.desk.expire(release.id).state is S.READY
    room.clock.advance(3601)
    assert room.desk.expire(release.id).state is S.EXPIRED


@pytest.mark.parametrize("still", ["open", "its hour has not come again"])
def test_nobody_plans_a_canary_that_may_not_begin(sqlite_engine: Engine, still: str) -> None:
    world = watched_room(sqlite_engine, config=small_gates(reentry_season_s=14_400.0))
    book = ReadBook(sqlite_engine)
    world.watch.ports = replace(world.watch.ports, evidence=book)
    waiting = world.queue("v2", Behaviour())
    world.room.desk.raise_incident(POLICY, release_id=None, reason="limits are burnt")
    if still != "open":
        world.room.desk.end_incident(POLICY, reason="kept again")
    for _ in range(2):
        world.watch.tick()
    assert (book.reads, world.room.desk.find(waiting.id).state) == (0, S.QUEUED)
    if still == "open":
        world.room.desk.end_incident(POLICY, reason="kept again")
    world.room.clock.advance(14_400)
    world.watch.tick()
    assert (book.reads, world.room.desk.find(waiting.id).state) == (1, S.CANARY)
