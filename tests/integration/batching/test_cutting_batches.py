"""Batches are cut from real rows, on both databases, by several at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import pytest
from sqlalchemy import Engine, func, insert, select
from sqlalchemy.exc import IntegrityError

from app.db.engine import writing
from app.db.learning.batches import SqlBatchStore
from app.db.tables import batch_items
from app.domain.errors import Held
from app.domain.learning.batches import BatchManifest
from app.domain.release.versions import HoldReason
from pipelines.batching import BatchingConfig, cut_batch
from tests.integration.batching.rows import NOON, add_turn, add_version

T = TypeVar("T")
CONFIG = BatchingConfig(min_turns=2)


def cut(engine: Engine, *, slot: int = 0, config: BatchingConfig = CONFIG, minutes: int = 60, champion: str = "champion") -> BatchManifest:
    now = NOON + timedelta(minutes=minutes)
    return cut_batch(SqlBatchStore(engine), policy="composer", slot=slot, champion=champion, anchor="anchor", config=config, now=now)


def test_every_reason_is_counted_and_only_the_eligible_are_in(engine: Engine) -> None:
    add_version(engine, "older")
    add_version(engine, "champion", parent="older")
    add_turn(engine, "good-1", reward=1.0)
    add_turn(engine, "good-2", reward=-1.0)
    add_turn(engine, "no-consent", train_consent=False)
    add_turn(engine, "erased", erased_at=NOON)
    add_turn(engine, "imported", source="import:history")
    add_turn(engine, "no-logprobs", has_logprobs=False)
    add_turn(engine, "fault", exclusion="engine_fault")
    add_turn(engine, "silent", exclusion="no_signal")
    add_turn(engine, "empty", completion_tokens=0)
    add_turn(engine, "stale", version="older")
    add_turn(engine, "unknown", version="never-seen")
    add_turn(engine, "gone", payload_segment=None)
    add_turn(engine, "kept-for-evaluation", held_out=True)
    add_turn(engine, "old-rules", rule_set="rules-0", minute=-1)
    add_turn(engine, "of-another-policy", policy="tab")
    batch = cut(engine, config=replace_config(staleness=0))
    assert [item.inference_id for item in batch.items] == ["good-1", "good-2"]
    assert batch.left_out == {
        "no_consent": 1, "erased": 1, "imported": 1, "no_logprobs": 1, "engine_fault": 1, "no_signal": 1, "empty_completion": 1,
        "stale_version": 1, "unknown_version": 1, "payload_missing": 1, "held_out": 1, "other_rule_set": 1,
    }  # fmt: skip
    assert (batch.window_from, batch.window_to) == (NOON - timedelta(minutes=1), NOON + timedelta(minutes=60))
    assert batch.items[0].payload_segment == "segment-1"


def test_the_same_slot_again_gives_the_same_batch(engine: Engine) -> None:
    for number in range(4):
        add_turn(engine, f"turn-{number}", reward=number)
    first = cut(engine)
    add_turn(engine, "later", reward=9.0)
    assert cut(engine) == first


def test_a_turn_is_in_at_most_one_batch(engine: Engine) -> None:
    for number in range(4):
        add_turn(engine, f"turn-{number}", reward=number)
    cut(engine)
    add_turn(engine, "new-1", reward=1.0, minute=61)
    add_turn(engine, "new-2", reward=2.0, minute=62)
    assert [item.inference_id for item in cut(engine, slot=1, minutes=120).items] == ["new-1", "new-2"]
    with pytest.raises(IntegrityError), writing(engine) as connection:
        row = {"inference_id": "turn-1", "batch_id": "b", "episode_id": "e", "reward": 0.0, "label_revision": 1, "segment": ""}
        connection.execute(insert(batch_items).values(row))


def test_the_id_depends_on_what_is_learned_and_not_on_when(engine: Engine) -> None:
    for number in range(3):
        add_turn(engine, f"turn-{number}", reward=number)
    store = SqlBatchStore(engine)
    ids: list[str] = []
    for minutes in (60, 90):
        with pytest.raises(ZeroDivisionError), store.cutting("composer") as session:
            labels = session.unused_labels(versions=("champion",), since=None, until=NOON + timedelta(minutes=minutes))
            assert len(labels) == 3
            ids.append(cut_within(session, minutes).id)
            raise ZeroDivisionError  # rolls the cut back, so that the same labels are there again
    assert ids[0] == ids[1]
    assert cut(engine, slot=7).id == ids[0]


def cut_within(session: object, minutes: int) -> BatchManifest:
    """Cut inside an open session, as a store that hands out that session."""

    class Store:
        def cutting(self, policy: str) -> "Store":
            return self

        def __enter__(self) -> object:
            return session

        def __exit__(self, *_: object) -> None:
            return None

    now = NOON + timedelta(minutes=minutes)
    return cut_batch(Store(), policy="composer", slot=0, champion="champion", anchor="anchor", config=CONFIG, now=now)  # type: ignore[arg-type]


def test_concurrent_cutters_of_one_slot_get_one_batch(engine: Engine) -> None:
    for number in range(20):
        add_turn(engine, f"turn-{number:02d}", reward=number)
    found = together([lambda: cut(engine)] * 4)
    assert len({batch.id for batch in found}) == 1
    with writing(engine) as connection:
        assert connection.execute(select(func.count()).select_from(batch_items)).scalar_one() == 20


def test_concurrent_cutters_of_different_slots_never_share_a_turn(engine: Engine) -> None:
    for number in range(40):
        add_turn(engine, f"turn-{number:02d}", reward=number)
    config = BatchingConfig(min_turns=2, max_turns=15)

    def cut_or_hold(slot: int) -> BatchManifest | None:
        try:
            return cut(engine, slot=slot, config=config)
        except Held as held:
            assert held.reason == HoldReason.TOO_FEW_LABELS
            return None

    found = [batch for batch in together([lambda slot=slot: cut_or_hold(slot) for slot in range(4)]) if batch is not None]
    taken = [item.inference_id for batch in found for item in batch.items]
    assert sorted(len(batch.items) for batch in found) == [10, 15, 15]  # 15 + 15 + 10 = 40; the fourth cutter finds nothing
    assert len(taken) == len(set(taken)) == 40


def together(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run the jobs at once; what each returned."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def test_staleness_lets_older_versions_in(engine: Engine) -> None:
    add_version(engine, "v1")
    add_version(engine, "v2", parent="v1")
    add_version(engine, "v3", parent="v2")
    for number, version in enumerate(("v1", "v2", "v3", "v3")):
        add_turn(engine, f"turn-{number}", reward=number, version=version)
    one_back = cut(engine, champion="v3", config=replace_config(staleness=1))
    assert [item.version for item in one_back.items] == ["v2", "v3", "v3"]
    assert one_back.left_out == {"stale_version": 1}


def replace_config(**changes: int) -> BatchingConfig:
    return BatchingConfig(min_turns=2, **changes)  # type: ignore[arg-type]


def test_a_chain_waits_until_all_its_turns_have_labels(engine: Engine) -> None:
    add_turn(engine, "a", reward=1.0)
    add_turn(engine, "b", reward=0.0)
    add_turn(engine, "c-1", reward=0.5, episode="c")
    add_turn(engine, "c-2", episode="c", labelled=False)
    batch = cut(engine)
    assert [item.inference_id for item in batch.items] == ["a", "b"]
    assert batch.left_out == {"episode_open": 1}


def test_the_final_reward_reaches_every_turn_of_the_chain_and_its_summary(engine: Engine) -> None:
    add_turn(engine, "a-1", reward=-1.0, episode="a", minute=1)
    add_turn(engine, "a-2", reward=0.0, episode="a", minute=2, exclusion="no_signal", kind="summary")
    add_turn(engine, "a-3", reward=1.0, episode="a", minute=3)
    add_turn(engine, "b", reward=0.25)
    paid = {item.inference_id: item.reward for item in cut(engine).items}
    assert paid == {"a-1": 1.0, "a-2": 1.0, "a-3": 1.0, "b": 0.25}


def test_too_few_labels_hold_and_use_nothing_up(engine: Engine) -> None:
    add_turn(engine, "only", reward=1.0)
    with pytest.raises(Held, match="1 turns are eligible") as held:
        cut(engine)
    assert held.value.reason == HoldReason.TOO_FEW_LABELS
    add_turn(engine, "second", reward=0.0, minute=1)
    assert len(cut(engine, slot=1).items) == 2


def test_equal_rewards_hold(engine: Engine) -> None:
    for number in range(3):
        add_turn(engine, f"turn-{number}", reward=0.5)
    with pytest.raises(Held) as held:
        cut(engine)
    assert held.value.reason == HoldReason.EQUAL_REWARDS


def test_the_stored_manifest_is_the_returned_one(engine: Engine) -> None:
    for number in range(3):
        add_turn(engine, f"turn-{number}", reward=number / 3, actor=f"actor-{number}")
    returned = cut(engine)
    with SqlBatchStore(engine).cutting("composer") as session:
        assert session.existing(0) == replace(returned)
        assert session.existing(1) is None
