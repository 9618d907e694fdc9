"""Training runs and trackers in SQL: the port `RunStore`."""

from collections import defaultdict
from typing import Any

from sqlalchemy import Engine, select

from app.db.engine import reading, upsert, writing
from app.db.learning.label_use import used_share_of_batch
from app.db.tables import batch_items, labels, tracker_states, training_runs
from app.domain.ids import utc_now
from app.domain.release.versions import HoldReason, RunStatus, TrainingRun


class SqlRunStore:
    """Runs in the state database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def get(self, run_id: str) -> TrainingRun | None:
        """The run as last recorded."""
        with reading(self.engine) as connection:
            row = connection.execute(select(training_runs).where(training_runs.c.id == run_id)).one_or_none()
        if row is None:
            return None
        return TrainingRun(
            id=row.id, policy=row.policy, batch_id=row.batch_id, parent=row.parent, status=RunStatus(row.status),
            hold_reason=HoldReason(row.hold_reason) if row.hold_reason else None, message=row.message, candidate=row.candidate,
            metrics=row.metrics, config=row.config, started_at=row.started_at, finished_at=row.finished_at,
        )  # fmt: skip

    def put(self, run: TrainingRun) -> None:
        """Insert or overwrite."""
        values = {
            "id": run.id, "policy": run.policy, "batch_id": run.batch_id, "parent": run.parent, "status": run.status.value,
            "hold_reason": run.hold_reason.value if run.hold_reason else None, "message": run.message, "candidate": run.candidate,
            "metrics": run.metrics, "config": run.config, "started_at": run.started_at, "finished_at": run.finished_at,
        }  # fmt: skip
        with writing(self.engine) as connection:
            connection.execute(upsert(connection, training_runs, key=("id",), update=tuple(values)), values)

    def tracker(self, digest: str) -> dict[str, Any] | None:
        """State of the baseline tracker after the run that made `digest`."""
        with reading(self.engine) as connection:
            return connection.execute(select(tracker_states.c.state).where(tracker_states.c.digest == digest)).scalar_one_or_none()

    def put_tracker(self, digest: str, policy: str, state: dict[str, Any]) -> None:
        """Remember it."""
        values = {"digest": digest, "policy": policy, "state": state, "updated_at": utc_now()}
        with writing(self.engine) as connection:
            connection.execute(upsert(connection, tracker_states, key=("digest",), update=("state", "updated_at")), values)

    def labels_used_share(self, batch_id: str) -> float | None:
        """Of the labels of the day up to the batch that could teach something, the share that is in a batch."""
        with reading(self.engine) as connection:
            return used_share_of_batch(connection, batch_id)

    def term_shares(self, batch_id: str) -> dict[str, float]:
        """Share of the absolute reward of the batch that comes from each term: its weighted values' sizes over those of all terms."""
        sizes: defaultdict[str, float] = defaultdict(float)
        for terms in self._terms(batch_id):
            for term in terms:
                sizes[term["name"]] += abs(term["weight"] * term["value"]) if term["value"] is not None else 0.0
        total = sum(sizes.values())
        return {name: size / total for name, size in sorted(sizes.items())} if total > 0.0 else {}

    def term_means(self, batch_id: str) -> dict[str, float]:
        """Mean of each term's value over the labels that the batch was cut from, where the term spoke."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        for terms in self._terms(batch_id):
            for term in terms:
                if term["value"] is not None:
                    values[term["name"]].append(term["value"])
        return {name: sum(found) / len(found) for name, found in sorted(values.items())}

    def _terms(self, batch_id: str) -> list[list[dict[str, Any]]]:
        """The breakdown of every label that the batch was cut from."""
        statement = (
            select(labels.c.terms)
            .join(batch_items, (batch_items.c.inference_id == labels.c.inference_id) & (batch_items.c.label_revision == labels.c.revision))
            .where(batch_items.c.batch_id == batch_id)
        )
        with reading(self.engine) as connection:
            return list(connection.execute(statement).scalars())
