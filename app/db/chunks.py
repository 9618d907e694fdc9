"""Long IN lists in pieces: databases bound the number of parameters, and a few sizes keep the compiled statements cached."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

IN_LIST = 500


def chunked(items: Iterable[T], size: int = IN_LIST) -> Iterator[list[T]]:
    """The items in lists of at most `size`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
