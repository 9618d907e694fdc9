"""Checkpoints of a running update: written whole or not at all, verified before they are believed.

    RUN/checkpoint-00002/   weights.safetensors  optimizer.safetensors  progress.json  MANIFEST (digest of each file, written last)

Several workers write a file of their own each (`pipelines.training.numerics.state_files`).

A folder without a true MANIFEST is passed over, by name, for the one before it.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from app.domain.learning.training import Place
from app.domain.ports import Trainer
from pipelines.training.numerics.state_files import MANIFEST, digest_of

log = logging.getLogger(__name__)

PROGRESS = "progress.json"
KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The newest checkpoint that is whole, and what had to be passed over."""

    folder: Place | None
    progress: dict[str, Any] | None
    damaged: tuple[str, ...]
    """Files that are missing or not what the manifest says."""


def write_checkpoint(run_folder: Path, trainer: Trainer, progress: dict[str, Any], *, step: int) -> Path:
    """Save trainer and progress; older checkpoints beyond the last two are removed afterwards."""
    final = run_folder / f"checkpoint-{step:05d}"
    incoming = run_folder / f".{final.name}.incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    written = trainer.save_state(incoming)
    (incoming / PROGRESS).write_bytes(msgspec.json.encode(progress))
    seal(incoming, written)
    shutil.rmtree(final, ignore_errors=True)
    incoming.rename(final)
    for old in _checkpoints(run_folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest_checkpoint(run_folder: Path) -> Restored:
    """The newest checkpoint whose files are all there and all true; names every file that is not."""
    damaged: list[str] = []
    for folder in reversed(_checkpoints(run_folder)):
        found = damage(folder)
        if not found:
            progress = msgspec.json.decode((folder / PROGRESS).read_bytes())
            return Restored(folder=folder, progress=progress, damaged=tuple(damaged))
        log.error("checkpoint damaged files=%s; falling back to the one before it", ",".join(found))
        damaged += found
    return Restored(folder=None, progress=None, damaged=tuple(damaged))


def seal(folder: Path, written: Mapping[str, str] = {}) -> None:
    """Write the manifest: from now on the folder is believed. `written`: digests that whoever wrote a file has found."""
    digests = {file.name: written.get(file.name) or digest_of(file) for file in sorted(folder.iterdir()) if file.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps(digests))


def damage(folder: Path) -> list[str]:
    """Files that are missing, unreadable or changed since the folder was sealed; empty for a whole folder."""
    try:
        digests: dict[str, str] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return [str(folder / MANIFEST)]
    return [str(folder / name) for name, digest in digests.items() if not (folder / name).is_file() or digest_of(folder / name) != digest]


def _checkpoints(run_folder: Path) -> list[Path]:
    return sorted(run_folder.glob("checkpoint-*"))
