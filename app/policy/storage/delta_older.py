"""The first two formats of deltas, which are read and no longer written.

    RATCHETD1   one section of 16-bit changes and one of whole tensors, tensors without their kinds, escapes counted in elements
    RATCHETD2   sections of three frames (gaps, values, escapes), each the streams of its tensors one after the other

Gaps are bytes, 255 for each full 255; values are zigzagged differences of images, a byte each, 255 for an escape of two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from app.policy.storage.delta_streams import FULL, WIDTHS, Bits, Bytes, from_image, image, opened, read_sizes, running_sums, width_of
from app.policy.storage.weights import SAFETENSORS_DTYPES

FIRST, SECOND = b"RATCHETD1\n", b"RATCHETD2\n"


@dataclass(frozen=True, kw_only=True)
class OlderTensor:
    """One tensor's part of a section."""

    name: str
    dtype: str
    """Empty in the first format."""
    count: int
    """Changed elements."""
    gap_bytes: int
    escape_bytes: int


@dataclass(frozen=True, kw_only=True)
class OlderSection:
    """Some tensors' changes in three frames."""

    frames: tuple[int, ...]
    start: int
    tensors: tuple[OlderTensor, ...]

    @property
    def names(self) -> list[str]:
        """Of its parts, which are whole tensors."""
        return [tensor.name for tensor in self.tensors]

    @property
    def changed(self) -> int:
        """Elements."""
        return sum(tensor.count for tensor in self.tensors)

    def spans(self, base: Mapping[str, Tensor]) -> list[tuple[str, int, int]]:
        """Each part as (name, first, size). Raises `ValueError`, `KeyError` for what no delta to this base can say."""
        for tensor in self.tensors:
            known = base[tensor.name]
            count, kind = known.numel(), SAFETENSORS_DTYPES[known.dtype]
            escapes = 2 * tensor.count if known.element_size() == 2 else 0
            if tensor.dtype not in (kind, "") or not 0 < tensor.count <= count or not 0 <= tensor.escape_bytes <= escapes:
                raise ValueError(f"{tensor.name} cannot change so")
            if not tensor.count <= tensor.gap_bytes <= tensor.count + count // FULL + 1:
                raise ValueError(f"positions of {tensor.name}")
        return [(tensor.name, 0, base[tensor.name].numel()) for tensor in self.tensors]

    def open(self, delta: memoryview, *, relative: bool) -> "OlderOpened":
        """Decompress. Raises `ValueError`."""
        return OlderOpened(self, delta, relative=relative)


class OlderOpened:
    """A section's streams, to be applied tensor by tensor."""

    def __init__(self, section: OlderSection, delta: memoryview, *, relative: bool) -> None:
        self._section, self._relative = section, relative
        widths = [_value_width(tensor, relative=relative) for tensor in section.tensors]
        sizes = [
            [tensor.gap_bytes for tensor in section.tensors],
            [tensor.count * width for tensor, width in zip(section.tensors, widths, strict=True)],
            [tensor.escape_bytes for tensor in section.tensors],
        ]
        self._streams: list[list[Bytes]] = []
        at = section.start
        for length, mine in zip(section.frames, sizes, strict=True):
            whole = opened(delta[at : at + length], [sum(mine)])
            self._streams.append(np.split(whole, np.cumsum(mine)[:-1]) if mine else [])
            at += length

    def apply(self, number: int, bits: Bits) -> None:
        """Change the elements of a tensor where they are. Raises `ValueError`, `IndexError`."""
        tensor = self._section.tensors[number]
        gaps, values, escapes = (stream[number] for stream in self._streams)
        sums = running_sums(gaps)
        places = sums + np.arange(len(sums))
        if len(places) != tensor.count or places[-1] >= len(bits):
            raise ValueError(f"positions of {tensor.name}")
        if not self._relative:
            bits[places] = values.view(bits.dtype)
            return
        dtype, zigzag = tensor.dtype or "BF16", read_sizes(values, escapes.view(WIDTHS[2]), bits.itemsize)
        one = zigzag.dtype.type(1)
        difference = (zigzag >> one) ^ (zigzag.dtype.type(0) - (zigzag & one))
        bits[places] = from_image(image(bits[places], dtype) + difference, dtype)


def _value_width(tensor: OlderTensor, *, relative: bool) -> int:
    wide = width_of(tensor.dtype or "BF16")
    return 4 if relative and wide == 4 else 1 if relative else wide


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A tensor that is sent as it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its frame in the delta."""
    length: int
    first: int = 0
    """Of its bytes among those of the frame."""
    beside: int = 0
    """Bytes of other tensors in the frame."""

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * width_of(self.dtype)


def read_older(magic: bytes, header: bytes, start: int) -> tuple[dict[str, Any], list[OlderSection], list[Whole], int]:
    """The header as it stands, the sections, the tensors sent whole, and where the delta ends. Raises `ValueError` and its like."""
    found: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
    sections, whole = list[OlderSection](), list[Whole]()
    for said in found["sections"] if magic == SECOND else _first_sections(found):
        frames = tuple(int(length) for length in said["frames"])
        if len(frames) != (1 if said.get("whole") else 3) or min(frames) < 0:
            raise ValueError("frames")
        if said.get("whole"):
            whole += _whole(said["tensors"], start, frames[0])
        else:
            tensors = tuple(
                OlderTensor(name=str(name), dtype=str(dtype), count=int(count), gap_bytes=int(gaps), escape_bytes=int(escapes))
                for name, dtype, count, gaps, escapes in said["tensors"]
            )
            sections.append(OlderSection(frames=frames, start=start, tensors=tensors))
        start += sum(frames)
    return found, sections, whole, start


def _whole(tensors: Sequence[Any], start: int, length: int) -> list[Whole]:
    shapes = [(str(name), str(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in tensors]
    if any(size < 0 for _, _, shape in shapes for size in shape):
        raise ValueError("shape")
    sizes = [math.prod(shape) * width_of(dtype) for _, dtype, shape in shapes]
    return [
        Whole(name=name, dtype=dtype, shape=shape, start=start, length=length, first=sum(sizes[:index]), beside=sum(sizes) - sizes[index])
        for index, (name, dtype, shape) in enumerate(shapes)
    ]


def _first_sections(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first format's two parts as sections; it wrote three and one frame whether or not anything was in them."""
    tensors = [(name, "", count, gaps, 2 * escapes) for name, count, gaps, escapes in found["tensors"]]
    frames = list(found["frames"])
    return [{"tensors": tensors, "frames": frames[:3]}, {"whole": True, "tensors": found["raw"], "frames": frames[3:]}]
