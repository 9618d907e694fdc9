"""What products are made of: a tile of a few rows by the lanes of two registers, and threads to share them out to.

No sum leaves its register while a tile's inputs go by: each weight that is read is multiplied by all rows. A sum adds its products one
after the other, in the order of inputs, each fused with its addition. So its bits depend on its own row and its own weights, and not on how
many rows a tile has, or on which thread.
"""

from typing import Any

import torch  # noqa: F401 - brings the OpenMP that `spread` asks for threads
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_COMPILED_FOR: Any = cpu_target.target_context
HAS_AVX512 = "+avx512f" in _COMPILED_FOR.codegen().magic_tuple()[2].split(",")
"""Of what is compiled for: what numba keeps is found again by the same features."""
LANES = 16 if HAS_AVX512 else 8
"""Numbers of a register."""
ROWS = 14 if HAS_AVX512 else 6
"""Of a tile at most: two registers of sums each, beside two of weights and one of inputs, of the 32 or 16 that there are."""
OUTPUTS = 2 * LANES
"""Of a tile."""
AHEAD = 4096
"""Bytes by which weights are fetched ahead; what a row or two wait for is memory."""

_INTEGER, _WORD, _SHORT, _NUMBER = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_WORDS, _SHORTS, _NUMBERS = (ir.VectorType(kind, LANES) for kind in (_WORD, _SHORT, _NUMBER))
_BYTE_POINTER = ir.IntType(8).as_pointer()


def _tile(
    _context: Any, kind: Any, rows: Any, inputs: Any, input_step: Any, weights: Any, weight_step: Any, count: Any, out: Any, out_step: Any,
    onto: Any,
) -> Any:  # fmt: skip
    """Sums over `count` inputs, at least one, of 1 to `ROWS` rows by `OUTPUTS` outputs; from what is in `out` on where it is `onto`, else
    from zero.

    All but `kind` and `onto` are addresses and steps in bytes: of float32 inputs from row to row, of weights from input to input, of sums
    from row to row. What weights are is what `kind` is: float32; uint16, the bits of bfloat16; or uint32, two of those, of which the lower
    is an output of the first half and the upper one of the second.
    """
    signature = types.void(kind, *[types.int64] * 8, types.boolean)

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, rows, inputs, input_step, weights, weight_step, count, out, out_step, onto = arguments
        after = builder.function.append_basic_block("after")
        which = builder.switch(rows, after)
        for many in range(1, ROWS + 1):
            block = builder.function.append_basic_block(f"rows{many}")
            which.add_case(ir.Constant(_INTEGER, many), block)
            builder.position_at_end(block)
            _written_out(builder, signature.args[0], many, inputs, input_step, weights, weight_step, count, out, out_step, onto)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, generated


tile: Any = intrinsic(_tile)


def _written_out(
    builder: Any, kind: Any, rows: int, inputs: Any, input_step: Any, weights: Any, weight_step: Any, count: Any, out: Any, out_step: Any,
    onto: Any,
) -> None:  # fmt: skip
    """The loop of a tile of so many rows."""
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_NUMBERS, [_NUMBERS] * 3), f"llvm.fma.v{LANES}f32")
    places = [
        _at(builder, builder.add(_step(builder, out, out_step, row), ir.Constant(_INTEGER, half * 4 * LANES)), _NUMBERS)
        for row in range(rows) for half in range(2)
    ]  # fmt: skip
    zero = ir.Constant(_NUMBERS, [0.0] * LANES)
    starts = [builder.select(onto, builder.load(place, align=4), zero) for place in places]
    before, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)

    builder.position_at_end(loop)
    index, sums = builder.phi(_INTEGER), [builder.phi(_NUMBERS) for _ in starts]
    index.add_incoming(ir.Constant(_INTEGER, 0), before)
    halves = _halves(builder, kind, builder.add(weights, builder.mul(index, weight_step)))
    added = []
    for row in range(rows):
        number = builder.load(_at(builder, _step(builder, _step(builder, inputs, index, 4), input_step, row), _NUMBER), align=4)
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


def _halves(builder: Any, kind: Any, place: Any) -> list[Any]:
    """The weights of one input there, as two registers of float32; those of a later one are fetched."""
    fetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _WORD, _WORD, _WORD]), "llvm.prefetch.p0"
    )
    to_read, closest, data = (ir.Constant(_WORD, how) for how in (0, 3, 1))
    builder.call(fetch, [_at(builder, builder.add(place, ir.Constant(_INTEGER, AHEAD)), ir.IntType(8)), to_read, closest, data])

    def loaded(vector: Any, half: int) -> Any:
        size = vector.element.width // 8 if vector is not _NUMBERS else 4
        return builder.load(_at(builder, builder.add(place, ir.Constant(_INTEGER, half * size * LANES)), vector), align=size)

    if kind == types.float32:
        return [loaded(_NUMBERS, half) for half in range(2)]
    upper = ir.Constant(_WORDS, [16] * LANES)
    if kind == types.uint16:
        return [builder.bitcast(builder.shl(builder.zext(loaded(_SHORTS, half), _WORDS), upper), _NUMBERS) for half in range(2)]
    word = loaded(_WORDS, 0)
    return [
        builder.bitcast(builder.shl(word, upper), _NUMBERS),
        builder.bitcast(builder.and_(word, ir.Constant(_WORDS, [0xFFFF0000] * LANES)), _NUMBERS),
    ]


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _step(builder: Any, address: Any, step: Any, times: int) -> Any:
    return builder.add(address, builder.mul(step, ir.Constant(_INTEGER, times)))


def _spread(_context: Any, threads: Any, job: Any, arguments: Any) -> Any:
    """job(part, parts, *arguments) for each of so many parts, beside each other on as many threads: torch's own, of the OpenMP that it
    brings, which is GNU's or answers to its names. The job may not raise."""
    kinds = (types.int64, types.int64, *arguments.types)
    job.dispatcher.compile(kinds)
    done = job.dispatcher.overloads[kinds]

    def generated(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        threads, _, values = given
        context.add_linking_libs([done.library])

        def of_openmp(name: str, gives: Any, *takes: Any) -> Any:
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(gives, takes), name)

        def do(within: Any, part: Any, parts: Any, values: Any) -> None:
            handed = [within.extract_value(values, place) for place in range(len(arguments))]
            context.call_internal_no_propagate(within, done.fndesc, done.signature, [part, parts, *handed])

        share = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_BYTE_POINTER]), builder.module.get_unique_name("share"))
        share.linkage = "internal"
        within = ir.IRBuilder(share.append_basic_block())
        whose = (of_openmp(name, _WORD) for name in ("omp_get_thread_num", "omp_get_num_threads"))
        part, parts = (within.sext(within.call(function, []), _INTEGER) for function in whose)
        do(within, part, parts, within.load(within.bitcast(share.args[0], values.type.as_pointer())))
        within.ret_void()

        none, one = ir.Constant(_INTEGER, 0), ir.Constant(_INTEGER, 1)
        with builder.if_else(builder.icmp_signed("<=", threads, one)) as (alone, together):
            with alone:
                do(builder, none, one, values)
            with together:
                memory = builder.bitcast(cgutils.alloca_once_value(builder, values), _BYTE_POINTER)
                run = of_openmp("GOMP_parallel", ir.VoidType(), share.type, _BYTE_POINTER, _WORD, _WORD)
                builder.call(run, [share, memory, builder.trunc(threads, _WORD), ir.Constant(_WORD, 0)])
        return context.get_dummy_value()

    return types.void(threads, job, arguments), generated


spread: Any = intrinsic(_spread)
