"""A database that fails over: its connections are found dead and opened again, and no right to act is given out a second time."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Engine, delete, select
from sqlalchemy.exc import OperationalError

from app.db import leases
from app.db.engine import open_engine, reading, writing
from app.db.learning.cycles import SqlCycles
from app.db.migrate import upgrade
from app.db.operations.server import timeline
from app.db.tables import cycles
from app.db.tables import leases as lease_rows
from app.domain.errors import LeaseLost
from tests.fakes.served import at
from tests.killable_postgres import KillablePostgres

TTL = timedelta(seconds=10)
WITHIN_S = 30.0
"""Writes go on at the latest this long after the primary was lost (facts of the field: Patroni's default needs twenty)."""


@pytest.fixture(scope="module")
def server() -> Iterator[KillablePostgres]:
    with KillablePostgres() as started:
        upgrade(started.url)
        yield started


@pytest.fixture
def engine(server: KillablePostgres) -> Iterator[Engine]:
    opened = open_engine(server.url)
    yield opened
    opened.dispose()


def test_no_token_is_given_out_twice_and_writes_go_on(server: KillablePostgres, engine: Engine) -> None:
    """The commit that gave the lease to `old` is lost, as in a failover to a standby that had not everything."""
    book = SqlCycles(engine)
    with writing(engine) as connection:
        before = timeline(connection)
        old = leases.acquire(connection, "relay", "old", ttl=TTL, now=at(0))
        assert old is not None
    slot = book.elect("composer", 60, owner="old", now=at(0), lease=TTL)
    assert slot is not None

    with engine.connect() as broken:  # a connection that is open when the primary dies
        server.fail_over()
        lost_at = time.monotonic()
        with pytest.raises(OperationalError):
            broken.execute(select(1))

    with writing(engine) as connection:  # the same engine: dead connections are found and opened again
        assert timeline(connection) > before
        connection.execute(delete(lease_rows))
        connection.execute(delete(cycles))
    with writing(engine) as connection:
        new = leases.acquire(connection, "relay", "new", ttl=TTL, now=at(1))
        assert new is not None
        assert new.token > old.token
        with pytest.raises(LeaseLost):
            leases.require(connection, old)
    again = book.elect("composer", 60, owner="new", now=at(1), lease=TTL)
    assert again is not None
    assert again.fencing_token > slot.fencing_token
    with pytest.raises(LeaseLost):
        book.advance(slot, step="train", changes={})
    assert time.monotonic() - lost_at < WITHIN_S


def test_a_lease_that_survived_the_failover_is_kept_and_the_next_one_is_above_it(server: KillablePostgres, engine: Engine) -> None:
    with writing(engine) as connection:
        connection.execute(delete(lease_rows))
        held = leases.acquire(connection, "relay", "one", ttl=TTL, now=at(0))
        assert held is not None
    with writing(engine) as connection:
        connection.exec_driver_sql("CHECKPOINT")  # this server commits without waiting for its disk: what is written now, stays
    server.fail_over()
    engine.dispose()
    with writing(engine) as connection:
        held = leases.renew(connection, held, ttl=TTL, now=at(1))
        taken = leases.acquire(connection, "relay", "two", ttl=TTL, now=at(12))
        assert taken is not None
        assert taken.token >= leases.lowest_token(connection) > held.token


def test_a_statement_that_never_ends_is_ended(server: KillablePostgres) -> None:
    """Timeouts are on every connection; here with a second instead of sixty."""
    impatient = open_engine(server.url, session={"statement_timeout": "1s"})
    started = time.monotonic()
    with pytest.raises(OperationalError, match="statement timeout"), reading(impatient) as connection:
        connection.exec_driver_sql("SELECT pg_sleep(30)")
    assert time.monotonic() - started < 15.0
    impatient.dispose()
