"""Bounds in time, met at the moment itself and the least bit beyond it: clocks, leases, troubles, backlogs, sweeps, engines, keys."""

import logging
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, exc, select
from sqlalchemy.dialects import sqlite

from app.db import locks, tables
from app.db.clock import DatabaseClock
from app.db.engine import reading, writing
from app.db.ingestion.backlog import SqlBacklog
from app.db.ingestion.claims import SqlClaimSweep
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import SqlRelayOffice, SqlRelayTerm, has_backlog, inbox_metrics
from app.db.leases import acquire, lowest_token
from app.db.tables import UtcMicros
from app.db.troubles import SqlTroubles, ingestion_troubles
from app.domain.errors import BadConfig
from tests.fakes.clock import FrozenClock
from tests.unit.app.db.rows import NOON, fill

BIT = timedelta(microseconds=1)
FULL_DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("moment", "micros"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC), 1),
        (datetime(1970, 1, 2, 0, 0, 1, tzinfo=UTC), 86_401_000_000),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), -1),
        (datetime(2026, 11, 24, tzinfo=UTC), 1_795_478_400_000_000),
    ],
)
def test_a_moment_is_stored_in_microseconds_since_1970_and_read_back_exactly(moment: datetime, micros: int) -> None:
    kind, dialect = UtcMicros(), sqlite.dialect()
    assert kind.process_bind_param(moment, dialect) == micros
    assert kind.process_result_value(micros, dialect) == moment
    assert kind.process_bind_param(None, dialect) is None
    assert kind.process_result_value(None, dialect) is None
    with pytest.raises(ValueError, match="no timezone"):
        kind.process_bind_param(moment.replace(tzinfo=None), dialect)


def test_what_is_stored_beyond_the_calendar_is_read_as_its_first_and_last_whole_day() -> None:
    kind, dialect = UtcMicros(), sqlite.dialect()
    first, last = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
    for bound, within, beyond in ((first, BIT, -BIT), (last, -BIT, BIT)):
        stored = kind.process_bind_param(bound, dialect)
        assert stored is not None
        assert kind.process_result_value(stored, dialect) == bound
        assert kind.process_result_value(stored + within // BIT, dialect) == bound + within
        assert kind.process_result_value(stored + beyond // BIT, dialect) == bound
    assert kind.process_result_value(-(2**62), dialect) == first
    assert kind.process_result_value(2**62, dialect) == last


class Times:
    """A database's clock, the counter of a process and its own clock, each moved by hand; an answer takes `takes_s`."""

    def __init__(self, *, ahead: timedelta = timedelta(), takes_s: float = 0.0) -> None:
        self.counted_s, self.asked, self.told = 100.0, 0, NOON
        self.ahead, self.takes_s = ahead, takes_s
        self.fails = False
        self.clock = DatabaseClock(
            create_engine("sqlite://"), asked=lambda _: self.ask(), counter=lambda: self.counted_s, own=lambda: self.told + self.ahead
        )

    def ask(self) -> datetime:
        self.asked += 1
        self.counted_s += self.takes_s
        if self.fails:
            raise exc.OperationalError("select", {}, Exception("away"))
        return self.told


def test_the_database_is_asked_once_a_second_and_in_between_the_counter_goes_on() -> None:
    times = Times()
    assert times.clock() == NOON
    times.counted_s += 0.75
    assert times.clock() == NOON + timedelta(seconds=0.75)
    assert times.asked == 1
    times.counted_s += 0.25
    times.told = NOON + timedelta(hours=1)
    assert times.clock() == NOON + timedelta(hours=1)
    assert times.asked == 2


def test_an_answer_is_dated_in_the_middle_of_what_it_took() -> None:
    times = Times(takes_s=0.5)
    assert times.clock() == NOON + timedelta(seconds=0.25)


def test_while_the_database_is_away_time_goes_on_and_before_its_first_answer_there_is_none() -> None:
    times = Times()
    times.fails = True
    with pytest.raises(exc.OperationalError):
        times.clock()
    times.fails = False
    times.clock()
    times.fails = True
    times.counted_s += 5.0
    assert times.clock() == NOON + timedelta(seconds=5)
    times.counted_s += 0.5
    asked = times.asked
    assert times.clock() == NOON + timedelta(seconds=5.5)
    assert times.asked == asked, "who is away is asked once a second as well"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_clock_is_refused_beyond_two_seconds_and_what_the_answer_left_in_doubt(sign: int) -> None:
    two = timedelta(seconds=2)
    Times(ahead=sign * two).clock.refuse_skew()
    far = Times(ahead=sign * (two + BIT))
    with pytest.raises(BadConfig, match=rf"clock is \{'+' if sign > 0 else '-'}2.0 s from the database's, and 2 s are borne"):
        far.clock.refuse_skew()
    assert far.clock.skew_s() == pytest.approx(sign * 2.0, abs=1e-5)
    doubtful = Times(takes_s=4.0)
    doubtful.ahead = timedelta(seconds=2) + sign * timedelta(seconds=4)
    doubtful.clock.refuse_skew()  # half of four seconds are in doubt, and told is the middle
    doubtful.ahead += sign * BIT
    doubtful.counted_s += 1.0
    with pytest.raises(BadConfig):
        doubtful.clock.refuse_skew()


def test_a_skewed_clock_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    times = Times(ahead=timedelta(seconds=3))
    times.clock()
    for step_s, said in ((59.0, 1), (1.0, 2), (59.0, 2), (2.0, 3)):
        times.counted_s += step_s
        times.clock()
        assert sum("clock_skewed ahead_s=3.0" in record.getMessage() for record in caplog.records) == said


class Lost(Exception):
    """As psycopg has it."""

    sqlstate = "40P01"


def test_a_transaction_that_lost_a_race_is_begun_six_times_after_pauses_that_double() -> None:
    tried, pauses = list[int](), list[float]()

    def work(_: object) -> None:
        tried.append(1)
        raise exc.OperationalError("update", {}, Lost())

    with pytest.raises(exc.OperationalError):
        locks.settled(create_engine("sqlite://"), work, pause=pauses.append)
    assert len(tried) == 6
    assert len(pauses) == 5
    for attempt, pause in enumerate(pauses):
        assert 0.01 * 2**attempt <= pause <= 0.03 * 2**attempt


def test_what_was_no_race_is_raised_at_once_and_what_succeeds_answers() -> None:
    def broken(_: object) -> None:
        raise exc.OperationalError("update", {}, Exception("disk"))

    with pytest.raises(exc.OperationalError):
        locks.settled(create_engine("sqlite://"), broken, pause=lambda _: pytest.fail("nothing is waited for"))
    outcomes = [exc.OperationalError("update", {}, Lost()), None]

    def second(_: object) -> str:
        if (error := outcomes.pop(0)) is not None:
            raise error
        return "done"

    assert locks.settled(create_engine("sqlite://"), second, pause=lambda _: None) == "done"


def test_tokens_begin_at_one_where_a_database_has_one_history(sqlite_engine: Engine) -> None:
    with writing(sqlite_engine) as connection:
        assert lowest_token(connection) == 1
        tokens = [acquire(connection, "x", "one", ttl=FULL_DAY, now=NOON + n * FULL_DAY) for n in range(3)]
    assert [lease.token for lease in tokens if lease] == [1, 2, 3]


@pytest.mark.parametrize(("later", "taken"), [(FULL_DAY - BIT, False), (FULL_DAY, True), (-FULL_DAY, False), (-FULL_DAY - BIT, True)])
def test_a_lease_is_over_at_its_end_and_where_it_ends_more_than_twice_its_time_ahead(
    sqlite_engine: Engine, later: timedelta, *, taken: bool
) -> None:
    with writing(sqlite_engine) as connection:
        acquire(connection, "x", "one", ttl=FULL_DAY, now=NOON)
        assert (acquire(connection, "x", "two", ttl=FULL_DAY, now=NOON + later) is not None) is taken


def test_trouble_is_said_again_after_ten_seconds_and_believed_for_two_minutes(sqlite_engine: Engine) -> None:
    clock, counted = FrozenClock(NOON), [0.0]
    troubles = SqlTroubles(sqlite_engine, name="relay", clock=clock, now_s=lambda: counted[0])
    for counts, told_at in ((0.0, 0), (9.75, 0), (10.0, 20), (19.75, 20)):
        counted[0] = counts
        troubles.report("away")
        with reading(sqlite_engine) as connection:
            assert connection.execute(select(tables.troubles.c.updated_at)).scalar_one() == NOON + timedelta(seconds=told_at)
        clock.advance(10)
    clock.now = NOON + timedelta(seconds=20) + timedelta(minutes=2) - BIT
    assert len(ingestion_troubles(sqlite_engine, sqlite_engine, clock=clock)) == 1
    clock.now += BIT
    assert ingestion_troubles(sqlite_engine, sqlite_engine, clock=clock) == []
    troubles.report("another")
    troubles.report(None)
    with reading(sqlite_engine) as connection:
        assert connection.execute(select(tables.troubles)).all() == []


def test_events_are_stalled_after_more_than_a_minute(sqlite_engine: Engine) -> None:
    minute = timedelta(minutes=1)
    fill(sqlite_engine, tables.inbox, received_at=NOON)
    for later, told in ((minute, 0), (minute + BIT, 1)):
        assert len(ingestion_troubles(sqlite_engine, sqlite_engine, clock=lambda at=NOON + later: at)) == told


def test_a_member_is_alive_for_four_seconds_and_its_row_goes_after_a_minute_either_way(sqlite_engine: Engine) -> None:
    clock = FrozenClock(NOON)
    one, two = (SqlMembership(sqlite_engine, group="g", clock=clock, name=lambda n=name: n) for name in "12")

    def rows() -> int:
        with reading(sqlite_engine) as connection:
            return len(connection.execute(select(tables.leases)).all())

    one.partitions()
    clock.now = NOON + timedelta(seconds=4) - BIT
    assert two.partitions() == {1, 3, 5}
    clock.now += BIT
    assert two.partitions() == frozenset(range(6))
    clock.now = NOON + timedelta(seconds=64)  # its row says four seconds after noon
    assert (len(two.partitions()), rows()) == (6, 2)
    clock.now += BIT
    assert (len(two.partitions()), rows()) == (6, 1)
    one.partitions()
    clock.now -= timedelta(seconds=56)  # the rows end a minute ahead
    two.partitions()
    assert rows() == 2
    clock.now -= BIT
    two.partitions()
    assert rows() == 1


@pytest.mark.parametrize(("age", "seen"), [(timedelta(seconds=5), True), (timedelta(seconds=5) + BIT, False)])
def test_what_was_accepted_within_five_seconds_is_looked_at_again(sqlite_engine: Engine, age: timedelta, *, seen: bool) -> None:
    """Rows may be committed in another order than they are numbered: the row before the second comes after the look."""
    backlog = SqlBacklog(sqlite_engine, sqlite_engine)
    fill(sqlite_engine, tables.inbox, seq=1, event_id="first", received_at=NOON - FULL_DAY)
    fill(sqlite_engine, tables.applied_events, source="000000", event_id="first")
    fill(sqlite_engine, tables.inbox, seq=3, event_id="third", received_at=NOON - age)
    fill(sqlite_engine, tables.applied_events, source="000000", event_id="third")
    assert backlog.complete_until(now=NOON) == NOON
    fill(sqlite_engine, tables.inbox, seq=2, event_id="second", received_at=NOON - timedelta(seconds=7))
    assert backlog.complete_until(now=NOON) == (NOON - timedelta(seconds=7) if seen else NOON)


def test_nothing_is_complete_beyond_now_whatever_a_door_s_clock_says(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.inbox, seq=1, event_id="ahead", received_at=NOON + FULL_DAY)
    assert SqlBacklog(sqlite_engine, sqlite_engine).complete_until(now=NOON) == NOON


def test_a_backlog_longer_than_a_look_is_looked_at_to_its_end(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.inbox, 2_001, event_id=lambda n: f"e{n}", source="s", received_at=NOON - FULL_DAY)
    fill(sqlite_engine, tables.applied_events, 2_000, event_id=lambda n: f"e{n}", source="s")
    assert SqlBacklog(sqlite_engine, sqlite_engine).complete_until(now=NOON) == NOON - FULL_DAY
    fill(sqlite_engine, tables.applied_events, event_id="e2000", source="s")
    assert SqlBacklog(sqlite_engine, sqlite_engine).complete_until(now=NOON) == NOON


@pytest.mark.parametrize("relayed_at", [None, NOON])
def test_claims_are_swept_an_hour_old_and_an_hour_before_what_waits(sqlite_engine: Engine, relayed_at: datetime | None) -> None:
    asked, dropped = list[datetime](), list[str]()

    def claims(before: datetime) -> list[str]:
        asked.append(before)
        return ["claim-b", "claim-a", "claim-known"]

    fill(sqlite_engine, tables.segments, name="claim-known")
    sweep = SqlClaimSweep(sqlite_engine, sqlite_engine, claims=claims, drop=dropped.append).sweep
    assert sweep(NOON) == 2
    fill(sqlite_engine, tables.inbox, received_at=NOON - timedelta(hours=3), relayed_at=relayed_at)
    assert sweep(NOON) == 2
    assert asked == [NOON - timedelta(hours=1), NOON - timedelta(hours=4)]
    assert dropped == ["claim-a", "claim-b"] * 2


def term_of(engine: Engine) -> SqlRelayTerm:
    term = SqlRelayOffice(engine, engine, group="g").take("one", now=NOON)
    assert term is not None
    return term


def test_a_relay_is_in_office_for_four_seconds(sqlite_engine: Engine) -> None:
    office, term = SqlRelayOffice(sqlite_engine, sqlite_engine, group="g"), term_of(sqlite_engine)
    four = timedelta(seconds=4)
    assert office.take("two", now=NOON + four - BIT) is None
    term.renew(now=NOON + four - BIT)
    assert office.take("two", now=NOON + 2 * four - 2 * BIT) is None
    assert office.take("two", now=NOON + 2 * four - BIT) is not None


def test_payloads_are_dropped_five_thousand_at_once_the_oldest_and_only_what_is_older(sqlite_engine: Engine) -> None:
    term = term_of(sqlite_engine)
    applied = {"relayed_at": NOON, "payload": b"x"}
    fill(sqlite_engine, tables.inbox, 5_001, applied_at=lambda n: NOON - FULL_DAY + n * BIT, **applied)
    fill(sqlite_engine, tables.inbox, event_id="young", applied_at=NOON, **applied)
    fill(sqlite_engine, tables.inbox, event_id="waits", **applied)
    assert [term.trim(applied_before=NOON) for _ in range(3)] == [5_000, 1, 0]
    with reading(sqlite_engine) as connection:
        kept = connection.execute(select(tables.inbox.c.event_id).where(tables.inbox.c.payload == b"x").order_by(tables.inbox.c.seq))
        assert kept.scalars().all() == ["young", "waits"]


def test_a_batch_to_send_ends_with_the_row_that_takes_it_beyond_sixteen_mebibytes(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.inbox, 4, payload=bytes(8 * 1024 * 1024))
    term = term_of(sqlite_engine)
    assert len(term.unsent_inbox(10)) == 3, "two fill it exactly, the third takes it beyond"
    assert len(term.unsent_inbox(2)) == 2


def test_what_is_not_applied_is_looked_at_up_to_sixteen_mebibytes_at_once(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.inbox, 4, payload=bytes(8 * 1024 * 1024), relayed_at=NOON)
    assert len(term_of(sqlite_engine).confirm_applied(relayed_before=NOON + BIT, limit=10, now=NOON)) == 3


def test_what_is_relayed_and_not_applied_is_asked_about_and_sent_again_one_round_older(sqlite_engine: Engine) -> None:
    term = term_of(sqlite_engine)
    fill(sqlite_engine, tables.inbox, 3, source="s", event_id=lambda n: f"e{n}", relayed_at=lambda n: NOON + n * BIT)
    assert has_backlog(sqlite_engine)
    fill(sqlite_engine, tables.applied_events, source="s", event_id="e0")
    missing = term.confirm_applied(relayed_before=NOON + 2 * BIT, limit=10, now=NOON)
    assert [(row.event.id, row.rounds) for row in missing] == [("e1", 0)], "the third was relayed at that moment"
    term.send_again([missing[0].seq])
    assert [(row.event.id, row.rounds) for row in term.unsent_inbox(9)] == [("e1", 1)]
    assert term.applied_before(now=NOON) == NOON + 2 * BIT
    with reading(sqlite_engine) as connection:
        told = inbox_metrics(connection, now=NOON + timedelta(seconds=10))
    assert (told["inbox_unsent"], told["inbox_unapplied"]) == (1, 1)
    assert (told["inbox_unsent_age_s"], told["inbox_unapplied_age_s"]) == (9.0, 8.0)
    term.applied_directly([row.seq for row in missing], now=NOON)
    term.confirm_applied(relayed_before=NOON + FULL_DAY, limit=10, now=NOON)
    assert term.applied_before(now=NOON) == NOON + 2 * BIT
    with reading(sqlite_engine) as connection:
        counts = {row.name: row.value for row in connection.execute(select(tables.counters))}
    assert counts == {"sent_again": 1, "applied_from_inbox": 1}
