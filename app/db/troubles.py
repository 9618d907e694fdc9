"""What a process waits for, in its own words: written when it begins to wait, taken away when it goes on, shown by `/health`."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.exc import SQLAlchemyError

from app.db.engine import reading, upsert, writing
from app.db.tables import inbox, troubles
from app.domain.ids import utc_now
from app.domain.ports import Clock

log = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
FRESH = timedelta(minutes=2)
"""Older words are those of a process that ended without taking them back."""
STALLED = timedelta(seconds=60)
"""Events that wait so long say that something is wrong, also where nobody could write down what."""


class SqlTroubles:
    """The words of one process."""

    def __init__(self, engine: Engine, *, name: str, clock: Clock = utc_now, now_s: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._name = name
        self._clock = clock
        self._now_s = now_s
        self._said: str | None = None
        self._said_at = float("-inf")

    def report(self, trouble: str | None) -> None:
        """Say it, or that it is over; where even that cannot be written the log has it."""
        if trouble == self._said and (trouble is None or self._now_s() - self._said_at < SAY_EVERY_S):
            return
        try:
            self._write(trouble)
        except SQLAlchemyError as error:
            log.warning("event=trouble_not_written trouble=%s error=%s", trouble, error)
            return
        self._said, self._said_at = trouble, self._now_s()

    def _write(self, trouble: str | None) -> None:
        now = self._clock()
        with writing(self._engine) as connection:
            if trouble is None:
                connection.execute(delete(troubles).where(troubles.c.name == self._name))
                return
            row = {"name": self._name, "reason": trouble, "since": now, "updated_at": now}
            connection.execute(upsert(connection, troubles, key=("name",), update=("reason", "updated_at")), row)


def ingestion_troubles(state: Engine, inbox_engine: Engine, *, clock: Clock = utc_now) -> list[str]:
    """What keeps accepted events from being applied, one sentence each; empty where all is well."""
    now = clock()
    with reading(state) as connection:
        fresh = select(troubles).where(troubles.c.updated_at > now - FRESH).order_by(troubles.c.name)
        said = [f"{row.name} waits since {row.since:%H:%M:%S}: {row.reason}" for row in connection.execute(fresh)]
    unsent = select(func.min(inbox.c.received_at)).where(inbox.c.relayed_at.is_(None))
    unapplied = select(func.min(inbox.c.relayed_at)).where(inbox.c.relayed_at.is_not(None), inbox.c.applied_at.is_(None))
    with reading(inbox_engine) as connection:
        oldest = {"sent": connection.execute(unsent).scalar(), "applied": connection.execute(unapplied).scalar()}
    waits = {what: now - moment for what, moment in oldest.items() if moment is not None and now - moment > STALLED}
    process = {"sent": "relay", "applied": "ingest"}
    return said + [
        f"events wait for {wait.total_seconds():.0f} s to be {what}: is `ratchet {process[what]}` running?" for what, wait in waits.items()
    ]
