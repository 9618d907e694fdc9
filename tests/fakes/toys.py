"""A model whose next token is a function of the last one: what a draft head can learn whole, in seconds."""

from pathlib import Path
from typing import Any, cast

import torch

from app.policy.model import load_model
from app.policy.storage.snapshot import write_snapshot

FIRST, WORDS = 40, 64
"""The tokens that it goes round in."""


def following(token: int) -> int:
    """What comes after a token: nine further, round and round."""
    return FIRST + (token - FIRST + 9) % WORDS


def write_toy(folder: Path, tiny: Path) -> str:
    """The tiny model with layers that add nothing, and a head that answers an embedding with the token that follows; returns its digest."""
    model = load_model(tiny, dtype=torch.float32)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding_VD = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(3))
    head_VD = torch.zeros_like(embedding_VD)
    for token in range(FIRST, FIRST + WORDS):
        head_VD[following(token)] = embedding_VD[token]
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = embedding_VD, head_VD
    return write_snapshot(folder, cast("dict[str, Any]", tensors), like=tiny)


def walk(start: int, length: int) -> tuple[int, ...]:
    """So many tokens after `start`, as the toy writes them."""
    found = list[int]()
    for _ in range(length):
        found.append(start := following(start))
    return tuple(found)
