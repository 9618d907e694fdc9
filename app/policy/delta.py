"""Weight deltas: what changed between two versions, bit-exact, in about ten bits per changed weight.

The layout is `facts/rl.md` section 6.6: sorted index gaps as bytes with escape, and differences of the order-preserving integer
images of the 16-bit patterns (units in the last place), zigzag, as bytes with escape; three zstd frames over the whole state.

    magic │ u32 length │ JSON header │ gaps │ values │ escapes │ raw
                          base, digest, mode, per tensor: name, changed, gap bytes, escapes; lengths of the frames

`raw` holds tensors that have no counterpart of the same shape and 16-bit dtype in the base, whole.
A `ulp` delta is relative and must be applied once, to its base; an `overwrite` delta carries new values, so that repeating it does no harm.
Not covered: whether the sender may send it; the digests guard against mistakes, not against people.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from app.domain.errors import BadInput, Refused
from app.policy.weights import digest_of

MAGIC = b"RATCHETD1\n"
LEVEL = 1
"""zstd level: 3 and Rice-coded gaps gain nothing (276.5 against 278.8 times smaller at 0.5 % density)."""
SIGN = np.uint16(0x8000)
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

U16 = NDArray[np.uint16]


class StaleDelta(Refused):
    """The delta was made for another base than the one here: fetch the chain up to it, or a keyframe. Nothing is damaged."""


class Mode(StrEnum):
    """What the value stream holds."""

    ULP = "ulp"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, kw_only=True)
class DeltaHead:
    """What a delta says about itself."""

    base: str
    digest: str
    """Of the whole state after it."""
    mode: Mode
    tensors: tuple[tuple[str, int, int, int], ...]
    """Name, changed weights, gap bytes, escapes; only tensors that changed."""
    raw: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of tensors sent whole."""
    gone: tuple[str, ...]
    """Tensors of the base that the new state does not have."""
    frames: tuple[int, int, int, int]
    """Compressed bytes of gaps, values, escapes and raw."""

    @property
    def changed(self) -> int:
        """Number of changed weights, tensors sent whole not counted."""
        return sum(changed for _, changed, _, _ in self.tensors)


@dataclass(kw_only=True)
class _Streams:
    gaps: list[bytes] = field(default_factory=list[bytes])
    values: list[bytes] = field(default_factory=list[bytes])
    escapes: list[bytes] = field(default_factory=list[bytes])
    raw: list[bytes] = field(default_factory=list[bytes])
    tensors: list[tuple[str, int, int, int]] = field(default_factory=list[tuple[str, int, int, int]])
    whole: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list[tuple[str, str, tuple[int, ...]]])


def encode_delta(base: Mapping[str, Tensor], new: Mapping[str, Tensor], *, mode: Mode = Mode.ULP) -> bytes:
    """What turns `base` into `new`, bound to the digests of both. Comparison is bitwise: -0, infinities and NaN payloads survive."""
    streams = _Streams()
    for name in sorted(new):
        if name in base and base[name].shape == new[name].shape and base[name].dtype == new[name].dtype and new[name].element_size() == 2:
            _add_changes(streams, name, _bits(base[name]), _bits(new[name]), mode)
        else:
            streams.whole.append((name, NAMES[new[name].dtype], tuple(new[name].shape)))
            streams.raw.append(new[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    frames = [compress(b"".join(stream)) for stream in (streams.gaps, streams.values, streams.escapes, streams.raw)]
    header = json.dumps({
        "base": digest_of(base), "digest": digest_of(new), "mode": mode.value, "tensors": streams.tensors, "raw": streams.whole,
        "gone": sorted(set(base) - set(new)), "frames": [len(frame) for frame in frames],
    }, separators=(",", ":")).encode()  # fmt: skip
    return MAGIC + len(header).to_bytes(4, "little") + header + b"".join(frames)


def read_head(delta: bytes) -> DeltaHead:
    """What a delta says about itself. Raises `BadInput` when it is none."""
    try:
        if not delta.startswith(MAGIC):
            raise ValueError("magic")
        length = int.from_bytes(delta[len(MAGIC) : len(MAGIC) + 4], "little")
        found: dict[str, Any] = json.loads(delta[len(MAGIC) + 4 : len(MAGIC) + 4 + length])
        return DeltaHead(
            base=str(found["base"]), digest=str(found["digest"]), mode=Mode(found["mode"]), gone=tuple(found["gone"]),
            tensors=tuple((str(n), int(c), int(g), int(e)) for n, c, g, e in found["tensors"]),
            raw=tuple((str(n), str(d), tuple(s)) for n, d, s in found["raw"]), frames=_four(found["frames"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput("this is not a weight delta, or it is damaged: fetch it again, or load a keyframe") from error


def apply_delta(base: Mapping[str, Tensor], delta: bytes, *, base_digest: str | None = None) -> dict[str, Tensor]:
    """The new state; `base` is left as it is. `base_digest` saves hashing the base where it is known.

    Raises `StaleDelta` for another base, `BadInput` for a damaged delta or when the result is not what the delta promises.
    """
    head = read_head(delta)
    digest = base_digest or digest_of(base)
    if head.base != digest and not (head.mode is Mode.OVERWRITE and digest == head.digest):
        raise StaleDelta(f"this delta is for the weights {head.base[:12]}, here are {digest[:12]}: apply the deltas before it first")
    try:
        new = _applied(base, delta, head)
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError, OverflowError, zstandard.ZstdError) as error:
        raise BadInput(f"the delta to {head.digest[:12]} is damaged ({error}): fetch it again, or load a keyframe") from error
    if (found := digest_of(new)) != head.digest:
        raise BadInput(f"the delta gave the weights {found[:12]}, not {head.digest[:12]}: fetch it again, or load a keyframe")
    return new


def _applied(base: Mapping[str, Tensor], delta: bytes, head: DeltaHead) -> dict[str, Tensor]:
    most = 2 * sum(tensor.numel() for tensor in base.values())
    most += sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in head.raw)
    gaps, values, escapes, raw = _frames(delta, head, most=most)
    new = {name: tensor for name, tensor in base.items() if name not in head.gone}
    gap_at = value_at = escape_at = raw_at = 0
    width = 1 if head.mode is Mode.ULP else 2
    for name, changed, gap_bytes, escaped in head.tensors:
        bits = _bits(base[name]).copy()
        places = _places(gaps[gap_at : gap_at + gap_bytes])
        if len(places) != changed or places[-1] >= len(bits):
            raise ValueError(f"positions of {name}")
        stream = values[value_at : value_at + changed * width]
        if head.mode is Mode.ULP:
            steps = _steps(stream, escapes[escape_at : escape_at + 2 * escaped])
            bits[places] = _from_order(_to_order(bits[places]) + steps)
        else:
            bits[places] = stream.view("<u2")
        new[name] = torch.from_numpy(bits).view(base[name].dtype).view(base[name].shape)
        gap_at, value_at, escape_at = gap_at + gap_bytes, value_at + changed * width, escape_at + 2 * escaped
    for name, dtype, shape in head.raw:
        size = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        new[name] = torch.from_numpy(raw[raw_at : raw_at + size].copy()).view(DTYPES[dtype]).view(shape)
        raw_at += size
    return new


def _add_changes(streams: _Streams, name: str, old: U16, new: U16, mode: Mode) -> None:
    places = np.flatnonzero(old != new)
    if not len(places):
        return
    gaps = _gap_bytes(places)
    if mode is Mode.ULP:
        zigzag = _zigzag(_to_order(new[places]) - _to_order(old[places]))
        large = zigzag >= 255
        streams.values.append(np.minimum(zigzag, 255).astype(np.uint8).tobytes())
        streams.escapes.append(zigzag[large].astype("<u2").tobytes())
        escaped = int(large.sum())
    else:
        streams.values.append(new[places].astype("<u2").tobytes())
        escaped = 0
    streams.gaps.append(gaps)
    streams.tensors.append((name, len(places), len(gaps), escaped))


def _to_order(bits: U16) -> U16:
    """The image under which consecutive floats are consecutive integers; a bijection of all 65,536 patterns."""
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _from_order(image: U16) -> U16:
    return np.where(image & SIGN, image & ~SIGN, ~image)


def _zigzag(difference: U16) -> U16:
    """Differences modulo 2¹⁶ as small non-negative numbers: 0, -1, 1, -2, … become 0, 1, 2, 3, …"""
    signed = difference.view(np.int16).astype(np.int32)
    return ((signed << 1) ^ (signed >> 31)).astype(np.uint16)


def _steps(values: NDArray[np.uint8], escapes: NDArray[np.uint8]) -> U16:
    zigzag = values.astype(np.uint16)
    zigzag[values == 255] = escapes.view("<u2")
    return (zigzag >> np.uint16(1)) ^ (np.uint16(0) - (zigzag & np.uint16(1)))


def _gap_bytes(places: NDArray[np.int64]) -> bytes:
    """Gaps between sorted positions: a byte of 255 for each full 255, then the rest below 255."""
    gaps = np.diff(places, prepend=-1) - 1
    full, rest = gaps // 255, gaps % 255
    written = np.full(int(full.sum()) + len(gaps), 255, dtype=np.uint8)
    written[np.cumsum(full + 1) - 1] = rest
    return written.tobytes()


def _places(written: NDArray[np.uint8]) -> NDArray[np.int64]:
    ends = np.flatnonzero(written != 255)
    gaps = np.diff(np.cumsum(written, dtype=np.int64)[ends], prepend=0)
    return np.cumsum(gaps + 1) - 1


def _frames(delta: bytes, head: DeltaHead, *, most: int) -> list[NDArray[np.uint8]]:
    """Decompressed; none may claim more than `most` bytes, which no change of these weights needs: damage must not take the memory."""
    at = len(delta) - sum(head.frames)
    frames: list[NDArray[np.uint8]] = []
    for length in head.frames:
        frame = delta[at : at + length]
        if not 0 <= zstandard.frame_content_size(frame) <= most:
            raise ValueError("a frame claims more than these weights can change")
        frames.append(np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), dtype=np.uint8))
        at += length
    return frames


def _four(lengths: list[int]) -> tuple[int, int, int, int]:
    gaps, values, escapes, raw = lengths
    return int(gaps), int(values), int(escapes), int(raw)


def _bits(tensor: Tensor) -> U16:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint16).numpy()
