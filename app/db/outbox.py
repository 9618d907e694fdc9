"""The outbox: events of the loop itself (labels, releases, dead letters, tombstones), written in the transaction that causes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, insert

from app.db.engine import insert_or_ignore
from app.db.tables import outbox
from app.domain.ids import uuid7


@dataclass(frozen=True, kw_only=True)
class OutboxEvent:
    """One event for the relay."""

    topic: str
    """A base name of `app.domain.telemetry.events.Topic`."""
    type: str
    key: str
    payload: bytes
    """JSON; empty for a tombstone."""
    event_id: str | None = None
    """Fixed where the same cause may be written twice; the second is ignored."""


def enqueue(connection: Connection, events: Sequence[OutboxEvent], *, now: datetime) -> None:
    """Put events into the outbox; the relay sends them after the commit, in order."""
    if not events:
        return
    rows = [
        {
            "event_id": event.event_id or uuid7(), "topic": str(event.topic), "key": event.key[:200], "type": str(event.type),
            "payload": event.payload, "created_at": now,
        }
        for event in events
    ]  # fmt: skip
    fixed = any(event.event_id for event in events)
    connection.execute(insert_or_ignore(connection, outbox) if fixed else insert(outbox), rows)
