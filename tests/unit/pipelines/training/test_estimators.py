"""Baselines, by hand."""

import pytest

from app.domain.learning.batches import BatchItem, BatchManifest
from pipelines.training.config import TrackerConfig, TrainingConfig
from pipelines.training.estimators import RewardedTurn
from pipelines.training.estimators.batch_mean import BatchMean
from pipelines.training.estimators.choice import estimator_of
from pipelines.training.estimators.group_mean import GroupMean
from pipelines.training.estimators.grouped import Grouped
from pipelines.training.estimators.segment_tracker import SegmentTracker
from tests.fakes.learning import NOON


def turn(reward: float, *, unit: str = "", segment: str = "", prompt: str = "", channels: str = "") -> RewardedTurn:
    return RewardedTurn(unit=unit or f"unit-{reward}-{segment}", reward=reward, segment=segment, prompt=prompt, channels=channels)


def test_batch_mean_leaves_each_turn_out_of_its_own_baseline() -> None:
    # rewards 0, 3, 6: the means of the others are 4.5, 3, 1.5
    assert BatchMean().baselines([turn(0), turn(3), turn(6)]) == [4.5, 3.0, 1.5]


def test_turns_of_one_chain_are_not_each_others_baseline() -> None:
    # the chain's two turns (reward 1 each) look at the other unit only, which looks at both of them
    assert BatchMean().baselines([turn(1, unit="chain"), turn(1, unit="chain"), turn(4)]) == [4.0, 4.0, 1.0]


def test_a_lone_unit_teaches_nothing() -> None:
    assert BatchMean().baselines([turn(2)]) == [2]
    assert SegmentTracker(TrackerConfig(), None).baselines([turn(2)]) == [2]


def test_group_mean_is_the_mean_of_the_prompt_and_singletons_are_zero() -> None:
    turns = [turn(1, prompt="p"), turn(3, prompt="p"), turn(9, prompt="alone")]
    assert GroupMean().baselines(turns) == [2, 2, 9]
    assert [t.reward - b for t, b in zip(turns, GroupMean().baselines(turns), strict=True)] == [-1, 1, 0]


def test_the_tracker_shrinks_a_segment_to_the_mean_of_all() -> None:
    # k = 2. Others of turn 1 (reward 0, segment a): a has {1}, everybody {1, 4}, so g = 2.5 and b = (1·1 + 2·2.5)/(1 + 2) = 2
    turns = [turn(0, segment="a"), turn(1, segment="a"), turn(4, segment="b")]
    tracker = SegmentTracker(TrackerConfig(prior_weight=2), None)
    # turn 2 (reward 1): a has {0}, g = (0 + 4)/2 = 2, b = (0 + 4)/3; turn 3: b has nothing, g = 0.5, b = 0.5
    assert tracker.baselines(turns) == pytest.approx([2.0, 4 / 3, 0.5])


def test_what_is_usual_where_a_thumb_decided_says_nothing_of_turns_that_nobody_rated() -> None:
    # k = 0. Thumbs say −0.5 on average, nobody's turns cost 0.1: each is compared with its like, and a turn is not praised for silence
    rated = [turn(reward, unit=str(n), channels="rating") for n, reward in enumerate((-0.5, -0.5, -1.0, 0.0))]
    silent = [turn(-0.1, unit=f"silent-{n}") for n in range(2)]
    found = SegmentTracker(TrackerConfig(prior_weight=0.0), None).baselines(rated + silent)
    assert found == pytest.approx([-0.5, -0.5, -1 / 3, -2 / 3, -0.1, -0.1])


def test_the_trackers_past_counts_by_its_weight() -> None:
    # past: segment a, weight 6, mean 1. Alone in the batch, so g = 1 and b = (6·1 + 8·1)/(6 + 8) = 1
    tracker = SegmentTracker(TrackerConfig(), {"segments": {"a": [6, 1.0]}})
    assert tracker.baselines([turn(5, segment="a")]) == [1.0]
    # a new segment starts at the mean of all
    assert tracker.baselines([turn(5, segment="new")]) == [1.0]


@pytest.mark.parametrize(("drift", "memory"), [(0.0, 0.96), (0.006, 0.9330329915368074), (0.06, 0.875), (1.0, 0.875)])
def test_the_memory_fades_with_how_far_the_policy_moved(drift: float, memory: float) -> None:
    # 2^(-0.006/0.06) = 2^-0.1 = 0.93303; at 0.06 it would be 0.5 and is held at 0.875; at 0 it would be 1 and is held at 0.96
    tracker = SegmentTracker(TrackerConfig(), {"segments": {"a": [10, 2.0]}})
    state = tracker.remember([turn(5, segment="a")], drift=drift)
    weight = memory * 10
    assert state == {"segments": {"a": pytest.approx([weight + 1, (weight * 2.0 + 5) / (weight + 1)])}}


def test_what_is_remembered_is_where_the_next_update_starts() -> None:
    state = SegmentTracker(TrackerConfig(), None).remember([turn(1, segment="a"), turn(0, segment="b")], drift=0.1)
    again = SegmentTracker(TrackerConfig(), state).remember([], drift=0.0)
    assert again == {"segments": {"a": pytest.approx([0.96, 1.0]), "b": pytest.approx([0.96, 0.0])}}


def test_a_memory_made_under_another_rule_set_is_not_used() -> None:
    # under the old rules the segment earned 3; under the new ones everybody earns about 0: with the old memory b = (96·3 + 0)/97 ≈ 3
    state = SegmentTracker(TrackerConfig(), None, rule_set="old").remember([turn(3, unit=str(n)) for n in range(96)], drift=0.0)
    turns = [turn(reward, unit=str(reward)) for reward in (-0.5, 0.5)]
    same, other = (SegmentTracker(TrackerConfig(), state, rule_set=rules) for rules in ("old", "new"))
    assert min(same.baselines(turns)) > 2.5
    assert other.baselines(turns) == pytest.approx([0.5, -0.5]), "each by the other alone"
    again = other.remember(turns, drift=0.0)
    assert again == {"rule_set": "new", "segments": {"": pytest.approx([2.0, 0.0])}}


def test_an_episode_counts_once_in_its_group_however_many_turns_it_took() -> None:
    # tries at one task: one of three turns that earned 1 each, one of a single turn that earned 0: b = (1 + 0)/2
    turns = [turn(1, unit="long", prompt="task")] * 3 + [turn(0, unit="short", prompt="task")]
    assert GroupMean().baselines(turns) == [0.5] * 4


@pytest.mark.parametrize(("groups", "is_grouped"), [(["", ""], False), (["", "g"], True), (["g", "g"], True)])
def test_practice_in_a_batch_is_measured_against_its_group_whatever_else_is_in_it(groups: list[str], is_grouped: bool) -> None:
    items = tuple(
        BatchItem(inference_id=str(n), episode_id=str(n), reward=0.0, label_revision=1, segment="", actor=None, group=group)
        for n, group in enumerate(groups)
    )
    batch = BatchManifest(
        id="b", policy="composer", slot=0, champion="c", anchor="c", rule_set="r", window_from=NOON, window_to=NOON, items=items
    )  # fmt: skip
    made = estimator_of(batch, TrainingConfig(estimator="batch_mean"), None)
    assert isinstance(made, Grouped if is_grouped else BatchMean)
