"""Practice beside production: labelled by the same rules, let in by a share, whole groups at a time, measured against the group."""

from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from app.db.engine import reading
from app.db.learning.batches import SqlBatchStore
from app.db.tables import batches
from app.domain.errors import BadConfig, Held
from app.domain.learning.batches import BatchManifest
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.training.config import TrackerConfig
from pipelines.training.estimators import RewardedTurn
from pipelines.training.estimators.batch_mean import BatchMean
from pipelines.training.estimators.grouped import Grouped
from pipelines.training.estimators.segment_tracker import SegmentTracker
from tests.integration.batching.rows import NOON, add_turn, add_version


@pytest.fixture
def engine(sqlite_engine: Engine) -> Engine:
    add_version(sqlite_engine, "older")
    add_version(sqlite_engine, "before", parent="older")
    add_version(sqlite_engine, "champion", parent="before")
    return sqlite_engine


def practise(engine: Engine, group: str, rewards: list[float], *, turns: int = 1, version: str = "champion", **more: object) -> None:
    """A group of tries, each an episode of so many turns that is paid at its end."""
    for attempt, reward in enumerate(rewards):
        for turn in range(turns):
            add_turn(
                engine, f"{group}-{attempt}-{turn}", reward=reward, version=version, episode=f"{group}-{attempt}", minute=turn,
                source="rollout:small-functions", tags={"group": group, "attempt": str(attempt)}, segment="task=add", **more,  # type: ignore[arg-type]
            )  # fmt: skip


def cut(engine: Engine, **config: float) -> BatchManifest:
    held = BatchingConfig(min_turns=2, max_turns=int(config.pop("max_turns", 100)), **config)  # type: ignore[arg-type]
    now = NOON + timedelta(minutes=60)
    return cut_batch(SqlBatchStore(engine), policy="composer", slot=0, champion="champion", anchor="champion", config=held, now=now)


def groups_of(batch: BatchManifest) -> Counter[str]:
    return Counter(item.group for item in batch.items)


def test_without_a_share_practice_is_left_out_and_counted(engine: Engine) -> None:
    for number in range(4):
        add_turn(engine, f"served-{number}", reward=number)
    practise(engine, "g1", [0.0, 1.0])
    batch = cut(engine)
    assert groups_of(batch) == {"": 4}
    assert batch.left_out == {"rollout": 2}


def test_a_share_lets_whole_groups_in_beside_production(engine: Engine) -> None:
    for number in range(8):
        add_turn(engine, f"served-{number}", reward=number)
    for group in ("g1", "g2", "g3"):
        practise(engine, group, [0.0, 1.0, 1.0])
    batch = cut(engine, rollout_share=0.4)  # 0.4 / 0.6 of eight is five turns: one group of three
    counted = groups_of(batch)
    assert counted[""] == 8
    assert sorted(counted.values()) == [3, 8]
    assert batch.left_out == {"not_sampled": 6}
    again = SqlBatchStore(engine)
    with again.cutting("composer") as session:
        kept = session.existing(0)
    assert kept is not None
    assert groups_of(kept) == counted, "the group is known to whoever reads the batch later"


def test_a_share_of_one_learns_from_practice_alone_and_less_does_not(engine: Engine) -> None:
    practise(engine, "g1", [0.0, 1.0], turns=3)
    with pytest.raises(Held, match="0 turns are eligible"):
        cut(engine, rollout_share=0.9)
    batch = cut(engine, rollout_share=1.0)
    assert groups_of(batch) == {"g1": 6}
    assert {item.episode_id: item.reward for item in batch.items} == {"g1-0": 0.0, "g1-1": 1.0}, "the outcome reaches every turn"


def test_what_the_machinery_failed_is_in_no_batch_and_a_try_that_is_left_alone_waits(engine: Engine) -> None:
    practise(engine, "g1", [0.0, 1.0])
    practise(engine, "g2", [1.0])
    practise(engine, "g2-lost", [0.0], exclusion="environment_fault")
    batch = cut(engine, rollout_share=1.0)
    assert groups_of(batch) == {"g1": 2}
    assert batch.left_out == {"environment_fault": 1, "not_sampled": 1}


def test_practice_may_be_one_version_old_and_production_two(engine: Engine) -> None:
    for number, version in enumerate(("champion", "before", "older", "older")):
        add_turn(engine, f"served-{number}", reward=number, version=version)
    for group, version in (("g1", "before"), ("g2", "older")):
        practise(engine, group, [0.0, 1.0], version=version)
    batch = cut(engine, rollout_share=0.5)
    assert groups_of(batch) == {"": 4, "g1": 2}
    assert batch.left_out == {"stale_version": 2}


def test_nobody_s_word_is_drawn_to_the_mean_for_practice(engine: Engine) -> None:
    practise(engine, "g1", [0.0, 1.0])
    for number in range(4):
        add_turn(engine, f"served-{number}", reward=number)
    paid = {item.episode_id: item.reward for item in cut(engine, rollout_share=0.5).items if item.group}
    assert paid == {"g1-0": 0.0, "g1-1": 1.0}


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(BadConfig, match="from 0 to 1"):
        BatchingConfig(rollout_share=1.5)


def test_no_batch_is_cut_of_a_label_twice(engine: Engine) -> None:
    practise(engine, "g1", [0.0, 1.0])
    assert cut(engine, rollout_share=1.0) == cut(engine, rollout_share=1.0)
    with reading(engine) as connection:
        assert len(connection.execute(batches.select()).all()) == 1


def turn(unit: str, reward: float, *, group: str = "", prompt: str = "") -> RewardedTurn:
    return RewardedTurn(unit=unit, reward=reward, segment="", prompt=prompt, group=group)


def test_a_group_is_one_from_the_first_turn_to_the_last_and_production_is_measured_by_itself() -> None:
    turns = [
        turn("e1", 1.0, group="g", prompt="first"), turn("e1", 1.0, group="g", prompt="second"), turn("e2", 0.0, group="g", prompt="other"),
        turn("s1", 0.2), turn("s2", 0.6),
    ]  # fmt: skip
    # the group's mean is (1 + 0) / 2, each episode once; the others' means are of the others: 0.6 and 0.2
    assert Grouped(BatchMean()).baselines(turns) == pytest.approx([0.5, 0.5, 0.5, 0.6, 0.2])
    # what is remembered is what the others brought: 0.2 and 0.6
    remembered = Grouped(SegmentTracker(TrackerConfig(), None)).remember(turns, drift=0.0)
    assert remembered == {"segments": {"": [2, pytest.approx(0.4)]}}
