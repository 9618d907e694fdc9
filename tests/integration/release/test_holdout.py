"""The long-term holdout on both databases: begins and ends by itself, counts everything once, and sees what builds up over releases."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, func, insert, select

from app.db.access.erasures import SqlEraser
from app.db.engine import reading, writing
from app.db.release.audit import entries
from app.db.release.holdouts import SqlHoldoutBook
from app.db.release.needed_weights import SqlNeededWeights
from app.db.release.pointer import SqlRoutes, versions_by_role, wanted_versions
from app.db.tables import exposures, holdout_people
from app.db.upkeep.needs import needs
from app.domain.ids import utc_now
from app.domain.release.assignment import Arm, member_of
from app.domain.release.holdouts import ArmMean, Counted, Holdout, Member, Piece, Reading
from pipelines.commands.release import release
from pipelines.evaluation.config import Good, HoldoutConfig, MetricClass, MetricConfig
from pipelines.evaluation.live.holdout import HoldoutKeeper
from tests.fakes.clock import FrozenClock
from tests.fakes.console import browser
from tests.fakes.releases import ADA, POLICY, release_room
from tests.fakes.served import erasure
from tests.fakes.streaming import MemorySegments
from tests.fakes.traffic import Behaviour, Traffic
from tests.fakes.watching import WatchedRoom, new_watch, small_gates, watched_room
from tests.integration.console.deployment import deploy

GATES = small_gates(holdout=HoldoutConfig(share=0.1, days=28.0), interval_s=1.0)
DAY = 86_400.0


@dataclass(kw_only=True)
class Wearing(Traffic):
    """Every turn on a version after the first wears a person out a little, for good; each release is as good as the one before it."""

    worn: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    a_turn: float = 0.02

    def _turn(self, batch: dict[str, list[dict[str, Any]]], actor: str, arm: Arm) -> None:
        self.worn[actor] += arm.digest != "v1"
        usual = self.behaviours[arm.digest]
        tired = replace(usual, success=max(0.0, usual.success - self.a_turn * self.worn[actor]))
        self.behaviours = self.behaviours | {arm.digest: tired}
        super()._turn(batch, actor, arm)
        self.behaviours = self.behaviours | {arm.digest: usual}


@pytest.fixture
def world(engine: Engine) -> WatchedRoom:
    return watched_room(engine, config=GATES)


def _open(engine: Engine) -> Holdout:
    found = SqlHoldoutBook(engine).open(POLICY)
    assert found is not None
    return found


def _days(world: WatchedRoom, days: int, *, people: int = 400, known: int = 400) -> None:
    """The same people come every day, once, in the morning; the watch looks in the evening until it has counted."""
    for _ in range(days):
        world.traffic.serve(people, seconds=600.0, known=known)
        world.room.clock.advance(DAY - 600.0)
        for _ in range(3):
            world.watch.tick()


def test_it_begins_on_the_champion_is_held_by_engines_and_ends_with_its_configuration(world: WatchedRoom, engine: Engine) -> None:
    world.watch.tick()
    begun = _open(engine)
    assert (begun.digest, begun.share, begun.ends_at - begun.began_at) == ("v1", 0.1, timedelta(days=28))
    assert SqlRoutes(engine, max_age_s=0.0).route(POLICY).holdout == begun
    world.watch.tick()
    assert _open(engine).id == begun.id, "one at a time"
    for digest in ("v2", "v3", "v4"):
        world.traffic.behaviours[digest] = Behaviour()
        world.traffic.engines_hold(digest)
        world.room.champion(digest)
    with reading(engine) as connection:
        assert (POLICY, "v1") in wanted_versions(connection)
        assert versions_by_role(connection, POLICY)["held"] == ["v1"]
        assert needs(connection).since[POLICY] <= begun.counted_until
    assert "v1" in SqlNeededWeights(engine, newest=0, clock=world.room.clock).needed()
    off = new_watch(engine, world.room, msgspec.structs.replace(GATES, holdout=HoldoutConfig()))
    off.tick()
    assert SqlHoldoutBook(engine).open(POLICY) is None
    ended = SqlHoldoutBook(engine).newest(POLICY)[0]
    assert (ended.id, ended.ended_because) == (begun.id, "the configuration asks for none")
    with reading(engine) as connection:
        acts = [entry.action for entry in entries(connection) if entry.action.startswith("holdout.")]
    assert acts == ["holdout.began", "holdout.ended"]


def test_every_turn_of_whom_it_follows_is_counted_once_whatever_is_killed(world: WatchedRoom, engine: Engine) -> None:
    world.watch.tick()
    begun, before = _open(engine), world.traffic.sessions
    world.room.clock.advance(1)
    world.traffic.serve(600, seconds=3_600.0, known=300)
    world.room.clock.advance(2 * DAY)
    while _open(engine).counted_until < world.room.clock.now - timedelta(hours=1):
        ports = new_watch(engine, world.room, GATES).ports  # each a process of its own, that remembers nothing
        HoldoutKeeper(POLICY, GATES, ports.holdouts, ports.evidence, ports.desk, ports.clock, piece=37).tick()
    book = SqlHoldoutBook(engine)
    with reading(engine) as connection:
        served = connection.execute(
            select(exposures.c.actor, func.count()).where(exposures.c.occurred_at > begun.began_at).group_by(exposures.c.actor)
        ).all()
    assert world.traffic.sessions - before == sum(number for _, number in served) == 600
    for is_held, member in ((True, Member.HELD), (False, Member.BESIDE)):
        mine = {actor: number for actor, number in served if member_of(begun, actor) is member}
        found = book.sums(begun, week=None)["task_success", is_held]
        assert (found.people, found.n) == (len(mine), sum(mine.values()))
        assert found.nn == sum(number**2 for number in mine.values())
    stale = replace(begun, counted_until=begun.began_at)
    piece = book.piece(stale, until=world.room.clock.now, limit=10)
    assert piece is not None
    assert not book.count(stale, piece, []), "another process has gone on meanwhile"


def test_a_slow_process_writes_no_older_readings_over_newer_ones(world: WatchedRoom, engine: Engine) -> None:
    world.watch.tick()
    begun, book, now = _open(engine), SqlHoldoutBook(engine), world.room.clock.now
    arm = ArmMean(people=1, turns=1, mean=0.5)
    newer = Reading(week=0, metric="task_success", held=arm, beside=arm)
    book.keep(begun, [newer], until=now + timedelta(hours=2))
    book.keep(begun, [], until=now + timedelta(hours=1))
    assert (_open(engine).read_until, len(_open(engine).readings)) == (now + timedelta(hours=2), 1)


def test_what_refers_to_the_champion_is_read_where_the_champion_was_known_at_its_beginning(sqlite_engine: Engine) -> None:
    tokens = MetricConfig(name="tokens", source="length", kind=MetricClass.COST, good=Good.DOWN, relative=True, abort_margin=0.06)
    unmeasured = msgspec.structs.replace(tokens, name="first_token", source="time_to_first_token")
    gates = msgspec.structs.replace(GATES, metrics=(*GATES.metrics, tokens, unmeasured))
    world = watched_room(sqlite_engine, config=gates)
    world.watch.tick()
    _days(world, 2)
    read = {reading.metric: reading for reading in _open(sqlite_engine).readings if reading.week is None}
    assert set(read) == {"fault", "task_success", "reward", "undone", "tokens"}, "without what has no direction"
    assert read["tokens"].beside.mean == pytest.approx(0.5, abs=0.02), "as long as its median: neither arm was told to be terser"


def test_exposures_of_one_moment_are_never_parted(world: WatchedRoom, engine: Engine) -> None:
    world.watch.tick()
    begun, moment = _open(engine), world.room.clock.now + timedelta(seconds=5)
    row = {
        "policy": POLICY, "release_id": None, "stage": "champion", "arm": "champion", "probability": 1.0, "share": 0.0, "holdback": 0.0,
        "digest": "v1", "occurred_at": moment,
    }  # fmt: skip
    rows = [row | {"id": f"x{n}", "inference_id": f"i{n}", "episode_id": f"e{n}", "actor": f"a{n}"} for n in range(7)]
    anonymous = row | {"id": "x7", "inference_id": "i7", "episode_id": "e7", "actor": "e7"}
    with writing(engine) as connection:
        connection.execute(insert(exposures), [*rows, anonymous])
    piece = SqlHoldoutBook(engine).piece(begun, until=moment + timedelta(hours=1), limit=3)
    assert piece is not None
    assert (piece.edge, {one.person for one in piece.seen}) == (moment, {f"a{n}" for n in range(7)}), "nobody is followed by an episode"


def test_what_builds_up_in_people_over_releases_shows_in_no_canary_and_here(sqlite_engine: Engine) -> None:
    world = watched_room(sqlite_engine, config=msgspec.structs.replace(GATES, anchor_margin=0.9))  # how tired all are it finds, too
    world.traffic = Wearing(engine=sqlite_engine, clock=world.room.clock, behaviours={"v1": Behaviour()}, seed=3)
    _days(world, 7, people=600, known=600)
    for digest in ("v2", "v3", "v4"):
        world.traffic.behaviours[digest] = Behaviour()
        world.traffic.engines_hold(digest)
        world.room.champion(digest)
        _days(world, 6, people=600, known=600)
    open_, book = _open(sqlite_engine), SqlHoldoutBook(sqlite_engine)
    by_week = {r.week: r for r in open_.readings if r.metric == "task_success"}
    low, high = by_week[0].low, by_week[0].high
    assert low is not None
    assert high is not None
    # who is held is drawn anew in each run: 95 of 100 intervals hold zero, and all but one of 10,000 would at twice their width
    assert abs(low + high) < 2 * (high - low), "before the first release there is nothing to find"
    last = by_week[max(week for week in by_week if week is not None)]
    assert last.high is not None
    assert last.high < -0.05, "tired by eighteen turns, whichever version came last"
    whole = by_week[None]
    assert whole.difference is not None
    assert last.difference is not None
    assert last.difference < whole.difference < 0.0
    assert (whole.held.people, whole.beside.people) == tuple(
        sum(member_of(open_, f"known-{n}") is member for n in range(600)) for member in (Member.HELD, Member.BESIDE)
    )
    assert book.sums(open_, week=None)["fault", True].people == whole.held.people


def test_it_ends_when_its_time_is_over_with_a_last_reading_forgets_people_and_the_next_one_begins(
    world: WatchedRoom, engine: Engine
) -> None:  # fmt: skip
    world.watch.tick()
    first = _open(engine)
    _days(world, 31, people=60, known=300)
    for _ in range(40):
        world.watch.tick()
    ended, running = SqlHoldoutBook(engine).newest(POLICY)[1], _open(engine)
    assert (ended.id, ended.ended_because) == (first.id, "its time is over")
    assert ended.counted_until == ended.last_moment == ended.read_until
    assert {reading.week for reading in ended.readings} == {0, 1, 2, 3, None}
    assert running.id != first.id
    with reading(engine) as connection:
        assert connection.execute(select(func.count()).where(holdout_people.c.holdout == first.id)).scalar_one() == 0


def test_a_version_that_is_quarantined_or_lost_holds_nobody(world: WatchedRoom, engine: Engine) -> None:
    world.watch.tick()
    lost = _open(engine)
    world.traffic.behaviours["v2"] = Behaviour()
    world.traffic.engines_hold("v2")
    world.room.champion("v2")
    world.traffic.engines_hold_no_more("v1")
    world.watch.tick()
    assert _open(engine).id == lost.id, "an engine may be starting anew"
    world.room.clock.advance(31)
    world.watch.tick()
    assert "no engine holds version v1 any more" in (SqlHoldoutBook(engine).newest(POLICY)[0].ended_because or "")
    world.watch.tick()
    second = _open(engine)
    assert second.digest == "v2"
    champion = world.room.desk.find(world.room.desk.pointer(POLICY).release_id or "")
    world.room.desk.roll_back(champion.id, actor=ADA, reason="broken")
    assert SqlRoutes(engine, max_age_s=0.0).route(POLICY).quarantined == {"v2"}
    world.watch.tick()
    assert "v2 is quarantined" in (SqlHoldoutBook(engine).newest(POLICY)[0].ended_because or "")


@pytest.fixture
def told(sqlite_url: str, tmp_path: Path) -> Callable[..., str]:
    """What a command of `ratchet release` prints on this database."""
    share = "[gates.holdout]\nshare = 0.02\n"
    (tmp_path / "ratchet.toml").write_text(f'[policies.{POLICY}]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n{share}')
    places = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    environment = places | {"COLUMNS": "160"}
    return lambda *words: CliRunner(env=environment).invoke(release, list(words), catch_exceptions=False).output


def test_the_terminal_says_how_to_begin_one(sqlite_engine: Engine, told: Callable[..., str]) -> None:
    release_room(sqlite_engine)
    assert "no long-term holdout of tab was begun: set share under [gates.holdout]" in told("holdout", POLICY)
    assert "2.0% of the people are the long-term holdout; a week of it shows about nothing" in told("plan", POLICY)


def test_the_plan_says_what_a_week_of_it_shows(sqlite_engine: Engine, told: Callable[..., str]) -> None:
    """500 people in a week, 10 of them held: 2.8 * sqrt(.25 * 1.25 / 10) is about .5 of a success rate of .6."""
    watched_room(sqlite_engine, config=GATES, clock=FrozenClock(utc_now() - timedelta(days=1)))
    said = told("plan", POLICY)
    assert "the long-term holdout; a week of it shows about" in said
    assert 0.0 < float(said.split("shows about ")[1].split(" pp of task_success")[0]) < 100.0


def test_the_terminal_says_what_the_releases_brought(sqlite_engine: Engine, told: Callable[..., str]) -> None:
    deploy(sqlite_engine)
    said = told("holdout", POLICY)
    assert "2.0% of the people on v1 since" in said
    assert "ended" in said
    words = " ".join(said.replace("\u2502", " ").split())
    assert "+3.00 pp [+1.00, +5.00] 40 and 160" in words
    assert "one interval of twenty misses, and there are 2" in said
    (found,) = json.loads(told("holdout", POLICY, "--json", "--all"))
    assert [reading["week"] for reading in found["readings"]] == [0, 1, 2, None]


def test_the_page_of_versions_shows_it_as_a_table_and_as_a_picture(engine: Engine) -> None:
    deploy(engine)
    page = browser(engine).get("/console/versions").text
    assert "Long-term holdout" in page
    assert "+3.00 pp" in page
    assert "difference by week, everybody else minus held: task_success 0.04 [0.01, 0.07]" in page
    assert "task_success,all" in browser(engine).get("/console/versions?sheet=holdout&as=csv").text


def test_an_erased_person_is_in_no_sum(world: WatchedRoom, engine: Engine) -> None:
    world.watch.tick()
    _days(world, 2)
    begun = _open(engine)
    gone = next(f"known-{n}" for n in range(400) if member_of(begun, f"known-{n}") is Member.HELD)

    def rows() -> int:
        with reading(engine) as connection:
            return connection.execute(select(func.count()).where(holdout_people.c.person == gone)).scalar_one()

    assert rows() > 0
    segments, asked = MemorySegments(), msgspec.structs.replace(erasure(gone), occurred_at=world.room.clock.now)
    SqlEraser(engine, engine, segments=segments).erase(asked, now=world.room.clock.now)
    assert rows() == 0
    piece = Piece(edge=begun.counted_until + timedelta(seconds=1), seen=())
    late = Counted(week=0, person=gone, metric="fault", held=True, turns=1, total=1.0, since=world.room.clock.now - timedelta(days=1))
    assert SqlHoldoutBook(engine).count(_open(engine), piece, [late])
    assert rows() == 0, "read before they were erased, counted after"
