"""A version made from one that serves, without loading it: what changed is unpacked, changed and packed again, the rest is shared.

    packed (base) ─▶ plain ─▶ changed ─▶ packed (copy of the structure) ─▶ unpacked once more: the digest of what will really be multiplied

The base goes on sampling meanwhile and is never touched; whatever fails leaves it as it is. One tensor is plain at a time.

Where layers are served rounded (`app.policy.precision`), what is multiplied is not what was published: a delta cannot be applied to it,
and the digest is not of it. So those layers' weights are kept as published beside the rounded ones; they are what is patched and what the
digest is of, and the live ones, unpacked once more, have to be what they round to, bit for bit.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.domain.errors import BadInput, Refused
from app.domain.ports import Way
from app.policy.model import Policy
from app.policy.packing.linear import PackedEmbedding, PackedLinear, PackedPart
from app.policy.precision import rounded
from app.policy.storage.delta import Patch
from app.policy.storage.snapshot import WEIGHTS
from app.policy.storage.weights import digest_of


class Changing(Protocol):
    """What leads from one version to another."""

    @property
    def names(self) -> Collection[str]:
        """Tensors that may change."""
        ...

    def patched(self, names: Iterable[str], base: Mapping[str, Tensor], *, in_place: bool = False) -> Mapping[str, Tensor]:
        """Those of these tensors that do change, new; `in_place` allows to change those of the base and to give them back."""
        ...


class Snapshot:
    """A version's file as what leads to it, from whichever version of the line."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / WEIGHTS
        with safe_open(self._file, framework="pt") as file:
            self._names = frozenset(file.keys())

    @property
    def names(self) -> Collection[str]:
        """All of them."""
        return self._names

    def patched(self, names: Iterable[str], base: Mapping[str, Tensor], *, in_place: bool = False) -> Mapping[str, Tensor]:
        """Those whose bytes differ, new."""
        with safe_open(self._file, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in names if name in self._names}
        return {name: tensor for name, tensor in found.items() if not _same_bits(tensor, base[name])}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where tensors of the snapshot live in a model: one parameter, or one packed product of several layers."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    read: Callable[[], Sequence[Tensor]]
    """The plain tensors, in the model's dtype."""
    write: Callable[[Sequence[Tensor]], None]
    unpacked: bool = False
    """What is read was unpacked for the reader, who may change it."""
    tied: bool = False
    """A second, packed copy of a tensor that also lies elsewhere: packed from that, and stored and hashed once."""

    def plain(self) -> dict[str, Tensor]:
        """The tensors as a snapshot holds them."""
        return {name: _stored(tensor) for name, tensor in zip(self.names, self.read(), strict=True)}


class LiveWeights(Mapping[str, Tensor]):
    """The weights that a model multiplies by, unpacked when they are asked for; `digest_of` reads them like a snapshot's."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._where = {name: place for place in places if not place.tied for name in place.names}
        self._plain: dict[int, dict[str, Tensor]] = {}
        """The last two places: names of one layer alternate between its two products."""

    def __getitem__(self, name: str) -> Tensor:
        place = self._where[name]
        if id(place) not in self._plain:
            if len(self._plain) == 2:
                self._plain.pop(next(iter(self._plain)))
            self._plain[id(place)] = place.plain()
        return self._plain[id(place)][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def patched(base: Policy, steps: Sequence[Changing], *, digest: str) -> Policy:
    """The version `digest`, made from `base` by these steps.

    Raises `BadInput` when what came of it is not that version, `Refused` for a model whose parts are not all known here: load it whole.
    """
    model = _structure(base.model)
    live, published = places_of(model), dict(base.published)
    places = [_rounding(place, published, base) for place in live]
    known = {name for place in places for name in place.names}
    for step in steps:
        if not set(step.names) <= known:
            raise Refused(f"{sorted(set(step.names) - known)[:3]} are not where this engine knows them: load the version whole")
    changed = {name for place in places if not place.tied and _change(place, steps) for name in place.names}
    weights = LiveWeights(places)
    for place in places:
        if place.tied and not changed.isdisjoint(place.names):
            place.write([weights[name] for name in place.names])
    if (found := digest_of(LiveWeights(places))) != digest:
        raise BadInput(f"patching gave the weights {found[:12]}, not {digest[:12]}: load the version whole")
    _require_tied(places, weights, digest)
    _require_rounded(live, published, base)
    return replace(base, digest=digest, model=model, published=published)


def as_published(policy: Policy) -> Mapping[str, Tensor]:
    """Every tensor of a version as it was published, whatever it is served in."""
    return LiveWeights([_rounding(place, dict(policy.published), policy) for place in places_of(policy.model)])


def follow(base: Policy, way: Way, *, digest: str) -> Policy:
    """The version `digest` from the one that `way` begins at. Raises as `patched` does, and `StaleDelta`."""
    if way.snapshot is not None:
        return patched(base, [Snapshot(way.snapshot)], digest=digest)
    outline = _outline(base.model)
    steps, at = list[Patch](), base.digest
    for delta in way.deltas:
        steps.append(Patch(delta, outline, base_digest=at))
        at = steps[-1].head.digest
    if any(step.head.gone or step.head.whole for step in steps):
        raise Refused(f"the tensors of {digest[:12]} are others than those of {base.digest[:12]}: load the version whole")
    return patched(base, steps, digest=digest)


def _outline(model: PreTrainedModel) -> dict[str, Tensor]:
    """Names, shapes and kinds of a snapshot's tensors, without their content."""
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for place in places_of(model)
        for name, shape in zip(place.names, place.shapes, strict=True)
    }


def places_of(model: PreTrainedModel) -> list[Place]:
    """Every tensor of the model, by the name that snapshots give it. Raises `Refused` for a packed one without a name there."""
    embedding = model.get_input_embeddings()
    embedded = next(name for name, module in model.named_modules() if module is embedding)
    found: list[Place] = []
    parts: dict[int, list[tuple[str, PackedPart]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedPart):
            parts.setdefault(id(module.shared), []).append((name, module))
        elif isinstance(module, PackedEmbedding):
            found.append(_packed((name,), module.layer, [module.layer.rows]))
        elif isinstance(module, PackedLinear):
            is_head = module is model.get_output_embeddings() and bool(model.config.get_text_config().tie_word_embeddings)
            if not (isinstance(embedding, PackedEmbedding) and embedding.layer is module):  # else it is the embedding's place
                found.append(_packed((name,), module, [module.rows], tied=f"{embedded}.weight" if is_head else None))
            found += _bias((name,), module, [module.rows])
    for layers in parts.values():
        layers.sort(key=lambda layer: layer[1].index)
        names, shared = tuple(name for name, _ in layers), layers[0][1].shared
        found.append(_packed(names, shared.product, shared.sizes))
        found += _bias(names, shared.product, shared.sizes)
    taken = {name for place in found if not place.tied for name in place.names}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for own, parameter in module._parameters.items():
            holders.setdefault(id(parameter), []).append((module, own))
    return found + [_parameter(name, held, holders[id(held)]) for name, held in model.named_parameters() if name not in taken]


def _packed(names: tuple[str, ...], linear: PackedLinear, sizes: Sequence[int], *, tied: str | None = None) -> Place:
    return Place(
        names=(tied,) if tied is not None else tuple(f"{name}.weight" for name in names),
        shapes=tuple((size, linear.columns) for size in sizes),
        read=lambda: linear.plain().split(list(sizes)),
        write=lambda tensors: linear.pack(_joined(tensors)),
        unpacked=True,
        tied=tied is not None,
    )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors as one; where they are one still, which is how they were unpacked, nothing is copied."""
    first, memory = tensors[0], tensors[0].untyped_storage().data_ptr()
    ends = list(accumulate((tensor.nbytes for tensor in tensors), initial=first.data_ptr()))
    if all(
        tensor.is_contiguous() and tensor.data_ptr() == at and tensor.untyped_storage().data_ptr() == memory
        for tensor, at in zip(tensors, ends, strict=False)
    ):
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    return torch.cat(list(tensors))


def _bias(names: tuple[str, ...], linear: PackedLinear, sizes: Sequence[int]) -> list[Place]:
    if linear.bias is None:
        return []
    bias = linear.bias

    def write(tensors: Sequence[Tensor]) -> None:
        linear.bias = nn.Parameter(torch.cat(list(tensors)).to(bias.dtype), requires_grad=False)

    shapes = tuple((size,) for size in sizes)
    return [Place(names=tuple(f"{name}.bias" for name in names), shapes=shapes, read=lambda: bias.detach().split(list(sizes)), write=write)]


def _parameter(name: str, held: nn.Parameter, holders: Sequence[tuple[nn.Module, str]]) -> Place:
    """`holders`: the modules that have it under which name; a plain tied head holds the very same parameter."""

    def write(tensors: Sequence[Tensor]) -> None:
        new = nn.Parameter(tensors[0].to(held.dtype).clone(), requires_grad=False)
        for module, own in holders:
            setattr(module, own, new)

    return Place(names=(name,), shapes=(tuple(held.shape),), read=lambda: [cast("Tensor", getattr(*holders[0])).detach()], write=write)


def _change(place: Place, steps: Sequence[Changing]) -> bool:
    """Whether the steps change anything there."""
    wanted = [step for step in steps if any(name in step.names for name in place.names)]
    if not wanted:
        return False
    plain, changed = place.plain(), False
    for step in wanted:
        new = step.patched(plain, plain, in_place=place.unpacked)
        plain, changed = {**plain, **new}, changed or bool(new)
    if changed:
        place.write([plain[name] for name in place.names])
    return changed


def _rounding(place: Place, published: dict[str, Tensor], policy: Policy) -> Place:
    """A place of rounded layers is read as published; what is written is kept so, and rounded on its way into the model."""
    if not published.keys() >= set(place.names):
        return place

    def write(tensors: Sequence[Tensor]) -> None:
        published.update(zip(place.names, tensors, strict=True))
        place.write([rounded(tensor.to(policy.model.dtype), policy.precision) for tensor in tensors])

    return replace(place, read=lambda: [published[name] for name in place.names], write=write, unpacked=False)


def _require_rounded(live: Sequence[Place], published: Mapping[str, Tensor], policy: Policy) -> None:
    for place in live:
        if not published.keys() >= set(place.names):
            continue
        for name, tensor in zip(place.names, place.read(), strict=True):
            if not _same_bits(tensor, rounded(published[name].to(tensor.dtype), policy.precision)):
                raise BadInput(f"{name} is not what its published weights round to in {policy.precision}: load the version whole")


def _require_tied(places: Sequence[Place], weights: LiveWeights, digest: str) -> None:
    """The trap of a tied head: it is packed apart, so it may keep the old weights while every stored tensor is right."""
    for place in (place for place in places if place.tied):
        for name, tensor in place.plain().items():
            if not _same_bits(tensor, weights[name]):
                raise BadInput(f"the head of {digest[:12]} is not its embedding, which it is tied to: load the version whole")


def _structure(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules once more, sharing every tensor. Raises `Refused` where something hooks into them.

    A deep copy, but for what modules are full of: where `copy.deepcopy` goes through some twenty empty dictionaries of each, Python's lock
    is kept from the sampling thread more than twice as long.
    """
    if any(module._forward_hooks for module in model.modules()):
        raise Refused("this model is being recorded from, and cannot be copied: load the version whole")
    memo: dict[int, object] = {id(model.config): model.config}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    plain = [module for module in model.modules() if not hasattr(module, "__deepcopy__")]
    for module in plain:
        memo[id(module)] = type(module).__new__(type(module))
    for module in plain:
        vars(memo[id(module)]).update({name: _again(value, memo) for name, value in vars(module).items()})
    return copy.deepcopy(model, memo)


def _again(value: object, memo: dict[int, object]) -> object:
    """A deep copy of what a module has."""
    if value is None or isinstance(value, bool):
        return value
    if not value and isinstance(value, dict) and type(value) in {dict, OrderedDict}:
        return value.copy()
    return copy.deepcopy(value, memo)


def _stored(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
