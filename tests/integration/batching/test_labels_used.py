"""Over a day of slots nearly everything people said is learned from, also what they said while an update was on its way."""

from datetime import timedelta

from sqlalchemy import Engine

from app.db.learning.batches import SqlBatchStore
from app.db.learning.runs import SqlRunStore
from pipelines.batching import BatchingConfig, cut_batch
from tests.integration.batching.rows import NOON, add_turn, add_version

SLOT_MIN = 300
PROMOTED_MIN = 210
"""A slot's candidate becomes champion three and a half hours after the cut it was made from."""
WAIT_MIN = 30
EVERY_MIN = 20
SLOTS = 6


def champion_at(minute: int) -> str:
    """Version n was made from the cut of slot n − 1."""
    return f"v{max(0, (minute - PROMOTED_MIN) // SLOT_MIN + 1)}"


def a_day(engine: Engine, config: BatchingConfig) -> float:
    """Every slot promotes; what was said is labelled half an hour after the answer. The share of labels used, as the last run says it."""
    add_version(engine, "v0")
    for number in range(1, SLOTS + 1):
        add_version(engine, f"v{number}", parent=f"v{number - 1}")
    for minute in range(0, SLOTS * SLOT_MIN, EVERY_MIN):
        add_turn(engine, f"turn-{minute:04d}", reward=minute % 7, version=champion_at(minute), minute=minute + WAIT_MIN)
    store, batch_id = SqlBatchStore(engine), ""
    for slot in range(1, SLOTS + 1):
        at = slot * SLOT_MIN
        now = NOON + timedelta(minutes=at)
        batch_id = cut_batch(store, policy="composer", slot=slot, champion=champion_at(at), anchor="v0", config=config, now=now).id
    share = SqlRunStore(engine).labels_used_share(batch_id)
    assert share is not None
    return share


def test_nine_in_ten_labels_are_used_under_the_default_staleness(sqlite_engine: Engine) -> None:
    assert a_day(sqlite_engine, BatchingConfig(min_turns=2)) >= 0.9


def test_with_no_staleness_most_of_what_people_said_is_thrown_away(sqlite_engine: Engine) -> None:
    assert a_day(sqlite_engine, BatchingConfig(min_turns=2, staleness=0)) < 0.5


def test_there_is_no_share_where_nothing_could_teach(sqlite_engine: Engine) -> None:
    assert SqlRunStore(sqlite_engine).labels_used_share("unknown") is None
