"""Which dtype the matrix products of training run in."""

from functools import lru_cache

import torch

from app.policy.packing.products import fastest

SIZE = (512, 576, 1536)
"""Rows, inputs and outputs of the product that is timed: one layer's shape of a small model."""


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of a configuration value; `auto` is the faster one on this machine."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[resolve_name(name)]


@lru_cache
def resolve_name(name: str) -> str:
    """`float32` or `bfloat16`. A GPU multiplies bfloat16 faster; of processors it is not known until asked: AVX512-BF16 without AMX was
    measured at 0.55 times the speed of float32 (Emerald Rapids, 2 cores) and at 2 to 3.5 times it (another 2-core machine)."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "bfloat16"
    return min(("float32", "bfloat16"), key=lambda candidate: _seconds(getattr(torch, candidate)))


def _seconds(dtype: torch.dtype) -> float:
    rows, inputs, outputs = SIZE
    left, right = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    return fastest(lambda: torch.nn.functional.linear(left, right))
