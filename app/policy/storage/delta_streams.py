"""The numbers inside a delta: where a tensor changed and by how much, as streams of bytes that compress well.

Ranks (sorted, without repetition) become gaps, a byte of 255 for each full 255, then the rest; the lower byte of long gaps apart.
Steps are differences of order-preserving images modulo 2^width: whether it goes down (a bit), and how many places beyond the first:

    1 byte    one byte
    2 bytes   one byte; 255 says that the whole of it stands in the escapes, two planes of bytes
    4 bytes   four planes of bytes, the lowest of all first, so that what is small compresses

The image of a float is the integer under which consecutive floats are consecutive; integers, exponents (E8M0) and packed four-bit pairs are
their own. Any pattern can become any other, and every step has one inverse.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from app.policy.storage.weights import SAFETENSORS_DTYPES

Bits = NDArray[Any]
"""The elements of a tensor as unsigned integers of its width."""
Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
FLOATS = frozenset({"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"})
"""Sign and magnitude: their image turns the negative half round."""
WIDTHS = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
SIGNED = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}
LEVEL = 1
"""Of zstd: higher ones gain a thousandth, and take three times as long."""
FULL = 255


def width_of(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype].itemsize


def bits_of(tensor: Tensor) -> Bits:
    """A tensor's elements; shares its memory where it can."""
    plain = tensor.detach().cpu().contiguous().view(-1)
    return plain.view(torch.uint8).numpy().view(WIDTHS[plain.element_size()])


def gaps_of(ranks: Places) -> Places:
    """Between the ranks, and before the first."""
    gaps = ranks.copy()
    gaps[1:] -= ranks[:-1]
    gaps[1:] -= 1
    return gaps


def escaped(numbers: Places) -> Bytes:
    """Each as full bytes and the rest."""
    full = numbers // FULL
    if not full.any():
        return numbers.astype(np.uint8)
    written = np.full(int(full.sum()) + len(numbers), FULL, dtype=np.uint8)
    written[np.cumsum(full + 1) - 1] = (numbers - FULL * full).astype(np.uint8)
    return written


def running_sums(written: Bytes, low: Bytes | None = None) -> Places:
    """The sums of escaped numbers up to each of them; with `low`, of numbers whose lower bytes are those."""
    sums = np.cumsum(written, dtype=np.int64)[np.flatnonzero(written != FULL)]
    if low is None:
        return sums
    if len(low) != len(sums):
        raise ValueError("places")
    return 256 * sums + np.cumsum(low, dtype=np.int64)


def steps(old: Bits, new: Bits, dtype: str) -> tuple[NDArray[np.bool_], Bits]:
    """What leads from the old elements to the new ones, all of which differ: whether down, and how many places beyond the first."""
    difference = (image(new, dtype) - image(old, dtype)).view(SIGNED[old.itemsize])
    return difference < 0, np.abs(difference).view(old.dtype) - old.dtype.type(1)


def moves_of(is_down: NDArray[np.bool_], sizes: Bits) -> Bits:
    """What is added to images, modulo 2^width: one place more than these sizes, up or down."""
    turn = np.negative(is_down.astype(sizes.dtype))
    return ((sizes + sizes.dtype.type(1)) ^ turn) - turn


def stepped(old: Bits, moves: Bits, dtype: str) -> Bits:
    """The new elements."""
    return from_image(image(old, dtype) + moves, dtype)


def written_sizes(sizes: Bits) -> tuple[Bytes, Bytes]:
    """As bytes, and escapes."""
    if sizes.itemsize == 1:
        return sizes, sizes[:0]
    if sizes.itemsize == 4:
        return _planes(sizes), np.empty(0, dtype=np.uint8)
    return np.minimum(sizes, FULL).astype(np.uint8), _planes(sizes[sizes >= FULL])


def read_sizes(written: Bytes, escapes: Bits, itemsize: int) -> Bits:
    """The sizes again. Raises `ValueError` where the escapes do not fit."""
    if itemsize == 1:
        return written
    if itemsize == 4:
        return from_planes(written, itemsize)
    sizes, large = written.astype(WIDTHS[2]), written == FULL
    if np.count_nonzero(large) != len(escapes):
        raise ValueError("escapes")
    sizes[large] = escapes
    return sizes


def _planes(numbers: Bits) -> Bytes:
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T).reshape(-1)


def from_planes(planes: Bytes, itemsize: int) -> Bits:
    """Numbers whose bytes lie apart, the lowest of all first."""
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(WIDTHS[itemsize])[:, 0]


def image(bits: Bits, dtype: str) -> Bits:
    """The order-preserving integer, ~x of negative x and x | sign of others; a bijection of all patterns."""
    return bits if dtype not in FLOATS else bits ^ (_spread(bits) | _sign(bits))


def from_image(images: Bits, dtype: str) -> Bits:
    """The elements again."""
    return images if dtype not in FLOATS else images ^ (~_spread(images) | _sign(images))


def _spread(bits: Bits) -> Bits:
    """The highest bit in all places."""
    return (bits.view(SIGNED[bits.itemsize]) >> (8 * bits.itemsize - 1)).view(bits.dtype)


def _sign(bits: Bits) -> Any:  # noqa: ANN401 - a scalar of the array's own type
    return bits.dtype.type(1 << (8 * bits.itemsize - 1))


def compressed(data: Bytes | bytes) -> bytes:
    """A frame that says how much it holds."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(data if isinstance(data, bytes) else data.data)


def opened(frame: memoryview, sizes: range | Sequence[int]) -> Bytes:
    """A frame's content, whose size has to be one of these: looked at before any memory is taken. Raises `ValueError`."""
    size = zstandard.frame_content_size(frame)
    if size not in sizes:
        raise ValueError("a frame claims another size than its tensors have")
    found = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    if len(found) != size:
        raise ValueError("a frame is shorter than it says")
    return np.frombuffer(found, dtype=np.uint8)
