"""Labelled turns that no batch may take: people held out, and people who did not agree to training."""

from sqlalchemy import Connection, select

from app.db.tables import labels, turns
from app.domain.learning.batches import RewardedTurn
from app.domain.learning.rewards import Exclusion
from app.domain.telemetry.events import GATEWAY

KEPT = (Exclusion.NO_CONSENT.value, Exclusion.HELD_OUT.value)
"""Exclusions that say no more than that a turn is not for training."""


def rewarded_turns(connection: Connection, policy: str, version: str, *, newest: int) -> list[RewardedTurn]:
    """The newest such turns of a version with a reward and log-probabilities, oldest first. What labelling excluded for another
    reason than these two is left out."""
    query = (
        select(turns.c.inference_id, turns.c.payload_segment, labels.c.reward)
        .join(labels, (labels.c.inference_id == turns.c.inference_id) & labels.c.current)
        .where(turns.c.policy == policy, turns.c.version == version, turns.c.source == GATEWAY, turns.c.kind == "answer")
        .where(labels.c.held_out | ~turns.c.train_consent, labels.c.exclusion.is_(None) | labels.c.exclusion.in_(KEPT))
        .where(turns.c.has_logprobs, turns.c.payload_segment.is_not(None), turns.c.erased_at.is_(None))
        .order_by(turns.c.finished_at.desc(), turns.c.inference_id)
        .limit(newest)
    )
    rows = connection.execute(query).all()
    return [RewardedTurn(inference_id=row.inference_id, segment=row.payload_segment, reward=row.reward) for row in reversed(rows)]
