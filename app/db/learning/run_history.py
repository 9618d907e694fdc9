"""The runs behind a champion's line, with what their canaries measured."""

from sqlalchemy import Connection, select

from app.db.release.versions import lineage
from app.db.tables import batches, gate_results, training_runs
from app.domain.release.versions import PastRun


def run_history(connection: Connection, policy: str, champion: str, *, newest: int = 20) -> list[PastRun]:
    """Oldest first, the run that made the champion last; versions that no run made are left out."""
    line = [version for version in lineage(connection, policy, champion) if version.run_id is not None][:newest]
    found: list[PastRun] = []
    for version in reversed(line):
        run = connection.execute(
            select(training_runs.c.metrics, batches.c.anchor)
            .join(batches, batches.c.id == training_runs.c.batch_id)
            .where(training_runs.c.id == version.run_id)
        ).one_or_none()
        if run is not None:
            canary = _passed_canary(connection, version.digest)
            found.append(PastRun(candidate=version.digest, anchor=run.anchor, metrics=run.metrics, canary=canary))
    return found


def _passed_canary(connection: Connection, digest: str) -> dict[str, object] | None:
    table = gate_results.c
    passed = (table.digest == digest) & (table.gate == "g3_canary") & (table.verdict == "pass")
    return connection.execute(select(table.evidence).where(passed).order_by(table.id.desc()).limit(1)).scalar()
