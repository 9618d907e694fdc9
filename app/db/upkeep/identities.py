"""Identities of events, bodies of what was sent, and dead letters: what the streaming rooms remember of the past."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, delete, func, literal_column, select

from app.db.chunks import one_of
from app.db.tables import applied_events, dead_letters, inbox, outbox
from app.domain.telemetry.events import Topic

SAID = (Topic.EVENTS.value, Topic.LABELS.value, Topic.DEAD_LETTERS.value)
"""What the loop tells Kafka again and again. Releases are few, their webhooks may be sent again, and they stay."""


def forget_inbox(connection: Connection, *, before: datetime, limit: int, after: int = 0) -> tuple[int, int]:
    """Delete applied events from the inbox, oldest first; returns how many, and up to which `seq` was looked.

    The rows stand in order of their arrival, so the head of the table is its oldest part and no index over times is needed.
    """
    head = select(inbox.c.seq, inbox.c.applied_at).where(inbox.c.seq > after).order_by(inbox.c.seq).limit(limit).subquery()
    looked = connection.execute(select(head.c.seq, head.c.applied_at).order_by(head.c.seq)).all()
    old = [row.seq for row in looked if row.applied_at is not None and row.applied_at < before]
    if not old:
        return 0, after
    connection.execute(delete(inbox).where(one_of(connection, inbox.c.seq, old)))
    return len(old), max(old)


def forget_applied(connection: Connection, *, before: datetime, limit: int) -> int:
    """Delete deduplication rows, oldest first; returns how many. By their place on the disk, because nothing ever moves them."""
    a = applied_events.c
    place = literal_column("rowid" if connection.dialect.name == "sqlite" else "ctid")
    old = select(place).select_from(applied_events).where(a.applied_at < before).order_by(a.applied_at).limit(limit)
    mine = place.in_(old) if connection.dialect.name == "sqlite" else place == func.any(func.array(old.scalar_subquery()))
    return connection.execute(delete(applied_events).where(mine)).rowcount


def forget_outbox(connection: Connection, *, before: datetime, limit: int, after: int = 0) -> tuple[int, int]:
    """Delete what was said to Kafka, oldest first; returns how many, and up to which `seq` was looked."""
    columns = (outbox.c.seq, outbox.c.topic, outbox.c.sent_at)
    head = connection.execute(select(*columns).where(outbox.c.seq > after).order_by(outbox.c.seq).limit(limit)).all()
    young = next((n for n, row in enumerate(head) if row.sent_at is None or row.sent_at >= before), len(head))
    old = [row.seq for row in head[:young] if row.topic in SAID]
    if old:
        connection.execute(delete(outbox).where(one_of(connection, outbox.c.seq, old)))
    return len(old), head[young - 1].seq if young else after


def forget_letters(connection: Connection, *, before: datetime, limit: int) -> int:
    """Delete dead letters that were not seen since; they are few, so their table is read."""
    old = select(dead_letters.c.id).where(dead_letters.c.last_seen_at < before).order_by(dead_letters.c.id).limit(limit)
    return connection.execute(delete(dead_letters).where(dead_letters.c.id.in_(old))).rowcount


def oldest(connection: Connection) -> dict[str, datetime | None]:
    """When the oldest of each came: what an officer asks to see."""
    first: dict[str, Select[Any]] = {
        "inbox": select(inbox.c.received_at).order_by(inbox.c.seq).limit(1),
        "identities": select(func.min(applied_events.c.applied_at)),
        "dead_letters": select(func.min(dead_letters.c.last_seen_at)),
    }
    return {name: connection.execute(query).scalar() for name, query in first.items()}
