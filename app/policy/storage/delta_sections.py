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

from app.policy.storage.delta_classes import BINS, BUCKETS, MOST_CLASSES, bins_of, chosen, class_table, classes_of, magnitudes, members
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
    places_where,
    read_sizes,
    running_sums,
    stepped,
    steps,
    width_of,
    written_sizes,
)

PART = 1 << 22
"""Elements of a part at most. A quarter of it fits a processor's cache, and is slower all the same: threads wait for each other between two
operations of numpy, of which a part takes some sixty however large it is (two threads decode 1.57 GB/s with a quarter, 2.06 with this)."""
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
    classes = classes_of(magnitudes(part.old[part.places], dtype), table)
    order = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=len(below) + 1))[:-1]
    places, edges = members(part.old, dtype, below, table, np.array([0, size]))
    listed = np.split(places, edges[1:, 0])
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
    """A section's streams, decompressed, to be applied to some of its parts at a time.

    Shapes: C classes, k parts in a row, laid end to end. Everything is done for all of them at once: between two operations of numpy a
    thread waits for others that are between two, and small parts would do little else.
    """

    def __init__(self, said: Changes, frames: memoryview, *, relative: bool) -> None:
        """`frames` are all of them, one after the other. Raises `ValueError` where they do not fit the header."""
        self._said, self._relative, self._table = said, relative, class_table(said.below)
        self._ends = _ends([part.size for part in said.parts])
        listed = [*zip(*(part.all_listed for part in said.parts), strict=True)]
        changed = [*zip(*(part.changed for part in said.parts), strict=True)]
        self._listed_ends, self._changed_ends = [_ends(column) for column in listed], [_ends(column) for column in changed]
        self._listed, self._is_rest = np.array(listed), np.array([listing is Listing.REST for listing in said.listings])
        self._ranks, self._moves, behind, at = list[Places](), list[Bits](), list[Places](), 0
        for index in range(len(said.listings)):
            ends = list(accumulate(said.frames[STREAMS * index : STREAMS * (index + 1)], initial=at))
            streams = [frames[start:end] for start, end in pairwise(ends)]
            ranks, behind_parts = self._places(index, *streams[:2])
            self._ranks.append(ranks)
            behind.append(behind_parts)
            self._moves.append(self._steps(index, *streams[2:]))
            at = ends[-1]
        of_rest, is_rest = self._listed + np.array(changed), self._is_rest[:, None]
        self._least, self._most = np.maximum(np.stack(behind), is_rest * of_rest), np.where(is_rest, of_rest, np.diff(self._ends))
        """Elements that a class has in a part, at least and at most: what is listed is among them, and as many change as said."""

    def _places(self, index: int, high: memoryview, low: memoryview) -> tuple[Places, Places]:
        """The ranks of a class, each within its part, and of each part one more than the last."""
        ends = np.array(self._listed_ends[index])
        count = self._listed_ends[index][-1]
        is_far, full = self._said.listings[index] is Listing.FAR, self._ends[-1] // FULL if len(high) else 0
        sums = running_sums(_stream(high, range(count, count + full + 1)), _stream(low, [count]) if is_far else None)
        if len(sums) != count or (len(low) and not is_far):
            raise ValueError("places")
        through = sums + np.arange(count)  # counted through all parts: a part begins where the one before ended
        behind = np.concatenate([[0], through + 1])[ends]
        return through - np.repeat(behind[:-1], np.diff(ends)), behind[1:] - behind[:-1]

    def _steps(self, index: int, signs: memoryview, sizes: memoryview, escapes: memoryview) -> Bits:
        """What is added to the images of a class's changed elements; or their new values."""
        count, width = self._changed_ends[index][-1], width_of(self._said.dtype)
        if not self._relative:
            return _stream(sizes, [count * width]).view(WIDTHS[width])
        over = from_planes(opened(escapes, range(0, 2 * count + 1, 2)) if len(escapes) else NOTHING, 2)
        beyond = read_sizes(_stream(sizes, [count * (width if width == 4 else 1)]), over, width)
        least = beyond.dtype.type(self._said.least[index])
        is_down = np.unpackbits(_stream(signs, [(count + 7) // 8]), count=count).view(np.bool_)
        return moves_of(is_down, beyond + least if least else beyond)

    def apply(self, first: int, old: Sequence[Bits], out: Sequence[Bits]) -> None:
        """Write the new elements of neighbouring parts, the first of which is number `first`; `out` may be `old`. Raises `ValueError`,
        `IndexError`."""
        parts = range(first, first + len(old))
        if len(old) == 1:
            if out[0] is not old[0]:
                out[0][:] = old[0]
            self._change(parts, out[0])
            return
        joined = np.concatenate(old)
        self._change(parts, joined)
        for number, mine in zip(parts, out, strict=True):
            mine[:] = joined[self._ends[number] - self._ends[first] :][: len(mine)]

    def _change(self, parts: range, bits: Bits) -> None:
        """The old elements of parts, laid end to end, become the new ones."""
        below, dtype = self._said.below, self._said.dtype
        begins = np.array(self._ends[parts.start : parts.stop + 1]) - self._ends[parts.start]
        found = [self._found(slice(0, 1), parts, begins[None], None)]
        if below:
            places, edges = members(bits, dtype, below, self._table, begins)
            found.append(self._found(slice(1, None), parts, edges, places))
        places = np.concatenate(found)
        moves = np.concatenate(_of_parts(self._moves, self._changed_ends, parts))
        bits[places] = stepped(bits[places], moves, dtype) if self._relative else moves

    def _found(self, classes: slice, parts: range, edges: Places, places: Places | None) -> Places:
        """The changed elements of some classes. `edges` [classes, k + 1] are where in `places` those of each class and part begin, and end;
        without `places` they are elements themselves."""
        here, sizes, is_rest = slice(parts.start, parts.stop), edges[:, 1:] - edges[:, :-1], self._is_rest[classes]
        if not ((self._least[classes, here] <= sizes) & (sizes <= self._most[classes, here])).all():
            raise ValueError("places")
        ranks = np.concatenate(_of_parts(self._ranks[classes], self._listed_ends[classes], parts))
        ranks += np.repeat(edges[:, :-1].ravel(), self._listed[classes, here].ravel())
        if not is_rest.any():
            return ranks if places is None else places[ranks]
        is_changed = np.repeat(is_rest, edges[:, -1] - edges[:, 0])
        is_changed[ranks] ^= True
        return places_where(is_changed) if places is None else places[is_changed]


def _of_parts(streams: Sequence[Bits], ends: Sequence[Sequence[int]], parts: range) -> list[Bits]:
    """What belongs to these parts, class by class."""
    return [stream[mine[parts.start] : mine[parts.stop]] for stream, mine in zip(streams, ends, strict=True)]


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where things of these sizes begin and end, laid end to end: one number more than they are."""
    return [*accumulate(sizes, initial=0)]


def _stream(frame: memoryview, sizes: range | Sequence[int]) -> Bytes:
    """A stream; one that is left out is zeros, of the least size that it may have."""
    return opened(frame, sizes) if len(frame) else np.zeros(sizes[0], dtype=np.uint8)
