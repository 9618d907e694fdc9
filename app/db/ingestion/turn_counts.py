"""How many turns each version served, and how many of those have a label: counted when they are written, read for nothing."""

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import Connection, func, select

from app.db.engine import add_up
from app.db.tables import turn_counts, turns

Versions = Iterable[tuple[str, str]]
"""(policy, version) of turns, one for each."""


def count_turns(connection: Connection, served: Versions) -> None:
    """These turns were inserted."""
    _add(connection, turns_=Counter(served), labelled=Counter())


def count_labelled(connection: Connection, labelled: Versions, *, by: int = 1) -> None:
    """These turns have a label now (`by=-1`: no longer)."""
    _add(connection, turns_=Counter(), labelled=Counter({key: by * n for key, n in Counter(labelled).items()}))


def _add(connection: Connection, *, turns_: Counter[tuple[str, str]], labelled: Counter[tuple[str, str]]) -> None:
    """In sorted order, so that two writers cannot wait for each other in a ring."""
    keys = sorted({key for counts in (turns_, labelled) for key, n in counts.items() if n})
    rows = [{"policy": key[0], "version": key[1], "turns": turns_[key], "labelled": labelled[key]} for key in keys]
    add_up(connection, turn_counts, rows, key=("policy", "version"), add=("turns", "labelled"))


def read_turn_counts(connection: Connection, policy: str | None = None) -> list[tuple[str, str, int, int]]:
    """(policy, version, turns, labelled), in order."""
    c = turn_counts.c
    query = select(c.policy, c.version, c.turns, c.labelled).order_by(c.policy, c.version)
    if policy is not None:
        query = query.where(c.policy == policy)
    return [(row.policy, row.version, int(row.turns), int(row.labelled)) for row in connection.execute(query)]


def recount(connection: Connection) -> list[tuple[str, str, int, int]]:
    """The same from the turns themselves, for a test to compare: it reads the whole table."""
    query = select(turns.c.policy, turns.c.version, func.count(), func.count(turns.c.labelled_at)).group_by(turns.c.policy, turns.c.version)
    return [(row[0], row[1], int(row[2]), int(row[3])) for row in connection.execute(query.order_by(turns.c.policy, turns.c.version))]
