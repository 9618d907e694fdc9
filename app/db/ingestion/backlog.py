"""How far everything that was accepted is applied: labels wait for it, so that lag never makes one miss what was already said."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, Row, func, select

from app.db.engine import reading
from app.db.ingestion.streams import applied_among
from app.db.tables import inbox

CHUNK = 2_000
LATE_COMMIT = timedelta(seconds=5)
"""Rows may be committed in another order than they are numbered (PostgreSQL, several doors): what is younger is looked at again."""


class SqlBacklog:
    """The inbox against what was applied. Every row is looked at a few times, however long the inbox is."""

    def __init__(self, inbox_engine: Engine, state_engine: Engine) -> None:
        self._inbox = inbox_engine
        self._state = state_engine
        self._applied_to: int | None = None
        """Up to this row everything is applied, for good; None before the first look."""

    def complete_until(self, *, now: datetime) -> datetime:
        """Everything accepted before this moment is applied; `now` where nothing waits.

        With `ingest=direct` there is no inbox, so nothing waits in it: what comes after its label then corrects it.
        """
        if self._applied_to is None:
            self._applied_to = self._begin()
        seen = self._applied_to
        while rows := self._unmarked(seen):
            applied = self._applied([(row.source, row.event_id) for row in rows])
            for row in rows:
                if (row.source, row.event_id) not in applied:
                    return min(row.received_at, now)
                if row.received_at < now - LATE_COMMIT and self._applied_to == seen:
                    self._applied_to = row.seq
                seen = row.seq
        return now

    def _begin(self) -> int:
        """The row before the first that is not marked as applied; found by the indexes over such rows."""
        i = inbox.c
        unsent = select(func.min(i.seq)).where(i.relayed_at.is_(None))
        unmarked = select(func.min(i.seq)).where(i.relayed_at.is_not(None), i.applied_at.is_(None))
        with reading(self._inbox) as connection:
            found = [connection.execute(statement).scalar() for statement in (unsent, unmarked)]
            newest = connection.execute(select(func.max(i.seq))).scalar() or 0
        return min([seq - 1 for seq in found if seq is not None], default=newest)

    def _unmarked(self, after: int) -> list[Row[*tuple[Any, ...]]]:
        i = inbox.c
        wanted = select(i.seq, i.source, i.event_id, i.received_at).where(i.seq > after, i.applied_at.is_(None))
        with reading(self._inbox) as connection:
            return list(connection.execute(wanted.order_by(i.seq).limit(CHUNK)))

    def _applied(self, identities: list[tuple[str, str]]) -> set[tuple[str, str]]:
        with reading(self._state) as connection:
            return applied_among(connection, identities)
