"""A section of a delta: what changed in some parts of tensors, in five streams for each class of magnitudes.

    places     gaps between the listed elements, counted within the class: `high` bytes (255: 255 more), and `low` ones where gaps are long
    steps      `signs`, a bit each; `sizes`, places moved beyond the first; `escapes`, the sizes that no byte holds

What is listed are the changed elements, or where more than half of a class changed the unchanged ones. A stream of zeros is left out.
Parts are pieces of tensors small enough for a processor's cache; each has its own counts, so that one can be read without the others' base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.policy.storage.delta_classes import BINS, BUCKETS, MOST_CLASSES, bins_of, chosen, class_table, magnitudes, members
from app.policy.storage.delta_streams import (
    FLOATS,
    FULL,
    WIDTHS,
    Bits,
    Bytes,
    Places,
    bits_of,
    compressed,
    escaped,
    from_planes,
    gaps_of,
    opened,
    places_where,
    read_sizes,
    running_sums,
    stepped,
    steps,
    width_of,
    written_sizes,
)

PART = 1 << 20
"""Elements of a part at most."""
SAMPLED = 61
"""One element in so many is looked at for how many have which magnitude."""
ENOUGH = 16_384
"""Changes of a part that are looked at for the same."""
STREAMS = 5
FAR_BELOW = 256
"""A class of which fewer than one element in so many changed has gaps of two bytes."""
NOTHING = np.empty(0, dtype=np.uint8)


class Listing(StrEnum):
    """How a class says which of its elements changed."""

    NEAR = "near"
    """Gaps of bytes between the changed ones."""
    FAR = "far"
    """The same in two bytes."""
    REST = "rest"
    """Gaps of bytes between the unchanged ones."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some neighbouring elements of a tensor."""

    name: str
    first: int
    size: int
    changed: list[int]
    """By class."""
    listed: list[int]
    """By class; the same where it is empty."""

    @property
    def all_listed(self) -> list[int]:
        return self.listed or self.changed


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What the header says of a section."""

    dtype: str
    parts: list[Part]
    below: list[int]
    """Descending bounds between the classes, in bins of magnitudes."""
    listings: list[Listing]
    """By class."""
    least: list[int]
    """By class: a step that sizes are counted from, modulo 2^width."""
    frames: list[int]
    """Compressed bytes, class by class; 0 for a stream that is left out."""

    def check(self, *, relative: bool) -> None:
        """Raises `ValueError` for what cannot be, whatever the base."""
        classes = len(self.below) + 1
        bounds = [BINS, *self.below, 0]
        sorts = all(above > bound for above, bound in pairwise(bounds))
        if not sorts or classes > MOST_CLASSES or (self.below and not (relative and self.dtype in FLOATS)):
            raise ValueError("classes")
        if len(self.least) != classes or not all(0 <= size < 1 << (8 * width_of(self.dtype)) for size in self.least):
            raise ValueError("least steps")
        if len(self.listings) != classes or len(self.frames) != STREAMS * classes or min(self.frames) < 0:
            raise ValueError("frames")
        for part in self.parts:
            if len(part.changed) != classes or len(part.all_listed) != classes or min(*part.changed, *part.all_listed) < 0:
                raise ValueError(f"counts of {part.name}")
            if part.first < 0 or not 0 < sum(part.changed) <= part.size or sum(part.all_listed) > part.size:
                raise ValueError(f"size of {part.name}")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A part's changes, by class."""

    name: str
    first: int
    universes: list[int]
    """Elements that positions are counted among."""
    ranks: list[Places]
    signs: list[NDArray[np.bool_]]
    sizes: list[Bits]


def encode_changes(
    base: Mapping[str, Tensor], new: Mapping[str, Tensor], spans: Sequence[tuple[str, int, int]], dtype: str, *, relative: bool
) -> tuple[Changes, list[bytes]] | None:
    """A section over `spans` (name, first, size) of tensors of one kind; None where nothing changed in them."""
    different = list[_Different]()
    for name, first, size in spans:
        old, now = (bits_of(side[name])[first : first + size] for side in (base, new))
        if len(places := places_where(old != now)):
            moves = steps(old[places], now[places], dtype) if relative else (np.zeros(0, dtype=np.bool_), now[places])
            different.append(_Different(name=name, first=first, old=old, places=places, signs=moves[0], sizes=moves[1]))
    if not different:
        return None
    below = _bounds(different, dtype) if relative and dtype in FLOATS else ()
    table = class_table(below)
    found = [_by_class(entry, dtype, below, table) for entry in different]
    listings, least, frames, listed = list[Listing](), list[int](), list[bytes](), list[list[int]]()
    for index in range(len(below) + 1):
        listing = _listing(sum(len(part.ranks[index]) for part in found), sum(part.universes[index] for part in found))
        places, counts = _places(found, index, listing)
        base_size, moves = _moves(found, index, relative=relative)
        listings.append(listing)
        least.append(base_size)
        listed.append(counts)
        frames += [_framed(stream) for stream in (*places, *moves)]
    parts = [
        Part(part.name, part.first, part.universes[0], changed, [] if changed == others else others)
        for part, others in zip(found, map(list, zip(*listed, strict=True)), strict=True)
        for changed in [[len(ranks) for ranks in part.ranks]]
    ]
    lengths = [len(frame) for frame in frames]
    return Changes(dtype=dtype, parts=parts, below=list(below), listings=listings, least=least, frames=lengths), frames


@dataclass(frozen=True, kw_only=True)
class _Different:
    """A part in which something changed."""

    name: str
    first: int
    old: Bits
    places: Places
    signs: NDArray[np.bool_]
    sizes: Bits


def _bounds(different: Sequence[_Different], dtype: str) -> tuple[int, ...]:
    """The classes with which these changes cost least, by the magnitudes of all that changed and of a sample of the rest."""
    sizes, moved = np.zeros(BINS), np.zeros(BINS * BUCKETS)
    for part in different:
        sample = bins_of(magnitudes(part.old[::SAMPLED], dtype))
        sizes += np.bincount(sample, minlength=BINS) * (len(part.old) / len(sample))
        every = 1 + len(part.places) // ENOUGH
        bins = bins_of(magnitudes(part.old[part.places[::every]], dtype)).astype(np.uint16)
        buckets = np.minimum(part.sizes[::every], part.sizes.dtype.type(BUCKETS - 1)).astype(np.uint16)
        moved += np.bincount(bins * np.uint16(BUCKETS) + buckets, minlength=BINS * BUCKETS) * (len(part.places) / len(bins))
    steps_by_bin = moved.reshape(BINS, BUCKETS)
    return chosen(np.maximum(sizes, steps_by_bin.sum(1)), steps_by_bin)


def _by_class(part: _Different, dtype: str, below: Sequence[int], table: NDArray[np.uint8]) -> _Found:
    size = len(part.old)
    if not below:
        return _Found(
            name=part.name, first=part.first, universes=[size], ranks=[part.places], signs=[part.signs], sizes=[part.sizes]
        )  # fmt: skip
    mags = magnitudes(part.old, dtype)
    classes = table[bins_of(mags[part.places])]
    order = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=len(below) + 1))[:-1]
    listed = members(mags, below, table)
    changed = np.zeros(size, dtype=np.bool_)
    changed[part.places] = True
    return _Found(
        name=part.name, first=part.first, universes=[size, *map(len, listed)],
        ranks=[part.places[order[: ends[0]]], *(places_where(changed[places]) for places in listed)],
        signs=np.split(part.signs[order], ends), sizes=np.split(part.sizes[order], ends),
    )  # fmt: skip


def _listing(changed: int, size: int) -> Listing:
    if 2 * changed > size:
        return Listing.REST
    return Listing.FAR if changed * FAR_BELOW < size else Listing.NEAR


def _places(found: Sequence[_Found], index: int, listing: Listing) -> tuple[tuple[Bytes, Bytes], list[int]]:
    """The two streams of one class, and how many elements of each part are listed."""
    ranks = [part.ranks[index] for part in found]
    if listing is Listing.REST:
        ranks = [_rest(part.ranks[index], part.universes[index]) for part in found]
    gaps = np.concatenate([gaps_of(mine) for mine in ranks])
    streams = (escaped(gaps >> 8), (gaps & 255).astype(np.uint8)) if listing is Listing.FAR else (escaped(gaps), NOTHING)
    return streams, [len(mine) for mine in ranks]


def _rest(ranks: Places, size: int) -> Places:
    others = np.ones(size, dtype=np.bool_)
    others[ranks] = False
    return places_where(others)


def _moves(found: Sequence[_Found], index: int, *, relative: bool) -> tuple[int, tuple[Bytes, Bytes, Bytes]]:
    """The least step of a class, and the streams of how far beyond it its elements went."""
    sizes = np.concatenate([part.sizes[index] for part in found])
    if not relative:
        return 0, (NOTHING, sizes.view(np.uint8), NOTHING)
    least = max(0, int(np.median(sizes[::SAMPLED])) - FULL // 2) if sizes.itemsize == 2 and len(sizes) else 0
    return least, (np.packbits(np.concatenate([part.signs[index] for part in found])), *written_sizes(sizes - sizes.dtype.type(least)))


def _framed(stream: Bytes) -> bytes:
    return compressed(stream) if stream.any() else b""


class Opened:
    """A section's streams, decompressed, to be applied part by part."""

    def __init__(self, said: Changes, frames: memoryview, *, relative: bool) -> None:
        """`frames` are all of them, one after the other. Raises `ValueError` where they do not fit the header."""
        self._said, self._relative, self._table = said, relative, class_table(said.below)
        self._elements, at = sum(part.size for part in said.parts), 0
        self._ranks, self._signs, self._sizes = list[Places](), list[NDArray[np.bool_]](), list[Bits]()
        for index in range(len(said.listings)):
            ends = list(accumulate(said.frames[STREAMS * index : STREAMS * (index + 1)], initial=at))
            streams = [frames[start:end] for start, end in pairwise(ends)]
            self._ranks.append(self._places(index, *streams[:2]))
            signs, sizes = self._steps(index, *streams[2:])
            self._signs.append(signs)
            self._sizes.append(sizes)
            at = ends[-1]
        columns = range(len(said.listings))
        self._listed = [list(accumulate((part.all_listed[index] for part in said.parts), initial=0)) for index in columns]
        self._changed = [list(accumulate((part.changed[index] for part in said.parts), initial=0)) for index in columns]

    def _places(self, index: int, high: memoryview, low: memoryview) -> Places:
        """What is listed of a class, counted through all parts: a part begins where the one before ended."""
        count = sum(part.all_listed[index] for part in self._said.parts)
        is_far, full = self._said.listings[index] is Listing.FAR, self._elements // FULL if len(high) else 0
        sums = running_sums(_stream(high, range(count, count + full + 1)), _stream(low, [count]) if is_far else None)
        if len(sums) != count or (len(low) and not is_far):
            raise ValueError("places")
        return sums + np.arange(count)

    def _steps(self, index: int, signs: memoryview, sizes: memoryview, escapes: memoryview) -> tuple[NDArray[np.bool_], Bits]:
        """Down or up, and how far beyond one place, of a class; or the new values."""
        count, width = sum(part.changed[index] for part in self._said.parts), width_of(self._said.dtype)
        if not self._relative:
            return np.zeros(count, dtype=np.bool_), _stream(sizes, [count * width]).view(WIDTHS[width])
        over = from_planes(opened(escapes, range(0, 2 * count + 1, 2)) if len(escapes) else NOTHING, 2)
        beyond = read_sizes(_stream(sizes, [count * (width if width == 4 else 1)]), over, width)
        least = beyond.dtype.type(self._said.least[index])
        return np.unpackbits(_stream(signs, [(count + 7) // 8]), count=count).view(np.bool_), beyond + least if least else beyond

    def apply(self, number: int, old: Bits, out: Bits) -> None:
        """Write what changes in a part into `out`, which holds its old elements as `old` does. Raises `ValueError`, `IndexError`."""
        below, dtype = self._said.below, self._said.dtype
        listed = members(magnitudes(old, dtype), below, self._table) if below else []
        used = [index for index, ends in enumerate(self._changed) if ends[number] < ends[number + 1]]
        found = [self._found(index, number, listed[index - 1] if index else None, len(old)) for index in used]
        places = found[0] if len(found) == 1 else np.concatenate(found)
        mine = [(index, slice(*self._changed[index][number : number + 2])) for index in used]
        sizes = np.concatenate([self._sizes[index][here] for index, here in mine])
        if len(places) != len(sizes):
            raise ValueError("counts")
        if not self._relative:
            out[places] = sizes
            return
        out[places] = stepped(old[places], np.concatenate([self._signs[index][here] for index, here in mine]), sizes, dtype)

    def _found(self, index: int, number: int, listed: Places | None, size: int) -> Places:
        """The changed elements of a class in a part."""
        first, last = self._listed[index][number : number + 2]
        ranks = self._ranks[index][first:last] - (self._ranks[index][first - 1] + 1 if first else 0)
        size = size if listed is None else len(listed)
        if len(ranks) and ranks[-1] >= size:
            raise ValueError("places")
        if self._said.listings[index] is Listing.REST:
            ranks = _rest(ranks, size)
        return ranks if listed is None else listed[ranks]


def _stream(frame: memoryview, sizes: range | Sequence[int]) -> Bytes:
    """A stream; one that is left out is zeros, of the least size that it may have."""
    return opened(frame, sizes) if len(frame) else np.zeros(sizes[0], dtype=np.uint8)
