"""Leases with fencing tokens: one owner at a time, and whoever lost the lease finds out at its next write.

`now` is the database's clock (`app.db.clock`). A lease that ends more than twice as far ahead as it was given for is expired: the clock
was set back, and nobody waits an hour for an owner that may be dead. A living owner renews within a second.

A failover to a standby that had not everything takes commits back, and would give the same tokens out again, to somebody else. So a token
begins with the timeline of the database, which every failover raises: what was given out before it is never given out after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Connection, Engine, case, or_, select, update

from app.db.clock import ConnectionClock
from app.db.engine import insert_or_ignore, writing
from app.db.operations.server import timeline
from app.db.tables import leases
from app.domain.errors import LeaseLost
from app.domain.ports import Lease

PER_TIMELINE = 2**40
"""Tokens within one timeline; with 2^22 timelines they fit a BIGINT."""


def acquire(connection: Connection, name: str, owner: str, *, ttl: timedelta, now: datetime) -> Lease | None:
    """Take the lease where it is free or expired, with a token above every earlier one; None while another owner holds it."""
    lowest = lowest_token(connection)
    fresh = {"name": name, "owner": owner, "token": lowest, "expires_at": now + ttl}
    first = insert_or_ignore(connection, leases).values(**fresh).returning(leases.c.name)  # not rowcount: it is -1 here on PostgreSQL
    if connection.execute(first).first() is not None:
        return Lease(name=name, owner=owner, token=lowest, expires_at=now + ttl)
    taken = connection.execute(
        update(leases)
        .where(leases.c.name == name, expired(leases.c.expires_at, ttl=ttl, now=now))
        .values(owner=owner, token=next_token(leases.c.token, lowest), expires_at=now + ttl)
        .returning(leases.c.token)
    ).scalar()
    return None if taken is None else Lease(name=name, owner=owner, token=taken, expires_at=now + ttl)


def lowest_token(connection: Connection) -> int:
    """The first token of the database's present timeline; 1 on SQLite, which has one history."""
    return timeline(connection) * PER_TIMELINE + 1


def next_token(held: ColumnElement[int], lowest: int) -> ColumnElement[int]:
    """A token above the one that is held, and above all of earlier timelines."""
    return case((held + 1 < lowest, lowest), else_=held + 1)


def expired(expires_at: ColumnElement[datetime], *, ttl: timedelta, now: datetime) -> ColumnElement[bool]:
    """Whether a lease given for `ttl` is over, or never can have been given.

    Not from `now + ttl` on: `now` was read before this transaction had its connection and its row, and an owner that renewed meanwhile, or
    whose reading of the clock is a millisecond ahead, is a living one. Twice the time leaves all of `ttl` for that.
    """
    return or_(expires_at <= now, expires_at > now + 2 * ttl)


def renew(connection: Connection, lease: Lease, *, ttl: timedelta, now: datetime) -> Lease:
    """Extend the lease; an expired one too, as long as nobody took it. Raises `LeaseLost`."""
    kept = connection.execute(update(leases).where(leases.c.name == lease.name, leases.c.token == lease.token).values(expires_at=now + ttl))
    if kept.rowcount != 1:
        raise _lost(lease)
    return Lease(name=lease.name, owner=lease.owner, token=lease.token, expires_at=now + ttl)


def require(connection: Connection, lease: Lease) -> None:
    """Fence a write: call it in the transaction that writes. Raises `LeaseLost`.

    On PostgreSQL the row is locked, so that nobody takes the lease between this check and the commit.
    """
    statement = select(leases.c.token).where(leases.c.name == lease.name).with_for_update()
    if connection.execute(statement).scalar() != lease.token:
        raise _lost(lease)


def release(connection: Connection, lease: Lease, *, now: datetime) -> None:
    """Give the lease back; harmless when it was lost already."""
    connection.execute(update(leases).where(leases.c.name == lease.name, leases.c.token == lease.token).values(expires_at=now))


@contextmanager
def term(engine: Engine, name: str, owner: str, *, ttl: timedelta, clock: ConnectionClock) -> Iterator[Lease | None]:
    """The lease for as long as the block takes, given back at its end; None while another owner holds it. The block renews it."""
    with writing(engine) as connection:
        lease = acquire(connection, name, owner, ttl=ttl, now=clock(connection))
    try:
        yield lease
    finally:
        if lease is not None:
            with writing(engine) as connection:
                release(connection, lease, now=clock(connection))


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"the lease {lease.name!r} was taken over while token {lease.token} held it: this process stops acting")
