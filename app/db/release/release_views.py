"""What people read about releases: one release with everything about it, and the audit chain."""

from typing import Any

from sqlalchemy import Engine, select

from app.db.engine import reading
from app.db.release.alarms import read_alarms
from app.db.release.audit import Verification, entries, verify
from app.db.release.pairs import read_preference
from app.db.release.pointer import read_history, read_pointer
from app.db.release.releases import read_approvals, read_frozen, read_release
from app.db.tables import circuit_breakers, cycles, deployment_pointer, gate_results, quarantine, release_history
from app.domain.release.by_people import BY_PEOPLE, BY_TRAFFIC
from app.domain.release.releases import AuditEntry, Release


class SqlReleaseViews:
    """Reads only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def release(self, release_id: str) -> dict[str, Any]:
        """A release with its way, every gate's newest answer, what people judged blind, approvals and alarms. Raises `NotFound`."""
        with reading(self._engine) as connection:
            found = read_release(connection, release_id)
            steps = connection.execute(
                select(release_history).where(release_history.c.release_id == release_id).order_by(release_history.c.generation)
            )
            judged = read_preference(connection, release_id)
            answers = connection.execute(select(gate_results).where(gate_results.c.release_id == release_id).order_by(gate_results.c.id))
            return {
                **row_of(found),
                "terms": {k: v for k, v in found.config.items() if k not in ("gates", "plan")},
                "plan": found.config.get("plan", {}),
                "history": [dict(row._mapping) for row in steps],
                "gates": list({row.gate: dict(row._mapping) for row in answers}.values()),
                "preference": {**vars_of(judged), "told": judged.sentence()},
                "approvals": [vars_of(approval) for approval in read_approvals(connection, release_id)],
                "alarms": [vars_of(alarm) for alarm in read_alarms(connection, found.policy, release_id=release_id)],
            }

    def policies(self) -> list[str]:
        """Policies with a deployment."""
        with reading(self._engine) as connection:
            return list(connection.execute(select(deployment_pointer.c.policy).order_by(deployment_pointer.c.policy)).scalars())

    def slots(self, *, policy: str | None, limit: int) -> list[dict[str, Any]]:
        """The newest slots, newest first: what became of each, and how long it took."""
        query = select(cycles).order_by(cycles.c.started_at.desc(), cycles.c.slot.desc()).limit(limit)
        if policy is not None:
            query = query.where(cycles.c.policy == policy)
        shown = ("policy", "slot", "status", "step", "reason", "attempt", "batch_id", "run_id", "release_id", "started_at", "finished_at")
        with reading(self._engine) as connection:
            rows = connection.execute(query).all()
        return [
            {name: getattr(row, name) for name in shown}
            | {"took_s": None if row.finished_at is None else (row.finished_at - row.started_at).total_seconds()}
            for row in rows
        ]

    def deployment(self, policy: str) -> dict[str, Any]:
        """What is live, what was, what is quarantined, whether promotions are frozen, and every alarm with its end."""
        with reading(self._engine) as connection:
            pointer = read_pointer(connection, policy)
            barred = connection.execute(select(quarantine).where(quarantine.c.policy == policy).order_by(quarantine.c.since.desc()))
            votes = connection.execute(select(circuit_breakers.c.unfreeze_votes).where(circuit_breakers.c.policy == policy)).scalar()
            return {
                "pointer": None if pointer is None else vars_of(pointer),
                "history": [dict(row._mapping) for row in read_history(connection, policy)],
                "quarantine": [dict(row._mapping) for row in barred],
                "frozen": read_frozen(connection, policy),
                "unfreeze_votes": votes or [],
                "alarms": [vars_of(alarm) for alarm in read_alarms(connection, policy)],
            }

    def audit(self, *, subject: str | None = None, policy: str | None = None, newest: int = 100) -> list[AuditEntry]:
        """The newest entries, newest first; with a policy those about it, its releases and its versions alone."""
        with reading(self._engine) as connection:
            return list(entries(connection, subject=subject, policy=policy, newest=newest))

    def verify(self, *, seen: tuple[int, str] | None = None) -> Verification:
        """Recompute the chain."""
        with reading(self._engine) as connection:
            return verify(connection, seen=seen)


def row_of(release: Release) -> dict[str, Any]:
    """A release as plain data, without its frozen configuration."""
    plain = {name: value for name, value in vars_of(release).items() if name != "config"}
    return plain | {"judged_by": BY_TRAFFIC if release.config.get("by_people") is None else BY_PEOPLE}


def vars_of(value: object) -> dict[str, Any]:
    """A frozen dataclass's fields."""
    return dict(vars(value))
