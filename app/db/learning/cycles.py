"""Cycles: one row per policy and slot; the row elects the replica that runs it, leases it, and remembers how far it got.

The election is `INSERT … ON CONFLICT DO NOTHING`; every later write carries the fencing token, so a replica that was paused past
its lease changes nothing when it wakes up.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, Row, func, select, update

from app.db import leases
from app.db.engine import insert_or_ignore, reading, writing
from app.db.leases import lowest_token
from app.db.tables import cycles
from app.domain.errors import LeaseLost
from app.domain.learning.cycles import MAX_ATTEMPTS, Cycle, CycleStatus


def _cycle(row: Row[tuple[object, ...]]) -> Cycle:
    return Cycle(**{**row._asdict(), "status": CycleStatus(row.status)})


class SqlCycles:
    """The `CycleBook` port on SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def elect(self, policy: str, slot: int, *, owner: str, now: datetime, lease: timedelta) -> Cycle | None:
        """Try to become the one that runs this slot; None when somebody already did."""
        with writing(self._engine) as connection:
            inserted = connection.execute(
                insert_or_ignore(connection, cycles).values(
                    policy=policy, slot=slot, status=CycleStatus.RUNNING, step="elected", owner=owner,
                    fencing_token=lowest_token(connection), attempt=1, lease_expires_at=now + lease, timings={}, started_at=now,
                ).returning(cycles.c.slot)  # not rowcount: it is -1 here on PostgreSQL
            )  # fmt: skip
            if inserted.first() is None:
                return None
            return _cycle(connection.execute(select(cycles).where(cycles.c.policy == policy, cycles.c.slot == slot)).one())

    def take_over(self, policy: str, *, owner: str, now: datetime, lease: timedelta) -> Cycle | None:
        """Take over the newest running cycle whose lease has expired; one that has no attempts left is recorded as failed."""
        expired = (cycles.c.policy == policy) & (cycles.c.status == CycleStatus.RUNNING)
        expired &= leases.expired(cycles.c.lease_expires_at, ttl=lease, now=now)
        with writing(self._engine) as connection:
            row = connection.execute(select(cycles).where(expired).order_by(cycles.c.slot.desc()).with_for_update()).first()
            if row is None:
                return None
            same = (cycles.c.policy == policy) & (cycles.c.slot == row.slot) & (cycles.c.fencing_token == row.fencing_token)
            if row.attempt >= MAX_ATTEMPTS:
                reason = f"the lease expired in step {row.step} on attempt {row.attempt}, and {MAX_ATTEMPTS} attempts are the limit"
                connection.execute(update(cycles).where(same).values(status=CycleStatus.FAILED, reason=reason, finished_at=now))
                return None
            token = max(row.fencing_token + 1, lowest_token(connection))
            taken = {"owner": owner, "fencing_token": token, "attempt": row.attempt + 1, "lease_expires_at": now + lease}
            if connection.execute(update(cycles).where(same).values(**taken)).rowcount != 1:
                return None
            return _cycle(connection.execute(select(cycles).where(cycles.c.policy == policy, cycles.c.slot == row.slot)).one())

    def renew(self, cycle: Cycle, *, now: datetime, lease: timedelta) -> None:
        """Heartbeat. Raises `LeaseLost`."""
        self._write(cycle, {"lease_expires_at": now + lease})

    def advance(self, cycle: Cycle, *, step: str, changes: Mapping[str, Any]) -> Cycle:
        """Record that `step` is done, with what it produced (`batch_id`, `run_id`, `release_id`, `timings`). Raises `LeaseLost`."""
        self._write(cycle, {"step": step, **changes})
        return self.find(cycle.policy, cycle.slot)

    def finish(self, cycle: Cycle, *, status: CycleStatus, reason: str | None, now: datetime) -> None:
        """End the cycle. Raises `LeaseLost`."""
        self._write(cycle, {"status": status, "reason": reason, "finished_at": now})

    def skip(self, policy: str, slot: int, *, reason: str, now: datetime) -> bool:
        """Record a slot that nobody will run, and why; False when the slot already has a row."""
        with writing(self._engine) as connection:
            inserted = connection.execute(
                insert_or_ignore(connection, cycles).values(
                    policy=policy, slot=slot, status=CycleStatus.SKIPPED, step="skipped", reason=reason, fencing_token=0, attempt=0,
                    timings={}, started_at=now, finished_at=now,
                ).returning(cycles.c.slot)
            )  # fmt: skip
            return inserted.first() is not None

    def find(self, policy: str, slot: int) -> Cycle:
        """The cycle of a slot, which must exist."""
        with reading(self._engine) as connection:
            return _cycle(connection.execute(select(cycles).where(cycles.c.policy == policy, cycles.c.slot == slot)).one())

    def newest_slot(self, policy: str) -> int | None:
        """The newest slot with a row, whatever became of it."""
        with reading(self._engine) as connection:
            return connection.execute(select(func.max(cycles.c.slot)).where(cycles.c.policy == policy)).scalar()

    def running(self, policy: str) -> Cycle | None:
        """The cycle that is running, expired lease or not."""
        with reading(self._engine) as connection:
            query = select(cycles).where(cycles.c.policy == policy, cycles.c.status == CycleStatus.RUNNING).order_by(cycles.c.slot.desc())
            row = connection.execute(query).first()
            return None if row is None else _cycle(row)

    def recent(self, policy: str, *, limit: int = 50) -> list[Cycle]:
        """The newest cycles, newest first."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(cycles).where(cycles.c.policy == policy).order_by(cycles.c.slot.desc()).limit(limit))
            return [_cycle(row) for row in rows]

    def _write(self, cycle: Cycle, values: Mapping[str, Any]) -> None:
        mine = (cycles.c.policy == cycle.policy) & (cycles.c.slot == cycle.slot) & (cycles.c.fencing_token == cycle.fencing_token)
        with writing(self._engine) as connection:
            running = mine & (cycles.c.status == CycleStatus.RUNNING)
            if connection.execute(update(cycles).where(running).values(**values)).rowcount != 1:
                raise LeaseLost(f"the cycle of slot {cycle.slot} was taken over by another replica; this one stops without writing")
