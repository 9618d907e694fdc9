"""Products of inputs with weights that were laid out for the processor, each with what it takes to give a row the same bits in any company.

| inputs   | weights                     | library | measured against a plain product                                             |
|----------|-----------------------------|---------|------------------------------------------------------------------------------|
| bfloat16 | bfloat16 in blocks          | oneDNN  | 1.2 to 1.9 times as fast, 1 to 16 rows (one AVX512-BF16 core, SmolLM2)       |
| float32  | bfloat16 in panels          | our own | 2.3 to 5.2 times as fast, 1 to 32 rows; 1.1 at 256 (one AVX512 core, SmolLM2) |
| float32  | float32 in blocks           | oneDNN  | .8 to 1.8 times; for weights that bfloat16 cannot hold, such as rounded ones |

Shapes: N rows, I columns of the inputs, O columns of the outputs.
"""

import ctypes
import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

PACK_FOR_ROWS = 16
"""Rows oneDNN picks the blocking for; the choice hardly matters (within 5 % from 1 to 200 rows in bfloat16)."""
NARROW = 1024
"""Columns from which on oneDNN multiplies one row alone in another order than several: of bfloat16, and of float32 with AVX512."""
TIMED = (256, 576, 1536)
"""Rows, columns and outputs of the product by which dtypes are compared: a chunk of prompts and one layer of a small model."""
TRIES = 8


class Product(Protocol):
    """Weights [O, I] that inputs are multiplied by."""

    def __call__(self, inputs_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """inputs · weightᵀ + bias [N, O], in the inputs' dtype; a row's bits do not depend on the others, as far as that can be had."""
        ...

    def plain(self) -> Tensor:
        """The weights [O, I] that it multiplies by, laid out as usual, of bfloat16 where they are kept so."""
        ...

    looks_up: bool
    """Whether `rows` reads no more than it gives."""

    def rows(self, outputs_N: Tensor) -> Tensor:
        """The weights [N, I] of these outputs."""
        ...


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and processor multiply packed weights of this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()) or (dtype == torch.float32 and _compiles())


def _compiles() -> bool:
    """Whether products in panels are compiled here: registers are counted for x86 with AVX2 and AVX512, and threads are OpenMP's."""
    return torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"} and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def fastest(multiply: Callable[[], object]) -> float:
    """Seconds that the calling thread computes for the fastest of a few products.

    Not by the wall, where a thread also waits for a core and for Python's lock: in an engine that started beside two others on two cores,
    products of 3 ms took 36 at best, and those in the other dtype, of 9 ms, took 13.
    """
    best = math.inf
    for _ in range(TRIES):
        began = time.thread_time()
        multiply()
        best = min(best, time.thread_time() - began)
    return best


def _seconds(dtype: torch.dtype) -> float:
    rows, columns, outputs = TIMED
    product, inputs_NI = packed(torch.ones(outputs, columns), dtype), torch.ones(rows, columns, dtype=dtype)
    return fastest(lambda: product(inputs_NI, None))


@lru_cache
def compute_dtype(seconds: Callable[[torch.dtype], float] = _seconds) -> torch.dtype:
    """What models are loaded and served in on this processor, also where there is a GPU: bfloat16, or float32 where that multiplies packed
    weights faster.

    Without instructions for bfloat16 (AVX512-BF16, AMX) it is emulated, and not asked about. With them it is not known until asked: an
    Intel Xeon with AVX512-BF16 and without AMX is .6 times as fast in bfloat16. oneDNN is asked as well: it may be told to do without
    what the processor has (ONEDNN_MAX_CPU_ISA), and is 6 times slower in bfloat16 then.
    """
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    able = [dtype for dtype in (torch.bfloat16, torch.float32) if can_pack(dtype)]
    if not native or torch.bfloat16 not in able:
        return torch.float32
    return min(able, key=seconds)


def packed(weight_OI: Tensor, dtype: torch.dtype) -> Product:
    """The quickest product of inputs of a dtype that `can_pack` with these weights, that multiplies by exactly what they are in it."""
    if dtype == torch.float32:
        from app.policy.packing.panels import PanelProduct  # which imports numba

        if (product := PanelProduct.of(weight_OI)) is not None:
            return product
    return BlockedProduct(weight_OI.to(dtype))


def prepare() -> None:
    """Have what is compiled here compiled, or fetched, before anything is decoded."""
    if can_pack(torch.float32):
        from app.policy.packing.panels import prepare  # the same

        prepare()


class BlockedProduct:
    """oneDNN's, of bfloat16 or float32. Processors that multiply bfloat16 take its subnormal numbers, below 2^-126, for zero."""

    looks_up = False

    def __init__(self, weight_OI: Tensor) -> None:
        ops: Any = torch.ops.mkldnn
        self._packed: Tensor = ops._reorder_linear_weight(weight_OI, PACK_FOR_ROWS)
        self._multiply = ops._linear_pointwise.default
        self._alone_differs = weight_OI.shape[1] > NARROW

    def __call__(self, inputs_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See `Product`."""
        if self._alone_differs and len(inputs_NI) == 1:
            return self._multiply(functional.pad(inputs_NI, (0, 0, 0, 1)), self._packed, bias_O, "none", [], "")[:1]
        return self._multiply(inputs_NI, self._packed, bias_O, "none", [], "")

    def plain(self) -> Tensor:
        """See `Product`."""
        return self._packed.to_dense()

    def rows(self, outputs_N: Tensor) -> Tensor:
        """See `Product`."""
        return self.plain()[outputs_N]
