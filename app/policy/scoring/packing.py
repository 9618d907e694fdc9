"""Packing: many sequences as one row of tokens, with shared beginnings computed once.

A packed row is a forest. Sequences that begin alike (the same system prompt, the turns of one chain, several answers to one prompt)
share the nodes of their common beginning; every token attends to its ancestors and to nothing else, with the position it has in its own
sequence. So nothing is padded, nothing is computed twice, and no sequence sees another.

    "S A x"   "S A y"   "S B z"        row:  S A x y B z        x sees S A x · y sees S A y · z sees S B z

Legend of shapes: N tokens in the row, M scored tokens, S tokens of one sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MIN_SAVED_TOKENS = 8
"""A shared node is made where it saves at least this many tokens; below, its own attention call costs more than the tokens."""


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """A sequence of which the tokens from `first_scored` on are asked for their log-probabilities."""

    tokens: tuple[int, ...]
    first_scored: int
    """At least 1: the first token of a sequence has nothing that predicts it."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A run of tokens of the row, and the runs before it that it may see, oldest first."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """What the model is fed."""

    input_ids: torch.Tensor
    """[N] int64"""
    position_ids: torch.Tensor
    """[N] int64: each token's place in its own sequence."""
    nodes: tuple[Node, ...]
    predictors: torch.Tensor
    """[M] int64: places in the row whose hidden state predicts each scored token; repeats where answers share a prompt."""
    targets: torch.Tensor
    """[M] int64: the scored tokens themselves."""
    lengths: tuple[int, ...]
    """Scored tokens of each sequence, in the order given; they sum to M."""

    def to(self, device: torch.device) -> "PackedRow":
        """The same row on another device."""
        moved = (self.input_ids.to(device), self.position_ids.to(device), self.predictors.to(device), self.targets.to(device))
        return PackedRow(
            input_ids=moved[0], position_ids=moved[1], nodes=self.nodes, predictors=moved[2], targets=moved[3], lengths=self.lengths
        )  # fmt: skip


def pack(sequences: Sequence[ScoredSequence], *, share_prefixes: bool = True) -> PackedRow:
    """Lay the sequences out as one row; `share_prefixes=False` keeps each in a node of its own."""
    row = _Row([list(s.tokens) for s in sequences])
    if share_prefixes:
        order = sorted(range(len(sequences)), key=lambda i: sequences[i].tokens)
        row.grow(order, depth=0, ancestors=())
    else:
        for index in range(len(sequences)):
            row.add([index], 0, len(sequences[index].tokens), ())
    predictors, targets = row.scored(sequences)
    return PackedRow(
        input_ids=torch.tensor(row.tokens, dtype=torch.long),
        position_ids=torch.tensor(row.positions, dtype=torch.long),
        nodes=tuple(row.nodes),
        predictors=torch.tensor(predictors, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        lengths=tuple(len(s.tokens) - s.first_scored for s in sequences),
    )


class _Row:
    """A row under construction; `places[i][j]` is where token j of sequence i lies."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self.sequences = sequences
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.nodes: list[Node] = []
        self.places: list[list[int]] = [[] for _ in sequences]

    def grow(self, order: list[int], *, depth: int, ancestors: tuple[tuple[int, int], ...]) -> None:
        """Add the sequences in `order` (sorted by their tokens, equal up to `depth`) below `ancestors`."""
        if len(order) == 1:
            self.add(order, depth, len(self.sequences[order[0]]), ancestors)
            return
        shared = _common_length(self.sequences[order[0]], self.sequences[order[-1]])
        if (shared - depth) * (len(order) - 1) >= MIN_SAVED_TOKENS:
            ancestors = self.add(order, depth, shared, ancestors)
            depth = shared
        for group in self._groups(order, shared):
            self.grow(group, depth=depth, ancestors=ancestors)

    def _groups(self, order: list[int], shared: int) -> Iterator[list[int]]:
        """Cut `order` wherever the token after the shared beginning changes; a sequence that ends there is a group of its own."""
        group: list[int] = []
        last: int | None = None
        for index in order:
            tokens = self.sequences[index]
            following = tokens[shared] if len(tokens) > shared else None
            if group and (following is None or following != last):
                yield group
                group = []
            group.append(index)
            last = following
        yield group

    def add(self, owners: list[int], start: int, end: int, ancestors: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Add tokens `start`…`end` of the owners as one node; returns the ancestors of what comes below it."""
        if end == start:
            return ancestors
        first = len(self.tokens)
        self.tokens += self.sequences[owners[0]][start:end]
        self.positions += range(start, end)
        self.nodes.append(Node(start=first, end=len(self.tokens), ancestors=ancestors))
        for owner in owners:
            self.places[owner] += range(first, len(self.tokens))
        return (*ancestors, (first, len(self.tokens)))

    def scored(self, sequences: Sequence[ScoredSequence]) -> tuple[list[int], list[int]]:
        """Where each scored token is predicted, and the token."""
        predictors: list[int] = []
        targets: list[int] = []
        for index, sequence in enumerate(sequences):
            if not 1 <= sequence.first_scored <= len(sequence.tokens):
                raise ValueError(f"first_scored is {sequence.first_scored} of {len(sequence.tokens)} tokens: give a number from 1 to that")
            predictors += self.places[index][sequence.first_scored - 1 : -1]
            targets += sequence.tokens[sequence.first_scored :]
        return predictors, targets


def _common_length(a: list[int], b: list[int]) -> int:
    """Length of the common beginning of two sequences."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
