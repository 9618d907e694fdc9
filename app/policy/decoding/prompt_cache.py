"""Prompts that were fed before: their keys and values, kept until the room is used up.

A product asks many things in the same words (a fixed task, a regeneration), and feeding 140 tokens of prompt to SmolLM2 costs as much
as decoding 50. Belongs to one decoder, so an entry is never used with other weights.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

Entry = list[tuple[Tensor, Tensor]]
"""Keys and values [K, T, D] per layer."""


class PromptCache:
    """The least recently used prompt leaves first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[int, ...], Entry] = OrderedDict()
        self.hits = 0

    def find(self, prompt: Sequence[int]) -> Entry | None:
        """What was kept of exactly this beginning."""
        key = tuple(prompt)
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return self._entries[key]

    def __contains__(self, prompt: Sequence[int]) -> bool:
        """Whether exactly this beginning is kept."""
        return tuple(prompt) in self._entries

    def wants(self, prompt: Sequence[int]) -> bool:
        """Whether keeping this prompt would add anything."""
        return self._max_bytes > 0 and prompt not in self

    def keep(self, prompt: Sequence[int], entry: Entry) -> None:
        """Keep a prompt's keys and values, making room; one that would fill more than half of it is not kept."""
        size = _size(entry)
        if 2 * size > self._max_bytes:
            return
        self._entries[tuple(prompt)] = entry
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= _size(oldest)

    def clear(self) -> None:
        """Give the memory back."""
        self._entries.clear()
        self._bytes = 0


def _size(entry: Entry) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in entry)
