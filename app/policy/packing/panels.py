"""Products of float32 with weights of bfloat16, compiled for the processor at hand.

Weights lie in panels: the weights of as many outputs as two registers have lanes, input after input, a 32-bit word a lane, which holds
an output of the first register in its lower half and one of the second in its upper. A shift or a mask makes either float32. A tile is one
panel by as many rows as registers can hold the sums of: each word is read once for all of them, and no sum leaves its register in between.

A sum adds its products one after the other, in the order of inputs, each fused with its addition. So an output's bits depend on its row
and its weights alone: not on other rows, nor on how many threads there are.

Shapes: N rows, I inputs, O outputs; P panels of L lanes.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from app.policy.compiling import compiled, prepared

HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Of what is compiled for: what numba keeps is found again by the same features."""
LANES = 16 if HAS_AVX512 else 8
"""Numbers of a register."""
ROWS = 14 if HAS_AVX512 else 6
"""Of a tile: two registers of sums each, beside two of weights and one of inputs, of the 32 or 16 that there are."""
OUTPUTS = 2 * LANES
"""Of a panel."""
INPUTS = 1024
"""Of a panel that rows are multiplied by at a time, so that it stays in the first cache while tiles go over it."""
BYTES = 1 << 18
"""Of inputs that a panel is multiplied by at a time: they stay in the second cache while panels go over them."""
AHEAD = 4096
"""Bytes by which words are fetched ahead; what a row or two wait for is memory."""
WORTH_WAKING = 1 << 18
"""Multiplications from which on all threads take part."""

_INTEGER, _WORD, _NUMBER = ir.IntType(64), ir.IntType(32), ir.FloatType()
_WORDS, _NUMBERS = ir.VectorType(_WORD, LANES), ir.VectorType(_NUMBER, LANES)
_BYTE_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def _tile(_context: Any, rows: Any, inputs: Any, input_step: Any, words: Any, count: Any, out: Any, out_step: Any, onto: Any) -> Any:  # noqa: ANN401
    """One panel by 1 to `ROWS` rows, of `count` inputs (at least one): addresses and steps from row to row, in bytes. Sums start from
    what is in `out` where it is `onto`, else from zero."""
    signature = types.void(*[types.int64] * 7, types.boolean)

    def generated(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        rows, *addresses, onto = arguments
        after = builder.function.append_basic_block("after")
        which = builder.switch(rows, after)
        for many in range(1, ROWS + 1):
            block = builder.function.append_basic_block(f"rows{many}")
            which.add_case(ir.Constant(_INTEGER, many), block)
            builder.position_at_end(block)
            _tile_of(many, builder, *addresses, onto)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, generated


def _tile_of(rows: int, builder: Any, inputs: Any, input_step: Any, words: Any, count: Any, out: Any, out_step: Any, onto: Any) -> None:  # noqa: ANN401
    """Write out the loop of a tile of so many rows."""
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_NUMBERS, [_NUMBERS] * 3), f"llvm.fma.v{LANES}f32")
    fetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _WORD, _WORD, _WORD]), "llvm.prefetch.p0"
    )

    def at(address: Any, kind: Any) -> Any:  # noqa: ANN401
        return builder.inttoptr(address, kind.as_pointer())

    def by(step: Any, times: int) -> Any:  # noqa: ANN401
        return builder.mul(step, ir.Constant(_INTEGER, times))

    places = [
        at(builder.add(builder.add(out, by(out_step, row)), ir.Constant(_INTEGER, half * 4 * LANES)), _NUMBERS)
        for row in range(rows) for half in range(2)
    ]  # fmt: skip
    zero = ir.Constant(_NUMBERS, [0.0] * LANES)
    starts = [builder.select(onto, builder.load(place, align=4), zero) for place in places]
    before, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)

    builder.position_at_end(loop)
    index, sums = builder.phi(_INTEGER), [builder.phi(_NUMBERS) for _ in starts]
    index.add_incoming(ir.Constant(_INTEGER, 0), before)
    place = builder.add(words, by(index, 4 * LANES))
    word = builder.load(at(place, _WORDS), align=4)
    builder.call(
        fetch, [at(builder.add(place, ir.Constant(_INTEGER, AHEAD)), ir.IntType(8)), *(ir.Constant(_WORD, how) for how in (0, 3, 1))]
    )
    halves = [
        builder.bitcast(builder.shl(word, ir.Constant(_WORDS, [16] * LANES)), _NUMBERS),
        builder.bitcast(builder.and_(word, ir.Constant(_WORDS, [0xFFFF0000] * LANES)), _NUMBERS),
    ]
    added = []
    for row in range(rows):
        number = builder.load(at(builder.add(builder.add(inputs, by(index, 4)), by(input_step, row)), _NUMBER), align=4)
        first = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), number, ir.Constant(_WORD, 0))
        spread = builder.shuffle_vector(first, ir.Constant(_NUMBERS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))
        added += [builder.call(fused, [spread, half, total]) for half, total in zip(halves, sums[2 * row : 2 * row + 2], strict=True)]
    following = builder.add(index, ir.Constant(_INTEGER, 1))
    index.add_incoming(following, loop)
    for total, start, new in zip(sums, starts, added, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)

    builder.position_at_end(done)
    for place, new in zip(places, added, strict=True):
        builder.store(new, place, align=4)


@intrinsic
def _on_threads(typing: Any, threads: Any, job: Any, arguments: Any) -> Any:  # noqa: ANN401
    """job(*arguments, part, parts) on each of so many threads: torch's own, of the OpenMP that it brings (GNU's, or LLVM's as GNU's)."""
    kinds = (*arguments.types, types.int64, types.int64)
    job.dispatcher.compile(kinds)
    done = job.dispatcher.overloads[kinds]

    def generated(context: Any, builder: Any, _signature: Any, given: Any) -> Any:  # noqa: ANN401
        def from_openmp(name: str, gives: Any, *takes: Any) -> Any:  # noqa: ANN401
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(gives, takes), name)

        held = given[2].type
        share = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_BYTE_POINTER]), builder.module.get_unique_name("share"))
        share.linkage = "internal"
        within = ir.IRBuilder(share.append_basic_block())
        values = within.load(within.bitcast(share.args[0], held.as_pointer()))
        part, parts = (
            within.sext(within.call(from_openmp(name, _WORD), []), _INTEGER) for name in ("omp_get_thread_num", "omp_get_num_threads")
        )
        context.add_linking_libs([done.library])
        context.call_internal_no_propagate(
            within, done.fndesc, done.signature, [*(within.extract_value(values, n) for n in range(len(arguments.types))), part, parts]
        )
        within.ret_void()
        memory = cgutils.alloca_once_value(builder, given[2])
        builder.call(
            from_openmp("GOMP_parallel", ir.VoidType(), share.type, _BYTE_POINTER, _WORD, _WORD),
            [share, builder.bitcast(memory, _BYTE_POINTER), builder.trunc(given[0], _WORD), ir.Constant(_WORD, 0)],
        )
        return context.get_dummy_value()

    return types.void(threads, job, arguments), generated


@compiled
def _share(inputs: int, rows: int, columns: int, words: int, panels: int, out: int, part: int, parts: int) -> None:
    """The outputs of one part of the panels."""
    pieces = (columns + INPUTS - 1) // INPUTS
    for piece in range(pieces):
        start, stop = columns * piece // pieces, columns * (piece + 1) // pieces
        chunks = (rows * (stop - start) * 4 + BYTES - 1) // BYTES
        for chunk in range(chunks):
            first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
            tiles = (last - first + ROWS - 1) // ROWS
            for panel in range(panels * part // parts, panels * (part + 1) // parts):
                for tile in range(tiles):
                    row, end = first + (last - first) * tile // tiles, first + (last - first) * (tile + 1) // tiles
                    _tile(
                        end - row, inputs + (row * columns + start) * 4, columns * 4, words + (panel * columns + start) * 4 * LANES,
                        stop - start, out + (row * panels + panel) * 4 * OUTPUTS, panels * 4 * OUTPUTS, piece > 0,
                    )  # fmt: skip


@compiled
def _multiply(inputs: int, rows: int, columns: int, words: int, panels: int, out: int, threads: int) -> None:
    """Addresses of inputs, words and outputs, row after row. Nothing is checked."""
    if threads == 1 or rows * columns * panels * OUTPUTS < WORTH_WAKING:
        _share(inputs, rows, columns, words, panels, out, 0, 1)
    else:
        _on_threads(threads, _share, (inputs, rows, columns, words, panels, out))


@compiled
def _laid_out(weight_OI: NDArray[np.uint32], words_PIL: NDArray[np.uint32]) -> bool:
    """Put the bits of float32 weights into panels; whether they are all of bfloat16. Where they are not, panels are left as they come."""
    outputs, inputs = weight_OI.shape
    lost = np.uint32(0)
    for panel in range(len(words_PIL)):
        for lane in range(2 * LANES):
            output, shift = panel * 2 * LANES + lane, np.uint32(0 if lane >= LANES else 16)
            for index in range(inputs):
                bits = weight_OI[output, index] if output < outputs else np.uint32(0)
                lost |= bits & np.uint32(0xFFFF)
                kept = (bits & np.uint32(0xFFFF0000)) >> shift
                words_PIL[panel, index, lane % LANES] = kept if lane < LANES else words_PIL[panel, index, lane % LANES] | kept
        if lost:
            return False
    return True


@compiled
def _read_out(words_PIL: NDArray[np.uint32], weight_OI: NDArray[np.uint32]) -> None:
    """The bits of float32 weights from panels."""
    for output in range(len(weight_OI)):
        panel, lane = output // (2 * LANES), output % (2 * LANES)
        shift = np.uint32(0 if lane >= LANES else 16)
        for index in range(weight_OI.shape[1]):
            weight_OI[output, index] = (words_PIL[panel, index, lane % LANES] << shift) & np.uint32(0xFFFF0000)


class PanelProduct:
    """See above; a `Product` (`app.policy.packing.products`)."""

    def __init__(self, outputs: int, words_PIL: Tensor) -> None:
        self._outputs, self._words_PIL = outputs, words_PIL

    @classmethod
    def of(cls, weight_OI: Tensor) -> "PanelProduct | None":
        """With weights of float32; None where bfloat16 does not hold them to the last bit."""
        prepare()
        outputs, columns = weight_OI.shape
        words_PIL = torch.empty(-(-outputs // OUTPUTS), columns, LANES, dtype=torch.int32)
        return cls(outputs, words_PIL) if _laid_out(_bits(weight_OI.contiguous()), _bits(words_PIL)) else None

    def __call__(self, inputs_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See `Product`. Raises `ValueError` for inputs of another width or dtype, which compiled loops would not notice."""
        panels, columns, _ = self._words_PIL.shape
        if inputs_NI.shape[1] != columns or inputs_NI.dtype != torch.float32:
            raise ValueError(f"inputs are {inputs_NI.dtype} of {inputs_NI.shape[1]} columns, not float32 of {columns}")
        inputs_NI = inputs_NI.contiguous()
        outputs_NO = torch.empty(len(inputs_NI), panels * OUTPUTS)
        _multiply(
            inputs_NI.data_ptr(),
            len(inputs_NI),
            columns,
            self._words_PIL.data_ptr(),
            panels,
            outputs_NO.data_ptr(),
            torch.get_num_threads(),
        )
        if panels * OUTPUTS > self._outputs:
            outputs_NO = outputs_NO[:, : self._outputs].contiguous()
        return outputs_NO if bias_O is None else outputs_NO.add_(bias_O)

    def plain(self) -> Tensor:
        """See `Product`."""
        weight_OI = torch.empty(self._outputs, self._words_PIL.shape[1])
        _read_out(_bits(self._words_PIL), _bits(weight_OI))
        return weight_OI


@cache
def prepare() -> None:
    """Have them compiled, or fetched, before anything is decoded."""
    bits = np.zeros((1, 1), np.uint32)
    panel = np.zeros((1, 1, LANES), np.uint32)
    prepared(_laid_out, bits, panel)
    prepared(_read_out, panel, bits)
    prepared(_multiply, 0, 0, 1, 0, 0, 0, 1)


def _bits(tensor: Tensor) -> NDArray[np.uint32]:
    return tensor.detach().numpy().view(np.uint32)
