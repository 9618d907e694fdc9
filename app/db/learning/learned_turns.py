"""Where the answers lie that versions of a policy were trained on."""

from sqlalchemy import Connection, select

from app.db.tables import batch_items, batches, turns


def learned_turns(connection: Connection, policy: str, *, batch: str | None, newest: int) -> list[tuple[str, str]]:
    """(segment, inference_id) of the turns of one batch, or of the newest batches; what was erased since is absent."""
    query = (
        select(turns.c.payload_segment, turns.c.inference_id)
        .join(batch_items, batch_items.c.inference_id == turns.c.inference_id)
        .join(batches, batches.c.id == batch_items.c.batch_id)
        .where(batches.c.policy == policy, turns.c.payload_segment.is_not(None), turns.c.erased_at.is_(None))
        .order_by(batches.c.slot.desc(), turns.c.inference_id)
        .limit(newest)
    )
    if batch is not None:
        query = query.where(batch_items.c.batch_id == batch)
    return [(row.payload_segment, row.inference_id) for row in connection.execute(query)]
