"""What is published is what was trained and judged, and what rounding keeps back is not lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.domain.learning.batches import TurnPayload
from app.domain.release.versions import RunStatus, TrainingRun, Version
from app.policy.model import load_model
from app.policy.scoring.forward import token_logprobs
from pipelines.training import TrainingConfig, TrainingPorts
from pipelines.training.config import LoraConfig
from pipelines.training.measurement import kl_from_sampler
from tests.fakes.learning import (
    fake_ports,
    make_batch,
    put_version,
    random_prompts,
    sample_turns,
    version_of,
)
from tests.fakes.updating import CONFIG, OPEN, a_batch, low_tokens, one_update, run


@pytest.fixture
def ports(tmp_path: Path) -> TrainingPorts:
    return fake_ports(tmp_path)


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
    lora = LoraConfig(rank=rank, alpha=rank, learning_rate=2e-4)
    versions, runs, turns = four_cycles(ports, msgspec.structs.replace(STEPS_BELOW_BF16, lora=lora))
    base = ports.weights.path(versions[0].digest)
    served = [objective(ports.weights.path(version.digest), turns) for version in versions]
    assert [made.metrics["optimizer"] for made in runs] == ["new", "inherited", "inherited", "inherited"]
    trained = [objective(base, turns, exactly(base, made)) for made in runs]
    assert trained[-1] - served[0] > 0.01
    assert served[-1] - served[0] > 0.9 * (trained[-1] - served[0]), (served, trained)
    assert served == sorted(served)
    assert trained[-1] - served[0] > 2 * (trained[0] - served[0]), "each goes on with the adapters of the one before"


def exactly(base: Path, made: TrainingRun) -> Path:
    """The weights of a base with what a run's adapters add to them, alpha / rank being 1, unrounded."""
    state = Path(made.metrics["optimizer_uri"])
    adapters, tensors = load_file(state / "weights.safetensors"), load_file(base / "model.safetensors")
    for name in [name for name in adapters if name.endswith("lora_up")]:
        layer = name.removesuffix(".lora_up")
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float() + adapters[name] @ adapters[f"{layer}.lora_down"]
    save_file(tensors, state / "exact.safetensors")
    return state / "exact.safetensors"


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
