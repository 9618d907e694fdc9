"""The key/value cache of a batch whose sequences join and leave: one row per sequence, rows packed from the front.

Shapes: R rows, K key/value heads, C capacity in tokens, D head size, n rows in use, Q new tokens per row, E room
for a value.
Sequences keep left-aligned positions 0, 1, 2, …; what lies behind a row's length is garbage that masks hide and later writes replace.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROW_TOKENS = 128
"""Capacity grows in steps of this many tokens: at most one copy of the cache per 128 decoded tokens, at most 127 tokens unused per row."""


@dataclass(frozen=True, kw_only=True)
class Fed:
    """Tokens that one forward pass adds to n rows of the cache."""

    first: int = 0
    """The first of the rows, which follow each other."""
    tokens_nQ: Tensor
    positions_nQ: Tensor
    width: int
    """Behind the last of the positions: as many tokens the longest row has afterwards."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where tokens that are fed belong, and what attention reads of their rows."""

    rows: slice
    rows_n1: Tensor
    """The same as numbers, which stand beside the positions in an index."""
    positions_nQ: Tensor
    width: int
    """Tokens of each row that attention reads."""


class KeyValues:
    """Keys and values of all layers. Handed to transformers as `past_key_values`; it calls `update` once per layer."""

    def __init__(self, *, max_rows: int, tiled: int = 0) -> None:
        """Where it is `tiled`, compiled attention reads it, so many outputs at a time: keys lie with tokens side by side, and values have
        room for a multiple of that a token."""
        self.max_rows, self._tiled = max_rows, tiled
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = 0
        self._capacity = 0
        self.planned: Plan | None = None
        """What `update` is given belongs there."""

    def reserve(self, fed: Fed) -> None:
        """Make room for what will be fed."""
        self._reserve(fed.first + len(fed.positions_nQ), fed.width)

    def plan(self, fed: Fed) -> Plan:
        """What `update` is given from now on belongs there; attention reads as many tokens of a row as the longest has: what stands behind
        a row's own length is masked."""
        self.reserve(fed)
        rows = slice(fed.first, fed.first + len(fed.positions_nQ))
        rows_n1 = torch.arange(rows.start, rows.stop, device=fed.positions_nQ.device)[:, None]
        self.planned = Plan(rows=rows, rows_n1=rows_n1, positions_nQ=fed.positions_nQ, width=fed.width)
        return self.planned

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the planned tokens of one layer [n, K, Q, D]; returns what attention reads, [n, K, width, D]."""
        assert self.planned is not None, "what is fed was not planned"
        to = self.planned
        keys, values = self._layer(layer_idx, key_states, value_states)
        keys[to.rows_n1, :, to.positions_nQ] = key_states.transpose(1, 2)
        values[to.rows_n1, :, to.positions_nQ] = value_states.transpose(1, 2)
        return keys[to.rows, :, : to.width], values[to.rows, :, : to.width]

    def tiled(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [R, K, D, C] and values [R, K, C, E] of one layer, to be read and written by compiled attention; `like` [n, K, Q, D] shows
        their heads, size and dtype."""
        keys, values = self._layer(layer, like, like)
        return keys.transpose(2, 3), values.as_strided((*values.shape[:3], values.stride(2)), values.stride())

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row over another row."""
        if not length:
            return
        self._reserve(max(source, target) + 1, length)
        for layer in list(self._layers):
            keys, values = self._layer(layer, *self._layers[layer])
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def take(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of the first `length` tokens of a row: keys and values [K, length, D] per layer."""
        layers = (self._layers[layer] for layer in sorted(self._layers))
        return [(keys[row, :, :length].clone(), values[row, :, :length].clone()) for keys, values in layers]

    def put(self, row: int, taken: list[tuple[Tensor, Tensor]]) -> None:
        """Write what `take` gave to the beginning of a row."""
        length = taken[0][0].shape[1]
        self._reserve(row + 1, length)
        for layer, (taken_keys, taken_values) in enumerate(taken):
            keys, values = self._layer(layer, taken_keys[None], taken_values[None])
            keys[row, :, :length] = taken_keys
            values[row, :, :length] = taken_values

    def trim(self, length: int) -> None:
        """No row is longer than this: give up room that would be read for nothing, once it is half of all."""
        capacity = _room(length)
        if 2 * capacity > self._capacity:
            return
        self._capacity = capacity
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = self._grown(keys, keys[:, :, :capacity], turned=True), self._grown(values, values[:, :, :capacity])

    def release(self) -> None:
        """Give the memory back; every row's content is lost."""
        self._layers.clear()
        self._rows = self._capacity = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved now (pages that were never written do not count as resident)."""
        return sum(held.untyped_storage().nbytes() for layer in self._layers.values() for held in layer)

    def _reserve(self, rows: int, length: int) -> None:
        assert rows <= self.max_rows
        if rows > self._rows:
            self._rows = min(self.max_rows, max(rows, 2 * self._rows))
        if length > self._capacity:
            self._capacity = _room(length)

    def _layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's tensors at the reserved size; `keys` and `values` only show heads, size and dtype the first time."""
        held = self._layers.get(layer)
        if held is not None and held[0].shape[0] >= self._rows and held[0].shape[2] >= self._capacity:
            return held
        grown = self._grown(keys, held and held[0], turned=True), self._grown(values, held and held[1])
        self._layers[layer] = grown
        return grown

    def _grown(self, like: Tensor, held: Tensor | None, *, turned: bool = False) -> Tensor:
        # zeros, not empty: a NaN in memory nobody wrote would pass through a mask (0 · NaN)
        rows, heads, capacity, size = self._rows, like.shape[1], self._capacity, like.shape[3]
        if not self._tiled:
            grown = like.new_zeros(rows, heads, capacity, size)
        elif turned:
            grown = like.new_zeros(rows, heads, size, capacity).transpose(2, 3)
        else:
            grown = like.new_zeros(rows, heads, capacity, _up(size, self._tiled))[..., :size]
        if held is not None:
            grown[: held.shape[0], :, : held.shape[2]] = held
        return grown


def _room(length: int) -> int:
    """Tokens reserved for so many."""
    return _up(length, GROW_TOKENS)


def _up(length: int, step: int) -> int:
    return -(-length // step) * step
