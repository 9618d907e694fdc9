"""The loops of the delta codec that look at every weight, compiled: numpy would go through memory some forty times for them.

Elements are unsigned integers of one, two or four bytes, as `bits_of` has them. One whose magnitude (the bits without the sign) is below
`bound` has the class `table[magnitude >> shift]`, others have class 0; which classes there are, `delta_classes` says. `prepare` comes
before any other call.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.policy.compiling import compiled, prepared
from app.policy.storage.delta_streams import WIDTHS

BLOCK = 1024
"""Elements that are looked at together: what is noted of them stays in the fastest cache."""


@compiled
def differing(old: NDArray[Any], new: NDArray[Any]) -> NDArray[np.int64]:
    """Where two arrays of one size differ; most of them are the same in most places, so eight are looked at at a time."""
    places, count = np.empty(2 * BLOCK, dtype=np.int64), 0
    differs = np.zeros(BLOCK, dtype=np.bool_)
    words = differs.view(np.uint64)
    for first in range(0, len(old), BLOCK):
        before, after = old[first : first + BLOCK], new[first : first + BLOCK]
        for at in range(len(before)):
            differs[at] = before[at] != after[at]
        differs[len(before) :] = False
        if count + BLOCK >= len(places):
            places = np.concatenate((places, np.empty_like(places)))
        for word in range(len(words)):
            if words[word]:
                for at in range(8 * word, 8 * word + 8):
                    places[count] = first + at
                    count += differs[at]
    return places[:count].copy()


@compiled
def _members(bits: NDArray[Any], first: int, mask: Any, limit: Any, is_below: NDArray[np.bool_], found: NDArray[np.int64]) -> int:  # noqa: ANN401
    """Note in `found` which elements of the block from `first` on have a magnitude below `limit`; how many. Every place is written and only
    some are kept: a branch that nobody can foresee takes ten times as long as that."""
    block, count = bits[first : first + BLOCK], 0
    for at in range(len(block)):
        is_below[at] = (block[at] & mask) < limit
    for at in range(len(block)):
        found[count] = first + at
        count += is_below[at]
    return count


@compiled
def ranked(
    bits: NDArray[Any], places: NDArray[np.int64], table: NDArray[np.uint8], classes: int, bound: int, shift: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Of the elements at `places` [m], ascending: the class of each [m], and how many elements come before it in its class [m], in class 0
    of all; and how many elements each class has [C], class 0 all."""
    kinds, ranks, sizes = np.zeros(len(places), dtype=np.uint8), places.copy(), np.zeros(classes, dtype=np.int64)
    mask, limit = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1), bits.dtype.type(bound)
    is_below, found, at = np.empty(BLOCK, dtype=np.bool_), np.empty(BLOCK + 1, dtype=np.int64), 0
    for first in range(0, len(bits), BLOCK):
        for place in found[: _members(bits, first, mask, limit, is_below, found)]:
            kind = table[(bits[place] & mask) >> shift]
            while at < len(places) and places[at] < place:
                at += 1
            if at < len(places) and places[at] == place:
                kinds[at], ranks[at] = kind, sizes[kind]
            sizes[kind] += 1
    sizes[0] = len(bits)
    return kinds, ranks, sizes


@compiled
def located(
    bits: NDArray[Any], ranks: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], is_rest: NDArray[np.bool_],
    changed: NDArray[np.int64], table: NDArray[np.uint8], bound: int, shift: int,
) -> tuple[NDArray[np.int64], bool]:  # fmt: skip
    """The inverse: where the changed elements of the classes from 1 on are, class after class; and whether they are `changed` [C] of each.
    Class c lists `ranks[starts[c]:ends[c]]`, ascending: its changed elements or, where `is_rest[c]`, the others."""
    listed, sizes, filled = starts.copy(), np.zeros(len(starts), dtype=np.int64), np.cumsum(changed) - changed - changed[0]
    full, places = filled + changed, np.empty(changed[1:].sum(), dtype=np.int64)
    mask, limit = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1), bits.dtype.type(bound)
    is_below, found = np.empty(BLOCK, dtype=np.bool_), np.empty(BLOCK + 1, dtype=np.int64)
    for first in range(0, len(bits), BLOCK):
        for place in found[: _members(bits, first, mask, limit, is_below, found)]:
            kind = table[(bits[place] & mask) >> shift]
            is_listed = listed[kind] < ends[kind] and ranks[listed[kind]] == sizes[kind]
            listed[kind] += is_listed
            sizes[kind] += 1
            if is_listed != is_rest[kind]:
                if filled[kind] == full[kind]:
                    return places, False
                places[filled[kind]] = place
                filled[kind] += 1
    return places, bool((listed[1:] == ends[1:]).all() and (filled[1:] == full[1:]).all())


@cache
def prepare() -> None:
    """Compile every loop for elements of one, two and four bytes, in five seconds, or fetch what was compiled before, in half a second:
    either holds Python's lock, so whoever changes weights beside a thread that samples does it first."""
    places, ends, nothing = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.bool_)
    table = np.zeros(1, dtype=np.uint8)
    for width in WIDTHS.values():
        bits = np.zeros(1, dtype=width)
        prepared(differing, bits, bits)
        prepared(ranked, bits, places, table, 1, 0, 0)
        prepared(located, bits, places, ends, ends, nothing, ends, table, 0, 0)
