"""What runs updates on the machines: `python -m tests.bench.training_cluster.driver cluster|alone|refused`, settings from the environment.

    cluster    an update on two machines; the same under another name, in whose middle a machine is killed, until it is resumed; and one
               that continues from what that made
    alone      the first and the last of these with two workers on one machine, its folders, and no object storage
    refused    an update on two machines without object storage

Says what happens as lines of JSON, each with `at`, seconds since the epoch.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from app import wiring
from app.domain.errors import BadConfig, Unavailable
from app.domain.learning.batches import BatchManifest
from app.domain.ports import WeightStore
from app.domain.release.versions import TrainingRun, Version
from app.settings import Settings, from_environment
from app.trajectories.segments import ParquetSegments
from pipelines.training import TrainingConfig, TrainingPorts, train
from pipelines.training.config import GuardLimits
from pipelines.training.elsewhere.states import open_states
from pipelines.training.elsewhere.storage import Storage
from pipelines.training.ray_actors import RayTrainers
from tests.fakes.learning import (
    FakeProgress,
    FakeRuns,
    make_batch,
    random_prompts,
    sample_turns,
    small_snapshot,
    version_of,
)

VOCABULARY, LAYERS, HIDDEN = 1024, 4, 128
TURNS, TOKENS, STEPS = 48, 6, 6
ATTEMPTS = 5
CONFIG = TrainingConfig(
    learning_rate=3e-3, turns_per_step=TURNS // STEPS, micro_batch_tokens=16, threads=1, dtype="float32", checkpoint_every_s=0.0,
    workers=2, attempt_timeout_s=600.0, guards=GuardLimits(max_kl_champion=99, max_kl_anchor=99, min_entropy_share=0.0),
)  # fmt: skip
"""Sixteen tokens a worker: three or four passes a step, so that most of what can be interrupted is inside one."""


def say(event: str, **more: Any) -> None:
    """One line."""
    print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


def ports_of(settings: Settings) -> tuple[TrainingPorts, RayTrainers, FakeProgress]:
    """The real stores; what a database would hold of runs is a dict here."""
    trainers = RayTrainers(wiring.ray_token(settings), Storage.of(weights=settings.weights, states=settings.states))
    progress = FakeProgress()
    ports = TrainingPorts(
        trajectories=ParquetSegments(settings.segments), weights=wiring.open_weights(settings), runs=FakeRuns(), progress=progress,
        folder=settings.data / "training", trainers=trainers, states_elsewhere=open_states(settings.states),
    )  # fmt: skip
    return ports, trainers, progress


def first_version(weights: WeightStore, folder: Path) -> Version:
    """A random one, published."""
    digest = small_snapshot(folder, vocabulary=VOCABULARY, layers=LAYERS, hidden=HIDDEN)
    assert weights.publish(folder) == digest
    return version_of(digest)


def batch_of(ports: TrainingPorts, version: Version, slot: int) -> BatchManifest:
    """What the version said, and a user who likes the first third of the vocabulary."""
    prompts = random_prompts(TURNS, vocabulary=VOCABULARY, seed=slot)
    turns = sample_turns(ports.weights.path(version.digest), prompts, version=version.digest, length=TOKENS, seed=slot)
    likes = [sum(token < VOCABULARY // 3 for token in turn.completion_tokens) / TOKENS for turn in turns]
    return make_batch(ports, turns, likes, champion=version.digest, slot=slot)


def next_version(made: TrainingRun, parent: Version) -> Version:
    """What an update made."""
    assert made.candidate is not None, made.message
    return version_of(made.candidate, parent=parent.digest, step=parent.step + 1, optimizer_uri=made.metrics["optimizer_uri"])


def update(ports: TrainingPorts, name: str, parent: Version, batch: BatchManifest) -> TrainingRun:
    """One update, of which is said what it came to."""
    began = time.monotonic()
    made = train(batch, run_id=name, parent=parent, anchor=parent, config=CONFIG, ports=ports)
    say(
        "made", name=name, candidate=made.candidate, took_s=round(time.monotonic() - began, 2), optimizer=made.metrics.get("optimizer"),
        resumed_from=made.metrics.get("resumed_from_step"), damaged=made.metrics.get("damaged_checkpoints"), said=made.message,
    )  # fmt: skip
    return made


def until_resumed(
    ports: TrainingPorts, progress: FakeProgress, trainers: RayTrainers, parent: Version, batch: BatchManifest
) -> TrainingRun:
    """As the loop does: an attempt that fails is made again."""
    per_step = -(-len(progress.reports) // STEPS)
    before = len(progress.reports)

    def half(count: int) -> None:
        if count - before == 2 * per_step + 2:
            say("half")

    progress.on_report = half
    for attempt in range(1, ATTEMPTS + 1):
        try:
            made = update(ports, "cut", parent, batch)
        except Unavailable as error:
            failed = ports.runs.get("cut")
            assert failed is not None
            say("lost", attempt=attempt, said=str(error), status=failed.status.value, steps=len(failed.metrics.get("steps", ())))

            def first(count: int, known: int = len(progress.reports)) -> None:
                if count == known + 1:
                    warm = trainers._warm
                    assert warm is not None
                    say("goes_on", nodes=warm[1].nodes)

            progress.on_report = first
        else:
            return made
    raise SystemExit(f"{ATTEMPTS} attempts were not enough")


def on_a_cluster(settings: Settings) -> None:
    """See above."""
    ports, trainers, progress = ports_of(settings)
    parent = first_version(ports.weights, settings.data / "first")
    batch = batch_of(ports, parent, 0)
    update(ports, "whole", parent, batch)
    assert trainers._warm is not None
    say("placed", nodes=trainers._warm[1].nodes, reports=len(progress.reports))
    made = until_resumed(ports, progress, trainers, parent, batch)
    progress.on_report = lambda count: None
    child = next_version(made, parent)
    update(ports, "next", child, batch_of(ports, child, 1))
    trainers.stop()


def alone(settings: Settings) -> None:
    """See above."""
    ports, trainers, _ = ports_of(settings)
    parent = first_version(ports.weights, settings.data / "first")
    child = next_version(update(ports, "whole", parent, batch_of(ports, parent, 0)), parent)
    update(ports, "next", child, batch_of(ports, child, 1))
    assert trainers._warm is not None
    say("placed", nodes=trainers._warm[1].nodes)
    trainers.stop()


def refused(settings: Settings) -> None:
    """See above; that nothing was started is seen by whoever counts the machines' processes."""
    folders = replace(settings, weights=str(settings.data / "weights"), states=str(settings.data / "training"))
    _, trainers, _ = ports_of(folders)
    try:
        trainers.warm(workers=2, threads=1, timeout_s=60)
    except BadConfig as error:
        say("refused", said=str(error))


if __name__ == "__main__":
    os.umask(0o077)
    {"cluster": on_a_cluster, "alone": alone, "refused": refused}[sys.argv[1]](from_environment())
