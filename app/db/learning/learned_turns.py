"""Where the answers lie that versions of a policy were trained on, or may draft like."""

from typing import Any

from sqlalchemy import Connection, Select, false, func, select

from app.db.tables import batch_items, batches, labels, turns
from app.domain.telemetry.events import GATEWAY


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


def own_turns(connection: Connection, policy: str, version: str, *, newest: int) -> list[tuple[str, str, str]]:
    """(segment, inference_id, who asked) of the newest answers that a version gave people who let them be trained on and are not held out,
    the newest first; who asked is the actor, or the episode where nobody is named."""
    return [(row.payload_segment, row.inference_id, row.unit) for row in connection.execute(_own(policy, version, newest=newest))]


def count_own_turns(connection: Connection, policy: str, version: str, *, at_most: int) -> int:
    """How many those are, counted no further than `at_most`."""
    found = _own(policy, version, newest=at_most).subquery()
    return connection.execute(select(func.count()).select_from(found)).scalar_one()


def _own(policy: str, version: str, *, newest: int) -> Select[Any, Any, Any]:
    # one look-up per answer: as an EXISTS, PostgreSQL reads every held-out label there is
    held_out = select(labels.c.held_out).where(labels.c.inference_id == turns.c.inference_id, labels.c.current).limit(1).scalar_subquery()
    return (
        select(turns.c.payload_segment, turns.c.inference_id, func.coalesce(turns.c.actor, turns.c.episode_id).label("unit"))
        .where(turns.c.policy == policy, turns.c.version == version, turns.c.source == GATEWAY, turns.c.kind == "answer")
        .where(func.coalesce(held_out, false()).is_(False))
        .where(turns.c.train_consent, turns.c.payload_segment.is_not(None), turns.c.erased_at.is_(None))
        .order_by(turns.c.finished_at.desc(), turns.c.inference_id)
        .limit(newest)
    )
