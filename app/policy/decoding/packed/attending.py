"""Attention over the cache, compiled: softmax(queries · keysᵀ · scale) · values, of each token over its own row up to itself.

Scores and what they weigh are products like any other, made of tiles (`app.policy.packing.tiles`): a tile's rows are a few queries that
share their keys, all heads of a group and, of a prompt, tokens beside each other. Nothing behind a token reaches it: its weights there are
zero. Everything is computed in float32, whatever the cache holds.

A query's bits depend on its own row alone: products see to that, and the largest score and the sum of weights are taken by `LANES` lanes
from the beginning of the row on.

Shapes: N rows with Q new tokens each; K key/value heads, G query heads to each of them, M = Q·G; d per head; of the cache R rows of C
tokens, and e numbers of room for a value's d.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from app.policy.compiling import compiled, prepared
from app.policy.decoding.packed.between import LANES, Elements, exponential, rounded, summed
from app.policy.packing.tiles import OUTPUTS, ROWS, spread, tile

WORTH_WAKING = 1 << 22
"""Multiplications from which on all threads take part: below, two rows decode faster than a second thread wakes."""


@compiled
def _weights(scores_C: NDArray[np.float32], known: int, width: int, scale: float) -> np.float32:
    """e to each of the scores, times the scale and less the largest, in its place, and zeros up to `width`; their sum."""
    by, lanes = np.float32(scale), np.full(LANES, -np.inf, dtype=np.float32)
    even = known // LANES * LANES
    for at in range(known):
        scores_C[at] *= by
    for at in range(0, even, LANES):
        for lane in range(LANES):
            lanes[lane] = scores_C[at + lane] if scores_C[at + lane] > lanes[lane] else lanes[lane]
    for at in range(even, known):
        lanes[at - even] = scores_C[at] if scores_C[at] > lanes[at - even] else lanes[at - even]
    most = lanes[0]
    for lane in range(1, LANES):
        most = lanes[lane] if lanes[lane] > most else most
    for at in range(known):
        scores_C[at] = exponential(scores_C[at] - most)
    scores_C[known:width] = 0
    lanes[:] = 0
    for at in range(0, even, LANES):
        for lane in range(LANES):
            lanes[lane] += scores_C[at + lane]
    for at in range(even, known):
        lanes[at - even] += scores_C[at]
    return summed(lanes)


@compiled
def _attended(
    part: int, parts: int, queries_NKMd: NDArray[np.float32], keys_RKdC: Elements, values_RKCe: Elements, first: int,
    positions_NQ: NDArray[np.int64], scale: float, out_NQKGd: Elements,
) -> None:  # fmt: skip
    rows, groups, many, size = queries_NKMd.shape
    group, capacity, item = out_NQKGd.shape[3], keys_RKdC.shape[3], keys_RKdC.itemsize
    kind = keys_RKdC[0, 0, 0, 0]
    tiles, panels = (many + ROWS - 1) // ROWS, (size + OUTPUTS - 1) // OUTPUTS
    scores, sums = np.empty((ROWS, capacity), dtype=np.float32), np.empty((ROWS, panels * OUTPUTS), dtype=np.float32)
    totals = np.empty(ROWS, dtype=np.float32)
    for unit in range(part, rows * groups * tiles, parts):
        row, of_group, begin = unit // tiles // groups, unit // tiles % groups, many * (unit % tiles) // tiles
        height = many * (unit % tiles + 1) // tiles - begin
        width = 0
        for query in range(begin // group, (begin + height - 1) // group + 1):
            width = max(width, int(positions_NQ[row, query]) + 1)
        keys = keys_RKdC.ctypes.data + (first + row) * keys_RKdC.strides[0] + of_group * keys_RKdC.strides[1]
        values = values_RKCe.ctypes.data + (first + row) * values_RKCe.strides[0] + of_group * values_RKCe.strides[1]
        per_row, per_group, per_query, _ = queries_NKMd.strides
        queries = queries_NKMd.ctypes.data + row * per_row + of_group * per_group + begin * per_query
        for panel in range((width + OUTPUTS - 1) // OUTPUTS):
            tile(
                kind, height, queries, per_query, keys + panel * OUTPUTS * item, keys_RKdC.strides[2], size,
                scores.ctypes.data + panel * OUTPUTS * 4, capacity * 4, False,
            )  # fmt: skip
        for index in range(height):
            totals[index] = _weights(scores[index], int(positions_NQ[row, (begin + index) // group]) + 1, width, scale)
        for panel in range(panels):
            tile(
                kind, height, scores.ctypes.data, capacity * 4, values + panel * OUTPUTS * item, values_RKCe.strides[2], width,
                sums.ctypes.data + panel * OUTPUTS * 4, panels * OUTPUTS * 4, False,
            )  # fmt: skip
        for index in range(height):
            out = out_NQKGd[row, (begin + index) // group, of_group, (begin + index) % group]
            for at in range(size):
                out[at] = rounded(sums[index, at] / totals[index], out[at])


@compiled
def attended(
    threads: int, queries_NKMd: NDArray[np.float32], keys_RKdC: Elements, values_RKCe: Elements, first: int,
    positions_NQ: NDArray[np.int64], scale: float, out_NQKGd: Elements,
) -> None:  # fmt: skip
    """Attention of N rows, in the cache from row `first` on, of which everything up to each of `positions_NQ` is there. C and e are
    multiples of a tile's outputs (`app.policy.decoding.keyvalues`). Nothing is checked."""
    spread(threads, _attended, (queries_NKMd, keys_RKdC, values_RKCe, first, positions_NQ, scale, out_NQKGd))


@cache
def prepare() -> None:
    """Have it compiled, or fetched, before anything is decoded."""
    queries, position = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1), np.int64)
    for kind in (np.float32, np.uint16):
        cell, out = np.zeros((1, 1, OUTPUTS, OUTPUTS), kind), np.zeros((1, 1, 1, 1, 1), kind)
        prepared(attended, 1, queries, cell[:, :, :1], cell, 0, position, 1.0, out)
