"""Products of float32 with weights of bfloat16, compiled for the processor at hand.

Weights lie in panels: of as many outputs as a tile has (`app.policy.packing.tiles`), input after input, a 32-bit word a lane, which holds
an output of the first half in its lower bits and one of the second in its upper. A shift or a mask makes either float32.

Shapes: N rows, I inputs, O outputs; P panels of L lanes.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.policy.compiling import compiled, prepared
from app.policy.packing.tiles import LANES, OUTPUTS, ROWS, spread, tile

INPUTS = 1024
"""Of a panel that rows are multiplied by at a time, so that it stays in the first cache while tiles go over it."""
BYTES = 1 << 18
"""Of inputs that a panel is multiplied by at a time: they stay in the second cache while panels go over them."""
WORTH_WAKING = 1 << 18
"""Multiplications from which on all threads take part."""


@compiled
def _share(part: int, parts: int, inputs: int, rows: int, columns: int, words: int, panels: int, out: int) -> None:
    """The outputs of one part of the panels."""
    pieces = (columns + INPUTS - 1) // INPUTS
    for piece in range(pieces):
        start, stop = columns * piece // pieces, columns * (piece + 1) // pieces
        chunks = (rows * (stop - start) * 4 + BYTES - 1) // BYTES
        for chunk in range(chunks):
            first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
            blocks = (last - first + ROWS - 1) // ROWS
            for panel in range(panels * part // parts, panels * (part + 1) // parts):
                for block in range(blocks):
                    row, end = first + (last - first) * block // blocks, first + (last - first) * (block + 1) // blocks
                    tile(
                        np.uint32(0), end - row, inputs + (row * columns + start) * 4, columns * 4,
                        words + (panel * columns + start) * 4 * LANES, 4 * LANES, stop - start,
                        out + (row * panels + panel) * 4 * OUTPUTS, panels * 4 * OUTPUTS, piece > 0,
                    )  # fmt: skip


@compiled
def _multiply(inputs: int, rows: int, columns: int, words: int, panels: int, out: int, threads: int) -> None:
    """Addresses of inputs, words and outputs, row after row. Nothing is checked."""
    small = rows * columns * panels * OUTPUTS < WORTH_WAKING
    spread(1 if small else threads, _share, (inputs, rows, columns, words, panels, out))


@compiled
def _laid_out(weight_OI: NDArray[np.uint16], words_PIL: NDArray[np.uint32]) -> None:
    """Put the bits of bfloat16 weights into panels; outputs that there are not are zero."""
    outputs, inputs = weight_OI.shape
    for panel in range(len(words_PIL)):
        for index in range(inputs):
            for lane in range(LANES):
                lower, upper = panel * OUTPUTS + lane, panel * OUTPUTS + LANES + lane
                low = np.uint32(weight_OI[lower, index]) if lower < outputs else np.uint32(0)
                high = np.uint32(weight_OI[upper, index]) if upper < outputs else np.uint32(0)
                words_PIL[panel, index, lane] = low | (high << np.uint32(16))


@compiled
def _read_out(words_PIL: NDArray[np.uint32], outputs_N: NDArray[np.int64], weight_NI: NDArray[np.uint16]) -> None:
    """The bits of these outputs' weights from panels."""
    for row, output in enumerate(outputs_N):
        panel, lane = output // OUTPUTS, output % OUTPUTS
        shift = np.uint32(0 if lane < LANES else 16)
        for index in range(weight_NI.shape[1]):
            weight_NI[row, index] = np.uint16((words_PIL[panel, index, lane % LANES] >> shift) & np.uint32(0xFFFF))


class PanelProduct:
    """See above; a `Product` (`app.policy.packing.products`)."""

    looks_up = True

    def __init__(self, outputs: int, words_PIL: Tensor) -> None:
        self._outputs, self._words_PIL = outputs, words_PIL

    @classmethod
    def of(cls, weight_OI: Tensor) -> "PanelProduct | None":
        """With weights of bfloat16, or of another dtype; None where bfloat16 does not hold those to the last bit of float32."""
        prepare()
        weight_OI = weight_OI.detach().contiguous()
        if weight_OI.dtype != torch.bfloat16:
            bits = weight_OI.float().view(torch.int16)
            lower_OI, upper_OI = bits[:, ::2], bits[:, 1::2]
            if lower_OI.any():
                return None
            weight_OI = upper_OI.contiguous().view(torch.bfloat16)
        outputs, columns = weight_OI.shape
        words_PIL = torch.empty(-(-outputs // OUTPUTS), columns, LANES, dtype=torch.int32)
        _laid_out(_halves(weight_OI), _words(words_PIL))
        return cls(outputs, words_PIL)

    def __call__(self, inputs_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See `Product`. Raises `ValueError` for inputs of another width or dtype, which compiled loops would not notice."""
        panels, columns, _ = self._words_PIL.shape
        if inputs_NI.shape[1] != columns or inputs_NI.dtype != torch.float32:
            raise ValueError(f"inputs are {inputs_NI.dtype} of {inputs_NI.shape[1]} columns, not float32 of {columns}")
        inputs_NI = inputs_NI.contiguous()
        outputs_NO = torch.empty(len(inputs_NI), panels * OUTPUTS)
        read, words, written = inputs_NI.data_ptr(), self._words_PIL.data_ptr(), outputs_NO.data_ptr()
        _multiply(read, len(inputs_NI), columns, words, panels, written, torch.get_num_threads())
        if panels * OUTPUTS > self._outputs:
            outputs_NO = outputs_NO[:, : self._outputs].contiguous()
        return outputs_NO if bias_O is None else outputs_NO.add_(bias_O)

    def plain(self) -> Tensor:
        """See `Product`: of bfloat16."""
        return self.rows(torch.arange(self._outputs))

    def rows(self, outputs_N: Tensor) -> Tensor:
        """See `Product`: of bfloat16. Raises `IndexError` for an output that it does not have."""
        if len(outputs_N) and not 0 <= int(outputs_N.min()) <= int(outputs_N.max()) < self._outputs:
            raise IndexError(f"outputs {outputs_N.min()} to {outputs_N.max()} were asked for, there are {self._outputs}")
        weight_NI = torch.empty(len(outputs_N), self._words_PIL.shape[1], dtype=torch.bfloat16)
        _read_out(_words(self._words_PIL), outputs_N.contiguous().numpy(), _halves(weight_NI))
        return weight_NI


@cache
def prepare() -> None:
    """Have them compiled, or fetched, before anything is decoded."""
    halves, panel = np.zeros((1, 1), np.uint16), np.zeros((1, 1, LANES), np.uint32)
    prepared(_laid_out, halves, panel)
    prepared(_read_out, panel, np.zeros(1, np.int64), halves)
    prepared(_multiply, 0, 0, 1, 0, 0, 0, 1)


def _halves(tensor: Tensor) -> NDArray[np.uint16]:
    return tensor.view(torch.uint16).numpy()


def _words(tensor: Tensor) -> NDArray[np.uint32]:
    return tensor.numpy().view(np.uint32)
