"""How a client asks and wants to be answered: chat completions are the gateway's own style, others are translated into it and back."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from app.api.chat.recording import Recording
from app.api.telemetry.intake import BRACKETS, more_than
from app.domain.errors import BadRequest
from app.domain.telemetry.serving import GenerationChunk


class Stream(Protocol):
    """Writes one answer as server-sent events."""

    def first(self) -> bytes: ...
    def chunk(self, chunk: GenerationChunk) -> bytes: ...
    def last(self, chunk: GenerationChunk) -> bytes: ...
    def failure(self, body: bytes) -> bytes: ...


class Style(Protocol):
    """Writes the answers to one request: one, or `n` where chat completions and completions ask for so many."""

    def whole(self, answers: Sequence[tuple[Recording, list[dict[str, Any]]]]) -> bytes:
        """The body of the finished answers, each with its log-probability items."""
        ...

    def streaming(self, recordings: Sequence[Recording], index: int) -> Stream:
        """A writer of one of the answers."""
        ...

    def end(self, recordings: Sequence[Recording]) -> bytes:
        """What follows when all of them are written."""
        ...


MOST_BRACKETS = 80_000
"""`{` and `[` in one body, those in texts included: four times what a list of messages may have of values, and 2 MB of dense code."""


def bounded(raw: bytes, *, most: int = MOST_BRACKETS) -> bytes:
    """The body again; refused before it is decoded where that would make too many objects. Raises `BadRequest`."""
    if more_than(most, raw, *BRACKETS):
        raise BadRequest(f"the body has more than {most} brackets: send less at once", code="too_many_values")
    return raw


Read = Callable[[bytes], tuple[bytes, Style]]
"""The body of a chat completion that says what a body says, and how its answer is written. Raises `BadRequest`."""
