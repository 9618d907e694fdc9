"""The numbers inside a delta: where a tensor changed and by how much, as streams of bytes that compress well.

Positions: gaps between them, a byte of 255 for each full 255, then the rest. Values, by the width of an element:

    1 byte    difference of the order-preserving images, zigzag, one byte
    2 bytes   the same; a byte of 255 says that the whole difference stands in the escapes, two bytes each
    4 bytes   the same in four planes, the low bytes of all first, so that what is small compresses

The image of a float is the integer under which consecutive floats are consecutive; integers, exponents (E8M0) and packed four-bit pairs are
their own. All of it is modulo 2^width: any pattern can become any other, and every step has one inverse.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.policy.storage.weights import SAFETENSORS_DTYPES

Bits = NDArray[Any]
"""The elements of a tensor as unsigned integers of its width."""
Bytes = NDArray[np.uint8]
DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
FLOATS = frozenset({"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"})
"""Sign and magnitude: their image turns the negative half round."""
WIDTHS = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
WORD = np.dtype("<u8")


def width_of(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype].itemsize


def bits_of(tensor: Tensor) -> Bits:
    """A tensor's elements; shares its memory where it can."""
    plain = tensor.detach().cpu().contiguous().view(-1)
    return plain.view(torch.uint8).numpy().view(WIDTHS[plain.element_size()])


def changed_places(old: Bits, new: Bits) -> NDArray[np.int64]:
    """Positions at which two tensors differ, compared eight bytes at a time: most words are equal."""
    lanes = WORD.itemsize // old.itemsize
    whole = len(old) // lanes * lanes
    before, after = old[:whole].view(WORD), new[:whole].view(WORD)
    words = np.flatnonzero(before != after)
    differing = before[words].view(old.dtype).reshape(-1, lanes) != after[words].view(old.dtype).reshape(-1, lanes)
    which, lane = np.nonzero(differing)
    rest = np.flatnonzero(old[whole:] != new[whole:]) + whole
    return np.concatenate([words[which] * lanes + lane, rest]).astype(np.int64, copy=False)


def gap_bytes(places: NDArray[np.int64]) -> Bytes:
    """Sorted positions as gaps."""
    gaps = np.diff(places, prepend=-1) - 1
    full = gaps // 255
    if not full.any():
        return gaps.astype(np.uint8)
    written = np.full(int(full.sum()) + len(gaps), 255, dtype=np.uint8)
    written[np.cumsum(full + 1) - 1] = (gaps - 255 * full).astype(np.uint8)
    return written


def places_of(written: Bytes) -> NDArray[np.int64]:
    """The positions again; of any bytes, sorted and without repetition."""
    ends = np.flatnonzero(written != 255)
    sums = np.cumsum(written, dtype=np.int64)[ends]
    return sums + np.arange(len(ends))


def value_bytes(old: Bits, new: Bits, dtype: str) -> tuple[bytes, bytes]:
    """What leads from the old elements to the new ones: values and escapes."""
    steps = _zigzag(_image(new, dtype) - _image(old, dtype))
    if steps.itemsize == 1:
        return steps.tobytes(), b""
    if steps.itemsize == 4:
        return steps.view(np.uint8).reshape(-1, 4).T.tobytes(), b""
    large = steps >= 255
    return np.minimum(steps, 255).astype(np.uint8).tobytes(), steps[large].astype("<u2").tobytes()


def stepped(old: Bits, values: Bytes, escapes: Bytes, dtype: str) -> Bits:
    """The new elements. Raises `ValueError` where the streams do not fit."""
    kind = WIDTHS[old.itemsize]
    if old.itemsize == 2:
        steps = values.astype(kind)
        large = values == 255
        if int(large.sum()) * 2 != len(escapes):
            raise ValueError("escapes")
        steps[large] = escapes.view(kind)
    elif old.itemsize == 4:
        steps = np.ascontiguousarray(values.reshape(4, -1).T).view(kind)[:, 0]
    else:
        steps = values
    difference = (steps >> kind.type(1)) ^ (kind.type(0) - (steps & kind.type(1)))
    return _from_image(_image(old, dtype) + difference, dtype)


def _sign(bits: Bits) -> Any:  # noqa: ANN401 - a scalar of the array's own type
    return bits.dtype.type(1 << (8 * bits.itemsize - 1))


def _image(bits: Bits, dtype: str) -> Bits:
    """The order-preserving integer; a bijection of all patterns."""
    if dtype not in FLOATS:
        return bits
    sign = _sign(bits)
    return np.where(bits & sign, ~bits, bits | sign)


def _from_image(image: Bits, dtype: str) -> Bits:
    if dtype not in FLOATS:
        return image
    sign = _sign(image)
    return np.where(image & sign, image & ~sign, ~image)


def _zigzag(difference: Bits) -> Bits:
    """Differences modulo 2^width as small numbers: 0, -1, 1, -2, … become 0, 1, 2, 3, …"""
    doubled = difference << difference.dtype.type(1)
    return np.where(difference & _sign(difference), ~doubled, doubled)
