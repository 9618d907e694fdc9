"""Exposures: who was about to be served by which version with which probability."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from app.db.engine import insert_or_ignore
from app.db.tables import exposures
from app.domain.telemetry.events import Exposure


def insert_exposures(connection: Connection, shown: Sequence[Exposure]) -> int:
    """Insert what is new; the first assignment of an inference stays. Returns how many were ignored."""
    if not shown:
        return 0
    rows = [_row(exposure) for exposure in sorted(shown, key=lambda exposure: exposure.inference_id)]
    statement = insert_or_ignore(connection, exposures).returning(exposures.c.id)
    return len(rows) - len(connection.execute(statement, rows).all())


def _row(exposure: Exposure) -> dict[str, Any]:
    return {
        "id": exposure.id, "policy": exposure.policy, "inference_id": exposure.inference_id, "episode_id": exposure.episode_id,
        "actor": exposure.actor, "release_id": exposure.release_id, "stage": exposure.stage, "arm": exposure.arm,
        "probability": exposure.probability, "share": exposure.share, "holdback": exposure.holdback, "digest": exposure.digest,
        "occurred_at": exposure.occurred_at,
    }  # fmt: skip
