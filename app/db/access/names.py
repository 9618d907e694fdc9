"""Whether a payload that nobody can decode names somebody: a dead letter may be anything."""

import json
from collections.abc import Iterable, Mapping

_APART = bytes.maketrans(b"\"'\\,:{}[]", b" " * 9)
"""JSON's punctuation as blanks: what is left are words, and cutting at blanks is what Python does fastest."""


def in_words(names: Iterable[str]) -> dict[int, set[bytes]]:
    """The names as payloads have them, cut like these, by how many words they are: an id may have blanks and punctuation in it."""
    by_size: dict[int, set[bytes]] = {}
    for name in names:
        for written in (name, json.dumps(name), json.dumps(name, ensure_ascii=False)):
            words = written.encode().translate(_APART).split()
            by_size.setdefault(len(words), set()).add(b" ".join(words))
    return by_size


def has_one_of(payload: bytes, wanted: Mapping[int, set[bytes]]) -> bool:
    """Whether a payload has one of these names in it."""
    words = payload.translate(_APART).split()
    return any(
        not names.isdisjoint(words if size == 1 else map(b" ".join, zip(*(words[n:] for n in range(size)), strict=False)))
        for size, names in wanted.items()
    )
