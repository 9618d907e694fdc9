"""How far an update may go: budgets, steps back, ratios and gradients out of bounds."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from app.domain.learning.batches import BatchManifest, TurnPayload
from app.domain.learning.training import AdamParams, Datum, LossSpec
from app.domain.release.versions import HoldReason, RunStatus, TrainingRun, Version
from app.policy.model import load_model
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.snapshot import snapshot_digest
from pipelines.training import TrainingPorts
from pipelines.training.config import LoraConfig
from pipelines.training.guards import ratio_report
from pipelines.training.measurement import terms_to_reference
from pipelines.training.numerics.advantage import penalty
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.fakes.learning import fake_ports, put_version, small_snapshot, version_of
from tests.fakes.updating import CONFIG, a_batch, assert_held, broken_guards, one_update, run


@pytest.fixture
def ports(tmp_path: Path) -> TrainingPorts:
    return fake_ports(tmp_path)


def test_an_entropy_that_collapses_holds(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    assert_held(run(ports, a_batch(ports, parent), parent, config=broken_guards(min_entropy_share=2.0)), ports, HoldReason.ENTROPY_COLLAPSE)


@pytest.mark.parametrize("kl_beta", [0.0, 0.005])
def test_a_candidate_beyond_the_anchors_budget_is_held_and_the_penalty_has_risen(ports: TrainingPorts, kl_beta: float) -> None:
    anchor, child = one_update(ports)
    config = msgspec.structs.replace(broken_guards(max_kl_anchor=1e-4), kl_beta=kl_beta)
    made = run(ports, a_batch(ports, child, slot=1), child, anchor=anchor, config=config, name="two")
    assert_held(made, ports, HoldReason.KL_ANCHOR)
    assert made.metrics["kl_beta"] == (0.1 if kl_beta else 0.0)


def test_the_penalty_is_that_of_where_the_champion_is_going_and_a_new_anchor_begins_anew(ports: TrainingPorts) -> None:
    config = broken_guards(max_kl_anchor=1.0)
    anchor = put_version(ports)
    first = run(ports, a_batch(ports, anchor), anchor, config=config, name="one")
    assert first.candidate is not None, first.message
    child = version_of(first.candidate, parent=anchor.digest, step=1, optimizer_uri=first.metrics["optimizer_uri"])
    moved = first.metrics["kl_anchor"]
    made = run(ports, a_batch(ports, child, slot=1), child, anchor=anchor, config=config, name="two").metrics
    assert made["kl_anchor_coming"] == pytest.approx(made["kl_anchor_before"] + 8 * moved)
    assert made["kl_beta"] == pytest.approx(penalty(made["kl_anchor_coming"], target=0.45, least=0.005, most=0.1))
    where_it_is = run(
        ports, a_batch(ports, child, slot=1), child, anchor=anchor, config=msgspec.structs.replace(config, kl_look_ahead=0.0), name="three"
    ).metrics
    assert where_it_is["kl_beta"] == pytest.approx(penalty(made["kl_anchor_before"], target=0.45, least=0.005, most=0.1))
    other = put_version(ports, seed=1)
    renewed = run(ports, a_batch(ports, child, slot=2), child, anchor=other, config=config, name="four").metrics
    assert renewed["kl_anchor_coming"] == renewed["kl_anchor_before"] > 0, "how it went from another anchor says nothing of this one"


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


def test_how_far_an_update_went_from_the_anchor_is_measured_on_the_same_turns_without_a_penalty(ports: TrainingPorts) -> None:
    anchor, child = one_update(ports)
    batch = a_batch(ports, child, slot=1)
    configs = [msgspec.structs.replace(CONFIG, kl_beta=beta) for beta in (0.0, 1e-9)]
    made = [run(ports, batch, child, anchor=anchor, config=config, name=f"run-{config.kl_beta}").metrics for config in configs]
    # with a penalty, however small, every turn has its log π_ref
    without, least = (metrics["kl_anchor"] - metrics["kl_anchor_before"] for metrics in made)
    assert without == pytest.approx(least, rel=0.01)


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


def anchored(anchor: Version, child: Version, ports: TrainingPorts, *, budget: float, name: str) -> TrainingRun:
    """An update of the child within a budget to its parent; without a penalty the steps are the same whatever the budget."""
    config = msgspec.structs.replace(broken_guards(max_kl_anchor=budget), kl_beta=0.0)
    return run(ports, a_batch(ports, child, slot=1), child, anchor=anchor, config=config, name=name)


def test_what_lies_inside_the_anchors_budget_is_published_instead_of_nothing(ports: TrainingPorts) -> None:
    anchor, child = one_update(ports)
    free = anchored(anchor, child, ports, budget=99.0, name="free")
    before, after = free.metrics["kl_anchor_before"], free.metrics["kl_anchor_upper"]
    budget = before + 0.8 * (after - before)
    made = anchored(anchor, child, ports, budget=budget, name="bounded")
    assert made.status is RunStatus.SUCCEEDED, made.message
    assert before < made.metrics["kl_anchor_upper"] <= budget
    assert 0 < made.metrics["kept"] < 1
    assert made.candidate not in (child.digest, free.candidate)


def test_a_person_is_asked_to_renew_the_anchor_before_its_budget_is_gone(ports: TrainingPorts) -> None:
    anchor, child = one_update(ports)
    used = anchored(anchor, child, ports, budget=99.0, name="free").metrics["kl_anchor_upper"]
    early = anchored(anchor, child, ports, budget=used / 0.75, name="early")
    late = anchored(anchor, child, ports, budget=used / 0.85, name="late")
    assert early.candidate == late.candidate
    assert late.candidate is not None, late.message
    assert "alarms" not in early.metrics
    (asked,) = late.metrics["alarms"]
    assert asked.startswith(f"85% of the KL budget to the anchor is used ({late.metrics['kl_anchor']:.3f}, up to {used:.3f}, of ")
    assert "`ratchet release anchor composer`" in asked


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


def test_steps_that_leave_the_ratio_bounds_end_and_go_back_instead_of_losing_the_batch(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    free = run(ports, batch, parent, name="free")
    config = broken_guards(min_effective_sample_share=0.999, max_mismatch=99.0, max_mismatch_p99=99.0)
    made = run(ports, batch, parent, config=config, name="bounded")
    assert made.metrics["steps"][0]["effective_share"] > 0.999  # what the champion sampled, under the champion
    assert made.status is RunStatus.SUCCEEDED, made.message
    assert made.metrics["stopped_at_step"] == len(made.metrics["steps"])
    assert 0 < made.metrics["kept"] < 1
    bounded, unbounded = lost(ports, batch, parent, made), lost(ports, batch, parent, free)
    assert bounded < 0.005  # about the bound, on turns that the steps saw and others
    assert unbounded > 5 * bounded


def lost(ports: TrainingPorts, batch: BatchManifest, parent: Version, run: TrainingRun) -> float:
    """The share of the batch's tokens that the effective sample under the candidate lacks."""
    assert run.candidate is not None
    turns = ports.trajectories.read((item.payload_segment, item.inference_id) for item in batch.items if item.payload_segment).values()
    before = [logprob for turn in turns for logprob in scored(ports, parent.digest, turn)]
    after = [logprob for turn in turns for logprob in scored(ports, run.candidate, turn)]
    return 1 - ratio_report(after, before).effective_share


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


def test_an_update_clips_at_the_norm_that_its_configuration_names(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    config = msgspec.structs.replace(CONFIG, beta1=0.0, max_grad_norm=1e-3)
    made = run(ports, a_batch(ports, parent), parent, config=config)
    moments = load_file(Path(made.metrics["optimizer_uri"]) / "optimizer.safetensors")
    # with beta1 = 0 the first moment is the gradient that Adam was given in the last step
    norm = sum(float(tensor.square().sum()) for name, tensor in moments.items() if name.startswith("first.")) ** 0.5
    assert norm == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("stale", [16, 32], ids=["half of them", "all of them"])
def test_what_an_older_version_sampled_is_no_movement_of_the_update(ports: TrainingPorts, stale: int) -> None:
    """The way from a turn's own sampler to the parent was gone before the first step; the update goes next to none."""
    old, child = one_update(ports)
    sampled, own = a_batch(ports, old, slot=1), a_batch(ports, child, slot=2)
    mixed = tuple(sorted((*sampled.items[:stale], *own.items[stale:]), key=lambda item: item.inference_id))
    limits = broken_guards(max_kl_champion=1e-3, min_effective_sample_share=0.5, min_mean_ratio=0.2, max_mean_ratio=5.0)
    made = run(ports, replace(own, items=mixed), child, config=msgspec.structs.replace(limits, learning_rate=1e-6), name="two")
    assert made.metrics["steps"][0]["kl"] > 1e-3, "the parent itself is farther from the sampler than the budget"
    assert "stopped_at_step" not in made.metrics
    assert len(made.metrics["steps"]) == 4


def test_a_step_of_one_turn_is_not_judged_by_itself(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent, count=18)
    items = tuple(replace(item, episode_id="long" if n < 17 else "other") for n, item in enumerate(batch.items))
    made = run(ports, replace(batch, items=items), parent, config=msgspec.structs.replace(CONFIG, turns_per_step=9))
    assert [len(made.metrics["steps"]), made.metrics.get("stopped_at_step")] == [2, None]
