"""What travels with a version besides its weights: fp32 masters or adapters, and the optimizer's moments; a folder per policy and version.

    <folder>/optimizer/POLICY/DIGEST/   weights.safetensors (masters)  optimizer.safetensors  state.json  MANIFEST
    <folder>/runs/RUN/checkpoint-NNNNN/ of a running update (`pipelines.training.checkpoint`)

`pipelines.training.elsewhere` keeps the same in object storage.

A version whose state is gone still trains, with new moments and masters made of what is served; that is recorded and shown, because
what rounding had swallowed is lost.
"""

import json
import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from app.domain.learning.training import Place
from app.domain.ports import Trainer
from app.domain.release.versions import Version
from pipelines.training.checkpoint import Restored, damage, newest_checkpoint, seal, write_checkpoint
from pipelines.training.config import TrainingConfig
from pipelines.training.numerics.state_files import MANIFEST

log = logging.getLogger(__name__)

STATE = "state.json"
RUNS = "runs"
KEPT = 4
"""States kept per policy besides the pinned ones: the newest."""


class Inheritance(StrEnum):
    """What an update starts from."""

    INHERITED = "inherited"
    NEW = "new"
    """The parent was not made by an update, so there is nothing to inherit."""
    MISSING = "missing"
    DAMAGED = "damaged"
    OTHER = "other"
    """It is the state of another kind of training: of adapters, of all parameters, or of another rank."""


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """The parent's state, or why there is none."""

    kind: Inheritance
    folder: Place | None = None
    base: str | None = None
    """Digest of the snapshot that the adapters lie on."""
    damaged: tuple[str, ...] = ()

    @property
    def start(self) -> Place | None:
        """Place of the state that an update starts from; None where it starts from the snapshot."""
        return self.folder if self.kind is Inheritance.INHERITED else None

    def for_a_checkpoint(self) -> dict[str, Any]:
        """As JSON, by the names of the fields."""
        return {"kind": self.kind.value, "folder": self.folder and str(self.folder), "base": self.base, "damaged": list(self.damaged)}

    def since(self, began: dict[str, Any]) -> "Inherited | None":
        """What a resumed update goes on from, which is what it `began` from, whatever was lost or has come back since; None where it
        began from a state that is gone: its way back to its parent is gone too, and with adapters what they lie on."""
        kind = Inheritance(began["kind"])
        if kind is not Inheritance.INHERITED:
            return Inherited(kind=kind, folder=began["folder"], base=began["base"], damaged=tuple(began["damaged"]))
        return None if self.start is None else self

    @property
    def loss(self) -> str | None:
        """What a person should know; None where everything is in order."""
        if self.kind in (Inheritance.INHERITED, Inheritance.NEW):
            return None
        return (
            f"the parent's masters and optimizer state are {self.kind.value} ({', '.join(self.damaged) or self.folder}): the update "
            "started anew from what is served, and what rounding had kept back is lost"
        )


def inherited(parent: Version, *, shape: dict[str, object]) -> Inherited:
    """The state that the parent's run left; `shape` is that of the training to come (`shape_of`)."""
    if not parent.optimizer_uri:
        return Inherited(kind=Inheritance.NEW)
    folder = Path(parent.optimizer_uri)
    if not folder.is_dir():
        return Inherited(kind=Inheritance.MISSING, folder=folder)
    if damaged := damage(folder):
        log.error("optimizer state damaged files=%s", ",".join(damaged))
        return Inherited(kind=Inheritance.DAMAGED, folder=folder, damaged=tuple(damaged))
    found: dict[str, Any] = json.loads((folder / STATE).read_text()) if (folder / STATE).is_file() else {"shape": {}, "base": None}
    if found["shape"] != shape:
        return Inherited(kind=Inheritance.OTHER, folder=folder)
    return Inherited(kind=Inheritance.INHERITED, folder=folder, base=found["base"])


def shape_of(config: TrainingConfig) -> dict[str, object]:
    """Which parameters are trained: a state of others cannot be inherited."""
    lora = config.lora
    return {} if lora is None else {"rank": lora.rank, "alpha": lora.alpha, "target_modules": list(lora.target_modules)}


def keep_state(root: Path, trainer: Trainer, *, policy: str, digest: str, shape: dict[str, object], base: str | None) -> Path:
    """Save the trainer's state as that of the version it has just made, whole or not at all."""
    final = root / policy / digest
    incoming = final.with_name(f".{digest}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    written = trainer.save_state(incoming)
    (incoming / STATE).write_text(json.dumps({"shape": shape, "base": base}))
    seal(incoming, written)
    incoming.rename(final)
    return final


def forget_states(root: Path, *, policy: str, keep: Collection[str]) -> None:
    """Drop the states of a policy that are neither pinned (`keep`) nor among the newest few; other policies' are none of its business."""
    others = [path for path in (root / policy).glob("*") if path.name not in keep]
    for path in sorted(others, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


class LocalStates:
    """Checkpoints and states in a folder of this machine (the port `pipelines.training.ports.States`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_checkpoint(self, run_id: str, trainer: Trainer, progress: dict[str, Any], *, step: int) -> None:
        """See the port; so for all below."""
        write_checkpoint(self._run(run_id), trainer, progress, step=step)

    def newest_checkpoint(self, run_id: str) -> Restored:
        return newest_checkpoint(self._run(run_id))

    def begun(self) -> list[str]:
        return sorted(folder.name for folder in (self.folder / RUNS).glob("*"))

    def end_run(self, run_id: str) -> None:
        shutil.rmtree(self._run(run_id), ignore_errors=True)

    def keep(self, trainer: Trainer, *, policy: str, digest: str, shape: dict[str, object], base: str | None) -> str:
        return str(keep_state(self.folder / "optimizer", trainer, policy=policy, digest=digest, shape=shape, base=base))

    def inherited(self, parent: Version, *, shape: dict[str, object]) -> Inherited:
        return inherited(parent, shape=shape)

    def forget(self, policy: str, *, keep: Collection[str]) -> None:
        forget_states(self.folder / "optimizer", policy=policy, keep=keep)

    def set_aside(self, place: str) -> None:
        (Path(place) / MANIFEST).unlink(missing_ok=True)

    def _run(self, run_id: str) -> Path:
        return self.folder / RUNS / run_id
