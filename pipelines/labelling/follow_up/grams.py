"""Word and character n-grams of the beginning of a follow-up, counted the same way in training and in reading.

| block     | of                          | what                                                         |
|-----------|-----------------------------|--------------------------------------------------------------|
| `word`    | the first 150 characters    | words, runs of ! and ?, and pairs of neighbours              |
| `char`    | the same                    | 1 to 4 characters within a word and its borders              |
| `opening` | the first 25 characters     | 2 to 4 characters: how people begin decides more than length |
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from pipelines.labelling.follow_up.features import own_words

HEAD = 150
OPENING = 25
BLOCKS = ("word", "char", "opening")
_WORD = re.compile(r"\w[\w']*|[?!]+")


def grams(text: str) -> dict[str, Counter[str]]:
    """Counts by block."""
    own = own_words(text).lower()
    words = _WORD.findall(own[:HEAD])
    return {
        "word": Counter([*words, *(f"{a} {b}" for a, b in pairwise(words))]),
        "char": Counter(_characters(own[:HEAD].split(), 1, 4)),
        "opening": Counter(_characters(own[:OPENING].split(), 2, 4)),
    }


def weighted(counts: Mapping[str, int], rarity: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """(1 + log count) · rarity of each gram that `rarity` knows, as a vector of length 1 (tf-idf, Salton & Buckley 1988)."""
    values = {gram: (1.0 + math.log(count)) * rarity[gram] for gram, count in counts.items() if gram in rarity}
    length = math.sqrt(sum(value * value for value in values.values())) or 1.0
    return ((gram, value / length) for gram, value in values.items())


def rarities(counted: Iterable[Mapping[str, int]], *, at_least: int) -> dict[str, float]:
    """log((1 + n) / (1 + messages with it)) + 1 for each gram that is in at least so many of the n messages, in alphabetical order."""
    seen: Counter[str] = Counter()
    messages = 0
    for counts in counted:
        seen.update(counts.keys())
        messages += 1
    return {gram: math.log((1 + messages) / (1 + count)) + 1.0 for gram, count in sorted(seen.items()) if count >= at_least}


def _characters(words: Iterable[str], shortest: int, longest: int) -> Iterator[str]:
    for word in words:
        framed = f" {word} "
        for length in range(shortest, longest + 1):
            yield from (framed[at : at + length] for at in range(len(framed) - length + 1))
