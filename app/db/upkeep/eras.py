"""Eras of the inbox (PostgreSQL): its rows lie in partitions, one for each stretch of time, and go as a whole, bodies and all.

    era 7 (open): whatever the door inserts ──▶ its time is over: era 8 opens, a short transaction ──▶ … ──▶ era 7 is old, applied: dropped

A row's era is its column's default at the moment of its insertion: no clock but the keeper's decides, and code that knows nothing of eras
writes into the right one. An event is unique within an era, and looked for in the one before (`app.db.ingestion.inbox_rows`); what is sent
again later is accepted and sent on once more, and counts once, because ingestion knows it by `applied_events` for `dedupe_days`.

Other tables have no partitions, for reasons that were measured (docs/decisions/2026-11-24-partitions-where-they-pay.md). SQLite has none at
all: there, and of whatever an era that may not go leaves, what is old is deleted in steps (`app.db.upkeep.identities`).
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, exc, func, insert, select, text, update

from app.db import locks
from app.db.tables import inbox, inbox_eras

log = logging.getLogger(__name__)
NOT_THE_OWNER = "42501"
IN_A_STRETCH = 7
"""Eras in the time for which bodies are kept: a body goes up to one era after its time."""
SHORTEST = timedelta(hours=1)
PATIENCE = "2s"
"""How long a change of eras waits for whoever is at work, while others wait behind it; then it is tried again."""
FULL = text("length(payload) > 0")
"""As the index over rows with a payload says it."""


def span(keep: timedelta) -> timedelta:
    """How long an era lasts, where bodies are kept so long."""
    return max(SHORTEST, keep / IN_A_STRETCH)


def turn(engine: Engine, *, now: datetime, after: timedelta, patience: str = PATIENCE) -> int | None:
    """Open the next era where the present one has lasted long enough; returns its number."""
    return _patiently(engine, patience, lambda connection: _turn(connection, now, after))


def _patiently(engine: Engine, patience: str, work: Callable[[Connection], int | None]) -> int | None:
    """What may be done as well ten minutes later, where others do not let go of the table; None where there are no partitions."""
    if engine.dialect.name == "sqlite":
        return None

    def impatient(connection: Connection) -> int | None:
        connection.execute(text(f"SET LOCAL lock_timeout = '{patience}'"))
        return work(connection)

    try:
        return locks.settled(engine, impatient)
    except exc.DBAPIError as error:
        if locks.lost_race(error):
            log.warning("event=era_waits reason=others hold the inbox for longer than %s", patience)
        elif getattr(error.orig, "sqlstate", None) == NOT_THE_OWNER:
            why = str(error.orig).splitlines()[0]
            log.error("event=era_waits alarm=%s: ALTER TABLE inbox OWNER TO this role; until then what is old is emptied row by row", why)
        else:
            raise
        return None


def _turn(connection: Connection, now: datetime, after: timedelta) -> int | None:
    present = connection.execute(select(inbox_eras).where(inbox_eras.c.closed_at.is_(None)).with_for_update()).one_or_none()
    if present is None or now < present.opened_at + after:  # None: another keeper has just turned it
        return None
    number = present.era + 1
    for statement in (
        f"CREATE TABLE inbox_{number} (LIKE inbox INCLUDING DEFAULTS)",
        f"ALTER TABLE inbox_{number} ADD PRIMARY KEY (seq), ADD UNIQUE (source, event_id)",
        f"ALTER TABLE inbox ATTACH PARTITION inbox_{number} FOR VALUES IN ({number})",
        f"ALTER TABLE ONLY inbox ALTER COLUMN era SET DEFAULT {number}",
    ):
        connection.execute(text(statement))
    connection.execute(update(inbox_eras).where(inbox_eras.c.era == present.era).values(closed_at=now))
    connection.execute(insert(inbox_eras).values(era=number, opened_at=now))
    return number


def drop_oldest(engine: Engine, *, before: datetime, patience: str = PATIENCE) -> int | None:
    """Drop the oldest era where all of it was applied before; returns about how many rows that were, as the database last counted them."""
    return _patiently(engine, patience, lambda connection: _drop(connection, before))


def _drop(connection: Connection, before: datetime) -> int | None:
    oldest = connection.execute(select(inbox_eras).order_by(inbox_eras.c.era).limit(1).with_for_update()).one_or_none()
    if oldest is None or not _is_over(connection, oldest, before):
        return None
    counted = text("SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = to_regclass(:name)")
    rows = int(connection.execute(counted, {"name": f"inbox_{oldest.era}"}).scalar_one())
    connection.execute(text(f"DROP TABLE inbox_{oldest.era}"))
    connection.execute(delete(inbox_eras).where(inbox_eras.c.era == oldest.era))
    return rows


def _is_over(connection: Connection, era: Row[Any], before: datetime) -> bool:
    """Whether an era is closed, all of it applied, and no body of it younger than that."""
    if era.closed_at is None:
        return False
    mine, i = inbox.c.era == era.era, inbox.c
    for waiting in (i.relayed_at.is_(None), i.relayed_at.is_not(None) & i.applied_at.is_(None)):
        if connection.execute(select(i.seq).where(mine, waiting).limit(1)).first() is not None:
            return False
    newest = connection.execute(select(func.max(i.applied_at)).where(mine, i.applied_at.is_not(None), FULL)).scalar()
    return newest is None or newest < before
