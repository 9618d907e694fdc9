"""The order of work: which turns make one Adam step, and which of those go through the model together. A pure function of batch and seed;
a checkpoint keeps it by the turns' ids, so that a resumed run does what the killed one would have done, whoever was erased meanwhile.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.training.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Step:
    """One Adam step: micro-batches of indices into the samples."""

    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def turns(self) -> tuple[int, ...]:
        """All indices of the step."""
        return tuple(index for micro in self.micro_batches for index in micro)


def plan_steps(samples: Sequence[Sample], *, turns_per_step: int, micro_batch_tokens: int, seed: int) -> tuple[Step, ...]:
    """Shuffle the units, deal them to steps of nearly equal size, and cut each step into micro-batches.

    A unit is what shares tokens: the turns of an episode, and turns with the same prompt.
    """
    units = _units(samples)
    random.Random(seed).shuffle(units)
    count = max(1, round(len(samples) / turns_per_step))
    dealt: list[list[int]] = [[] for _ in range(min(count, len(units)))]
    for unit in sorted(units, key=len, reverse=True):  # large ones first, so that the sizes come out even; the sort keeps the shuffle
        min(dealt, key=len).extend(unit)
    return tuple(Step(micro_batches=cut_micro_batches(samples, turns, micro_batch_tokens)) for turns in dealt if turns)


def by_name(steps: Sequence[Step], samples: Sequence[Sample]) -> list[list[list[str]]]:
    """The plan for a checkpoint: inference ids instead of indices."""
    return [[[samples[index].item.inference_id for index in micro] for micro in step.micro_batches] for step in steps]


def by_index(plan: Sequence[Sequence[Sequence[str]]], samples: Sequence[Sample]) -> tuple[Step, ...]:
    """A checkpoint's plan, without the turns that are gone. A step that lost all of its turns stays, empty: steps are known by number."""
    places = {sample.item.inference_id: index for index, sample in enumerate(samples)}
    left = [[tuple(places[name] for name in micro if name in places) for micro in step] for step in plan]
    return tuple(Step(micro_batches=tuple(micro for micro in step if micro)) for step in left)


def cut_micro_batches(samples: Sequence[Sample], turns: Sequence[int], micro_batch_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Turns with a record of their experts and turns without one go apart: a pass replays for all of its turns or for none."""
    plain = [turn for turn in turns if samples[turn].payload.routed_experts is None]
    recorded = [turn for turn in turns if samples[turn].payload.routed_experts is not None]
    return _cut(samples, plain, micro_batch_tokens) + _cut(samples, recorded, micro_batch_tokens)


def _cut(samples: Sequence[Sample], turns: Sequence[int], micro_batch_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours by their tokens share the most, so cut the sorted turns where the new tokens reach the limit; a longer turn goes alone."""
    micro_batches: list[tuple[int, ...]] = []
    current: list[int] = []
    filled, previous = 0, ()
    for index in sorted(turns, key=lambda i: samples[i].tokens):
        tokens = samples[index].tokens
        new = len(tokens) - common_length(previous, tokens)
        if current and filled + new > micro_batch_tokens:
            micro_batches.append(tuple(current))
            current, filled, new = [], 0, len(tokens)
        current.append(index)
        filled, previous = filled + new, tokens
    return (*micro_batches, tuple(current)) if current else tuple(micro_batches)


def _units(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices grouped by episode and by prompt, transitively (union-find)."""
    parent = list(range(len(samples)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[object, int] = {}
    for index, sample in enumerate(samples):
        for key in (("episode", sample.item.episode_id), ("prompt", sample.payload.prompt_tokens)):
            parent[root(index)] = root(first.setdefault(key, index))
    units: dict[int, list[int]] = {}
    for index in range(len(samples)):
        units.setdefault(root(index), []).append(index)
    return list(units.values())


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
