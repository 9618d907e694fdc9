"""The ledger of engines on both databases."""

from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine, insert, select, text

from app.db.engine import reading, writing
from app.db.release.engine_reads import read_engines
from app.db.release.engines import SqlEngineLedger
from app.db.release.pointer import swap_pointer
from app.db.tables import deployment_pointer, engine_versions
from app.domain.ports import EngineState, Holder
from app.domain.release.releases import Pointer
from tests.fakes.clock import FrozenClock


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


def ledger_of(database: Engine, clock: FrozenClock, name: str) -> SqlEngineLedger:
    return SqlEngineLedger(database, engine_id=name, address=f"http://{name}", clock=clock)


def test_engines_that_hold_a_version_are_found_while_they_report(engine: Engine, clock: FrozenClock) -> None:
    one, two = ledger_of(engine, clock, "one"), ledger_of(engine, clock, "two")
    one.report("composer", "d1", EngineState.READY)
    two.report("composer", "d1", EngineState.LOADING)
    assert one.addresses("d1") == ["http://one"]
    clock.advance(9)
    two.report("composer", "d1", EngineState.READY)
    assert one.addresses("d1") == ["http://two", "http://one"]
    clock.advance(2)
    assert one.addresses("d1") == ["http://two"]
    assert one.addresses("d2") == []


def test_an_engine_shared_by_two_policies_is_named_once(engine: Engine, clock: FrozenClock) -> None:
    one = ledger_of(engine, clock, "one")
    one.report("composer", "d1", EngineState.READY)
    one.report("tab", "d1", EngineState.READY)
    assert one.addresses("d1") == ["http://one"]


def test_the_time_of_a_change_moves_with_the_state_only(engine: Engine, clock: FrozenClock) -> None:
    one = ledger_of(engine, clock, "one")
    started = clock()
    seen: list[tuple[str, datetime, datetime]] = []
    for state in (EngineState.LOADING, EngineState.READY, EngineState.READY):
        one.report("composer", "d1", state)
        with reading(engine) as connection:
            row = connection.execute(select(engine_versions)).one()
        seen.append((row.state, row.changed_at, row.seen_at))
        clock.advance(1)
    second = timedelta(seconds=1)
    assert seen == [
        ("loading", started, started), ("ready", started + second, started + second), ("ready", started + second, started + 2 * second),
    ]  # fmt: skip


def test_an_engine_that_leaves_takes_its_own_rows_along(engine: Engine, clock: FrozenClock) -> None:
    one, two = ledger_of(engine, clock, "one"), ledger_of(engine, clock, "two")
    one.report("composer", "d1", EngineState.READY)
    two.report("composer", "d1", EngineState.READY)
    one.forget()
    assert two.addresses("d1") == ["http://two"]


def test_the_champion_is_wanted(engine: Engine, clock: FrozenClock) -> None:
    with writing(engine) as connection:
        connection.execute(
            insert(deployment_pointer),
            {
                "policy": "composer", "digest": "d1", "generation": 1, "previous": None, "anchor": "d1", "holdback": 0.0,
                "release_id": None, "changed_at": clock(),
            },
        )  # fmt: skip
    assert ledger_of(engine, clock, "one").wanted() == {("composer", "d1")}


def test_whose_log_probabilities_are_in_doubt_is_said_with_who_holds_the_version(engine: Engine, clock: FrozenClock) -> None:
    one, two = ledger_of(engine, clock, "one"), ledger_of(engine, clock, "two")
    one.report("composer", "d1", EngineState.READY, "raw log-probabilities")
    two.report("composer", "d1", EngineState.READY)
    assert dict(one.holders("d1")) == {"http://one": Holder(doubt="raw log-probabilities"), "http://two": Holder()}


def test_an_engine_says_in_which_region_it_stands_and_rows_of_the_release_before_are_of_none(engine: Engine, clock: FrozenClock) -> None:
    SqlEngineLedger(engine, engine_id="eu/one", address="http://one", region="eu", clock=clock).report("composer", "d1", EngineState.READY)
    before = {"engine_id": "old", "policy": "composer", "digest": "d1", "address": "http://old", "state": "ready"}
    with writing(engine) as connection:
        connection.execute(
            text("INSERT INTO engine_versions (engine_id, policy, digest, address, state, changed_at, seen_at) "
                 "VALUES (:engine_id, :policy, :digest, :address, :state, 0, :seen_at)"),
            {**before, "seen_at": int(clock().timestamp() * 1e6)},
        )  # fmt: skip
    with reading(engine) as connection:
        listed = read_engines(connection, None, now=clock())
    assert {entry["engine"]: entry["region"] for entry in listed} == {"eu/one": "eu", "old": ""}
    assert {address: holder.region for address, holder in ledger_of(engine, clock, "me").holders("d1").items()} == {
        "http://one": "eu", "http://old": "",
    }  # fmt: skip


def test_engines_are_listed_with_their_lag_behind_the_pointer(engine: Engine, clock: FrozenClock) -> None:
    """`one` took two seconds to hold the present champion; `two` still holds the one before the one before."""
    one, two = ledger_of(engine, clock, "one"), ledger_of(engine, clock, "two")
    moves: list[tuple[int, str, str]] = [(1, "d1", "bootstrap"), (2, "d2", "promote"), (3, "d2", "anchor"), (4, "d3", "promote")]
    for generation, digest, action in moves:
        pointer = Pointer(
            policy="composer", digest=digest, generation=generation, previous=None, anchor="d1", holdback=0.0, release_id=None,
            changed_at=clock(),
        )  # fmt: skip
        with writing(engine) as connection:
            expected = None if generation == 1 else generation - 1
            swap_pointer(connection, pointer, expected=expected, action=action, actor="system:test", reason=None)
    two.report("composer", "d1", EngineState.READY)
    clock.advance(2)
    one.report("composer", "d3", EngineState.READY)
    two.report("composer", "d3", EngineState.LOADING)
    clock.advance(1)
    with reading(engine) as connection:
        first, second = read_engines(connection, "composer", now=clock())
        assert read_engines(connection, "tab", now=clock()) == []
    assert (first["engine"], first["lag"], first["reports"]) == ("one", {"champions": 0, "seconds": 2.0}, True)
    assert (second["engine"], second["lag"]) == ("two", {"champions": 2, "seconds": 3.0})
    assert {version["digest"]: version["role"] for version in second["versions"]} == {"d1": None, "d3": "champion"}
    for more, reports in ((9, True), (1, False)):  # ten seconds after their last word, and eleven
        clock.advance(more)
        assert one.everywhere() == (["http://one", "http://two"] if reports else [])
        with reading(engine) as connection:
            assert [entry["reports"] for entry in read_engines(connection, None, now=clock())] == [reports] * 2
