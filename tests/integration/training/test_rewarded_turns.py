"""Turns that no update may learn from, and those that updates learned from, on both databases."""

from collections.abc import Sequence

from sqlalchemy import Engine, insert

from app.db.engine import reading, writing
from app.db.learning.learned_turns import learned_turns, own_turns
from app.db.learning.rewarded_turns import rewarded_turns
from app.db.tables import batch_items, batches
from app.domain.learning.batches import RewardedTurn
from tests.integration.batching.rows import NOON, add_turn


def add_batch(engine: Engine, name: str, turns: Sequence[str], *, slot: int, policy: str = "composer") -> None:
    window = {"window_from": NOON, "window_to": NOON, "left_out": {}, "created_at": NOON}
    item = {"batch_id": name, "episode_id": "e", "reward": 1.0, "label_revision": 1, "segment": ""}
    with writing(engine) as connection:
        batch = {"id": name, "policy": policy, "slot": slot, "champion": "champion", "anchor": "champion", "rule_set": "rules-1"}
        connection.execute(insert(batches), batch | window)
        connection.execute(insert(batch_items), [item | {"inference_id": turn} for turn in turns])


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


def test_what_was_learned_is_that_of_one_batch_or_of_the_newest_ones_without_what_was_erased(engine: Engine) -> None:
    for turn in ("a", "b", "c"):
        add_turn(engine, turn, payload_segment=f"segment-of-{turn}")
    add_turn(engine, "without-tokens", payload_segment=None)
    add_turn(engine, "erased", erased_at=NOON)
    add_turn(engine, "of-tab", policy="tab")
    add_batch(engine, "first", ["b", "a", "erased"], slot=1)
    add_batch(engine, "second", ["c", "without-tokens"], slot=2)
    add_batch(engine, "other", ["of-tab"], slot=3, policy="tab")
    a, b, c = (("segment-of-" + turn, turn) for turn in "abc")
    with reading(engine) as connection:
        assert learned_turns(connection, "composer", batch="first", newest=10) == [a, b]
        assert learned_turns(connection, "composer", batch="second", newest=10) == [c]
        assert learned_turns(connection, "composer", batch=None, newest=10) == [c, a, b]
        assert learned_turns(connection, "composer", batch=None, newest=2) == [c, a]


def test_a_head_learns_from_a_versions_own_answers_of_people_who_agreed_the_newest_first(engine: Engine) -> None:
    add_turn(engine, "old", minute=1, actor="ada")
    add_turn(engine, "new", minute=2)
    add_turn(engine, "held-out", held_out=True, minute=3, actor="bob")
    add_turn(engine, "refused-training", train_consent=False, exclusion="no_consent", minute=4)
    add_turn(engine, "other-version", version="older", minute=5)
    add_turn(engine, "other-policy", policy="tab", minute=6)
    add_turn(engine, "no-tokens", payload_segment=None, minute=7)
    add_turn(engine, "erased", erased_at=NOON, minute=8)
    add_turn(engine, "imported", source="import:arena", minute=9)
    with reading(engine) as connection:
        found = own_turns(connection, "composer", "champion", newest=10)
        assert [(turn, unit) for _, turn, unit in found] == [("new", "episode-of-new"), ("old", "ada")]
        assert own_turns(connection, "composer", "champion", newest=1) == found[:1]
