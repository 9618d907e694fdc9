"""Snapshots: a model as a folder, `model.safetensors` (bfloat16), `config.json`, tokenizer files, and `READY` written last.

`READY` holds the digest of the weights. A folder without it is unfinished and is never read.
"""

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from app.domain.errors import BadInput, NotFound
from app.durable import sync, sync_folder
from app.policy.storage.weights import digest_of, digest_of_file

WEIGHTS = "model.safetensors"
PARENT = "PARENT"
"""Digest of the weights a snapshot was trained from, where it has any: stores may keep it as a delta to them."""
READY = "READY"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
"""The same version as a low-rank adapter (PEFT's layout), where it was trained as one: for engines that keep a base and load adapters."""
PROBE = "PROBE.json"
"""What the weights say of a fixed text (`app.policy.scoring.fixed_probe`): tells of an engine whether it really computes with them."""
HEAD, HEAD_RECORD = "draft_head.safetensors", "draft_head.json"
"""What drafts for this version, and how it did (`app.policy.storage.heads`): added after it was published, and no part of its digest."""
OF_THESE_WEIGHTS = frozenset({WEIGHTS, PARENT, READY, ADAPTER_CONFIG, ADAPTER, PROBE, HEAD, HEAD_RECORD})
"""Files that belong to one version's weights; everything else is the same for every version of a line."""


def require_snapshot(folder: Path) -> Path:
    """The folder, if it is a finished snapshot. Raises `NotFound` with the command that makes one."""
    if not (folder / READY).is_file():
        raise NotFound(
            f"there is no model at {folder}: run `make model` (or `ratchet model fetch --out {folder}`; "
            f"`ratchet model tiny --out {folder}` makes a random one)"
        )
    return folder


def snapshot_digest(folder: Path) -> str:
    """The digest `READY` states; see `verify_snapshot` for whether it is true."""
    return (require_snapshot(folder) / READY).read_text().strip()


def verify_snapshot(folder: Path) -> str:
    """The digest, recomputed from the bytes. Raises `BadInput` when they are not what `READY` states."""
    stated, found = snapshot_digest(folder), digest_of_file(folder / WEIGHTS)
    if stated != found:
        raise BadInput(
            f"the weights in {folder} are damaged (digest {found[:12]}, READY says {stated[:12]}): delete the folder, make it again"
        )
    return found


def write_snapshot(folder: Path, tensors: Mapping[str, Tensor], *, like: Path) -> str:
    """Write weights as a new snapshot, trained from the snapshot `like`, whose configuration and tokenizer it gets; returns the digest.

    Tensors may be of any float dtype and device; floats are cast to bfloat16, the one rounding between training and serving.
    Pass tied tensors once or twice, they are stored once. Durable when this returns; a folder that exists is replaced.
    """
    with replacing(folder) as incoming:
        for file in require_snapshot(like).iterdir():
            if file.is_file() and file.name not in OF_THESE_WEIGHTS:
                shutil.copyfile(file, incoming / file.name)
        (incoming / PARENT).write_text(snapshot_digest(like) + "\n")
        return finish_snapshot(incoming, tensors)


def finish_snapshot(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Add the weights and `READY` to a folder that holds everything else; returns the digest."""
    stored = {name: _as_stored(tensor) for name, tensor in _untied(tensors).items()}
    digest = digest_of(stored)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    os.chmod(folder / WEIGHTS, 0o644)
    sync_folder(folder)
    (folder / READY).write_text(digest + "\n")
    sync_folder(folder)
    return digest


def _as_stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the second name of a tensor stored under two (same memory, shape and strides)."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    kept: dict[str, Tensor] = {}
    for name in sorted(tensors, key=lambda name: (name.startswith("lm_head."), name)):
        tensor = tensors[name]
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def require_replaceable(folder: Path) -> None:
    """Refuse to put a snapshot in the place of anything but a snapshot or an empty folder. Raises `BadInput`."""
    is_free = not folder.exists() or (folder.is_dir() and ((folder / READY).is_file() or not any(folder.iterdir())))
    if not is_free:
        raise BadInput(f"{folder} is there and is no snapshot, and would be deleted: name a new folder in it, or clear it away yourself")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to fill, which takes its place when the block ends well and is removed when it does not.

    Raises `BadInput` where something else than a snapshot is in that place.
    """
    require_replaceable(folder)
    incoming = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.incoming"
    outgoing = incoming.with_suffix(".outgoing")
    incoming.mkdir(parents=True)
    try:
        yield incoming
        with suppress(FileNotFoundError):
            folder.rename(outgoing)
        incoming.rename(folder)
        sync(folder.parent)
    finally:
        for leftover in (incoming, outgoing):
            shutil.rmtree(leftover, ignore_errors=True)
