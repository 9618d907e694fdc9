"""Leases with fencing tokens: one owner at a time, and whoever lost the lease finds out at its next write.

`now` is the database's clock (`app.db.clock`). A lease that ends further ahead than it can have been given for is expired: the clock
was set back, and nobody waits an hour for an owner that may be dead. A living owner renews within a second.
"""

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Connection, or_, select, update

from app.db.engine import insert_or_ignore
from app.db.tables import leases
from app.domain.errors import LeaseLost
from app.domain.ports import Lease


def acquire(connection: Connection, name: str, owner: str, *, ttl: timedelta, now: datetime) -> Lease | None:
    """Take the lease where it is free or expired, with a token above every earlier one; None while another owner holds it."""
    fresh = {"name": name, "owner": owner, "token": 1, "expires_at": now + ttl}
    first = insert_or_ignore(connection, leases).values(**fresh).returning(leases.c.name)  # not rowcount: it is -1 here on PostgreSQL
    if connection.execute(first).first() is not None:
        return Lease(name=name, owner=owner, token=1, expires_at=now + ttl)
    taken = connection.execute(
        update(leases)
        .where(leases.c.name == name, expired(leases.c.expires_at, ttl=ttl, now=now))
        .values(owner=owner, token=leases.c.token + 1, expires_at=now + ttl)
        .returning(leases.c.token)
    ).scalar()
    return None if taken is None else Lease(name=name, owner=owner, token=taken, expires_at=now + ttl)


def expired(expires_at: ColumnElement[datetime], *, ttl: timedelta, now: datetime) -> ColumnElement[bool]:
    """Whether a lease given for `ttl` is over, or never can have been given."""
    return or_(expires_at <= now, expires_at > now + ttl)


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


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"the lease {lease.name!r} was taken over while token {lease.token} held it: this process stops acting")
