"""Scores of versions on offline suites."""

from datetime import datetime

from sqlalchemy import Engine, select

from app.db.engine import insert_or_ignore, reading, writing
from app.db.tables import suite_scores


class SqlScores:
    """The `ScoreBook` port of `pipelines.evaluation.offline` on SQL."""

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
