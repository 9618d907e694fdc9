"""What a delta says about itself.

magic │ u32 length │ zstd of the JSON header │ frames of the first section, of the second, …, of the tensors sent whole
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec
import zstandard
from torch import Tensor

from app.domain.errors import BadInput
from app.policy.storage.delta_older import FIRST, SECOND, Whole, read_older
from app.policy.storage.delta_sections import Changes, Opened
from app.policy.storage.delta_streams import Bits, compressed, opened
from app.policy.storage.weights import SAFETENSORS_DTYPES

MAGIC = b"RATCHETD3\n"
LONGEST_HEADER = 64 << 20
"""Compressed, and opened."""
DAMAGED = (
    ValueError, IndexError, KeyError, TypeError, RuntimeError, OverflowError, AttributeError, zstandard.ZstdError, msgspec.MsgspecError,
    RecursionError, MemoryError,
)  # fmt: skip


class Mode(StrEnum):
    """What the steps of a delta are."""

    ULP = "ulp"
    """Differences, to be applied once, to the base."""
    OVERWRITE = "overwrite"
    """New values, which may be written again."""


class Applied(Protocol):
    """A section's streams, decompressed."""

    def apply(self, number: int, bits: Bits) -> None:
        """Change the elements of a part where they are. Raises `ValueError`, `IndexError`, after which they are worth nothing."""
        ...


class Section(Protocol):
    """What changed in some parts of tensors."""

    @property
    def names(self) -> Sequence[str]:
        """Of the tensors, part by part."""
        ...

    @property
    def changed(self) -> int:
        """Elements."""
        ...

    def spans(self, base: Mapping[str, Tensor]) -> Sequence[tuple[str, int, int]]:
        """Each part as (name, first, size). Raises `ValueError`, `KeyError` for what no delta to this base can say."""
        ...

    def open(self, delta: memoryview, *, relative: bool) -> Applied:
        """Decompress. Raises `ValueError`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Located:
    """A section of this format, and where its frames begin."""

    said: Changes
    start: int

    @property
    def names(self) -> list[str]:
        """Of the tensors, part by part."""
        return [part.name for part in self.said.parts]

    @property
    def changed(self) -> int:
        """Elements."""
        return sum(sum(part.changed) for part in self.said.parts)

    def spans(self, base: Mapping[str, Tensor]) -> list[tuple[str, int, int]]:
        """Each part as (name, first, size)."""
        for part in self.said.parts:
            known = base[part.name]
            if SAFETENSORS_DTYPES[known.dtype] != self.said.dtype or part.first + part.size > known.numel():
                raise ValueError(f"{part.name} cannot change so")
        return [(part.name, part.first, part.size) for part in self.said.parts]

    def open(self, delta: memoryview, *, relative: bool) -> Opened:
        """Decompress."""
        return Opened(self.said, delta[self.start : self.start + sum(self.said.frames)], relative=relative)


@dataclass(frozen=True, kw_only=True)
class DeltaHead:
    """What a delta says about itself."""

    base: str
    digest: str
    """Of the whole state after it."""
    mode: Mode
    sections: Sequence[Section]
    whole: Sequence[Whole]
    """Tensors that the base does not have in this shape and kind."""
    gone: tuple[str, ...]
    """Tensors of the base that the new state does not have."""

    @property
    def changed(self) -> int:
        """Number of changed weights, tensors sent whole not counted."""
        return sum(section.changed for section in self.sections)


class WholeTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor sent whole, as the header says it."""

    name: str
    dtype: str
    shape: list[int]
    frame: int
    """Compressed bytes."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON."""

    base: str
    digest: str
    mode: Mode
    gone: list[str]
    sections: list[Changes]
    whole: list[WholeTensor]


class _Based(msgspec.Struct, frozen=True):
    base: str


def written_head(header: Header) -> bytes:
    """The beginning of a delta."""
    frame = compressed(msgspec.json.encode(header))
    return MAGIC + len(frame).to_bytes(4, "little") + frame


def read_head(delta: bytes) -> DeltaHead:
    """What a delta says about itself. Raises `BadInput` when it is none."""
    try:
        magic, length = delta[: len(MAGIC)], int.from_bytes(delta[len(MAGIC) : len(MAGIC) + 4], "little")
        start = len(MAGIC) + 4 + length
        if magic not in (MAGIC, FIRST, SECOND) or start > len(delta) or length > LONGEST_HEADER:
            raise ValueError("magic")
        written = memoryview(delta)[len(MAGIC) + 4 : start]
        head, end = _read(bytes(opened(written, range(LONGEST_HEADER + 1))), start) if magic == MAGIC else _older(magic, written, start)
        if end != len(delta):
            raise ValueError("length")
    except DAMAGED as error:
        raise BadInput("this is not a weight delta, or it is damaged: fetch it again, or load a keyframe") from error
    return head


def read_base(read: Callable[[int, int], bytes]) -> str:
    """The digest of a delta's base, from its header alone; `read(start, stop)` gives bytes of the delta. Raises `BadInput`."""
    try:
        start = len(MAGIC) + 4
        magic, length = (begun := read(0, start))[: len(MAGIC)], int.from_bytes(begun[len(MAGIC) :], "little")
        if length > LONGEST_HEADER:
            raise ValueError("length")
        written = read(start, start + length)
        header = bytes(opened(memoryview(written), range(LONGEST_HEADER + 1))) if magic == MAGIC else written
        return msgspec.json.decode(header, type=_Based).base
    except DAMAGED as error:
        raise BadInput("this is not a weight delta, or it is damaged: fetch it again, or load a keyframe") from error


def _read(header: bytes, start: int) -> tuple[DeltaHead, int]:
    said = msgspec.json.decode(header, type=Header)
    sections, whole = list[Located](), list[Whole]()
    for changes in said.sections:
        changes.check(relative=said.mode is Mode.ULP)
        sections.append(Located(said=changes, start=start))
        start += sum(changes.frames)
    for tensor in said.whole:
        if tensor.frame < 0 or min(tensor.shape, default=0) < 0:
            raise ValueError("whole")
        made = Whole(name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape), start=start, length=tensor.frame)
        whole.append(made)
        start += tensor.frame
    head = DeltaHead(base=said.base, digest=said.digest, mode=said.mode, sections=sections, whole=whole, gone=tuple(said.gone))
    return head, start


def _older(magic: bytes, written: memoryview, start: int) -> tuple[DeltaHead, int]:
    found, sections, whole, end = read_older(magic, bytes(written), start)
    head = DeltaHead(
        base=str(found["base"]), digest=str(found["digest"]), mode=Mode(found["mode"]), gone=tuple(map(str, found["gone"])),
        sections=sections, whole=whole,
    )  # fmt: skip
    return head, end
