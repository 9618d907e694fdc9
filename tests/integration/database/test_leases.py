"""Leases with fencing tokens, and members that share partitions."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine

from app.db import leases
from app.db.engine import writing
from app.db.ingestion.members import SqlMembership
from app.db.learning.cycles import SqlCycles
from app.domain.errors import LeaseLost
from tests.fakes.served import at

TTL = timedelta(seconds=10)


def test_a_lease_has_one_owner_until_it_expires_and_every_new_one_a_higher_token(engine: Engine) -> None:
    with writing(engine) as connection:
        first = leases.acquire(connection, "relay", "one", ttl=TTL, now=at(0))
        assert first is not None
        assert leases.acquire(connection, "relay", "two", ttl=TTL, now=at(9)) is None
        second = leases.acquire(connection, "relay", "two", ttl=TTL, now=at(10))
        assert second is not None
        assert second.token == first.token + 1


def test_renewing_keeps_the_lease_and_losing_it_is_told(engine: Engine) -> None:
    with writing(engine) as connection:
        first = leases.acquire(connection, "relay", "one", ttl=TTL, now=at(0))
        assert first is not None
        first = leases.renew(connection, first, ttl=TTL, now=at(9))
        assert leases.acquire(connection, "relay", "two", ttl=TTL, now=at(18)) is None
        leases.require(connection, first)
        assert leases.acquire(connection, "relay", "two", ttl=TTL, now=at(19)) is not None
        for act in (lambda: leases.require(connection, first), lambda: leases.renew(connection, first, ttl=TTL, now=at(19))):
            with pytest.raises(LeaseLost, match="taken over"):
                act()


@pytest.mark.parametrize("behind_s", [0.001, 1, 5])
def test_whoever_read_the_clock_before_the_owner_renewed_takes_nothing(engine: Engine, behind_s: float) -> None:
    """Between reading the time and writing lie a connection, a lock, another process's turn on the processor."""
    with writing(engine) as connection:
        assert leases.acquire(connection, "relay", "one", ttl=TTL, now=at(behind_s)) is not None
        assert leases.acquire(connection, "relay", "two", ttl=TTL, now=at(0)) is None
        assert leases.acquire(connection, "relay", "two", ttl=TTL, now=at(-3600)) is not None, "a clock set back by an hour blocks nobody"


@pytest.mark.parametrize("behind_s", [0.001, 1, 15])
def test_a_running_cycle_is_not_taken_from_an_owner_who_has_just_renewed(engine: Engine, behind_s: float) -> None:
    book, lease = SqlCycles(engine), timedelta(seconds=20)
    assert book.elect("composer", 1, owner="one", now=at(behind_s), lease=lease) is not None
    assert book.take_over("composer", owner="two", now=at(0), lease=lease) is None
    assert book.take_over("composer", owner="two", now=at(-3600), lease=lease) is not None


def test_a_released_lease_is_free_at_once_and_a_late_release_harms_nobody(engine: Engine) -> None:
    with writing(engine) as connection:
        first = leases.acquire(connection, "loop", "one", ttl=TTL, now=at(0))
        assert first is not None
        leases.release(connection, first, now=at(1))
        second = leases.acquire(connection, "loop", "two", ttl=TTL, now=at(1))
        assert second is not None
        leases.release(connection, first, now=at(2))
        leases.require(connection, second)
        assert leases.acquire(connection, "loop", "three", ttl=TTL, now=at(2)) is None


def test_members_share_all_partitions_and_those_of_a_dead_one_are_taken_over(engine: Engine) -> None:
    clock = [at(0)]
    one, two = (SqlMembership(engine, group="g", clock=lambda: clock[0], name=lambda n=name: n) for name in ("1", "2"))
    wide = SqlMembership(engine, group="w", clock=lambda: clock[0], partitions=12)
    assert wide.partitions() == frozenset(range(12))
    wide.leave()
    other_group = SqlMembership(engine, group="h", clock=lambda: clock[0])
    assert one.partitions() == frozenset(range(6))
    assert other_group.partitions() == frozenset(range(6))
    assert two.partitions() == {1, 3, 5}
    assert one.partitions() == {0, 2, 4}
    clock[0] = at(5)  # neither was heard of for five seconds
    assert one.partitions() == frozenset(range(6))
    assert two.partitions() == {1, 3, 5}
    two.leave()
    assert one.partitions() == frozenset(range(6))
