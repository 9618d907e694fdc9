"""Scores of versions on offline suites."""

from datetime import datetime

from sqlalchemy import Engine, select

from app.db.engine import insert_or_ignore, reading, writing
from app.db.tables import gate_results, releases, suite_scores


class SqlScores:
    """The `ScoreBook` port of `pipelines.evaluation.suites.offline` on SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, digest: str, suite: str) -> list[list[float]] | None:
        """Scores [tasks, samples] of a version on a suite, or None where it has not been run."""
        query = select(suite_scores.c.scores).where(suite_scores.c.digest == digest, suite_scores.c.suite == suite)
        with reading(self._engine) as connection:
            return connection.execute(query).scalar()

    def save(self, digest: str, suite: str, scores: list[list[float]], *, at: datetime) -> None:
        """Remember scores; the first ones stay."""
        with writing(self._engine) as connection:
            row = {"digest": digest, "suite": suite, "scores": scores, "scored_at": at}
            connection.execute(insert_or_ignore(connection, suite_scores).values(**row))

    def tested(self, policy: str, suite: str, *, gate: str, since: datetime) -> list[tuple[float, bool]]:
        """Level and whether it passed, of every candidate of a policy that the suite judged since then, oldest first."""
        mine = (releases.c.policy == policy) & (gate_results.c.gate == gate) & (gate_results.c.decided_at >= since)
        joined = gate_results.join(releases, releases.c.id == gate_results.c.release_id)
        query = select(gate_results.c.evidence[suite]["level"], gate_results.c.evidence[suite]["passed"]).select_from(joined).where(mine)
        with reading(self._engine) as connection:
            rows = connection.execute(query.order_by(gate_results.c.id)).all()
        return [(float(level), bool(passed)) for level, passed in rows if level is not None]
