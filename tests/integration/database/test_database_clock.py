"""One clock for all: the database's. Processes whose own clock is wrong take nothing from anybody and block nobody."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, insert, select, update
from sqlalchemy.exc import OperationalError

from app.db import leases
from app.db.clock import DatabaseClock, database_now
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import SqlRelayOffice
from app.db.learning.cycles import SqlCycles
from app.db.tables import inbox
from app.db.tables import leases as lease_rows
from app.domain.errors import BadConfig
from app.domain.ids import utc_now
from tests.fakes.served import at, event_of, turn

HOUR = timedelta(hours=1)


def test_the_databases_time_is_the_time(engine: Engine) -> None:
    with reading(engine) as connection:
        assert abs(database_now(connection) - utc_now()) < timedelta(seconds=5)


def test_a_relay_whose_clock_is_ten_seconds_ahead_does_not_take_a_live_lease(engine: Engine) -> None:
    office = SqlRelayOffice(engine, engine, group="g", clock=database_now)
    term = office.take("one", now=utc_now())
    assert term is not None
    assert office.take("ahead", now=utc_now() + timedelta(seconds=10)) is None
    term.renew(now=utc_now() - HOUR)  # and one that is behind keeps what it has
    assert office.take("ahead", now=utc_now()) is None


def test_a_relay_six_hours_ahead_that_dies_blocks_the_office_for_a_term_only(engine: Engine) -> None:
    office = SqlRelayOffice(engine, engine, group="g", clock=database_now)
    assert office.take("ahead", now=utc_now() + 6 * HOUR) is not None
    with reading(engine) as connection:
        ends = connection.execute(select(lease_rows.c.expires_at)).scalar_one()
        assert ends - database_now(connection) <= timedelta(seconds=4)


@pytest.mark.parametrize("jump", [HOUR, 6 * HOUR])
def test_a_clock_set_back_stops_nothing(engine: Engine, jump: timedelta) -> None:
    clock = [at(0) + jump]
    office = SqlRelayOffice(engine, engine, group="g", clock=lambda _: clock[0])
    member, other = (SqlMembership(engine, group="g", clock=lambda: clock[0], name=lambda n=name: n) for name in "12")
    book = SqlCycles(engine)
    assert office.take("died", now=clock[0]) is not None
    assert len(member.partitions()) == 6
    assert book.elect("composer", 0, owner="died", now=clock[0], lease=timedelta(minutes=1)) is not None
    clock[0] = at(0)  # the owners died with the clock that was ahead
    assert office.take("heir", now=clock[0]) is not None
    assert len(other.partitions()) == 6
    assert book.take_over("composer", owner="heir", now=clock[0], lease=timedelta(minutes=1)) is not None


def test_a_lease_as_far_ahead_as_it_may_be_is_a_live_one(engine: Engine) -> None:
    ttl = timedelta(seconds=10)
    with writing(engine) as connection:
        assert leases.acquire(connection, "x", "one", ttl=ttl, now=at(0)) is not None
        assert leases.acquire(connection, "x", "two", ttl=ttl, now=at(0)) is None
        connection.execute(update(lease_rows).values(expires_at=at(20) + timedelta(microseconds=1)))
        assert leases.acquire(connection, "x", "two", ttl=ttl, now=at(0)) is not None


def test_members_that_died_ahead_of_time_are_tidied_away(engine: Engine) -> None:
    gone = {"name": "g/dead", "owner": "g/dead", "token": 0, "expires_at": at(0) + HOUR}
    with writing(engine) as connection:
        connection.execute(insert(lease_rows), gone)
    assert len(SqlMembership(engine, group="g", clock=lambda: at(0)).partitions()) == 6
    with reading(engine) as connection:
        assert "g/dead" not in connection.execute(select(lease_rows.c.name)).scalars().all()


def test_the_clock_asks_once_a_second_and_goes_on_by_a_counter_in_between(engine: Engine) -> None:
    counter, told, asked = [100.0], [at(0)], list[int]()

    def ask(_: object) -> object:
        asked.append(1)
        return told[0]

    clock = DatabaseClock(engine, asked=ask, counter=lambda: counter[0], own=lambda: at(0))  # type: ignore[arg-type]
    assert (clock(), len(asked)) == (at(0), 1)
    counter[0] += 0.9
    told[0] = at(500)
    assert (clock(), len(asked)) == (at(0.9), 1)
    counter[0] += 0.1
    assert (clock(), len(asked)) == (at(500), 2)


def test_a_database_that_does_not_answer_does_not_stop_the_clock_that_it_started(engine: Engine) -> None:
    counter, up = [0.0], [True]

    def ask(_: object) -> object:
        if not up[0]:
            raise OperationalError("select", {}, Exception("gone"))
        return at(0)

    clock = DatabaseClock(engine, asked=ask, counter=lambda: counter[0], own=lambda: at(0))  # type: ignore[arg-type]
    clock()
    up[0], counter[0] = False, 30.0
    assert clock() == at(30)
    with pytest.raises(OperationalError):
        DatabaseClock(engine, asked=ask)()  # type: ignore[arg-type]


def test_a_process_whose_own_clock_is_far_off_says_so_once_a_minute(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    counter = [0.0]
    clock = DatabaseClock(engine, asked=lambda _: at(0), counter=lambda: counter[0], own=lambda: at(3))
    for seconds in (0, 2, 4, 61):
        counter[0] = seconds
        clock()
    assert [record.message.count("clock_skewed ahead_s=3.0") for record in caplog.records] == [1, 1]


@pytest.mark.parametrize(
    ("answers_after_s", "ahead_s", "refused"),
    [(0, 2, False), (0, -2, False), (0, 2.1, True), (0, -2.1, True), (2, 3.9, False), (2, 4.1, True)],
)
def test_a_process_starts_within_two_seconds_of_the_database_and_what_its_answer_took_is_borne(
    engine: Engine, answers_after_s: float, ahead_s: float, refused: bool
) -> None:
    """An answer that took two seconds is in doubt by one, and the database's time is that of its middle: 3.9 ahead is 1.9 at least."""
    counter = [0.0]

    def ask(_: object) -> object:
        counter[0] += answers_after_s
        return at(0)

    clock = DatabaseClock(engine, asked=ask, counter=lambda: counter[0], own=lambda: at(ahead_s))  # type: ignore[arg-type]
    if refused:
        with pytest.raises(BadConfig, match="from the database's, and 2 s are borne: set both by NTP"):
            clock.refuse_skew()
    else:
        clock.refuse_skew()


def test_a_door_with_a_wrong_clock_receives_at_the_databases_time(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    door = SqlInbox(engine)
    door.append_blocking([event_of(turn("a"))])
    door.close()
    with reading(engine) as connection:
        received = connection.execute(select(inbox.c.received_at)).scalar_one()
        assert timedelta(0) <= database_now(connection) - received < timedelta(seconds=60)
    engine.dispose()
