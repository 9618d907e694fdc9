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
from app.policy.packing.tiles import spread

Elements = NDArray[Any]
"""float32, or the bits of bfloat16 as uint16."""
LANES = 16
"""Sums beside each other, of every sixteenth number each: a row's bits depend on where a number stands, and on nothing else."""
NOT_A_NUMBER = 0x7FC0
LOG2_E = np.float32(1.4426950408889634)
LN2_FIRST, LN2_REST = np.float32(0.693359375), np.float32(-2.1219444005469057e-4)
"""ln 2 in two numbers, of which the first has so few bits that a whole number of them is exact."""
LEAST, MOST = np.float32(-87.3), np.float32(88.8)
TO_WHOLE = np.float32(3 << 22)
"""What is added to this is rounded to a whole number, which the last bits then are."""
SERIES = tuple(np.float32(1 / factor) for factor in (720, 120, 24, 6, 2, 1, 1))
"""Of e^r, before which comes 1 / 7!."""


@intrinsic
def _float_of(_context: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""
    return types.float32(types.uint32), lambda _context, builder, _signature, bits: builder.bitcast(bits[0], ir.FloatType())


@intrinsic
def _bits_of(_context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda _context, builder, _signature, value: builder.bitcast(value[0], ir.IntType(32))


def wide(element: Any) -> Any:
    """An element as float32; for compiled loops."""
    raise TypeError(f"{element} is read within compiled loops only")


@overload(wide)
def _wide(element: Any) -> Any:
    def of_bfloat16(element: Any) -> Any:
        return _float_of(np.uint32(np.uint32(element) << np.uint32(16)))  # pyright: ignore[reportCallIssue] - the context is numba's

    def of_float32(element: Any) -> Any:
        return element

    return of_bfloat16 if element == types.uint16 else of_float32


def rounded(value: Any, like: Any) -> Any:
    """A float32 as an element of the kind of `like`, the nearest, between two the even one; for compiled loops."""
    raise TypeError(f"{value} is rounded to the kind of {like} within compiled loops only")


@overload(rounded)
def _rounded(value: Any, like: Any) -> Any:
    def to_bfloat16(value: Any, like: Any) -> Any:
        bits = _bits_of(value)  # pyright: ignore[reportCallIssue] - the context is numba's
        nearest = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        return nearest if value == value else np.uint16(NOT_A_NUMBER)

    def to_float32(value: Any, like: Any) -> Any:
        return value

    return to_bfloat16 if like == types.uint16 else to_float32


@compiled
def summed(lanes: NDArray[np.float32]) -> np.float32:
    """The sum of all lanes, in their order."""
    total = np.float32(0)
    for lane in range(LANES):
        total += lanes[lane]
    return total


@compiled
def _normed(part: int, parts: int, hidden_TD: Elements, added_TD: Elements, weight_D: Elements, epsilon: float, out_TD: Elements) -> None:
    size = len(weight_D)
    even, squares = size // LANES * LANES, np.empty(LANES, dtype=np.float32)
    for token in range(len(hidden_TD) * part // parts, len(hidden_TD) * (part + 1) // parts):
        row, added, out = hidden_TD[token], added_TD[token], out_TD[token]
        for at in range(size):
            row[at] = rounded(wide(row[at]) + wide(added[at]), row[at])
        squares[:] = 0
        for at in range(0, even, LANES):
            for lane in range(LANES):
                squares[lane] += wide(row[at + lane]) * wide(row[at + lane])
        for at in range(even, size):
            squares[at - even] += wide(row[at]) * wide(row[at])
        scale = np.float32(1) / np.sqrt(summed(squares) / np.float32(size) + np.float32(epsilon))
        for at in range(size):
            out[at] = rounded(wide(rounded(wide(row[at]) * scale, row[at])) * wide(weight_D[at]), row[at])


@compiled
def normed(threads: int, hidden_TD: Elements, added_TD: Elements, weight_D: Elements, epsilon: float, out_TD: Elements) -> None:
    """Add to the hidden states what a layer gave, and put into `out` what the next one is fed: their root-mean-square normalisation,
    hidden / √(mean of squares + ε), rounded before the weight as the models were trained, · weight."""
    spread(threads, _normed, (hidden_TD, added_TD, weight_D, epsilon, out_TD))


@compiled
def exponential(power: Any) -> Any:
    """e to a float32: 2^n · e^r with |r| ≤ ln 2 / 2, whose series is cut where the rest is below half a place; within two places of the
    true one from -87 to 88, no less than e^-87.3 before, without an end from 88.4 on."""
    power = LEAST if power < LEAST else MOST if power > MOST else power  # what is no number stays that
    shifted = power * LOG2_E + TO_WHOLE
    whole = shifted - TO_WHOLE
    rest = power - whole * LN2_FIRST - whole * LN2_REST
    series = np.float32(1 / 5040)
    for factor in SERIES:
        series = series * rest + factor
    return series * _float_of(np.uint32((_bits_of(shifted) << np.uint32(23)) + np.uint32(127 << 23)))  # pyright: ignore[reportCallIssue]


@compiled
def _activated(part: int, parts: int, gate_up_TS: Elements, out_TM: Elements) -> None:
    size = out_TM.shape[1]
    for token in range(len(out_TM) * part // parts, len(out_TM) * (part + 1) // parts):
        row, out = gate_up_TS[token], out_TM[token]
        for at in range(size):
            gate = wide(row[at])
            out[at] = rounded(wide(rounded(gate / (np.float32(1) + exponential(-gate)), row[at])) * wide(row[at + size]), row[at])


@compiled
def activated(threads: int, gate_up_TS: Elements, out_TM: Elements) -> None:
    """silu(gate) · up of gates and, behind them, what they let through (S = 2·M): silu(x) = x / (1 + e^-x)."""
    spread(threads, _activated, (gate_up_TS, out_TM))


@compiled
def _turned(head_d: Elements, cos_d: Elements, sin_d: Elements, out_d: Elements) -> None:
    """Each pair of a head's numbers turned; the sine of the first half is negative."""
    half = len(head_d) // 2
    for at in range(half):
        out_d[at] = rounded(_sum_of_products(head_d[at], cos_d[at], head_d[at + half], sin_d[at]), out_d[at])
    for at in range(half):
        out_d[at + half] = rounded(_sum_of_products(head_d[at + half], cos_d[at + half], head_d[at], sin_d[at + half]), out_d[at])


@compiled
def _sum_of_products(one: Any, by: Any, other: Any, by_it: Any) -> Any:
    """As float32, rounded wherever torch's operations are."""
    first, second = rounded(wide(one) * wide(by), one), rounded(wide(other) * wide(by_it), one)
    return wide(rounded(wide(first) + wide(second), one))


@compiled
def _placed(
    part: int, parts: int, qkv_TSd: Elements, positions_NQ: NDArray[np.int64], first: int, cos_Cd: Elements, sin_Cd: Elements,
    keys_RKdC: Elements, values_RKCe: Elements, queries_NKMd: Elements,
) -> None:  # fmt: skip
    rows, new = positions_NQ.shape
    groups = keys_RKdC.shape[1]
    heads = qkv_TSd.shape[1] - 2 * groups
    size = heads // groups
    for token in range(rows * new * part // parts, rows * new * (part + 1) // parts):
        row, query = token // new, token % new
        position = positions_NQ[row, query]
        cos_d, sin_d = cos_Cd[position], sin_Cd[position]
        for head in range(heads):
            _turned(qkv_TSd[token, head], cos_d, sin_d, queries_NKMd[row, head // size, query * size + head % size])
        for group in range(groups):
            _turned(qkv_TSd[token, heads + group], cos_d, sin_d, keys_RKdC[first + row, group, :, position])
            values_RKCe[first + row, group, position, : qkv_TSd.shape[2]] = qkv_TSd[token, heads + groups + group]


@compiled
def placed(
    threads: int, qkv_TSd: Elements, positions_NQ: NDArray[np.int64], first: int, cos_Cd: Elements, sin_Cd: Elements,
    keys_RKdC: Elements, values_RKCe: Elements, queries_NKMd: Elements,
) -> None:  # fmt: skip
    """Turn a part's queries and keys by their positions, and put all where attention reads them. Of the S = K·G + 2·K heads of each token
    queries go to `queries_NKMd`, float32, the G of a token side by side (M = Q·G); keys and values into the cache's rows from `first` on.
    Nothing is checked: positions have to be below both C."""
    spread(threads, _placed, (qkv_TSd, positions_NQ, first, cos_Cd, sin_Cd, keys_RKdC, values_RKCe, queries_NKMd))


@cache
def prepare() -> None:
    """Have them compiled, or fetched, before anything is decoded."""
    position, queries = np.zeros((1, 1), np.int64), np.zeros((1, 1, 1, 1), np.float32)
    for kind in (np.float32, np.uint16):
        row, heads, cell = np.zeros((1, 1), kind), np.zeros((1, 3, 1), kind), np.zeros((1, 1, 1, 1), kind)
        prepared(normed, 1, row, row, row[0], 1.0, row)
        prepared(activated, 1, heads[0, :2].reshape(1, 2), row)
        prepared(placed, 1, heads, position, 0, row, row, cell, cell, queries)
