"""Counts that survive restarts, per policy and name (the empty policy where none is known)."""

from collections.abc import Mapping

from sqlalchemy import Connection, select

from app.db.engine import add_up
from app.db.tables import counters

Counts = Mapping[tuple[str, str], int]
"""By (policy, name)."""


def add_counts(connection: Connection, counts: Counts) -> None:
    """Add to the counters, creating those that do not exist; in sorted order, so that two writers cannot deadlock."""
    rows = [{"policy": policy, "name": name, "value": value} for (policy, name), value in sorted(counts.items()) if value]
    add_up(connection, counters, rows, key=("policy", "name"), add=("value",))


def read_counts(connection: Connection) -> dict[tuple[str, str], int]:
    """All counters."""
    return {(row.policy, row.name): row.value for row in connection.execute(select(counters))}
