"""Whole updates in one process: a batch that a simulated user judged, and the run it makes."""

from collections.abc import Callable

import msgspec

from app.domain.learning.batches import BatchManifest, TurnPayload
from app.domain.release.versions import HoldReason, RunStatus, TrainingRun, Version
from pipelines.training import TrainingConfig, TrainingPorts, train
from pipelines.training.config import GuardLimits
from tests.fakes.learning import (
    make_batch,
    put_version,
    random_prompts,
    sample_turns,
    version_of,
)

OPEN = GuardLimits(max_kl_champion=99, max_kl_anchor=99, min_entropy_share=0.0)
CONFIG = TrainingConfig(
    learning_rate=3e-3, turns_per_step=8, micro_batch_tokens=64, threads=1, dtype="float32", checkpoint_every_s=0.0, guards=OPEN
)  # fmt: skip


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


def assert_held(made: TrainingRun, ports: TrainingPorts, reason: HoldReason) -> None:
    assert (made.status, made.hold_reason, made.candidate) == (RunStatus.HELD, reason, None), made.message
    assert ports.runs.get(made.id) == made


def broken_guards(**limits: float) -> TrainingConfig:
    return msgspec.structs.replace(CONFIG, guards=msgspec.structs.replace(OPEN, **limits))


def one_update(ports: TrainingPorts, config: TrainingConfig = CONFIG) -> tuple[Version, Version]:
    """A version, and the one that an update made of it."""
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent), parent, config=config, name="one")
    assert made.candidate is not None, made.message
    return parent, version_of(made.candidate, parent=parent.digest, step=1, optimizer_uri=made.metrics["optimizer_uri"])
