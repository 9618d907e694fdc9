"""Claimed segments that no turn points at: their gateway died between the deposit and the commit of the event."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

from sqlalchemy import Engine, func, select

from app.db.chunks import chunked
from app.db.engine import reading
from app.db.tables import inbox, segments


class SqlClaimSweep:
    """Drops orphaned claims: nobody would find the text in them again when its person asks to be forgotten.

    `min_age`: an event is committed at most so long after its payload was deposited. What was committed later finds no payload.
    """

    def __init__(
        self,
        state: Engine,
        inbox_engine: Engine,
        *,
        claims: Callable[[datetime], Iterable[str]],
        drop: Callable[[str], None],
        min_age: timedelta = timedelta(hours=1),
    ) -> None:
        self._state = state
        self._inbox = inbox_engine
        self._claims = claims
        self._drop = drop
        self._min_age = min_age

    def sweep(self, now: datetime) -> int:
        """Drop claims whose event, had it been committed, would be applied by now; returns how many."""
        orphans = self._unknown(self._claims(min(now, self._pending_since(now)) - self._min_age))
        for name in orphans:
            self._drop(name)
        return len(orphans)

    def _pending_since(self, now: datetime) -> datetime:
        unsent = select(func.min(inbox.c.received_at)).where(inbox.c.relayed_at.is_(None))
        unapplied = select(func.min(inbox.c.received_at)).where(inbox.c.relayed_at.is_not(None), inbox.c.applied_at.is_(None))
        with reading(self._inbox) as connection:
            oldest = [connection.execute(statement).scalar() for statement in (unsent, unapplied)]
        return min((moment for moment in oldest if moment is not None), default=now)

    def _unknown(self, names: Iterable[str]) -> list[str]:
        unknown: list[str] = []
        for chunk in chunked(sorted(names)):
            with reading(self._state) as connection:
                known = set(connection.execute(select(segments.c.name).where(segments.c.name.in_(chunk))).scalars())
            unknown += [name for name in chunk if name not in known]
        return unknown
