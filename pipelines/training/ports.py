"""The outside world of a run, plugged in by whoever calls `train`."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from app.domain.ids import utc_now
from app.domain.learning.batches import BatchManifest
from app.domain.learning.corrections import Correction
from app.domain.ports import ProgressLog, RunStore, Trainer, TrajectoryStore, WeightStore
from app.domain.release.versions import Version
from pipelines.training.checkpoint import Restored
from pipelines.training.states import Inherited, LocalStates
from pipelines.training.trainer import TrainerSetup


class Trainers(Protocol):
    """Opens a trainer for the length of a run."""

    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> AbstractContextManager[Trainer]:
        """A trainer that starts with the weights of `setup.snapshot`."""
        ...


class States(Protocol):
    """Where checkpoints of running updates and the states of versions lie; each is whole and true, or not believed."""

    def write_checkpoint(self, run_id: str, trainer: Trainer, progress: dict[str, Any], *, step: int) -> None:
        """Save trainer and progress after `step` steps; of older ones the newest few stay."""
        ...

    def newest_checkpoint(self, run_id: str) -> Restored:
        """The newest one that is whole, with its place, and by name what had to be passed over."""
        ...

    def begun(self) -> Collection[str]:
        """Ids of the runs of which checkpoints, or parts of some, are there."""
        ...

    def end_run(self, run_id: str) -> None:
        """Take all checkpoints of a run away."""
        ...

    def keep(self, trainer: Trainer, *, policy: str, digest: str, shape: dict[str, object], base: str | None) -> str:
        """Save the trainer's state as that of the version it has just made; returns its place, a version's `optimizer_uri`."""
        ...

    def inherited(self, parent: Version, *, shape: dict[str, object]) -> Inherited:
        """The state that the parent's run left, or why there is none."""
        ...

    def forget(self, policy: str, *, keep: Collection[str]) -> None:
        """Drop a policy's states, but for those of the versions in `keep` (digests) and the newest few."""
        ...

    def set_aside(self, place: str) -> None:
        """Believe this state no more: a worker found in it what was not written."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingPorts:
    """The outside world of a run. Hold one for the life of the process: `trainers` keeps the Ray actors warm."""

    trajectories: TrajectoryStore
    weights: WeightStore
    runs: RunStore
    progress: ProgressLog
    folder: Path
    """Of this process, for what is being made."""
    trainers: Trainers
    states_elsewhere: States | None = None
    """Object storage for checkpoints and states; None: they lie in `folder`."""
    pinned: Callable[[str], Collection[str]] = lambda policy: ()
    """Digests of a policy whose optimizer state has to stay: champion, what a rollback may return to, candidates on their way."""
    corrections: Callable[[BatchManifest], Sequence[Correction]] = lambda batch: ()
    """What people showed the batch's turns should have been, as far as it is still there."""
    clock: Callable[[], datetime] = utc_now

    @property
    def states(self) -> States:
        """Where checkpoints and states lie."""
        return self.states_elsewhere or LocalStates(self.folder)
