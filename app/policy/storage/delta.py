"""Weight deltas: what changed between two versions, bit-exact, in the fewest bits that can be had fast. docs/delta-format.md is the format.

A section holds the changes of some parts of tensors (about `SECTION_BYTES` of weights, so that several threads encode and a reader holds
little at a time); tensors that have no counterpart of the same shape and dtype in the base are sent whole.
A `ulp` delta is relative and must be applied once, to its base; an `overwrite` delta carries new values, so that repeating it does no harm.
Not covered: whether the sender may send it; the digests guard against mistakes, not against people. Hostile input is refused before
anything is made that is larger than what the base allows.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from app.domain.errors import BadInput, Refused
from app.policy.storage.delta_head import (
    DAMAGED,
    MAGIC,
    Applied,
    DeltaHead,
    Header,
    Mode,
    Section,
    WholeTensor,
    read_base,
    read_head,
    written_head,
)
from app.policy.storage.delta_loops import prepare
from app.policy.storage.delta_older import Whole
from app.policy.storage.delta_sections import PART, encode_changes
from app.policy.storage.delta_streams import DTYPES, WIDTHS, bits_of, compressed, opened
from app.policy.storage.weights import SAFETENSORS_DTYPES, digest_of

__all__ = ["MAGIC", "Mode", "Patch", "StaleDelta", "apply_delta", "encode_delta", "read_base", "read_head"]
SECTION_BYTES = 32 << 20
Span = tuple[str, int, int]
"""Tensor, first element, number of elements."""


class StaleDelta(Refused):
    """The delta was made for another base than the one here: fetch the chain up to it, or a keyframe. Nothing is damaged."""


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
    prepare()
    before, after = digests or (digest_of(base), digest_of(new))
    kept = [name for name in sorted(new) if name in base and _alike(base[name], new[name])]
    fresh = sorted(set(new) - set(kept))
    _require_few(sum(new[name].nbytes for name in fresh), sum(tensor.nbytes for tensor in base.values()))
    with ThreadPoolExecutor(threads) as pool:
        groups = _grouped(kept, new, section_bytes)
        coded = pool.map(lambda group: encode_changes(base, new, group[1], group[0], relative=mode is Mode.ULP), groups)
        found = [section for section in coded if section is not None]
        frames = [(new[name], frame) for name, frame in zip(fresh, pool.map(lambda name: _whole(new[name]), fresh), strict=True)]
    whole = [
        WholeTensor(name, SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape), len(frame))
        for name, (tensor, frame) in zip(fresh, frames, strict=True)
    ]
    header = Header(
        base=before, digest=after, mode=mode, gone=sorted(set(base) - set(new)), sections=[said for said, _ in found], whole=whole
    )
    streams = [frame for _, section in found for frame in section]
    return b"".join([written_head(header), *streams, *(frame for _, frame in frames)])


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
        prepare()
        self.head: DeltaHead = read_head(delta)
        if self.head.base != base_digest and not (self.head.mode is Mode.OVERWRITE and base_digest == self.head.digest):
            raise StaleDelta(
                f"this delta is for the weights {self.head.base[:12]}, here are {base_digest[:12]}: apply the deltas before it first"
            )
        self._delta = memoryview(delta)
        self._relative = self.head.mode is Mode.ULP
        self._last: tuple[Section, Applied] | None = None
        """The section that was opened last: who asks for one tensor after the other asks for its neighbours."""
        try:
            self._spans = [list(section.spans(base)) for section in self.head.sections]
            self._check(base)
        except DAMAGED as error:
            raise self._damaged(error) from error

    @cached_property
    def _parts(self) -> dict[str, list[tuple[Section, int, slice]]]:
        """By tensor: its parts, each by where it comes in which section."""
        found: dict[str, list[tuple[Section, int, slice]]] = {}
        for section, spans in zip(self.head.sections, self._spans, strict=True):
            for number, (name, first, size) in enumerate(spans):
                found.setdefault(name, []).append((section, number, slice(first, first + size)))
        return found

    @property
    def names(self) -> Set[str]:
        """Tensors of the base that change."""
        return self._parts.keys()

    def changed(
        self, base: Mapping[str, Tensor], *, threads: int = 2, into: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is not the base's, new, one after the other; `threads` sections are worked on ahead. Where `into` has a tensor
        of the name, that is overwritten and given back: memory that is there already is two to four times faster than new one.
        Raises `BadInput`."""
        for name, tensor in (into or {}).items():
            if not tensor.is_contiguous() or tensor.shape != base[name].shape or tensor.dtype != base[name].dtype:
                raise ValueError(f"{name} cannot be written into a tensor of another shape, kind or order")
        try:
            yield from self._patched(base, threads, into or {})
            for tensor in self.head.whole:
                yield tensor.name, self._sent(tensor)
        except DAMAGED as error:
            raise self._damaged(error) from error

    def patched(self, names: Iterable[str], base: Mapping[str, Tensor], *, in_place: bool = False) -> dict[str, Tensor]:
        """Those of these tensors that change, new; `base` has them at least. `in_place`: they are the base's own, of which there is nothing
        left where this raises `BadInput`."""
        wanted = [name for name in names if name in self._parts]
        found = {name: base[name] if in_place else base[name].clone(memory_format=torch.contiguous_format) for name in wanted}
        try:
            for name, tensor in found.items():
                bits = bits_of(tensor)
                for section, number, part in self._parts[name]:
                    self._opened(section).apply(number, bits[part])
        except DAMAGED as error:
            raise self._damaged(error) from error
        return found

    def require(self, digest: str) -> None:
        """Raises `BadInput` when the state after the delta is not the one it promises."""
        if digest != self.head.digest:
            raise BadInput(f"the delta gave the weights {digest[:12]}, not {self.head.digest[:12]}: fetch it again, or load a keyframe")

    def _patched(self, base: Mapping[str, Tensor], threads: int, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        left = Counter(name for spans in self._spans for name, _, _ in spans)
        made: dict[str, Tensor] = {}
        under_way: deque[tuple[list[Span], Future[None]]] = deque()

        def ended() -> Iterator[tuple[str, Tensor]]:
            spans, work = under_way.popleft()
            work.result()
            left.subtract(name for name, _, _ in spans)
            for name in dict.fromkeys(name for name, _, _ in spans):
                if not left[name]:
                    yield name, made.pop(name)

        with ThreadPoolExecutor(threads) as pool:
            for section, spans in zip(self.head.sections, self._spans, strict=True):
                for name in dict.fromkeys(name for name, _, _ in spans):
                    if name not in made:
                        made[name] = into[name] if name in into else torch.empty_like(base[name], memory_format=torch.contiguous_format)
                pieces = [(base[name], made[name]) for name, _, _ in spans]
                under_way.append((spans, pool.submit(self._fill, section, spans, pieces)))
                if len(under_way) > threads:
                    yield from ended()
            while under_way:
                yield from ended()

    def _fill(self, section: Section, spans: list[Span], pieces: list[tuple[Tensor, Tensor]]) -> None:
        """Copy and change the parts of one section."""
        streams = section.open(self._delta, relative=self._relative)
        for number, ((name, first, size), (old, new)) in enumerate(zip(spans, pieces, strict=True)):
            before, after, end = bits_of(old), bits_of(new), first + size
            copied = slice(self._copied_from[name, first], end if end < self._ends[name] else len(before))
            after[copied] = before[copied]
            streams.apply(number, after[first:end])

    def _opened(self, section: Section) -> Applied:
        if self._last is None or self._last[0] is not section:
            self._last = section, section.open(self._delta, relative=self._relative)
        return self._last[1]

    def _sent(self, tensor: Whole) -> Tensor:
        frame = self._delta[tensor.start : tensor.start + tensor.length]
        raw = opened(frame, [tensor.nbytes + tensor.beside])[tensor.first : tensor.first + tensor.nbytes]
        return torch.from_numpy(raw.copy()).view(DTYPES[tensor.dtype]).view(tensor.shape)

    def _check(self, base: Mapping[str, Tensor]) -> None:
        """Raises `ValueError`, `KeyError` for what no delta to this base can say."""
        ends: dict[str, int] = {}
        self._copied_from: dict[tuple[str, int], int] = {}
        """By part: elements before it that no part has are copied with it."""
        spans = [span for section in self._spans for span in section]
        for name, parts in groupby(spans, key=lambda span: span[0]):
            if name in ends:
                raise ValueError(f"{name} comes twice")
            ends[name] = 0
            for _, first, size in parts:
                if first < ends[name]:
                    raise ValueError(f"parts of {name} lie in one another")
                self._copied_from[name, first] = ends[name]
                ends[name] = first + size
        self._ends = ends
        sent = [tensor.name for tensor in self.head.whole]
        if len(set(sent)) < len(sent) or not ends.keys().isdisjoint(sent):
            raise ValueError("a tensor comes twice")
        if sum(tensor.nbytes for tensor in self.head.whole) > most_whole(sum(tensor.nbytes for tensor in base.values())):
            raise ValueError("more is new than a delta carries: a keyframe would")

    def _damaged(self, error: BaseException) -> BadInput:
        return BadInput(f"the delta to {self.head.digest[:12]} is damaged ({error}): fetch it again, or load a keyframe")


def most_whole(base_bytes: int) -> int:
    """Bytes of whole tensors that a delta to such a base may carry; what is more new than that is sent as a snapshot."""
    return base_bytes + (1 << 20)


def _require_few(whole: int, base_bytes: int) -> None:
    if whole > most_whole(base_bytes):
        raise Refused(f"{whole} bytes are new and a delta to these weights carries {most_whole(base_bytes)}: send a snapshot")


def _whole(tensor: Tensor) -> bytes:
    return compressed(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _grouped(names: list[str], tensors: Mapping[str, Tensor], most: int) -> list[tuple[str, list[Span]]]:
    """Parts of neighbours by name, of one kind and about `most` bytes together."""
    groups: list[tuple[str, list[Span]]] = []
    for dtype, mine in groupby(sorted(names, key=lambda name: (_kind(tensors[name]), name)), key=lambda name: _kind(tensors[name])):
        filled = most
        for name in mine:
            tensor = tensors[name]
            for first in range(0, tensor.numel(), PART):
                size = min(PART, tensor.numel() - first)
                if filled >= most:
                    groups.append((dtype, []))
                    filled = 0
                groups[-1][1].append((name, first, size))
                filled += size * tensor.element_size()
    return groups


def _kind(tensor: Tensor) -> str:
    return SAFETENSORS_DTYPES[tensor.dtype]


def _alike(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and new.element_size() in WIDTHS
