"""What lies between the products of a decoder layer in float32, compiled: each is one loop here, and ten operations of torch.

Decoding a row or two, an operation costs what it takes to call it, whatever it computes; of a step of one row those were a third.
Nothing is summed in an order that depends on how many rows there are.

Shapes: T tokens, D hidden size; of a part N rows with Q new tokens each; K key/value heads, G query heads to each of them, d per head; of
the cache R rows of C tokens.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from app.policy.compiling import compiled, prepared

Floats = NDArray[np.float32]
LANES = 16
"""Sums of squares that are summed beside each other."""


@compiled
def normed(hidden_TD: Floats, weight_D: Floats, epsilon: float, out_TD: Floats) -> None:
    """Root-mean-square normalisation: hidden / √(mean of squares + ε) · weight."""
    size = len(weight_D)
    even, squares = size // LANES * LANES, np.empty(LANES, dtype=np.float32)
    for token in range(len(hidden_TD)):
        row, out = hidden_TD[token], out_TD[token]
        squares[:] = 0
        for at in range(0, even, LANES):
            for lane in range(LANES):
                squares[lane] += row[at + lane] * row[at + lane]
        for at in range(even, size):
            squares[at - even] += row[at] * row[at]
        total = np.float32(0)
        for lane in range(LANES):
            total += squares[lane]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        for at in range(size):
            out[at] = row[at] * scale * weight_D[at]


@compiled
def _turned(head_d: Floats, cos_d: Floats, sin_d: Floats, out_d: Floats) -> None:
    """Each pair of a head's numbers turned; the sine of the first half is negative."""
    half = len(head_d) // 2
    for at in range(half):
        out_d[at] = head_d[at] * cos_d[at] + head_d[at + half] * sin_d[at]
    for at in range(half):
        out_d[at + half] = head_d[at + half] * cos_d[at + half] + head_d[at] * sin_d[at + half]


@compiled
def placed(
    qkv_TSd: Floats, positions_NQ: NDArray[np.int64], first: int, cos_Cd: Floats, sin_Cd: Floats,
    keys_RKCd: Floats, values_RKCd: Floats, queries_NKGQd: Floats,
) -> None:  # fmt: skip
    """Turn a part's queries and keys by their positions, and put all where attention reads them. Of the S = K·G + 2·K heads of each token
    queries go to `queries_NKGQd`, which may have room for more of them, keys and values into the cache's rows from `first` on."""
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
    row, cell, position = np.zeros((1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1), np.int64)
    prepared(normed, row, row[0], 1.0, row)
    prepared(placed, np.zeros((1, 3, 1), np.float32), position, 0, row, row, cell, cell, cell[None])
