"""Weight deltas: what changed between two versions, bit-exact, in about ten bits per changed weight. docs/delta-format.md is the format.

    magic │ u32 length │ JSON header │ sections, one after the other
                          base, digest, mode, gone, sections: per section its tensors and the lengths of its three or one frames

A section holds the changes of some tensors, in their order (about `SECTION_BYTES` of weights, so that several threads encode and a reader
holds little at a time), or tensors whole that have no counterpart of the same shape and dtype in the base.
A `ulp` delta is relative and must be applied once, to its base; an `overwrite` delta carries new values, so that repeating it does no harm.
Not covered: whether the sender may send it; the digests guard against mistakes, not against people. Hostile input is refused before
anything is made that is larger than what the base allows.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from app.domain.errors import BadInput, Refused
from app.policy.storage.delta_streams import (
    DTYPES,
    WIDTHS,
    Bytes,
    bits_of,
    changed_places,
    gap_bytes,
    places_of,
    stepped,
    value_bytes,
    width_of,
)
from app.policy.storage.weights import SAFETENSORS_DTYPES, digest_of

MAGIC, FIRST_MAGIC = b"RATCHETD2\n", b"RATCHETD1\n"
"""The first format is one section of 16-bit changes and one of whole tensors, without their kinds; it is read, not written."""
LEVEL = 1
"""zstd level: 3 and Rice-coded gaps gain nothing (276.5 against 278.8 times smaller at 0.5 % density)."""
SECTION_BYTES = 16 << 20
LONGEST_HEADER = 64 << 20
DAMAGED = (ValueError, IndexError, KeyError, TypeError, RuntimeError, OverflowError, AttributeError, zstandard.ZstdError)


class StaleDelta(Refused):
    """The delta was made for another base than the one here: fetch the chain up to it, or a keyframe. Nothing is damaged."""


class Mode(StrEnum):
    """What the value stream holds."""

    ULP = "ulp"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """One tensor's part of a section."""

    name: str
    dtype: str
    count: int
    """Changed elements."""
    gap_bytes: int
    escape_bytes: int


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some tensors' changes in three frames (gaps, values, escapes), or with `whole` one tensor's bytes in one."""

    frames: tuple[int, ...]
    """Compressed bytes."""
    start: int
    """Of the first frame in the delta."""
    tensors: tuple[Changes, ...] = ()
    whole: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """Name, dtype and shape."""


@dataclass(frozen=True, kw_only=True)
class DeltaHead:
    """What a delta says about itself."""

    base: str
    digest: str
    """Of the whole state after it."""
    mode: Mode
    sections: tuple[Section, ...]
    gone: tuple[str, ...]
    """Tensors of the base that the new state does not have."""

    @property
    def changed(self) -> int:
        """Number of changed weights, tensors sent whole not counted."""
        return sum(tensor.count for section in self.sections for tensor in section.tensors)


def encode_delta(
    base: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    *,
    mode: Mode = Mode.ULP,
    digests: tuple[str, str] | None = None,
    threads: int = 2,
    section_bytes: int = SECTION_BYTES,
) -> bytes:
    """What turns `base` into `new`, bound to the digests of both (`digests` saves hashing them where they are known). Comparison is
    bitwise: -0, infinities and NaN payloads survive. Tensors may be mapped from files: a section of them is looked at at a time."""
    before, after = digests or (digest_of(base), digest_of(new))
    kept = [name for name in sorted(new) if name in base and _alike(base[name], new[name])]
    with ThreadPoolExecutor(threads) as pool:
        coded = list(pool.map(lambda names: _encode_section(base, new, names, mode), _grouped(kept, new, section_bytes)))
        coded += pool.map(lambda name: _encode_whole(new, name), sorted(set(new) - set(kept)))
    whole, most = sum(new[name].nbytes for name in set(new) - set(kept)), most_whole(sum(tensor.nbytes for tensor in base.values()))
    if whole > most:
        raise Refused(f"{whole} bytes are new and a delta to these weights carries {most}: send a snapshot")
    coded = [(said, frames) for said, frames in coded if said["tensors"]]
    header = json.dumps({
        "base": before, "digest": after, "mode": mode.value, "gone": sorted(set(base) - set(new)),
        "sections": [said | {"frames": [len(frame) for frame in frames]} for said, frames in coded],
    }, separators=(",", ":")).encode()  # fmt: skip
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *(frame for _, frames in coded for frame in frames)])


def read_head(delta: bytes) -> DeltaHead:
    """What a delta says about itself. Raises `BadInput` when it is none."""
    try:
        magic, length = delta[: len(MAGIC)], int.from_bytes(delta[len(MAGIC) : len(MAGIC) + 4], "little")
        start = len(MAGIC) + 4 + length
        if magic not in (MAGIC, FIRST_MAGIC) or start > len(delta) or length > LONGEST_HEADER:
            raise ValueError("magic")
        found: dict[str, Any] = json.loads(delta[len(MAGIC) + 4 : start])
        listed = found["sections"] if magic == MAGIC else _first_sections(found)
        sections: list[Section] = []
        for said in listed:
            sections.append(_section(said, start))
            start += sum(sections[-1].frames)
        if start != len(delta):
            raise ValueError("length")
        return DeltaHead(
            base=str(found["base"]), digest=str(found["digest"]), mode=Mode(found["mode"]), gone=tuple(map(str, found["gone"])),
            sections=tuple(sections),
        )  # fmt: skip
    except (*DAMAGED, RecursionError, MemoryError) as error:
        raise BadInput("this is not a weight delta, or it is damaged: fetch it again, or load a keyframe") from error


def read_base(read: Callable[[int, int], bytes]) -> str:
    """The digest of a delta's base, from its header alone; `read(start, stop)` gives bytes of the delta. Raises `BadInput`."""
    try:
        start = len(MAGIC) + 4
        length = int.from_bytes(read(len(MAGIC), start), "little")
        if length > LONGEST_HEADER:
            raise ValueError("length")
        return str(json.loads(read(start, start + length))["base"])
    except (*DAMAGED, RecursionError) as error:
        raise BadInput("this is not a weight delta, or it is damaged: fetch it again, or load a keyframe") from error


def apply_delta(base: Mapping[str, Tensor], delta: bytes, *, base_digest: str | None = None) -> dict[str, Tensor]:
    """The new state; `base` is left as it is. `base_digest` saves hashing the base where it is known.

    Raises `StaleDelta` for another base, `BadInput` for a damaged delta or when the result is not what the delta promises.
    """
    patch = Patch(delta, base, base_digest=base_digest or digest_of(base))
    new = {name: tensor for name, tensor in base.items() if name not in patch.head.gone} | dict(patch.changed(base))
    patch.require(digest_of(new))
    return new


class Patch:
    """A delta that fits a base, to be applied tensor by tensor. Every size in it was checked against the base."""

    def __init__(self, delta: bytes, base: Mapping[str, Tensor], *, base_digest: str) -> None:
        """Raises `StaleDelta` for another base, `BadInput` for a delta whose header cannot be true."""
        self.head = head = read_head(delta)
        if head.base != base_digest and not (head.mode is Mode.OVERWRITE and base_digest == head.digest):
            raise StaleDelta(
                f"this delta is for the weights {head.base[:12]}, here are {base_digest[:12]}: apply the deltas before it first"
            )
        self._delta = memoryview(delta)
        self._where = {tensor.name: section for section in head.sections for tensor in section.tensors}
        try:
            self._check(base)
        except DAMAGED as error:
            raise self._damaged(error) from error

    @property
    def names(self) -> frozenset[str]:
        """Tensors of the base that change."""
        return frozenset(self._where)

    def changed(self, base: Mapping[str, Tensor], *, threads: int = 2) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is not the base's, new, section by section. Raises `BadInput`."""
        with ThreadPoolExecutor(threads) as pool:
            try:
                for made in pool.map(lambda section: self._made(section, base), self.head.sections):
                    yield from made
            except DAMAGED as error:
                raise self._damaged(error) from error

    def patched(self, names: Iterable[str], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of these tensors that change, new; `base` has them at least. Raises `BadInput`."""
        wanted = frozenset(names)
        sections = {id(self._where[name]): self._where[name] for name in sorted(wanted & self.names)}
        try:
            return {name: tensor for section in sections.values() for name, tensor in self._made(section, base, only=wanted)}
        except DAMAGED as error:
            raise self._damaged(error) from error

    def require(self, digest: str) -> None:
        """Raises `BadInput` when the state after the delta is not the one it promises."""
        if digest != self.head.digest:
            raise BadInput(f"the delta gave the weights {digest[:12]}, not {self.head.digest[:12]}: fetch it again, or load a keyframe")

    def _made(self, section: Section, base: Mapping[str, Tensor], *, only: frozenset[str] | None = None) -> list[tuple[str, Tensor]]:
        made: list[tuple[str, Tensor]] = []
        if section.whole:
            (raw,) = self._frames(section, [_whole_bytes(section)])
            for name, dtype, shape in section.whole:
                size = math.prod(shape) * width_of(dtype)
                made.append((name, torch.from_numpy(raw[:size].copy()).view(DTYPES[dtype]).view(shape)))
                raw = raw[size:]
            return made
        gaps, values, escapes = self._frames(section, _stream_bytes(section, self.head.mode))
        for tensor in section.tensors:
            width = _value_width(tensor, self.head.mode)
            mine = gaps[: tensor.gap_bytes], values[: tensor.count * width], escapes[: tensor.escape_bytes]
            gaps, values, escapes = gaps[tensor.gap_bytes :], values[tensor.count * width :], escapes[tensor.escape_bytes :]
            if only is None or tensor.name in only:
                made.append((tensor.name, _patched(base[tensor.name], tensor, *mine, self.head.mode)))
        return made

    def _frames(self, section: Section, sizes: list[int]) -> list[Bytes]:
        """Decompressed; each of exactly the size that the header and the base allow, which is looked at before any memory is taken."""
        at, frames = section.start, list[Bytes]()
        for length, size in zip(section.frames, sizes, strict=True):
            frame = self._delta[at : at + length]
            if size < 0 or zstandard.frame_content_size(frame) != size:
                raise ValueError("a frame claims another size than its tensors have")
            found = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
            if len(found) != size:
                raise ValueError("a frame is shorter than it says")
            frames.append(np.frombuffer(found, dtype=np.uint8))
            at += length
        return frames

    def _check(self, base: Mapping[str, Tensor]) -> None:
        """Raises `ValueError`, `KeyError` for what no delta to this base can say."""
        total = sum(tensor.nbytes for tensor in base.values())
        named = [tensor.name for section in self.head.sections for tensor in section.tensors]
        named += [name for section in self.head.sections for name, _, _ in section.whole]
        if len(set(named)) < len(named):
            raise ValueError("a tensor comes twice")
        for tensor in (tensor for section in self.head.sections for tensor in section.tensors):
            known = base[tensor.name]
            count, kind = known.numel(), SAFETENSORS_DTYPES[known.dtype]
            escapes = 2 * tensor.count if known.element_size() == 2 else 0
            if tensor.dtype not in (kind, "") or not 0 < tensor.count <= count or not 0 <= tensor.escape_bytes <= escapes:
                raise ValueError(f"{tensor.name} cannot change so")
            if not tensor.count <= tensor.gap_bytes <= tensor.count + count // 255 + 1:
                raise ValueError(f"positions of {tensor.name}")
        if sum(map(_whole_bytes, self.head.sections)) > most_whole(total):
            raise ValueError("more is new than a delta carries: a keyframe would")

    def _damaged(self, error: BaseException) -> BadInput:
        return BadInput(f"the delta to {self.head.digest[:12]} is damaged ({error}): fetch it again, or load a keyframe")


def most_whole(base_bytes: int) -> int:
    """Bytes of whole tensors that a delta to such a base may carry; what is more new than that is sent as a snapshot."""
    return base_bytes + (1 << 20)


def _patched(old: Tensor, tensor: Changes, gaps: Bytes, values: Bytes, escapes: Bytes, mode: Mode) -> Tensor:
    bits = bits_of(old).copy()
    places = places_of(gaps)
    if len(places) != tensor.count or places[-1] >= len(bits):
        raise ValueError(f"positions of {tensor.name}")
    if mode is Mode.OVERWRITE:
        bits[places] = values.view(bits.dtype)
    else:
        bits[places] = stepped(bits[places], values, escapes, SAFETENSORS_DTYPES[old.dtype])
    return torch.from_numpy(bits.view(np.uint8)).view(old.dtype).view(old.shape)


def _encode_section(
    base: Mapping[str, Tensor], new: Mapping[str, Tensor], names: list[str], mode: Mode
) -> tuple[dict[str, Any], list[bytes]]:
    streams: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
    said: list[tuple[str, str, int, int, int]] = []
    for name in names:
        old, now = bits_of(base[name]), bits_of(new[name])
        places = changed_places(old, now)
        if not len(places):
            continue
        dtype, gaps = SAFETENSORS_DTYPES[new[name].dtype], gap_bytes(places).tobytes()
        after = now[places]
        values, escapes = value_bytes(old[places], after, dtype) if mode is Mode.ULP else (after.tobytes(), b"")
        said.append((name, dtype, len(places), len(gaps), len(escapes)))
        for stream, part in zip(streams, (gaps, values, escapes), strict=True):
            stream.append(part)
    return {"tensors": said}, [_compress(b"".join(stream)) for stream in streams]


def _encode_whole(new: Mapping[str, Tensor], name: str) -> tuple[dict[str, Any], list[bytes]]:
    tensor = new[name].detach().cpu().contiguous()
    said = [(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape))]
    return {"whole": True, "tensors": said}, [_compress(tensor.view(-1).view(torch.uint8).numpy().tobytes())]


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _grouped(names: list[str], tensors: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """Neighbours by name, about `most` bytes together."""
    groups: list[list[str]] = []
    filled = most
    for name in names:
        if filled >= most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensors[name].nbytes
    return groups


def _alike(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and new.element_size() in WIDTHS


def _section(said: Mapping[str, Any], start: int) -> Section:
    frames = tuple(int(length) for length in said["frames"])
    if len(frames) != (1 if said.get("whole") else 3) or min(frames) < 0:
        raise ValueError("frames")
    if said.get("whole"):
        whole = tuple((str(name), str(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in said["tensors"])
        if any(size < 0 for _, _, shape in whole for size in shape):
            raise ValueError("shape")
        return Section(frames=frames, start=start, whole=whole)
    tensors = tuple(
        Changes(name=str(name), dtype=str(dtype), count=int(count), gap_bytes=int(gaps), escape_bytes=int(escapes))
        for name, dtype, count, gaps, escapes in said["tensors"]
    )
    return Section(frames=frames, start=start, tensors=tensors)


def _first_sections(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first format's two parts as sections; it wrote three and one frame whether or not anything was in them."""
    tensors = [(name, "", count, gaps, 2 * escapes) for name, count, gaps, escapes in found["tensors"]]
    frames = list(found["frames"])
    return [{"tensors": tensors, "frames": frames[:3]}, {"whole": True, "tensors": found["raw"], "frames": frames[3:]}]


def _value_width(tensor: Changes, mode: Mode) -> int:
    wide = width_of(tensor.dtype or "BF16")
    return wide if mode is Mode.OVERWRITE else 4 if wide == 4 else 1


def _stream_bytes(section: Section, mode: Mode) -> list[int]:
    """Bytes of gaps, values and escapes."""
    return [
        sum(tensor.gap_bytes for tensor in section.tensors),
        sum(tensor.count * _value_width(tensor, mode) for tensor in section.tensors),
        sum(tensor.escape_bytes for tensor in section.tensors),
    ]


def _whole_bytes(section: Section) -> int:
    return sum(math.prod(shape) * width_of(dtype) for _, dtype, shape in section.whole)
