"""The inbox's rows go era by era on PostgreSQL: nothing that waits, nothing that is young, and nobody at work notices."""

import re
import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, func, insert, select, text, update

from app.db.engine import open_engine, reading, writing
from app.db.ingestion.inbox import SqlInbox, _row
from app.db.ingestion.inbox_rows import insert_rows
from app.db.ingestion.relay import SqlRelayOffice
from app.db.tables import inbox, inbox_eras
from app.db.upkeep import eras
from app.db.upkeep.keeper import SqlUpkeep
from app.domain.ports import Receipt
from app.domain.retention import Retention
from tests.fakes.served import applied, at, event_of, observation
from tests.fakes.streaming import MemorySegments
from tests.integration.database.test_upkeep import Files

DAY = timedelta(days=1)


class Door:
    """An inbox on PostgreSQL whose first era began at `at(0)`, with the acts of the tests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with writing(engine) as connection:
            connection.execute(update(inbox_eras).values(opened_at=at(0)))
        self.door = SqlInbox(engine, free_bytes=lambda: 1 << 40)

    def accept(self, *names: str) -> list[Receipt]:
        return self.door.append_blocking([event_of(observation(name, of=f"turn-of-{name}")) for name in names])

    def applied(self, *names: str, days: float) -> None:
        with writing(self.engine) as connection:
            moment = at(0) + days * DAY
            mine = inbox.c.event_id.in_(names)
            connection.execute(update(inbox).where(mine).values(relayed_at=moment, applied_at=moment))

    def turn(self, days: float) -> int | None:
        return eras.turn(self.engine, now=at(0) + days * DAY, after=DAY)

    def drop(self, days: float) -> int | None:
        return eras.drop_oldest(self.engine, before=at(0) + days * DAY)

    def rows(self) -> dict[str, int]:
        with reading(self.engine) as connection:
            return {row.event_id: row.era for row in connection.execute(select(inbox.c.event_id, inbox.c.era))}

    def close(self) -> None:
        self.door.close()


@pytest.fixture
def door(postgres_engine: Engine):  # noqa: ANN201 - a Door
    door = Door(postgres_engine)
    yield door
    door.close()


def test_an_era_opens_when_the_last_one_has_lasted_and_rows_fall_into_the_open_one(door: Door) -> None:
    door.accept("a")
    assert door.turn(0.9) is None
    assert door.turn(1.0) == 1
    door.accept("b")
    assert door.turn(1.9) is None
    assert door.turn(2.5) == 2
    door.accept("c")
    assert door.rows() == {"a": 0, "b": 1, "c": 2}
    with reading(door.engine) as connection:  # the order of arrival goes on over all of them
        assert connection.execute(select(inbox.c.event_id).order_by(inbox.c.seq)).scalars().all() == ["a", "b", "c"]


def test_code_that_knows_nothing_of_eras_writes_into_the_open_one(door: Door) -> None:
    """As the release before says it."""
    door.turn(1)
    statement = (
        "INSERT INTO inbox (source, event_id, type, key, time, payload, payload_hash, received_at) "
        "VALUES ('s', 'old', 't', 'k', 0, 'x', 'h', 0) ON CONFLICT DO NOTHING RETURNING source, event_id"
    )
    with writing(door.engine) as connection:
        assert len(connection.execute(text(statement)).all()) == 1
        assert len(connection.execute(text(statement)).all()) == 0
    assert door.rows() == {"old": 1}


def test_the_door_knows_an_event_again_through_the_change_of_an_era_and_takes_it_for_new_two_eras_later(door: Door) -> None:
    assert door.accept("a", "a") == [Receipt.ACCEPTED, Receipt.DUPLICATE]
    door.turn(1)
    other = event_of(observation("a", of="another"))
    assert door.accept("a", "b") == [Receipt.DUPLICATE, Receipt.ACCEPTED]
    assert door.door.append_blocking([other]) == [Receipt.CONFLICT]
    assert door.accept("b") == [Receipt.DUPLICATE]
    door.turn(2)
    assert door.accept("a", "b") == [Receipt.ACCEPTED, Receipt.DUPLICATE]
    with reading(door.engine) as connection:
        assert connection.execute(select(func.count()).where(inbox.c.event_id == "a")).scalar_one() == 2


def test_the_door_looks_into_one_partition_however_many_there_are(door: Door) -> None:
    for day in range(1, 6):
        door.turn(day)
    asked: list[str] = []

    class Cursor:
        def execute(self, statement: str, values: Any) -> None:
            asked.append(statement)

        def fetchall(self) -> list[Any]:
            return []

    class Connection:
        cursor = Cursor

    insert_rows(Connection(), "postgresql", [_row(event_of(observation("a", of="t")), None)])  # type: ignore[arg-type] - a double
    with reading(door.engine) as connection:
        statement = asked[0].replace("%s::text[]", "ARRAY['s']")
        plan = "\n".join(connection.execute(text(f"EXPLAIN (ANALYZE, TIMING OFF, COSTS OFF) {statement}")).scalars())
    unread = re.findall(r"on (inbox_\d+)[^\n]*\(never executed\)", plan)
    assert set(re.findall(r"on (inbox_\d+)", plan)) - set(unread) == {"inbox_4"}


def test_what_the_door_takes_twice_counts_once(door: Door) -> None:
    from app.db.ingestion.streams import SqlEffects
    from app.db.tables import observations
    from app.domain.telemetry.streams import EffectBatch, JoinRules

    segments = MemorySegments()
    store = SqlEffects(door.engine, rules=lambda: JoinRules(policies={}), segments=segments)
    for day in range(3):
        door.accept("a")
        store.apply(EffectBatch(events=(applied(observation("a", of="turn-of-a"), offset=day),)), now=at(day))
        door.turn(day + 1)
    with reading(door.engine) as connection:
        assert connection.execute(select(inbox.c.era).order_by(inbox.c.seq)).scalars().all() == [0, 2]
        assert connection.execute(select(func.count()).select_from(observations)).scalar_one() == 1


def test_an_era_goes_when_it_is_closed_and_all_of_it_was_applied_long_ago(door: Door) -> None:
    door.accept("a", "b", "sent", "waiting")
    door.applied("a", days=0.1)
    door.applied("b", days=0.6)
    assert door.drop(100) is None  # it is open
    door.turn(1)
    assert door.drop(100) is None  # two of its events wait
    with writing(door.engine) as connection:
        connection.execute(update(inbox).where(inbox.c.event_id == "sent").values(relayed_at=at(1)))
    door.applied("waiting", days=0.2)
    assert door.drop(100) is None  # one was sent and is not applied
    door.applied("sent", days=0.3)
    assert door.drop(0.6) is None  # one of them is young
    with writing(door.engine) as connection:
        connection.execute(text("ANALYZE inbox"))
    assert door.drop(0.7) == 4
    assert door.rows() == {}
    assert door.drop(100) is None  # the open one stays
    assert door.accept("a") == [Receipt.ACCEPTED]
    assert door.rows() == {"a": 1}


def test_whoever_keeps_house_turns_eras_and_drops_them(door: Door) -> None:
    def keep_house(days: float) -> dict[str, int]:
        now = at(0) + days * DAY
        kept = Retention(inbox_days=7)
        keeper = SqlUpkeep(door.engine, door.engine, files=Files(), retention=kept, owner="one", clock=lambda: now)
        with keeper.office() as lease:
            assert lease is not None
            return keeper.retire(lease)

    for day in range(10):
        door.accept(f"day-{day}")
        door.applied(f"day-{day}", days=day + 0.1)
        keep_house(day + 1)
        with writing(door.engine) as connection:
            connection.execute(text("ANALYZE inbox"))
    assert set(door.rows()) == {f"day-{n}" for n in range(3, 10)}
    assert set(door.rows().values()) == set(range(3, 10))
    assert keep_house(10.2)["inbox"] == 1


def test_a_body_that_was_emptied_by_an_erasure_holds_no_era_back(door: Door) -> None:
    door.accept("a")
    door.applied("a", days=3)
    with writing(door.engine) as connection:
        connection.execute(update(inbox).values(payload=b""))
    door.turn(1)
    assert door.drop(2) is not None


def test_whoever_holds_the_table_is_waited_for_a_moment_and_then_left_alone(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    other = open_engine(str(door.engine.url), session={})
    with other.begin() as connection:
        connection.execute(text("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE"))
        assert eras.turn(door.engine, now=at(0) + DAY, after=DAY, patience="50ms") is None
    other.dispose()
    assert "event=era_waits" in caplog.text
    assert door.turn(1) == 1


def test_who_does_not_own_the_table_is_told_and_rows_are_emptied_one_by_one(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    door.accept("a", "b")
    door.applied("a", days=0)
    with writing(door.engine) as connection:
        connection.execute(text("CREATE ROLE guest LOGIN"))
        for table in ("inbox", "inbox_eras", "leases"):
            connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO guest"))
    guest = open_engine(str(door.engine.url.set(username="guest")))
    try:
        assert eras.turn(guest, now=at(0) + DAY, after=DAY) is None
        assert "alarm=permission denied for schema public: ALTER TABLE inbox OWNER TO this role" in caplog.text
        term = SqlRelayOffice(guest, guest, group="g").take("one", now=at(0))
        assert term is not None
        assert term.trim(applied_before=at(0) + 2 * DAY) == 0
        assert term.trim(applied_before=at(1) + 2 * DAY) == 1
    finally:
        guest.dispose()
        with writing(door.engine) as connection:
            connection.execute(text("DROP OWNED BY guest"))
            connection.execute(text("DROP ROLE guest"))


def test_eras_change_under_a_door_and_a_relay_at_work_and_nothing_is_lost(door: Door) -> None:
    """Two doors, a relay that marks, a keeper that turns and drops as fast as it can: every acknowledged event was there, once."""
    second = SqlInbox(door.engine, free_bytes=lambda: 1 << 40)
    over, sent, failed = threading.Event(), set[int](), list[Exception]()
    term = SqlRelayOffice(door.engine, door.engine, group="g").take("one", now=at(0))
    assert term is not None

    def relay() -> None:
        try:
            while not over.is_set() or term.unsent_inbox(100):
                rows = [row.seq for row in term.unsent_inbox(100)]
                assert sent.isdisjoint(rows)
                term.mark_inbox(rows, now=at(1))
                sent.update(rows)
                with writing(door.engine) as connection:
                    connection.execute(update(inbox).where(inbox.c.seq.in_(rows)).values(applied_at=at(1)))
        except Exception as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    def keep() -> None:
        day = 1
        try:
            while not over.is_set():
                if door.turn(day) is not None:
                    day += 1
                door.drop(1_000)
        except Exception as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    threads = [threading.Thread(target=work) for work in (relay, keep)]
    for thread in threads:
        thread.start()
    told = [
        receipt for n in range(60) for some in (door.door, second)
        for receipt in some.append_blocking([event_of(observation(f"{id(some)}-{n}-{k}", of="t")) for k in range(10)])
    ]  # fmt: skip
    over.set()
    for thread in threads:
        thread.join(60)
    second.close()
    assert failed == []
    assert told == [Receipt.ACCEPTED] * 1_200
    assert len(sent) == 1_200
    with reading(door.engine) as connection:
        assert connection.execute(select(func.count()).select_from(inbox_eras)).scalar_one() >= 1
        assert connection.execute(select(func.max(inbox_eras.c.era))).scalar_one() > 2


def test_sqlite_has_no_eras(sqlite_engine: Engine) -> None:
    with writing(sqlite_engine) as connection:
        row = {"source": "s", "event_id": "e", "type": "t", "key": "k", "time": at(0), "payload": b"x", "payload_hash": b"h"}
        connection.execute(insert(inbox).values(**row, received_at=at(0)))
    assert eras.turn(sqlite_engine, now=at(1e9), after=DAY) is None
    assert eras.drop_oldest(sqlite_engine, before=at(1e9)) is None


@pytest.mark.parametrize(("keep", "lasts"), [(timedelta(days=7), DAY), (timedelta(hours=1), timedelta(hours=1))])
def test_an_era_lasts_a_seventh_of_the_time_for_which_bodies_are_kept(keep: timedelta, lasts: timedelta) -> None:
    assert eras.span(keep) == lasts
