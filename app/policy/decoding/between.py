"""What lies between the products of a decoder layer, compiled: each is one loop here, and ten operations of torch.

Decoding a row or two, an operation costs what it takes to call it, whatever it computes; of a step of one row those were a third.
Nothing is summed in an order that depends on how many rows there are. bfloat16 comes as its bits, uint16, is computed in float32, and
rounded wherever torch's operations would: what they give is what comes out here.

Shapes: T tokens, D hidden size; of a part N rows with Q new tokens each; K key/value heads, G query heads to each of them, d per head; of
the cache R rows of C tokens.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from app.policy.compiling import compiled, prepared

Elements = NDArray[Any]
"""float32, or the bits of bfloat16 as uint16."""
LANES = 16
"""Sums of squares that are summed beside each other."""
NOT_A_NUMBER = 0x7FC0
LOG2_E = np.float32(1.4426950408889634)
LN2_FIRST, LN2_REST = np.float32(0.693359375), np.float32(-2.1219444005469057e-4)
"""ln 2 in two numbers, of which the first has so few bits that a whole number of them is exact."""
TO_WHOLE = np.float32(3 << 22)
"""What is added to this is rounded to a whole number, which the last bits then are."""
SERIES = tuple(np.float32(1 / factor) for factor in (720, 120, 24, 6, 2, 1, 1))
"""Of e^r, before which comes 1 / 7!."""


@intrinsic
def _float_of(_context: Any, bits: Any) -> Any:  # noqa: ANN401
    """The float32 of 32 bits."""
    return types.float32(types.uint32), lambda _context, builder, _signature, bits: builder.bitcast(bits[0], ir.FloatType())


@intrinsic
def _bits_of(_context: Any, value: Any) -> Any:  # noqa: ANN401
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda _context, builder, _signature, value: builder.bitcast(value[0], ir.IntType(32))


def wide(element: Any) -> Any:  # noqa: ANN401
    """An element as float32; for compiled loops."""
    raise TypeError(f"{element} is read within compiled loops only")


@overload(wide)
def _wide(element: Any) -> Any:  # noqa: ANN401
    def of_bfloat16(element: Any) -> Any:  # noqa: ANN401
        return _float_of(np.uint32(np.uint32(element) << np.uint32(16)))  # pyright: ignore[reportCallIssue] - the context is numba's

    def of_float32(element: Any) -> Any:  # noqa: ANN401
        return element

    return of_bfloat16 if element == types.uint16 else of_float32


def rounded(value: Any, like: Any) -> Any:  # noqa: ANN401
    """A float32 as an element of the kind of `like`, the nearest, between two the even one; for compiled loops."""
    raise TypeError(f"{value} is rounded to the kind of {like} within compiled loops only")


@overload(rounded)
def _rounded(value: Any, like: Any) -> Any:  # noqa: ANN401
    def to_bfloat16(value: Any, like: Any) -> Any:  # noqa: ANN401
        bits = _bits_of(value)  # pyright: ignore[reportCallIssue] - the context is numba's
        nearest = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        return nearest if value == value else np.uint16(NOT_A_NUMBER)

    def to_float32(value: Any, like: Any) -> Any:  # noqa: ANN401
        return value

    return to_bfloat16 if like == types.uint16 else to_float32


@compiled
def normed(hidden_TD: Elements, weight_D: Elements, epsilon: float, out_TD: Elements) -> None:
    """Root-mean-square normalisation: hidden / √(mean of squares + ε), rounded before the weight as the models were trained, · weight."""
    size = len(weight_D)
    even, squares = size // LANES * LANES, np.empty(LANES, dtype=np.float32)
    for token in range(len(hidden_TD)):
        row, out = hidden_TD[token], out_TD[token]
        squares[:] = 0
        for at in range(0, even, LANES):
            for lane in range(LANES):
                squares[lane] += wide(row[at + lane]) * wide(row[at + lane])
        for at in range(even, size):
            squares[at - even] += wide(row[at]) * wide(row[at])
        total = np.float32(0)
        for lane in range(LANES):
            total += squares[lane]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        for at in range(size):
            out[at] = rounded(wide(rounded(wide(row[at]) * scale, row[at])) * wide(weight_D[at]), row[at])


@compiled
def exponential(power: Any) -> Any:  # noqa: ANN401
    """e to a float32: 2^n · e^r with |r| ≤ ln 2 / 2, whose series is cut where the rest is below half a place; within two places of the
    true one from -87 to 88, no less than e^-87.3 before, without an end from 88.4 on."""
    power = min(max(power, np.float32(-87.3)), np.float32(88.8))
    shifted = power * LOG2_E + TO_WHOLE
    whole = shifted - TO_WHOLE
    rest = power - whole * LN2_FIRST - whole * LN2_REST
    series = np.float32(1 / 5040)
    for factor in SERIES:
        series = series * rest + factor
    return series * _float_of(np.uint32((_bits_of(shifted) << np.uint32(23)) + np.uint32(127 << 23)))  # pyright: ignore[reportCallIssue]


@compiled
def activated(gate_up_TS: Elements, out_TM: Elements) -> None:
    """silu(gate) · up of gates and, behind them, what they let through (S = 2·M): silu(x) = x / (1 + e^-x)."""
    size = out_TM.shape[1]
    for token in range(len(out_TM)):
        row, out = gate_up_TS[token], out_TM[token]
        for at in range(size):
            gate = wide(row[at])
            out[at] = rounded(wide(rounded(gate / (np.float32(1) + exponential(-gate)), row[at])) * wide(row[at + size]), row[at])


@compiled
def _turned(head_d: Elements, cos_d: Elements, sin_d: Elements, out_d: Elements) -> None:
    """Each pair of a head's numbers turned; the sine of the first half is negative."""
    half = len(head_d) // 2
    for at in range(half):
        out_d[at] = _sum_of_products(head_d[at], cos_d[at], head_d[at + half], sin_d[at])
    for at in range(half):
        out_d[at + half] = _sum_of_products(head_d[at + half], cos_d[at + half], head_d[at], sin_d[at + half])


@compiled
def _sum_of_products(one: Any, by: Any, other: Any, by_it: Any) -> Any:  # noqa: ANN401
    first, second = rounded(wide(one) * wide(by), one), rounded(wide(other) * wide(by_it), one)
    return rounded(wide(first) + wide(second), one)


@compiled
def placed(
    qkv_TSd: Elements, positions_NQ: NDArray[np.int64], first: int, cos_Cd: Elements, sin_Cd: Elements,
    keys_RKCd: Elements, values_RKCd: Elements, queries_NKGQd: Elements,
) -> None:  # fmt: skip
    """Turn a part's queries and keys by their positions, and put all where attention reads them. Of the S = K·G + 2·K heads of each token
    queries go to `queries_NKGQd`, which may have room for more of them, keys and values into the cache's rows from `first` on. Nothing
    is checked: positions have to be below both C."""
    rows, new = positions_NQ.shape
    groups = keys_RKCd.shape[1]
    heads = qkv_TSd.shape[1] - 2 * groups
    for row in range(rows):
        for query in range(new):
            token, position = row * new + query, positions_NQ[row, query]
            cos_d, sin_d = cos_Cd[position], sin_Cd[position]
            for head in range(heads):
                group, place = head // (heads // groups), head % (heads // groups)
                _turned(qkv_TSd[token, head], cos_d, sin_d, queries_NKGQd[row, group, place, query])
            for group in range(groups):
                _turned(qkv_TSd[token, heads + group], cos_d, sin_d, keys_RKCd[first + row, group, position])
                values_RKCd[first + row, group, position] = qkv_TSd[token, heads + groups + group]


@cache
def prepare() -> None:
    """Have them compiled, or fetched, before anything is decoded."""
    position = np.zeros((1, 1), np.int64)
    for kind in (np.float32, np.uint16):
        row, heads, cell = np.zeros((1, 1), kind), np.zeros((1, 3, 1), kind), np.zeros((1, 1, 1, 1), kind)
        prepared(normed, row, row[0], 1.0, row)
        prepared(placed, heads, position, 0, row, row, cell, cell, cell[None])
        prepared(activated, heads[0, :2].reshape(1, 2), row)
