"""Rollouts in SQL: the port `RolloutBook`. A row is held by whoever took it last: every write names the token it was taken under."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, Row, insert, or_, select, update

from app.db.clock import database_now
from app.db.engine import expected_to_answer, reading, writing
from app.db.leases import expired
from app.db.tables import rollouts
from app.domain.errors import LeaseLost
from app.domain.learning.rollouts import Closed, Outcome, Rollout

DURATIONS = 100
OLDEST_FIRST = (rollouts.c.planned_at, rollouts.c.group_id, rollouts.c.attempt)


class SqlRollouts:
    """See the port."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def plan(self, planned: Sequence[Rollout]) -> None:
        """Insert them as free."""
        with writing(self.engine) as connection:
            now = database_now(connection)
            rows = [
                {"id": r.id, "policy": r.policy, "taskset": r.taskset, "task": r.task, "task_hash": r.task_hash, "group_id": r.group,
                 "attempt": r.attempt, "harness_hash": r.harness_hash, "token": 0, "planned_at": now}
                for r in planned
            ]  # fmt: skip
            if rows:
                connection.execute(insert(rollouts), rows)

    def take(self, policy: str, *, owner: str, ttl: timedelta, at_most: int) -> list[Rollout]:
        """One row after the other, each by a conditional update that only one of several dispatchers wins."""
        taken: list[Rollout] = []
        with writing(self.engine) as connection:
            now = database_now(connection)
            free = or_(rollouts.c.leased_until.is_(None), expired(rollouts.c.leased_until, ttl=ttl, now=now))
            open_ = (rollouts.c.policy == policy) & rollouts.c.outcome.is_(None) & free
            oldest = select(rollouts.c.id).where(open_).order_by(*OLDEST_FIRST).limit(at_most).with_for_update(skip_locked=True)
            for name in connection.execute(oldest).scalars().all():
                row = connection.execute(
                    update(rollouts)
                    .where(open_, rollouts.c.id == name)
                    .values(owner=owner, token=rollouts.c.token + 1, leased_until=now + ttl)
                    .returning(*rollouts.c)
                ).one_or_none()
                if row is not None:
                    taken.append(_rollout(row))
        return taken

    def begin(self, rollout: Rollout, episode: str) -> None:
        """The episode is unique in the table."""
        self._write(rollout, episode_id=episode)

    def renew(self, rollout: Rollout, *, ttl: timedelta) -> None:
        """Until so long from now."""
        self._write(rollout, ttl=ttl)

    def close(self, rollout: Rollout, closed: Closed) -> None:
        """Its outcome is written once: afterwards nobody holds it."""
        self._write(
            rollout, outcome=closed.outcome.value, reward=closed.reward, duration_s=closed.duration_s, turns=closed.turns,
            flags=list(closed.flags),
        )  # fmt: skip

    def history(self, policy: str, taskset: str, *, newest: int | None = None) -> list[Rollout]:
        """As they were planned."""
        mine = select(rollouts).where(rollouts.c.policy == policy, rollouts.c.taskset == taskset)
        backwards = mine.order_by(*(column.desc() for column in OLDEST_FIRST)).limit(newest)
        with reading(self.engine) as connection:
            return [_rollout(row) for row in connection.execute(backwards)][::-1]

    def durations_s(self, policy: str, taskset: str) -> list[float]:
        """Newest first."""
        mine = select(rollouts.c.duration_s).where(
            rollouts.c.policy == policy, rollouts.c.taskset == taskset, rollouts.c.duration_s.is_not(None)
        )
        with reading(self.engine) as connection:
            return list(connection.execute(mine.order_by(rollouts.c.planned_at.desc()).limit(DURATIONS)).scalars())

    def _write(self, rollout: Rollout, *, ttl: timedelta | None = None, **values: Any) -> None:  # noqa: ANN401 - columns
        with expected_to_answer("the rollout is gone on with when its lease is over"), writing(self.engine) as connection:
            now = database_now(connection)
            held = (rollouts.c.id == rollout.id) & (rollouts.c.token == rollout.token) & rollouts.c.outcome.is_(None)
            values |= {"leased_until": now + ttl} if ttl is not None else {}
            values |= {"closed_at": now} if "outcome" in values else {}
            if connection.execute(update(rollouts).where(held).values(**values)).rowcount != 1:
                raise LeaseLost(f"rollout {rollout.id} is held by another dispatcher, or closed: this one stops acting for it")


def _rollout(row: Row[Any]) -> Rollout:
    return Rollout(
        id=row.id, policy=row.policy, taskset=row.taskset, task=row.task, task_hash=row.task_hash, group=row.group_id, attempt=row.attempt,
        harness_hash=row.harness_hash, episode=row.episode_id, outcome=None if row.outcome is None else Outcome(row.outcome),
        reward=row.reward, token=row.token, flags=tuple(row.flags or ()),
    )  # fmt: skip
