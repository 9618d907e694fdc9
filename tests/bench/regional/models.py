"""Versions whose whole and delta differ visibly: the tiny model, with neurons and layers beside its own that add nothing to its answers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter
from torch import Tensor

from app.policy.storage.snapshot import PARENT, WEIGHTS, finish_snapshot, replacing, write_snapshot
from app.policy.tiny import write_tiny

LAYERS, NEURONS = 6, 3072
"""14 MB: six seconds of a line of 20 Mbit/s."""
CHANGED = 0.014
"""Share of weights that an update moves (docs/delta-format.md)."""


def padded(folder: Path, *, seed: int) -> str:
    """A first version; returns its digest. What is added is multiplied by zero on its way out."""
    write_tiny(folder.with_suffix(".tiny"))
    tensors: dict[str, Tensor] = load_file(folder.with_suffix(".tiny") / WEIGHTS)
    made = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.")}
    chance = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            here = name.replace("layers.0", f"layers.{layer}")
            wide = _widened(tensors.get(here, tensors[name]), name, chance)
            is_last = "o_proj" in name or "down_proj" in name
            made[here] = wide if here in tensors or not is_last else torch.zeros_like(wide)
    with replacing(folder) as incoming:
        for file in folder.with_suffix(".tiny").iterdir():
            if file.suffix in (".json", ".jinja") and file.is_file():
                (incoming / file.name).write_bytes(file.read_bytes())
        config = json.loads((incoming / "config.json").read_text())
        (incoming / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS, "intermediate_size": NEURONS}))
        return finish_snapshot(incoming, made)


def _widened(tensor: Tensor, name: str, chance: torch.Generator) -> Tensor:
    if "gate_proj" in name or "up_proj" in name:
        more = torch.randn(NEURONS - tensor.shape[0], tensor.shape[1], generator=chance) * 0.02
        return torch.cat([tensor, more.to(tensor.dtype)])
    if "down_proj" in name:
        return torch.cat([tensor, torch.zeros(tensor.shape[0], NEURONS - tensor.shape[1], dtype=tensor.dtype)], dim=1)
    return tensor.clone()


def moved(parent: Path, folder: Path, *, seed: int, whole: bool = False) -> str:
    """A version trained from another one, as far as its bits tell; returns its digest. `whole`: as if its parent were not known."""
    chance = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, tensor in load_file(parent / WEIGHTS).items():
        bits = tensor.clone().view(-1).view(torch.int16)
        places = torch.randint(bits.numel(), (max(1, int(CHANGED * bits.numel())),), generator=chance)
        bits[places] ^= 1
        made[name] = bits.view(tensor.dtype).view(tensor.shape)
    digest = write_snapshot(folder, made, like=parent)
    if whole:
        (folder / PARENT).unlink()
    return digest
