"""A section of a delta: what changed in some parts of tensors, in five streams for each class of magnitudes.

    places     gaps between the listed elements, counted within the class: `high` bytes (255: 255 more), and `low` ones where gaps are long
    steps      `signs`, a bit each; `sizes`, places moved beyond the first; `escapes`, the sizes that no byte holds

What is listed are the changed elements, or where more than half of a class changed the unchanged ones. A stream of zeros is left out.
Parts are pieces of tensors, each with its own counts, so that one can be read without the others' base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.policy.storage.delta_classes import BINS, BUCKETS, MOST_CLASSES, bin_shift, bins_of, chosen, class_table, magnitudes
from app.policy.storage.delta_loops import differing, located, ranked
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
    moves_of,
    opened,
    read_sizes,
    running_sums,
    stepped,
    steps,
    width_of,
    written_sizes,
)

PART = 1 << 22
"""Elements of a part at most. With a quarter of it two threads encode some 4 % slower: numpy still does a few things part by part."""
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
            if any(
                listing is not Listing.REST and changed != listed
                for listing, changed, listed in zip(self.listings, part.changed, part.all_listed, strict=True)
            ):
                raise ValueError(f"listed elements of {part.name}")
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
        if len(places := differing(old, now)):
            moves = steps(old[places], now[places], dtype) if relative else (np.zeros(0, dtype=np.bool_), now[places])
            different.append(_Different(name=name, first=first, old=old, places=places, signs=moves[0], sizes=moves[1]))
    if not different:
        return None
    below = _bounds(different, dtype) if relative and dtype in FLOATS else ()
    found = [_by_class(entry, below) for entry in different]
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


def _by_class(part: _Different, below: Sequence[int]) -> _Found:
    if not below:
        universes, ranks, signs, sizes = [len(part.old)], [part.places], [part.signs], [part.sizes]
    else:
        shift = bin_shift(part.old.itemsize)
        classes, every, members = ranked(part.old, part.places, class_table(below), len(below) + 1, below[0] << shift, shift)
        order, ends = np.argsort(classes, kind="stable"), np.cumsum(np.bincount(classes, minlength=len(below) + 1))[:-1]
        universes = members.tolist()
        ranks, signs, sizes = np.split(every[order], ends), np.split(part.signs[order], ends), np.split(part.sizes[order], ends)
    return _Found(name=part.name, first=part.first, universes=universes, ranks=ranks, signs=signs, sizes=sizes)


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
    return np.flatnonzero(others)


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
        self._is_rest = np.array([listing is Listing.REST for listing in said.listings])
        listed, changed = np.array([part.all_listed for part in said.parts]), np.array([part.changed for part in said.parts])
        self._listed_ends, self._move_starts = _ends(listed), _ends(changed)
        ranks, moves, at = list[Places](), list[Bits](), 0
        for index in range(len(said.listings)):
            ends = list(accumulate(said.frames[STREAMS * index : STREAMS * (index + 1)], initial=at))
            streams = [frames[start:end] for start, end in pairwise(ends)]
            ranks.append(self._places(index, *streams[:2]))
            moves.append(self._steps(index, *streams[2:]))
            at = ends[-1]
        self._ranks, self._moves = np.concatenate(ranks), np.concatenate(moves)

    def _places(self, index: int, high: memoryview, low: memoryview) -> Places:
        """The ranks of a class, each within its part."""
        ends = self._listed_ends[:, index] - self._listed_ends[0, index]
        count, size = int(ends[-1]), sum(part.size for part in self._said.parts)
        is_far, full = self._said.listings[index] is Listing.FAR, size // FULL if len(high) else 0
        sums = running_sums(_stream(high, range(count, count + full + 1)), _stream(low, [count]) if is_far else None)
        if len(sums) != count or (len(low) and not is_far):
            raise ValueError("places")
        through = sums + np.arange(count)  # counted through all parts: a part begins where the one before ended
        behind = np.concatenate([[0], through + 1])[ends]
        return through - np.repeat(behind[:-1], np.diff(ends))

    def _steps(self, index: int, signs: memoryview, sizes: memoryview, escapes: memoryview) -> Bits:
        """What is added to the images of a class's changed elements; or their new values."""
        count, width = int(self._move_starts[-1, index] - self._move_starts[0, index]), width_of(self._said.dtype)
        if not self._relative:
            return _stream(sizes, [count * width]).view(WIDTHS[width])
        over = from_planes(opened(escapes, range(0, 2 * count + 1, 2)) if len(escapes) else NOTHING, 2)
        beyond = read_sizes(_stream(sizes, [count * (width if width == 4 else 1)]), over, width)
        least = beyond.dtype.type(self._said.least[index])
        is_down = np.unpackbits(_stream(signs, [(count + 7) // 8]), count=count).view(np.bool_)
        return moves_of(is_down, beyond + least if least else beyond)

    def apply(self, number: int, bits: Bits) -> None:
        """Change the elements of a part where they are. Raises `ValueError`, `IndexError`, after which they are worth nothing."""
        starts, ends, changed = self._listed_ends[number], self._listed_ends[number + 1], np.array(self._said.parts[number].changed)
        first = self._ranks[starts[0] : ends[0]]
        places = _rest(first, len(bits)) if self._is_rest[0] else first
        fits = len(places) == changed[0]
        if self._said.below:
            shift = bin_shift(bits.itemsize)
            bound = self._said.below[0] << shift
            others, fit = located(bits, self._ranks, starts, ends, self._is_rest, changed, self._table, bound, shift)
            places, fits = np.concatenate([places, others]), fits and fit
        if not fits:
            raise ValueError("places")
        moves = np.concatenate([self._moves[at : at + count] for at, count in zip(self._move_starts[number], changed, strict=True)])
        bits[places] = stepped(bits[places], moves, self._said.dtype) if self._relative else moves


def _ends(counts: Places) -> Places:
    """Where the numbers of each part and class begin, laid end to end class by class, and in a last row where they end: [k + 1, C] of
    counts [k, C]."""
    totals = counts.sum(0)
    return np.concatenate([np.zeros_like(totals)[None], np.cumsum(counts, axis=0)]) + (np.cumsum(totals) - totals)


def _stream(frame: memoryview, sizes: range | Sequence[int]) -> Bytes:
    """A stream; one that is left out is zeros, of the least size that it may have."""
    return opened(frame, sizes) if len(frame) else np.zeros(sizes[0], dtype=np.uint8)
