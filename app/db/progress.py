"""How far long work is, for terminal and console: the port `ProgressLog`. One row per policy and task, overwritten."""

from typing import Any

from sqlalchemy import Engine

from app.db.engine import upsert, writing
from app.db.tables import progress
from app.domain.ids import utc_now


class SqlProgressLog:
    """Progress in the state database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def report(self, policy: str, task: str, done: float, total: float, detail: dict[str, Any]) -> None:
        """Overwrite the task's row."""
        values = {"policy": policy, "task": task, "done": done, "total": total, "detail": detail, "updated_at": utc_now()}
        with writing(self.engine) as connection:
            changed = ("done", "total", "detail", "updated_at")
            connection.execute(upsert(connection, progress, key=("policy", "task"), update=changed), values)
