"""Whole updates in one process, over fakes: candidates, refusals and resumption."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.domain.batches import BatchManifest, TurnPayload
from app.domain.errors import Unavailable
from app.domain.training import AdamParams, Datum, LossSpec
from app.domain.versions import HoldReason, RunStatus, TrainingRun, Version
from app.policy.forward import token_logprobs
from app.policy.model import load_model
from app.policy.snapshot import snapshot_digest
from pipelines.training import TrainingConfig, TrainingPorts, train
from pipelines.training.config import GuardLimits, LoraConfig
from pipelines.training.measurement import kl_from_sampler, terms_to_reference
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.fakes.learning import (
    FakeProgress,
    FakeRuns,
    broken,
    fake_ports,
    make_batch,
    put_version,
    random_prompts,
    sample_turns,
    small_snapshot,
    version_of,
)

OPEN = GuardLimits(max_kl_champion=99, max_kl_anchor=99, min_entropy_share=0.0)
CONFIG = TrainingConfig(
    learning_rate=3e-3, turns_per_step=8, micro_batch_tokens=64, threads=1, dtype="float32", checkpoint_every_s=0.0, guards=OPEN
)  # fmt: skip


@pytest.fixture
def ports(tmp_path: Path) -> TrainingPorts:
    return fake_ports(tmp_path)


def low_tokens(turn: TurnPayload) -> float:
    """A simulated user who likes tokens below 8 (a third of the vocabulary)."""
    return sum(token < 8 for token in turn.completion_tokens) / len(turn.completion_tokens)


def a_batch(
    ports: TrainingPorts, version: Version, *, count: int = 32, slot: int = 0, reward: Callable[[TurnPayload], float] = low_tokens,
    change: Callable[[TurnPayload], TurnPayload] = lambda turn: turn,
) -> BatchManifest:  # fmt: skip
    prompts = random_prompts(count, seed=slot)
    turns = [change(t) for t in sample_turns(ports.weights.path(version.digest), prompts, version=version.digest, length=5, seed=slot)]
    return make_batch(ports, turns, [reward(turn) for turn in turns], champion=version.digest, slot=slot)


def run(
    ports: TrainingPorts,
    batch: BatchManifest,
    parent: Version,
    *,
    anchor: Version | None = None,
    config: TrainingConfig = CONFIG,
    name: str = "run",
) -> TrainingRun:
    return train(batch, run_id=name, parent=parent, anchor=anchor or parent, config=config, ports=ports)


def test_an_update_makes_a_candidate_and_says_how(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent), parent)
    assert made.status is RunStatus.SUCCEEDED, made.message
    assert made.candidate is not None
    assert made.candidate != parent.digest
    assert ports.weights.exists(made.candidate)
    assert made.metrics["turns"] == 32
    assert len(made.metrics["steps"]) == 4
    assert made.metrics["mismatch"] < 1e-6
    assert made.metrics["segments"][""]["turns"] == 32
    assert sum(made.metrics["ratio_histogram"]) == 8 * 5
    assert made.metrics["ratio_histogram"][6] == 8 * 5  # at step zero every ratio is in 0.99…1.01
    assert made.config["learning_rate"] == 3e-3
    assert Path(made.metrics["optimizer_uri"]).is_dir()
    assert isinstance(ports.runs, FakeRuns)
    assert ports.runs.trackers[made.candidate]["segments"][""][0] == 32
    msgspec.json.encode(made.metrics)


def test_progress_is_told_per_micro_step(ports: TrainingPorts) -> None:
    parent, anchor = put_version(ports), put_version(ports, seed=1)
    run(ports, a_batch(ports, parent), parent, anchor=anchor)
    assert isinstance(ports.progress, FakeProgress)
    done = [report[1] for report in ports.progress.reports]
    assert done == sorted(done)
    assert ports.progress.reports[-1][1] == ports.progress.reports[-1][2]
    assert {report[3]["phase"] for report in ports.progress.reports} == {"anchor", "update"}


def test_a_finished_run_is_not_made_again(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    assert run(ports, batch, parent) is run(ports, batch, parent)


def test_the_same_batch_gives_the_same_weights_to_the_bit(ports: TrainingPorts, tmp_path: Path) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    assert run(ports, batch, parent, name="one").candidate == run(ports, batch, parent, name="two").candidate


def test_a_run_that_was_cut_off_and_reconfigured_ends_as_it_began(tmp_path: Path) -> None:
    whole, cut = fake_ports(tmp_path / "whole"), fake_ports(tmp_path / "cut")
    parent = put_version(whole)
    put_version(cut)
    expected = run(whole, a_batch(whole, parent), parent)
    batch = a_batch(cut, parent)
    assert isinstance(cut.progress, FakeProgress)

    def interrupt(count: int) -> None:
        if count == 5:
            raise Killed

    cut.progress.on_report = interrupt
    with pytest.raises(Killed):
        run(cut, batch, parent)
    other = msgspec.structs.replace(CONFIG, turns_per_step=16, learning_rate=1.0, seed=5, dtype="bfloat16", checkpoint_every_s=60.0)
    resumed = run(cut, batch, parent, config=other)
    assert resumed.candidate == expected.candidate
    assert (resumed.config["turns_per_step"], resumed.config["seed"]) == (8, 0)
    assert resumed.config["checkpoint_every_s"] == 60.0  # how it is worked on follows the operator
    assert resumed.metrics["dtype"] == "float32"


def test_a_missing_optimizer_state_is_recorded_and_not_a_default(ports: TrainingPorts) -> None:
    _, child = one_update(ports)
    shutil.rmtree(child.optimizer_uri or "")
    made = run(ports, a_batch(ports, child, slot=1), child, name="two")
    assert made.metrics["optimizer"] == "missing"
    assert child.optimizer_uri is not None
    assert child.optimizer_uri in made.metrics["alarms"][0]


def test_updates_of_one_policy_leave_the_optimizer_of_another_alone(tmp_path: Path) -> None:
    pins: set[str] = set()
    ports = replace(fake_ports(tmp_path), pinned=lambda policy: pins)
    _, child = one_update(ports)
    made: list[Path] = []
    for number in range(8):
        parent = replace(put_version(ports, seed=number + 10), policy="tab")
        batch = replace(a_batch(ports, parent, count=8, slot=number + 1), policy="tab")
        ran = run(ports, batch, parent, name=f"tab-{number}")
        assert ran.candidate is not None, ran.message
        if number == 0:
            pins.add(ran.candidate)  # what a rollback may return to
        made.append(Path(ran.metrics["optimizer_uri"]))
    assert Path(child.optimizer_uri or "").is_dir()
    assert [path.is_dir() for path in made] == [True, False, False, True, True, True, True, True]
    assert run(ports, a_batch(ports, child, slot=20), child, name="two").metrics["optimizer"] == "inherited"


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run may catch it."""


@pytest.mark.parametrize(("after", "lora"), [(2, None), (5, None), (9, None), (13, None), (13, LoraConfig(rank=4))])
def test_a_run_that_was_cut_off_ends_with_the_same_weights(tmp_path: Path, after: int, lora: LoraConfig | None) -> None:
    config = msgspec.structs.replace(CONFIG, lora=lora)
    whole, cut = fake_ports(tmp_path / "whole"), fake_ports(tmp_path / "cut")
    parent, anchor = put_version(whole), put_version(whole, seed=1)
    assert [put_version(cut), put_version(cut, seed=1)] == [parent, anchor]
    expected = run(whole, a_batch(whole, parent), parent, anchor=anchor, config=config)
    batch = a_batch(cut, parent)
    assert isinstance(cut.progress, FakeProgress)

    def interrupt(count: int) -> None:
        if count == after:
            raise Killed

    cut.progress.on_report = interrupt
    with pytest.raises(Killed):
        run(cut, batch, parent, anchor=anchor, config=config)
    resumed = run(cut, batch, parent, anchor=anchor, config=config)
    assert resumed.candidate == expected.candidate
    assert [s["loss"] for s in resumed.metrics["steps"]] == [s["loss"] for s in expected.metrics["steps"]]


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "progress.json", "MANIFEST"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, file: str) -> None:
    ports = fake_ports(tmp_path)
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    expected = run(ports, batch, parent, name="whole")
    assert isinstance(ports.progress, FakeProgress)
    ports.progress.reports.clear()
    cutting = replace(ports, runs=FakeRuns())
    micro_steps = 4

    def interrupt(count: int) -> None:
        if len(list((ports.folder / "runs" / "cut").glob("checkpoint-*"))) == 2 and count > micro_steps:
            raise Killed

    ports.progress.on_report = interrupt
    with pytest.raises(Killed):
        run(cutting, batch, parent, name="cut")
    ports.progress.on_report = lambda count: None
    newest = sorted((ports.folder / "runs" / "cut").glob("checkpoint-*"))[-1]
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (newest / file).write_bytes(content)
    resumed = run(cutting, batch, parent, name="cut")
    assert resumed.metrics["damaged_checkpoints"] == [str(newest / file)]
    assert resumed.metrics["resumed_from_step"] == 1
    assert resumed.candidate == expected.candidate


def test_the_optimizer_follows_the_lineage(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    first = run(ports, a_batch(ports, parent), parent, name="one")
    assert first.candidate is not None
    child = version_of(first.candidate, parent=parent.digest, step=1, optimizer_uri=first.metrics["optimizer_uri"])
    batch = a_batch(ports, child, slot=1)
    inherited = run(ports, batch, child, name="two")
    anew = run(ports, batch, replace(child, optimizer_uri=None), name="three")
    assert inherited.metrics["optimizer"] == "inherited"
    assert inherited.metrics["mismatch"] < 1e-3  # master weights are fp32, served ones bf16: close, not equal
    assert anew.metrics["optimizer"] == "new"
    assert inherited.candidate != anew.candidate


def test_a_damaged_optimizer_is_named_and_left_behind(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    first = run(ports, a_batch(ports, parent), parent, name="one")
    assert first.candidate is not None
    uri = first.metrics["optimizer_uri"]
    (Path(uri) / "optimizer.safetensors").write_bytes(b"rotten")
    child = version_of(first.candidate, parent=parent.digest, step=1, optimizer_uri=uri)
    second = run(ports, a_batch(ports, child, slot=1), child, name="two")
    assert second.metrics["damaged_checkpoints"] == [f"{uri}/optimizer.safetensors"]
    assert second.metrics["optimizer"] == "damaged"
    assert "what rounding had kept back is lost" in second.metrics["alarms"][0]


def test_bad_turns_are_counted_and_the_rest_is_learned_from(ports: TrainingPorts) -> None:
    parent = put_version(ports)

    def spoil(turn: TurnPayload) -> TurnPayload:
        number = int(turn.inference_id[-4:])
        changes: dict[int, dict[str, Any]] = {
            0: {"logprobs": None},
            1: {"completion_tokens": (1, 2, 3, 4, 99)},
            2: {"prompt_tokens": (1,) * 200},
        }
        return broken(turn, **changes.get(number, {}))

    made = run(ports, a_batch(ports, parent, change=spoil), parent)
    assert made.metrics["left_out"] == {"no_logprobs": 1, "tokens_out_of_range": 1, "too_long": 1}
    assert made.metrics["turns"] == 29


def assert_held(made: TrainingRun, ports: TrainingPorts, reason: HoldReason) -> None:
    assert (made.status, made.hold_reason, made.candidate) == (RunStatus.HELD, reason, None), made.message
    assert ports.runs.get(made.id) == made


def test_equal_rewards_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    assert_held(run(ports, a_batch(ports, parent, reward=lambda turn: 0.5), parent), ports, HoldReason.EQUAL_REWARDS)


def test_too_few_readable_turns_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent, count=10, change=lambda t: broken(t, logprobs=None)), parent)
    assert_held(made, ports, HoldReason.TOO_FEW_LABELS)
    assert made.metrics["left_out"] == {"no_logprobs": 10}


@pytest.mark.parametrize("logged", [-0.01, -9.0])
def test_log_probabilities_of_another_model_hold(ports: TrainingPorts, logged: float) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent, change=lambda t: broken(t, logprobs=(logged,) * 5)), parent)
    assert_held(made, ports, HoldReason.ENGINE_MISMATCH)


def test_data_too_far_off_policy_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    stale = broken_guards(max_mismatch=99.0, max_mismatch_p99=99.0, min_mean_ratio=0.0, max_mean_ratio=1e9)
    made = run(ports, a_batch(ports, parent, change=lambda t: broken(t, logprobs=(-0.1, -8.0, -0.1, -0.1, -0.1))), parent, config=stale)
    assert_held(made, ports, HoldReason.LOW_ESS)


def test_logged_probabilities_that_are_all_too_low_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    # every ratio is e^1.2 = 3.3: no token stands out, so the effective sample is whole and only their mean says that something is wrong
    batch = a_batch(ports, parent, change=lambda t: broken(t, logprobs=tuple(p - 1.2 for p in t.logprobs or ())))
    assert_held(run(ports, batch, parent, config=broken_guards(max_mismatch=99.0, max_mismatch_p99=99.0)), ports, HoldReason.MEAN_RATIO)


def test_weights_that_are_no_numbers_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    file = ports.weights.path(parent.digest) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file)
    assert_held(run(ports, batch, parent), ports, HoldReason.NOT_FINITE)


def broken_guards(**limits: float) -> TrainingConfig:
    return msgspec.structs.replace(CONFIG, guards=msgspec.structs.replace(OPEN, **limits))


def test_a_learning_rate_that_blows_up_is_held(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    config = msgspec.structs.replace(CONFIG, learning_rate=1e30)
    made = run(ports, a_batch(ports, parent), parent, config=config)
    assert made.status is RunStatus.HELD
    assert made.hold_reason in {HoldReason.NOT_FINITE, HoldReason.LOW_ESS, HoldReason.MEAN_RATIO}


def test_an_entropy_that_collapses_holds(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    assert_held(run(ports, a_batch(ports, parent), parent, config=broken_guards(min_entropy_share=2.0)), ports, HoldReason.ENTROPY_COLLAPSE)


@pytest.mark.parametrize("kl_beta", [0.0, 0.005])
def test_a_candidate_beyond_the_anchors_budget_is_held_and_the_penalty_has_risen(ports: TrainingPorts, kl_beta: float) -> None:
    anchor, child = one_update(ports)
    config = msgspec.structs.replace(broken_guards(max_kl_anchor=1e-4), kl_beta=kl_beta)
    made = run(ports, a_batch(ports, child, slot=1), child, anchor=anchor, config=config, name="two")
    assert_held(made, ports, HoldReason.KL_ANCHOR)
    assert made.metrics["kl_beta"] == (0.2 if kl_beta else 0.0)


def one_update(ports: TrainingPorts, config: TrainingConfig = CONFIG) -> tuple[Version, Version]:
    """A version, and the one that an update made of it."""
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent), parent, config=config, name="one")
    assert made.candidate is not None, made.message
    return parent, version_of(made.candidate, parent=parent.digest, step=1, optimizer_uri=made.metrics["optimizer_uri"])


def test_the_divergence_from_the_anchor_is_measured_to_the_anchor(ports: TrainingPorts) -> None:
    anchor, child = one_update(ports)
    batch = a_batch(ports, child, slot=1)
    config = msgspec.structs.replace(CONFIG, turns_per_step=64, final_pass_turns=0)
    made = run(ports, batch, child, anchor=anchor, config=config, name="two")
    assert made.candidate is not None, made.message
    found = ports.trajectories.read((item.payload_segment, item.inference_id) for item in batch.items if item.payload_segment)
    champion, to, candidate = (
        [scored(ports, digest, turn) for turn in found.values()] for digest in (child.digest, anchor.digest, made.candidate)
    )
    # every turn of the batch is in the final pass here, so the estimate is that over all of them
    rows = [terms_to_reference(*row) for row in zip(champion, candidate, to, strict=True)]
    far = sum(map(sum, rows)) / sum(map(len, rows))
    assert far > 2 * made.metrics["kl_champion"]
    assert made.metrics["kl_anchor"] == pytest.approx(far, rel=1e-3)


def scored(ports: TrainingPorts, digest: str, turn: TurnPayload) -> list[float]:
    """Log-probabilities of the answer under a published version."""
    model = load_model(ports.weights.path(digest), dtype=torch.float32)
    with torch.no_grad():
        return token_logprobs(model, turn.prompt_tokens, turn.completion_tokens).tolist()


def test_what_lies_inside_the_budget_is_published_instead_of_nothing(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    free = run(ports, batch, parent, name="free")
    budget = 0.5 * free.metrics["kl_champion_upper"]
    made = run(ports, batch, parent, config=broken_guards(max_kl_champion=budget), name="bounded")
    assert made.status is RunStatus.SUCCEEDED, made.message
    assert made.metrics["kl_champion_upper"] <= budget
    assert made.metrics["kl_champion_upper"] > 0.5 * budget  # as far as it reaches
    assert made.metrics["kept"] < 1
    assert made.candidate not in (parent.digest, free.candidate)


def test_steps_end_where_unseen_turns_show_that_the_budget_is_spent(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    config = msgspec.structs.replace(broken_guards(max_kl_champion=0.01), learning_rate=2e-2)
    made = run(ports, a_batch(ports, parent, count=64), parent, config=config)
    assert made.metrics["stopped_at_step"] < 8
    assert len(made.metrics["steps"]) == made.metrics["stopped_at_step"]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_half_the_way_back_is_half_the_way(tmp_path: Path, lora: LoraConfig | None) -> None:
    snapshot = tmp_path / "snapshot"
    small_snapshot(snapshot)
    trainer = LocalTrainer(TrainerSetup(snapshot=snapshot, scratch=tmp_path / "scratch", dtype="float32", threads=1, lora=lora))
    data = [Datum(tokens=(1, 2, 3, 4), first_scored=2, logprobs=(-3.0, -3.0), advantages=(1.0, -0.5))]

    def after_steps(count: int) -> dict[str, torch.Tensor]:
        for _ in range(count):
            trainer.forward_backward(data, LossSpec(normaliser=2.0))
            trainer.optim_step(AdamParams(learning_rate=1e-2))
        folder = tmp_path / f"state-{len(list(tmp_path.glob('state-*')))}"
        trainer.save_state(folder)
        return load_file(folder / "weights.safetensors")

    first = after_steps(1)
    third = after_steps(2)
    trainer.retreat(0.5, tmp_path / "state-0")
    half = after_steps(0)
    for name, tensor in first.items():
        assert torch.allclose(half[name], (tensor + third[name]) / 2, atol=1e-6), name
    trainer.retreat(0.0, snapshot)
    digest = trainer.save_weights_for_sampler(tmp_path / "back", snapshot)
    assert digest == snapshot_digest(snapshot)
    trainer.close()


def test_a_ratio_that_leaves_its_bounds_in_a_later_step_holds(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    config = broken_guards(min_effective_sample_share=0.999, max_mismatch=99.0, max_mismatch_p99=99.0)
    made = run(ports, a_batch(ports, parent), parent, config=config)
    assert made.metrics["steps"][0]["effective_share"] > 0.999  # what the champion sampled, under the champion
    assert_held(made, ports, HoldReason.LOW_ESS)


def test_a_gradient_that_is_no_number_holds_and_changes_nothing(tmp_path: Path) -> None:
    ports = fake_ports(tmp_path)
    parent = put_version(ports)
    # the loss is finite in fp32 (9e37 of 3e38), the square of its gradient is not
    config = msgspec.structs.replace(CONFIG, loss_tokens=1e-37)
    made = run(ports, a_batch(ports, parent), parent, config=config)
    assert_held(made, ports, HoldReason.NOT_FINITE)
    assert made.message is not None
    assert "gradient" in made.message


def test_a_large_gradient_is_clipped_to_its_norm(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    small_snapshot(snapshot)
    data = [Datum(tokens=(1, 2, 3, 4), first_scored=2, logprobs=(-3.0, -3.0), advantages=(50.0, -20.0))]
    trainer = LocalTrainer(TrainerSetup(snapshot=snapshot, scratch=tmp_path / "scratch", dtype="float32", threads=1))
    trainer.forward_backward(data, LossSpec(normaliser=1.0))
    # with beta1 = 0 the first moment is the gradient that Adam was given
    assert trainer.optim_step(AdamParams(learning_rate=1e-3, beta1=0.0, max_grad_norm=0.5)).grad_norm > 10
    trainer.save_state(tmp_path / "state")
    moments = load_file(tmp_path / "state" / "optimizer.safetensors")
    norm = sum(float(tensor.square().sum()) for name, tensor in moments.items() if name.startswith("first.")) ** 0.5
    assert norm == pytest.approx(0.5, rel=1e-4)
    trainer.close()


def test_an_update_too_small_for_bf16_is_held(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent), parent, config=msgspec.structs.replace(CONFIG, learning_rate=1e-12))
    assert_held(made, ports, HoldReason.EQUAL_REWARDS)


def test_a_lost_worker_fails_the_attempt_and_the_next_one_succeeds(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    assert isinstance(ports.progress, FakeProgress)

    def lose(count: int) -> None:
        if count == 7:
            raise Unavailable("a training worker was lost")

    ports.progress.on_report = lose
    with pytest.raises(Unavailable):
        run(ports, batch, parent)
    failed = ports.runs.get("run")
    assert failed is not None
    assert failed.status is RunStatus.FAILED
    assert run(ports, batch, parent).status is RunStatus.SUCCEEDED


def objective(folder: Path, turns: Sequence[TurnPayload], masters: Path | None = None) -> float:
    """Mean over turns of the centred reward times the log-probability of the answer, under a snapshot or under masters on top of it."""
    model = load_model(folder, dtype=torch.float32)
    if masters is not None:
        model.load_state_dict(load_file(masters), strict=False)
    rewards = [low_tokens(turn) for turn in turns]
    middle = sum(rewards) / len(rewards)
    with torch.no_grad():
        likely = [float(token_logprobs(model, t.prompt_tokens, t.completion_tokens).sum()) for t in turns]
    return sum((reward - middle) * logprob for reward, logprob in zip(rewards, likely, strict=True)) / len(turns)


def four_cycles(ports: TrainingPorts, config: TrainingConfig) -> tuple[list[Version], list[TrainingRun], list[TurnPayload]]:
    """Four updates on one batch, each from the version that the one before it published."""
    versions = [put_version(ports, hidden=64)]
    prompts = random_prompts(24)
    turns = sample_turns(ports.weights.path(versions[0].digest), prompts, version=versions[0].digest, length=5)
    batch = make_batch(ports, turns, [low_tokens(turn) for turn in turns], champion=versions[0].digest)
    runs: list[TrainingRun] = []
    for cycle in range(4):
        made = run(ports, replace(batch, slot=cycle), versions[-1], anchor=versions[0], config=config, name=f"cycle-{cycle}")
        assert made.candidate is not None, made.message
        runs.append(made)
        uri = made.metrics["optimizer_uri"]
        versions.append(version_of(made.candidate, parent=versions[-1].digest, step=cycle + 1, optimizer_uri=uri))
    return versions, runs, turns


STEPS_BELOW_BF16 = msgspec.structs.replace(
    CONFIG,
    learning_rate=5e-5,
    kl_beta=0.0,
    final_pass_turns=0,
    guards=msgspec.structs.replace(OPEN, max_mismatch=99.0, max_mismatch_p99=99.0),
)
"""The weights are about 0.3, where values of bfloat16 are 0.002 apart: sixteen steps of 0.00005 do not reach the next one."""


def test_what_four_cycles_teach_the_masters_is_served(ports: TrainingPorts) -> None:
    versions, runs, turns = four_cycles(ports, STEPS_BELOW_BF16)
    base = ports.weights.path(versions[0].digest)
    served = [objective(ports.weights.path(version.digest), turns) for version in versions]
    trained = objective(base, turns, Path(runs[-1].metrics["optimizer_uri"]) / "weights.safetensors")
    assert trained - served[0] > 0.01
    assert served[-1] - served[0] > 0.9 * (trained - served[0]), (served, trained)
    assert served == sorted(served)


def test_the_guards_judge_the_snapshot_that_will_be_served(ports: TrainingPorts) -> None:
    parent = put_version(ports, hidden=64)
    batch = a_batch(ports, parent, count=8)
    made = run(ports, batch, parent, config=STEPS_BELOW_BF16)
    assert made.candidate is not None, made.message
    turns = [ports.trajectories.read([(i.payload_segment, i.inference_id)])[i.inference_id] for i in batch.items if i.payload_segment]
    scored: list[list[float]] = []
    for digest in (parent.digest, made.candidate):
        model = load_model(ports.weights.path(digest), dtype=torch.float32)
        with torch.no_grad():
            scored.append([p for t in turns for p in token_logprobs(model, t.prompt_tokens, t.completion_tokens).tolist()])
    assert made.metrics["kl_champion"] == pytest.approx(kl_from_sampler(*scored), rel=1e-3, abs=1e-8)
    assert made.metrics["dtype"] == "float32"


@pytest.mark.parametrize("rank", [2, 8])
def test_what_four_cycles_teach_the_adapters_is_served(ports: TrainingPorts, rank: int) -> None:
    # at this rate the products of the adapters stay below half the distance of two values of bfloat16
    lora = LoraConfig(rank=rank, alpha=rank, learning_rate=2e-3)
    versions, runs, turns = four_cycles(ports, msgspec.structs.replace(STEPS_BELOW_BF16, lora=lora))
    base = ports.weights.path(versions[0].digest)
    served = [objective(ports.weights.path(version.digest), turns) for version in versions]
    assert [made.metrics["optimizer"] for made in runs] == ["new", "inherited", "inherited", "inherited"]
    adapters = load_file(Path(runs[-1].metrics["optimizer_uri"]) / "weights.safetensors")
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in adapters if name.endswith("lora_up")]:
        layer = name.removesuffix(".lora_up")
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() + adapters[name] @ adapters[f"{layer}.lora_down"]
    save_file(tensors, ports.folder / "exact.safetensors")
    trained = objective(base, turns, ports.folder / "exact.safetensors")
    assert trained - served[0] > 0.01
    assert served[-1] - served[0] > 0.9 * (trained - served[0]), (served, trained)
    assert served == sorted(served)


def test_a_state_of_other_adapters_is_not_inherited_in_silence(ports: TrainingPorts) -> None:
    _, child = one_update(ports)
    config = msgspec.structs.replace(CONFIG, lora=LoraConfig(rank=4))
    made = run(ports, a_batch(ports, child, slot=1), child, config=config, name="two")
    assert made.metrics["optimizer"] == "other"
    assert len(made.metrics["alarms"]) == 1


def test_adapters_learn_and_are_merged(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    config = msgspec.structs.replace(CONFIG, lora=LoraConfig(rank=4, learning_rate=2e-3))
    made = run(ports, a_batch(ports, parent), parent, config=config)
    assert made.status is RunStatus.SUCCEEDED, made.message
    assert made.candidate is not None
    again = sample_turns(ports.weights.path(made.candidate), random_prompts(2), version=made.candidate, length=2)
    assert len(again) == 2
