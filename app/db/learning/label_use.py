"""How much of what people said is learned from."""

from datetime import datetime, timedelta

from sqlalchemy import Connection, case, exists, func, select

from app.db.tables import batch_items, batches, labels

WINDOW = timedelta(days=1)


def labels_used_share(connection: Connection, policy: str, *, until: datetime) -> float | None:
    """Of the labels made in the day before `until` that could teach, the share that is in a batch; None where there are none.

    Could teach: current, not held out, and nothing about the turn itself against it. What batching left out (of a version too far behind,
    of another rule set, beyond a cap) is unused, and so is what waits for the next slot.
    """
    used = exists(select(1).where(batch_items.c.inference_id == labels.c.inference_id))
    query = select(func.count(), func.sum(case((used, 1), else_=0))).where(
        labels.c.policy == policy, labels.c.current, labels.c.exclusion.is_(None), ~labels.c.held_out,
        labels.c.labelled_at > until - WINDOW, labels.c.labelled_at <= until,
    )  # fmt: skip
    able, taken = connection.execute(query).one()
    return taken / able if able else None


def used_share_of_batch(connection: Connection, batch_id: str) -> float | None:
    """The share up to the end of a batch's window."""
    row = connection.execute(select(batches.c.policy, batches.c.window_to).where(batches.c.id == batch_id)).first()
    return None if row is None else labels_used_share(connection, row.policy, until=row.window_to)
