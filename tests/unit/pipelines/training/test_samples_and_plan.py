"""What can be read is read, what cannot is counted, and the order of work is the same for the same batch."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.domain.learning.batches import BatchItem, BatchManifest, TurnPayload
from app.domain.telemetry.turns import Form, Shape
from pipelines.training.estimators.group_mean import GroupMean
from pipelines.training.measurement import turn_metrics
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


@pytest.mark.parametrize(
    ("taken", "left_out", "reason"),
    [
        ({"logprobs": (-1.0, 1e-3)}, {"logprobs": (-1.0, 1.1e-3)}, "no_logprobs"),
        ({"top_p": 0.9, "kept_log_mass": (-0.1, 1e-3)}, {"top_p": 0.9, "kept_log_mass": (-0.1, 1.1e-3)}, "no_ratio"),
        ({"temperature": 1e-4}, {"temperature": 0.99e-4}, "no_ratio"),
        ({"top_p": 1.0}, {"top_p": 0.999}, "no_ratio"),
        ({"prompt_tokens": (1,) * 6}, {"prompt_tokens": (1,) * 7}, "too_long"),
        ({"prompt_tokens": (0, 9)}, {"prompt_tokens": (0, 10)}, "tokens_out_of_range"),
        ({"completion_tokens": (0, 9)}, {"completion_tokens": (-1, 9)}, "tokens_out_of_range"),
        ({}, {"prompt_tokens": ()}, "empty_completion"),
    ],
)
def test_a_turn_is_read_up_to_each_of_its_bounds(taken: dict[str, Any], left_out: dict[str, Any], reason: str) -> None:
    assert read(payload("a", **taken)) == {}
    assert read(payload("a", **left_out)) == {reason: 1}


def test_a_turn_of_no_version_is_of_whichever_sampled_it_and_kept_mass_is_worked_out_where_the_weights_are() -> None:
    assert read(payload("a", version="v9"), version="") == {}
    store = FakeTrajectories()
    store.write("s1", [payload("a", top_p=0.9), payload("b", top_p=0.9, version="v2")])
    items = batch(item("a"), item("b", version="v2"))
    samples, left_out = read_samples(items, store, LIMITS, has_weights=lambda digest: digest == "v2")
    assert ([sample.item.inference_id for sample in samples], left_out) == (["b"], {"no_ratio": 1})


def test_an_episode_opens_with_the_prompt_of_its_first_turn_and_of_two_at_once_with_the_first_by_name() -> None:
    store = FakeTrajectories()
    later = NOON + timedelta(seconds=1)
    turns = [
        payload("b", episode_id="e", prompt_tokens=(2,)), payload("a", episode_id="e", prompt_tokens=(1,)),
        payload("c", episode_id="e", prompt_tokens=(3,), finished_at=later),
    ]  # fmt: skip
    store.write("s1", turns)
    samples, _ = read_samples(batch(*(item(turn.inference_id, episode_id="e") for turn in turns)), store, LIMITS)
    assert [sample.opening for sample in samples] == [(1,)] * 3
    assert len({sample.rewarded().prompt for sample in samples}) == 1
    alone = [replace(sample, opening=()).rewarded().prompt for sample in samples]
    assert len(set(alone)) == 3
    assert alone[1] == samples[0].rewarded().prompt


@pytest.mark.parametrize(("turns", "per_step", "steps"), [(10, 4, 2), (11, 4, 3), (1, 4, 1), (3, 1, 3), (5, 100, 1)])
def test_there_are_as_many_steps_as_turns_fill_to_the_nearest(turns: int, per_step: int, steps: int) -> None:
    samples = [sample(f"t{n}", (n, n + 1, 3, 4)) for n in range(turns)]
    assert len(plan_steps(samples, turns_per_step=per_step, micro_batch_tokens=100, seed=1)) == steps


def test_one_unit_is_one_step_however_many_turns_it_has() -> None:
    chain = [sample(f"c{n}", (n, 50 + n, 60, 70), episode="chain") for n in range(9)]
    assert len(plan_steps(chain, turns_per_step=3, micro_batch_tokens=100, seed=0)) == 1
    # the prompt of one is that of another, which is of the first's episode
    linked = [sample("a", (1, 1, 5), episode="e"), sample("b", (2, 2, 5), episode="e"), sample("c", (2, 2, 6)), sample("d", (3, 3, 6))]
    steps = plan_steps(linked, turns_per_step=1, micro_batch_tokens=100, seed=0)
    assert sorted(sorted(step.turns) for step in steps) == [[0, 1, 2], [3]]


@pytest.mark.parametrize(
    ("limit", "parts"), [(7, ((0, 1), (2,))), (10, ((0, 1, 2),)), (9, ((0, 1), (2,))), (6, ((0, 1), (2,))), (5, ((0,), (1,), (2,)))]
)
def test_a_micro_batch_is_filled_up_to_its_limit(limit: int, parts: tuple[tuple[int, ...], ...]) -> None:
    # 5 tokens; one more beside them; 4 others
    samples = [sample("a", (1, 1, 1, 1, 1)), sample("b", (1, 1, 1, 1, 2)), sample("c", (2, 1, 1, 1))]
    assert cut_micro_batches(samples, (2, 1, 0), limit) == parts


def test_every_micro_batch_begins_empty() -> None:
    samples = [sample(name, (n,) * 5) for n, name in enumerate("abcd")]
    assert cut_micro_batches(samples, (0, 1, 2, 3), 10) == ((0, 1), (2, 3))


def test_a_turn_in_a_form_is_read_where_its_tokens_could_have_been_drawn_under_it() -> None:
    formed = payload("a", shape=Shape(form=Form(answer={"type": "object"})))
    store = FakeTrajectories()
    store.write("s1", [formed, replace(formed, inference_id="b", completion_tokens=(5, 4))])
    limits = replace(LIMITS, allow=lambda form, tokens: form == Form(answer={"type": "object"}) and tuple(tokens) == (4, 5))
    samples, left_out = read_samples(batch(item("a"), item("b")), store, limits)
    assert ([one.item.inference_id for one in samples], left_out) == (["a"], {"no_ratio": 1})
    assert read(formed) == {"no_ratio": 1}, "without a grammar no form is known to allow anything"
    assert read(payload("a", shape=Shape(presence_penalty=1.0))) == {}


def test_what_a_batch_says_of_its_turns_by_hand() -> None:
    rows = ((1.0, 2, 1, "b"), (0.0, 4, 3, "a"), (1.0 - 1e-10, 3, 2, "b"), (0.5, 3, 2, "a"))
    samples = [
        replace(made, item=replace(made.item, reward=reward, segment=segment))
        for n, (reward, length, prompt, segment) in enumerate(rows)
        for made in (sample(f"t{n}", tuple(range(prompt + length)), prompt=prompt),)
    ]
    found = turn_metrics(samples, [0.5, 0.5, 0.0, 0.0])
    assert (found["turns"], found["tokens"], found["length_max"]) == (4, 12, 4)
    assert (found["length_mean"], found["prompt_length_mean"], found["baseline_mean"]) == (3.0, 2.0, 0.25)
    assert found["ceiling_rate"] == 0.5
    # rewards 1, 0, 1, .5 about .625; above their baselines .5, -.5, 1, .5 about .375
    assert (found["reward_mean"], found["advantage_mean"]) == (pytest.approx(0.625), pytest.approx(0.375))
    assert found["reward_std"] == pytest.approx((0.6875 / 4) ** 0.5)
    assert found["advantage_std"] == pytest.approx((1.1875 / 4) ** 0.5)
    assert found["length_std"] == pytest.approx(0.5**0.5)
    assert list(found["segments"]) == ["a", "b"]
    assert found["segments"]["a"] == {"turns": 2, "reward_mean": 0.25, "baseline_mean": 0.25, "length_mean": 3.5}
    assert found["segments"]["b"]["length_mean"] == 2.5
