"""A damaged copy of a snapshot, for demonstrations and tests of what catches it."""

from pathlib import Path

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

from app.policy.storage.snapshot import WEIGHTS, write_snapshot

LAST_NORM = "model.norm.weight"


def write_damaged(folder: Path, *, like: Path) -> str:
    """Write the snapshot `like` with its last normalisation zeroed to `folder`; returns the digest.

    Every logit is then zero: the model still answers, quickly and with words drawn evenly from the whole vocabulary. (Noise on the
    matrices is no reliable harm: a tiny random model with noise on it is another random model, and no worse.)
    """
    tensors: dict[str, torch.Tensor] = load_file(like / WEIGHTS)
    tensors[LAST_NORM] = torch.zeros_like(tensors[LAST_NORM])
    return write_snapshot(folder, tensors, like=like)
