"""One update, from a batch to a candidate: the whole of it, in the order it happens.

    batch ──▶ read turns ──▶ baselines ──▶ anchor pass ──▶ for each step: micro-batches → guards → Adam ──▶ final pass ──▶ snapshot
                 │               │             │                                 │                             │
              left_out       tracker state   log π_ref                       checkpoint                  guards: entropy, KL

A refusal anywhere is a HELD run with its reason; a lost worker is a FAILED run. A run that was killed or failed goes on from its newest
checkpoint when it is called again, until whoever called gives it up (`forget_run`): a cycle gives up what failed, its slot being over.
"""

import logging
import shutil
from dataclasses import replace
from typing import Any

import msgspec

from app.domain.errors import DamagedState, Held, RatchetError
from app.domain.learning.batches import BatchManifest
from app.domain.release.versions import HoldReason, RunStatus, TrainingRun, Version
from pipelines.training.config import TrainingConfig
from pipelines.training.ports import States, TrainingPorts
from pipelines.training.states import RUNS
from pipelines.training.update import Update, UpdateResult

log = logging.getLogger(__name__)

FINISHED = frozenset({RunStatus.SUCCEEDED, RunStatus.HELD})
AROUND_THE_WORK = ("workers", "threads", "checkpoint_every_s", "attempt_timeout_s")
"""What a resumed run takes from the configuration of today: how it is worked on, not what is learned."""


def train(
    batch: BatchManifest, *, run_id: str, parent: Version, anchor: Version, config: TrainingConfig, ports: TrainingPorts
) -> TrainingRun:
    """Make a candidate from `parent` and one batch; the same `run_id` again resumes it, or returns it where it is finished.

    Raises `Unavailable` when a worker is lost, and whatever a mistake of ours raises: the run is FAILED, with the sentence, until it is
    called again.
    """
    known = ports.runs.get(run_id)
    if known is not None and known.status in FINISHED:
        return known
    config = _resumed_config(known, config, states=ports.states)
    _forget_earlier(run_id, batch.policy, ports)
    run = TrainingRun(
        id=run_id, policy=batch.policy, batch_id=batch.id, parent=parent.digest, status=RunStatus.RUNNING,
        config=msgspec.to_builtins(config), started_at=known.started_at if known else ports.clock(),
    )  # fmt: skip
    ports.runs.put(run)
    update = Update(batch=batch, run_id=run_id, parent=parent, anchor=anchor, config=config, ports=ports)
    try:
        run = _succeeded(run, update.make(), ports)
    except Held as held:
        run = _ended(run, RunStatus.HELD, update, ports, reason=HoldReason(held.reason), message=str(held))
    except DamagedState as error:
        ports.states.set_aside(error.place)
        _ended(run, RunStatus.FAILED, update, ports, message=str(error))
        raise
    except Exception as error:
        message = str(error) if isinstance(error, RatchetError) else f"{type(error).__name__}: {error}; this is a mistake in Ratchet"
        _ended(run, RunStatus.FAILED, update, ports, message=message)
        raise
    forget_run(run_id, ports)
    pinned = {parent.digest, anchor.digest, run.candidate or "", *ports.pinned(run.policy)}
    ports.states.forget(run.policy, keep=pinned)
    return run


def forget_run(run_id: str, ports: TrainingPorts) -> None:
    """Take away what a run needed on its way and nobody will resume: checkpoints, and the candidate that it was making."""
    ports.states.end_run(run_id)
    shutil.rmtree(ports.folder / RUNS / run_id, ignore_errors=True)


def _forget_earlier(run_id: str, policy: str, ports: TrainingPorts) -> None:
    """A policy's update begins when those before it are over: what they left, failed or killed, is resumed by nobody any more."""
    here = {path.name for path in (ports.folder / RUNS).glob("*")}
    for left in sorted({*here, *ports.states.begun()} - {run_id}):
        known = ports.runs.get(left)
        if known is not None and known.policy == policy:
            log.warning("training run=%s policy=%s status=%s was given up: its checkpoints go", left, policy, known.status.value)
            forget_run(left, ports)


def _resumed_config(known: TrainingRun | None, config: TrainingConfig, *, states: States) -> TrainingConfig:
    """A run that left a checkpoint goes on with the configuration it began with: its steps were planned by it. One that left none, or whose
    configuration this version cannot read, begins again with the present one."""
    if known is None or states.newest_checkpoint(known.id).folder is None:
        return config
    try:
        stored = msgspec.convert(known.config, TrainingConfig)
    except msgspec.ValidationError as error:
        log.warning("training run=%s was begun with a configuration that cannot be read (%s): it begins again", known.id, error)
        states.end_run(known.id)
        return config
    if stored != config:
        log.warning("training run=%s goes on with the configuration it was begun with; the present one is for the next run", known.id)
    return msgspec.structs.replace(stored, **{name: getattr(config, name) for name in AROUND_THE_WORK})


def _succeeded(run: TrainingRun, made: UpdateResult, ports: TrainingPorts) -> TrainingRun:
    ports.runs.put_tracker(made.candidate, run.policy, made.tracker)
    run = replace(run, status=RunStatus.SUCCEEDED, candidate=made.candidate, metrics=made.metrics, finished_at=ports.clock())
    ports.runs.put(run)
    log.info("training run=%s policy=%s candidate=%s turns=%s", run.id, run.policy, made.candidate[:12], made.metrics["turns"])
    return run


def _ended(
    run: TrainingRun, status: RunStatus, update: Update, ports: TrainingPorts, *, message: str, reason: HoldReason | None = None
) -> TrainingRun:
    metrics: dict[str, Any] = update.metrics
    run = replace(run, status=status, hold_reason=reason, message=message, metrics=metrics, finished_at=ports.clock())
    ports.runs.put(run)
    log.warning("training run=%s policy=%s status=%s reason=%s: %s", run.id, run.policy, status.value, reason, message)
    return run
