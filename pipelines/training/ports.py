"""The outside world of a run, plugged in by whoever calls `train`."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from app.domain.ids import utc_now
from app.domain.learning.batches import BatchManifest
from app.domain.learning.corrections import Correction
from app.domain.ports import ProgressLog, RunStore, Trainer, TrajectoryStore, WeightStore
from pipelines.training.trainer import TrainerSetup


class Trainers(Protocol):
    """Opens a trainer for the length of a run."""

    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> AbstractContextManager[Trainer]:
        """A trainer that starts with the weights of `setup.snapshot`."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingPorts:
    """The outside world of a run. Hold one for the life of the process: `trainers` keeps the Ray actors warm."""

    trajectories: TrajectoryStore
    weights: WeightStore
    runs: RunStore
    progress: ProgressLog
    folder: Path
    """Checkpoints and optimizer states; on a cluster, storage that driver and workers share."""
    trainers: Trainers
    pinned: Callable[[str], Collection[str]] = lambda policy: ()
    """Digests of a policy whose optimizer state has to stay: champion, what a rollback may return to, candidates on their way."""
    corrections: Callable[[BatchManifest], Sequence[Correction]] = lambda batch: ()
    """What people showed the batch's turns should have been, as far as it is still there."""
    clock: Callable[[], datetime] = utc_now
