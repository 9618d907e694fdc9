"""What a deployment is judged by afterwards: what was promised against what its database holds."""

import itertools
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, func, select

from app.db.engine import reading
from app.db.tables import cycles, dead_letters, inbox, labels, observations, releases, training_runs, turn_counts, turns, versions
from tests.bench.fleet.people import Book

POLICY = "composer"


def lost(database: Engine, book: Book) -> list[str]:
    """Answers and observations that somebody was promised and that are not there."""
    with reading(database) as connection:
        have = set(connection.execute(select(turns.c.inference_id)).scalars())
        have |= set(connection.execute(select(observations.c.id).where(observations.c.status.in_(("joined", "late")))).scalars())
    return sorted((book.answers.keys() | book.said.keys()) - have)


def held_up(database: Engine) -> dict[str, Any]:
    """Where events are that have no effect: not sent, sent and not applied, waiting for their turn, or buried, with the first reason."""
    with reading(database) as connection:

        def count(table: Any, where: Any) -> int:
            return int(connection.execute(select(func.count()).select_from(table).where(where)).scalar_one())

        found: dict[str, Any] = {
            "not sent": count(inbox, inbox.c.relayed_at.is_(None)),
            "not applied": count(inbox, inbox.c.applied_at.is_(None) & inbox.c.relayed_at.is_not(None)),
            "without a turn": count(observations, observations.c.status.in_(("parked", "orphan"))),
            "buried": count(dead_letters, dead_letters.c.id > 0),
        }
        found["first reason"] = connection.execute(select(dead_letters.c.reason).order_by(dead_letters.c.id).limit(1)).scalar()
    return {what: much for what, much in found.items() if much}


def unlabelled(database: Engine) -> int:
    """Turns that wait for a label, a first one or another one."""
    with reading(database) as connection:
        return connection.execute(
            select(func.count()).select_from(turns).where(turns.c.labelled_at.is_(None) | turns.c.needs_relabel)
        ).scalar_one()


def doubled(database: Engine) -> dict[str, int]:
    """Effects that happened more than once, by kind."""
    with reading(database) as connection:

        def count(query: Any) -> int:
            return int(connection.execute(query).scalar_one() or 0)

        rows = count(select(func.count()).select_from(turns))
        counted = count(select(func.sum(turn_counts.c.turns)))
        labelled = count(select(func.sum(turn_counts.c.labelled)))
        current = count(select(func.count()).select_from(labels).where(labels.c.current))
        runs = count(select(func.count()).select_from(training_runs))
        batches = count(select(func.count(func.distinct(training_runs.c.batch_id))))
        trained = count(select(func.count()).select_from(versions).where(versions.c.run_id.is_not(None)))
        trained_once = count(select(func.count(func.distinct(versions.c.run_id))))
        opened = count(select(func.count()).select_from(releases))
        opened_once = count(select(func.count(func.distinct(releases.c.digest))))
    return {
        "counted turns": abs(counted - rows), "counted labels": abs(labelled - current), "labels": max(0, current - rows),
        "runs of a batch": runs - batches, "versions of a run": trained - trained_once, "releases": opened - opened_once,
    }  # fmt: skip


def slots_lost(database: Engine) -> list[str]:
    """Slots without a row between the first and the last, slots that nobody decided on in time, and cycles that ran out of attempts."""
    with reading(database) as connection:
        rows = connection.execute(
            select(cycles.c.slot, cycles.c.status, cycles.c.reason).where(cycles.c.policy == POLICY).order_by(cycles.c.slot)
        ).all()
    found = [f"slot {row.slot}: {row.reason}" for row in rows if row.status == "failed" or (row.reason or "").startswith("missed")]
    gaps = [later.slot - earlier.slot for earlier, later in itertools.pairwise(rows)]
    return found + [f"a gap of {gap} s" for gap in gaps if gaps and gap > min(gaps)]


def ended_cycles(database: Engine) -> Sequence[Any]:
    """Status, attempt and slot of every cycle that is over."""
    with reading(database) as connection:
        return connection.execute(
            select(cycles.c.slot, cycles.c.status, cycles.c.attempt, cycles.c.reason).where(cycles.c.finished_at.is_not(None))
        ).all()
