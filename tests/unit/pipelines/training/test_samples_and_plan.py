"""What can be read is read, what cannot is counted, and the order of work is the same for the same batch."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.domain.learning.batches import BatchItem, BatchManifest, TurnPayload
from pipelines.training.estimators.group_mean import GroupMean
from pipelines.training.plan import cut_micro_batches, plan_steps
from pipelines.training.samples import Limits, Sample, limits_of, read_samples
from tests.fakes.learning import NOON, FakeTrajectories, small_snapshot

LIMITS = Limits(vocabulary=10, max_tokens=8)


def payload(name: str, **changes: Any) -> TurnPayload:
    turn = TurnPayload(
        inference_id=name, episode_id=name, policy="composer", version="v1", prompt_tokens=(1, 2, 3), completion_tokens=(4, 5),
        logprobs=(-1.0, -2.0), temperature=1.0, top_p=1.0, finished_at=NOON,
    )  # fmt: skip
    return replace(turn, **changes)


def item(name: str, **changes: Any) -> BatchItem:
    made = BatchItem(
        inference_id=name, episode_id=name, reward=1.0, label_revision=1, segment="", actor=None, version="v1", payload_segment="s1"
    )  # fmt: skip
    return replace(made, **changes)


def batch(*items: BatchItem) -> BatchManifest:
    return BatchManifest(
        id="b", policy="composer", slot=0, champion="v1", anchor="v0", rule_set="r", window_from=NOON, window_to=NOON, items=items
    )  # fmt: skip


def read(turn: TurnPayload | None, **changes: Any) -> dict[str, int]:
    store = FakeTrajectories()
    store.write("s1", [turn] if turn is not None else [])
    samples, left_out = read_samples(batch(item("a", **changes)), store, LIMITS)
    assert len(samples) + sum(left_out.values()) == 1
    return left_out


def test_a_good_turn_is_read() -> None:
    assert read(payload("a")) == {}
    assert read(payload("a", top_p=0.9, kept_log_mass=(-0.1, 0.0))) == {}
    assert read(payload("a", top_k=3, kept_log_mass=(-0.1, 0.0))) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "no_logprobs"),
        ({"logprobs": (-1.0,)}, "no_logprobs"),
        ({"logprobs": (-1.0, float("nan"))}, "no_logprobs"),
        ({"logprobs": (-1.0, 0.7)}, "no_logprobs"),
        ({"completion_tokens": (4, 10)}, "tokens_out_of_range"),
        ({"prompt_tokens": (-1, 2)}, "tokens_out_of_range"),
        ({"prompt_tokens": (1,) * 7}, "too_long"),
        ({"completion_tokens": (), "logprobs": ()}, "empty_completion"),
        ({"version": "v9"}, "unknown_version"),
        ({"temperature": 0.0}, "no_ratio"),
        ({"top_p": 0.9}, "no_ratio"),
        ({"top_k": 3}, "no_ratio"),
        ({"top_p": 0.9, "kept_log_mass": (-0.1,)}, "no_ratio"),
        ({"top_p": 0.9, "kept_log_mass": (-0.1, float("nan"))}, "no_ratio"),
        ({"top_p": 0.9, "kept_log_mass": (-0.1, 0.5)}, "no_ratio"),
    ],
)
def test_a_bad_turn_is_left_out_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert read(payload("a", **changes)) == {reason: 1}


def test_a_turn_may_be_as_long_as_the_models_context_and_no_longer(tmp_path: Path) -> None:
    small_snapshot(tmp_path / "snapshot")  # which reads 128 tokens
    assert [limits_of(tmp_path / "snapshot", max_tokens=most).max_tokens for most in (64, 128, 32_768)] == [64, 128, 128]


def test_a_turn_whose_segment_is_gone_is_left_out() -> None:
    assert read(None) == {"payload_missing": 1}
    assert read(payload("a"), payload_segment="") == {"payload_missing": 1}


def sample(name: str, tokens: tuple[int, ...], *, prompt: int = 2, episode: str | None = None) -> Sample:
    turn = payload(name, prompt_tokens=tokens[:prompt], completion_tokens=tokens[prompt:], logprobs=(-1.0,) * (len(tokens) - prompt))
    return Sample(item=item(name, episode_id=episode or name), payload=turn, logprobs=(-1.0,) * (len(tokens) - prompt))


def test_steps_are_of_nearly_equal_size_and_hold_every_turn_once() -> None:
    samples = [sample(f"t{i}", (i, i + 1, 3, 4)) for i in range(50)]
    steps = plan_steps(samples, turns_per_step=16, micro_batch_tokens=100, seed=1)
    assert sorted(len(step.turns) for step in steps) == [16, 17, 17]  # 50 / 16 rounds to 3 steps
    assert sorted(index for step in steps for index in step.turns) == list(range(50))
    assert steps == plan_steps(samples, turns_per_step=16, micro_batch_tokens=100, seed=1)
    assert steps != plan_steps(samples, turns_per_step=16, micro_batch_tokens=100, seed=2)


def test_chains_and_equal_prompts_stay_in_one_step() -> None:
    chain = [sample(f"c{i}", (i, 50 + i, 60, 70), episode="chain") for i in range(3)]
    twins = [sample(f"p{i}", (9, 9, i)) for i in range(3)]
    others = [sample(f"o{i}", (20 + i, 30 + i, 40 + i)) for i in range(10)]
    steps = plan_steps([*chain, *twins, *others], turns_per_step=4, micro_batch_tokens=100, seed=0)
    for together in ({0, 1, 2}, {3, 4, 5}):
        assert sum(bool(together & set(step.turns)) for step in steps) == 1


def test_micro_batches_count_shared_beginnings_once() -> None:
    # sorted: (1,1,1,1,1,2) costs 6; (1,1,1,1,1,3) only 1 more; (2,…) 6 more, which is past 8
    samples = [sample("a", (2, 1, 1, 1, 1, 2)), sample("b", (1, 1, 1, 1, 1, 3)), sample("c", (1, 1, 1, 1, 1, 2))]
    assert cut_micro_batches(samples, (0, 1, 2), 8) == ((2, 1), (0,))


def test_turns_with_and_without_recorded_experts_go_apart() -> None:
    plain = sample("plain", (1, 2, 3, 4))
    recorded = replace(plain, payload=replace(plain.payload, routed_experts=(((0, 1),), ((1, 0),))))
    assert cut_micro_batches([recorded, plain, recorded], [0, 1, 2], 100) == ((1,), (0, 2))


def test_a_turn_longer_than_a_micro_batch_goes_alone() -> None:
    samples = [sample("a", (1, 2, 3)), sample("b", tuple(range(30))), sample("c", (4, 5, 6))]
    assert sorted(cut_micro_batches(samples, (0, 1, 2), 8)) == [(0, 2), (1,)]


def test_tries_at_one_task_are_a_group_in_every_turn_although_only_the_first_prompt_is_the_same() -> None:
    store = FakeTrajectories()
    turns = [
        payload(f"{episode}-{n}", episode_id=episode, prompt_tokens=prompt, finished_at=NOON + timedelta(seconds=n))
        for number, episode in enumerate(("good", "bad"))
        for n, prompt in enumerate(((1, 2), (1, 2, number, 3)))
    ]
    store.write("s1", turns)
    items = [item(turn.inference_id, episode_id=turn.episode_id, reward=1.0 if turn.episode_id == "good" else 0.0) for turn in turns]
    samples, _ = read_samples(batch(*items), store, LIMITS)
    rewarded = [sample.rewarded() for sample in samples]
    above = [turn.reward - baseline for turn, baseline in zip(rewarded, GroupMean().baselines(rewarded), strict=True)]
    assert above == [0.5, 0.5, -0.5, -0.5]
