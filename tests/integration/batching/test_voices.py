"""Whose word decided a turn's outcome, read from real rows on both databases."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, insert

from app.db.engine import writing
from app.db.learning.batches import SqlBatchStore
from app.db.tables import observations
from app.domain.learning.batches import Voice
from pipelines.batching import BatchingConfig, cut_batch
from tests.integration.batching.rows import NOON, add_turn, add_version


@pytest.fixture
def engine(engine: Engine) -> Engine:
    add_version(engine, "champion")
    return engine


def say(engine: Engine, name: str, *, actor: str | None, minute: int = 0, retracted: bool = False, **target: Any) -> None:
    """An observation of that id."""
    at = NOON + timedelta(minutes=minute)
    row = {
        "source": "api", "id": name, "name": "rating", "value": True, "occurred_at": at, "received_at": at, "actor": actor, "tags": {},
        "status": "joined", "retracted_at": at if retracted else None, "policy": "composer", "inference_id": None, "episode_id": None,
    }  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(observations).values(row | target))


def test_the_rater_is_who_is_named_else_who_asked_and_what_decided_nothing_makes_nobody_one(engine: Engine) -> None:
    add_turn(engine, "rated", actor="asker", minute=100)
    add_turn(engine, "own", actor="asker", minute=100)
    add_turn(engine, "silent", actor=None, minute=100)
    add_turn(engine, "chain", actor="asker", episode="e", minute=100)
    say(engine, "1", actor="colleague", inference_id="rated", minute=101)
    say(engine, "2", actor="stranger", inference_id="rated", minute=101, retracted=True)
    say(engine, "3", actor=None, inference_id="own", minute=101)
    say(engine, "4", actor="reviewer", episode_id="e", minute=101)
    say(engine, "5", actor="reviewer", inference_id="long-ago", minute=1)
    say(engine, "6", actor="foreign", inference_id="own", minute=101, policy="tab")
    say(engine, "7", actor="late", inference_id="own", minute=101, status="late")
    say(engine, "8", actor="parked", episode_id="e", minute=101, status="parked", policy="tab")
    say(engine, "9", actor="anybody", inference_id="rated", minute=101, policy=None)
    with SqlBatchStore(engine).cutting("composer") as session:
        turns = session.unused_labels(versions=("champion",), since=None, until=NOON + timedelta(days=1))
        heard = session.voices(turns, before=NOON + timedelta(minutes=50))
    assert heard == {
        "rated": [Voice(rater="anybody", newcomer=True), Voice(rater="colleague", newcomer=True)],
        "own": [Voice(rater="asker", newcomer=True)],
        "silent": [Voice(rater=None, newcomer=True)],
        "chain": [Voice(rater="reviewer", newcomer=False)],
    }


def test_who_asked_before_is_no_newcomer(engine: Engine) -> None:
    add_turn(engine, "before", actor="asker", minute=1)
    add_turn(engine, "now", actor="asker", minute=100)
    with SqlBatchStore(engine).cutting("composer") as session:
        turns = session.unused_labels(versions=("champion",), since=None, until=NOON + timedelta(days=1))
        assert session.voices(turns, before=NOON + timedelta(minutes=50))["now"] == [Voice(rater="asker", newcomer=False)]


def test_one_rater_decides_no_more_of_a_batch_than_the_cap_whoever_asked(engine: Engine) -> None:
    for number in range(8):
        add_turn(engine, f"t{number}", actor=f"asker-{number}", reward=float(number % 2))
        if number < 6:
            say(engine, f"o{number}", actor="busy", inference_id=f"t{number}")
    config = BatchingConfig(min_turns=2, max_turns_per_rater=3)
    batch = cut_batch(
        SqlBatchStore(engine), policy="composer", slot=0, champion="champion", anchor="champion", config=config,
        now=NOON + timedelta(hours=1),
    )  # fmt: skip
    assert batch.left_out == {"rater_cap": 3}
    assert len(batch.items) == 5
