"""Turns that no update may learn from, on both databases."""

from sqlalchemy import Engine

from app.db.engine import reading
from app.db.learning.rewarded_turns import rewarded_turns
from app.domain.learning.batches import RewardedTurn
from tests.integration.batching.rows import add_turn


def test_only_what_cannot_be_in_a_batch_is_taken_and_the_newest_come_oldest_first(engine: Engine) -> None:
    add_turn(engine, "held-1", held_out=True, reward=0.5, minute=1)
    add_turn(engine, "held-2", held_out=True, reward=-0.5, minute=2)
    add_turn(engine, "refused-training", train_consent=False, exclusion="no_consent", reward=1.0, minute=3)
    add_turn(engine, "trainable", minute=4)
    add_turn(engine, "other-version", held_out=True, version="older", minute=5)
    add_turn(engine, "no-logprobs", held_out=True, has_logprobs=False, minute=6)
    add_turn(engine, "no-tokens", held_out=True, payload_segment=None, minute=7)
    add_turn(engine, "excluded", held_out=True, exclusion="aborted", minute=8)
    add_turn(engine, "imported", held_out=True, source="import:arena", minute=9)
    add_turn(engine, "other-policy", held_out=True, policy="tab", minute=10)
    with reading(engine) as connection:
        found = rewarded_turns(connection, "composer", "champion", newest=10)
        assert [(t.inference_id, t.reward) for t in found] == [("held-1", 0.5), ("held-2", -0.5), ("refused-training", 1.0)]
        newest = rewarded_turns(connection, "composer", "champion", newest=1)
        assert newest == [RewardedTurn(inference_id="refused-training", segment="segment-1", reward=1.0)]
