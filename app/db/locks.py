"""The one order in which transactions take locks, and what is tried again when two met all the same (PostgreSQL; SQLite has one writer).

    1. the erasure lock        shared by whatever writes what people said; alone while an erasure is announced
    2. a policy's batch lock   who cuts, and who erases
    3. applied_events          by (source, id)
    4. turns                   by inference id, all that a transaction will touch at once
    5. observations, retractions, labels, batch_items, exposures     only of turns that are locked
    6. segments                by name
    7. turn_counts, counters   by key
    8. stream_offsets          by place
    9. audit_head

A transaction that finds itself against the order anyway is ended by the database (40P01), as is one that lost a race (40001, 23505) or
waited too long for a lock (55P03): nothing of it was written, so it is begun again.
"""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine, exc, func, select

from app.db.engine import writing

T = TypeVar("T")

ERASURES = "ratchet.erasures"
TRIES = 6
LOST_RACES = frozenset({"40P01", "40001", "55P03", "23505"})
"""Deadlock, serialisation failure, lock timeout, and a unique key that another transaction wrote first."""


def share(connection: Connection, name: str) -> None:
    """Hold `name` beside others who share it, to the end of the transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock_shared(func.hashtextextended(name, 0))))


def hold(connection: Connection, name: str) -> None:
    """Hold `name` alone, to the end of the transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))


def batches_of(policy: str) -> str:
    """The name under which a policy's batches are cut."""
    return f"ratchet.batches:{policy}"


def lost_race(error: BaseException) -> bool:
    """Whether the database ended a transaction in favour of another, so that the same one may succeed now."""
    return isinstance(error, exc.DBAPIError) and getattr(error.orig, "sqlstate", None) in LOST_RACES


def settled(engine: Engine, work: Callable[[Connection], T], *, pause: Callable[[float], None] = time.sleep) -> T:
    """`work` in a transaction, begun again where it lost a race to another one; what it raises the last time is raised."""
    for attempt in range(TRIES):
        try:
            with writing(engine) as connection:
                return work(connection)
        except exc.DBAPIError as error:
            if not lost_race(error) or attempt == TRIES - 1:
                raise
            pause(random.uniform(0.5, 1.5) * 0.02 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")
