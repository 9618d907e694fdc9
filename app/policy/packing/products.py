"""Products of inputs with weights that were laid out for the processor, each with what it takes to give a row the same bits in any company.

| inputs   | weights                     | library | measured against a plain product                                             |
|----------|-----------------------------|---------|------------------------------------------------------------------------------|
| bfloat16 | bfloat16 in blocks          | oneDNN  | 1.2 to 1.9 times as fast, 1 to 16 rows (one AVX512-BF16 core, SmolLM2)       |
| float32  | float16 and a power of two  | FBGEMM  | 2.1 to 3.7 times as fast, 1 to 32 rows (one AVX2 core, SmolLM2)              |
| float32  | float32 in blocks           | oneDNN  | .8 to 1.8 times; for weights that float16 cannot hold, such as rounded ones  |

A weight of bfloat16 has eight significant bits and float16 has eleven: a power of two for each tensor brings its largest below 2^15, and
everything down to 2^-32 of that is held exactly. So what is multiplied is what was published, and half as much is read. Whether all of it
is exact is looked at whenever a tensor is packed.

Shapes: N rows, I columns of the inputs, O columns of the outputs.
"""

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
HALF_EXPONENT = 15
"""The largest weight is brought below two to this; float16 ends at 65,504."""
BLOCK_ROWS = 120
"""Rows that FBGEMM cuts an input into before it picks kernels for what is left."""
AT_ONCE = 1 << 17
"""Weights that are looked at together: larger pieces are given memory of their own, whose pages cost more than the looking."""
MOST_PADDED = 2
"""Rows that are added at most so that a row comes out as it does among many."""
TIMED = (256, 576, 1536)
"""Rows, columns and outputs of the product by which dtypes are compared: a chunk of prompts and one layer of a small model."""
TRIES = 8


class Product(Protocol):
    """Weights [O, I] that inputs are multiplied by."""

    def __call__(self, inputs_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """inputs · weightᵀ + bias [N, O], in the inputs' dtype; a row's bits do not depend on the others, as far as that can be had."""
        ...

    def rows_for(self, rows: int) -> int:
        """How many rows it multiplies when it is given so many: idle ones are added for those before them to come out as in any company."""
        ...

    def plain(self) -> Tensor:
        """The weights [O, I] that it multiplies by, laid out as usual."""
        ...


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and processor multiply packed weights of this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()) or (dtype == torch.float32 and _has_fbgemm())


def fastest(multiply: Callable[[], object]) -> float:
    """Seconds of the fastest of a few products: the machine may be busy, but not all the time."""
    best = math.inf
    for _ in range(TRIES):
        began = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - began)
    return best


def _seconds(dtype: torch.dtype) -> float:
    rows, columns, outputs = TIMED
    product, inputs_NI = packed(torch.ones(outputs, columns, dtype=dtype)), torch.ones(rows, columns, dtype=dtype)
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


def packed(weight_OI: Tensor) -> Product:
    """The quickest product with these weights, of a dtype that `can_pack`, that multiplies by exactly what they are."""
    if weight_OI.dtype == torch.float32 and (half := _halved(weight_OI)) is not None:
        return HalfProduct(*half)
    return BlockedProduct(weight_OI)


class BlockedProduct:
    """oneDNN's, of bfloat16 or float32. Processors that multiply bfloat16 take its subnormal numbers, below 2^-126, for zero."""

    def __init__(self, weight_OI: Tensor) -> None:
        ops: Any = torch.ops.mkldnn
        self._packed: Tensor = ops._reorder_linear_weight(weight_OI, PACK_FOR_ROWS)
        self._multiply = ops._linear_pointwise.default
        self._alone_differs = weight_OI.shape[1] > NARROW

    def __call__(self, inputs_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See `Product`."""
        if (more := self.rows_for(rows := len(inputs_NI))) > rows:
            return self._multiply(_with_idle(inputs_NI, more), self._packed, bias_O, "none", [], "")[:rows]
        return self._multiply(inputs_NI, self._packed, bias_O, "none", [], "")

    def rows_for(self, rows: int) -> int:
        """See `Product`."""
        return 2 if self._alone_differs and rows == 1 else rows

    def plain(self) -> Tensor:
        """See `Product`."""
        return self._packed.to_dense()


class HalfProduct:
    """FBGEMM's: inputs, products and sums are float32, the weights float16 times a power of two."""

    def __init__(self, scaled_OI: Tensor, scale: float) -> None:
        """`scaled_OI` are the weights over the scale, float32 that float16 holds."""
        ops: Any = torch.ops.quantized
        self._packed = ops.linear_prepack_fp16(scaled_OI, None)
        self._multiply, self._unpack = ops.linear_dynamic_fp16.default, ops.linear_unpack_fp16
        self._scale = torch.tensor(scale)  # which an operation takes in half the time of a number

    def __call__(self, inputs_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See `Product`."""
        if (more := self.rows_for(rows := len(inputs_NI))) > rows:
            outputs_NO = self._multiply(_with_idle(inputs_NI, more), self._packed)[:rows].mul_(self._scale)
        else:
            outputs_NO = self._multiply(inputs_NI, self._packed).mul_(self._scale)
        return outputs_NO if bias_O is None else outputs_NO.add_(bias_O)

    def rows_for(self, rows: int) -> int:
        """See `Product`."""
        return _rows_alike(rows)

    def plain(self) -> Tensor:
        """See `Product`."""
        return self._unpack(self._packed)[0].mul_(self._scale)


def _with_idle(inputs_NI: Tensor, rows: int) -> Tensor:
    """The inputs, and rows of zeros behind them up to so many."""
    return functional.pad(inputs_NI, (0, 0, 0, rows - len(inputs_NI)))


def _halved(weight_OI: Tensor) -> tuple[Tensor, float] | None:
    """Weights over a power of two that float16 holds bit for bit, and that power; None where there is none."""
    least, most = (abs(float(end)) for end in weight_OI.aminmax())
    if not math.isfinite(least + most):
        return None
    scale = 2.0 ** (math.frexp(max(least, most))[1] - HALF_EXPONENT)
    scaled_OI, rows = weight_OI * (1 / scale), max(1, AT_ONCE // weight_OI.shape[1])
    for part_RI, scaled_RI in zip(weight_OI.split(rows), scaled_OI.split(rows), strict=True):
        if not torch.equal(scaled_RI.half().float().mul_(scale), part_RI):
            return None
    return scaled_OI, scale


def _has_fbgemm() -> bool:
    """Whether products with float16 weights are FBGEMM's (x86 from AVX2 on)."""
    return torch.backends.quantized.engine in {"x86", "fbgemm"} and "fbgemm" in torch.backends.quantized.supported_engines


@lru_cache(maxsize=1024)
def _rows_alike(rows: int) -> int:
    """As many rows or a few more, all of which come out as they do among many: the last one or two of a block have kernels of their own."""
    left = rows % BLOCK_ROWS
    return next((rows + more for more in range(MOST_PADDED + 1) if (left + more) % BLOCK_ROWS not in _odd_rows()), rows)


@lru_cache
def _odd_rows() -> frozenset[int]:
    """Numbers of rows of which FBGEMM multiplies some in another order than in a full block, asked of this processor."""
    random = torch.Generator().manual_seed(0)
    weight_OI, row_1I = torch.randn(16, 256, generator=random), torch.randn(1, 256, generator=random)
    ops: Any = torch.ops.quantized
    product = ops.linear_prepack_fp16(weight_OI, None)
    usual_1O = ops.linear_dynamic_fp16(row_1I.expand(BLOCK_ROWS, -1), product)[:1]
    alike = [bool((ops.linear_dynamic_fp16(row_1I.expand(rows, -1), product) == usual_1O).all()) for rows in range(1, BLOCK_ROWS)]
    return frozenset(rows for rows, same in enumerate(alike, start=1) if not same)
