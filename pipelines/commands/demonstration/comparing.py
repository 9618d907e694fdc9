"""The same question by the same person to the first version and to the last champion: what each answered, and what the person kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.simulation.diary import Entry

SHOWN_AT = (0.9, 0.7, 0.5)
"""Quantiles of the gain among all pairs of which one each is shown: a clear gain, a usual one, the median. Nobody picks the prettiest."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One question, two answers."""

    first: Entry
    last: Entry
    quantile: float = 0.0
    """Of the gain, among all pairs."""

    @property
    def gain(self) -> float:
        """Share kept of the last answer less that of the first, -1 … 1."""
        return self.last.share - self.first.share


def pairs_of(before: Sequence[Entry], after: Sequence[Entry], *, first: str, last: str) -> list[Pair]:
    """Answers by those two versions (digests) to the same visit of the same person."""
    asked = {entry.number: entry for entry in before if entry.version == first}
    return [
        Pair(first=asked[entry.number], last=entry)
        for entry in after
        if entry.version == last and entry.number in asked and asked[entry.number].question == entry.question
    ]


def typical(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair at each of the quantiles, each with another question; fewer where there are not so many."""
    ranked = sorted(pairs, key=lambda pair: (pair.gain, pair.first.number))
    chosen: list[Pair] = []
    for quantile in SHOWN_AT:
        at = min(len(ranked) - 1, int(quantile * len(ranked)))
        nearest = sorted(range(len(ranked)), key=lambda index: abs(index - at))
        shown = {pair.first.question for pair in chosen}
        found = next((ranked[index] for index in nearest if ranked[index].first.question not in shown), None)
        if found is not None:
            chosen.append(Pair(first=found.first, last=found.last, quantile=quantile))
    return chosen
