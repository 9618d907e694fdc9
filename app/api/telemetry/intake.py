"""Reads request bodies within the limits of facts/ingestion.md, section 6.10: size, time, gzip ratio, bytes in flight."""

import asyncio
import time
import zlib
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import Receive, Scope

from app.api.workshop import breathe
from app.domain.errors import BadRequest, Overloaded
from app.listening.bodies import TOO_LARGE
from app.listening.errors import HttpError
from app.listening.headers import Headers

SMALL_GZIP = 4096
"""Bytes that are unpacked at once: at a hundred times their size at most a millisecond."""
GZIP_BYTES, GUNZIP_BYTES = 4 * 1024, 64 * 1024
"""Read and unpacked in one piece; the interpreter is free meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may cost."""

    event_bytes: int = 256 * 1024
    batch_bytes: int = 1024 * 1024
    batch_events: int = 500
    chat_bytes: int = 4 * 1024 * 1024
    """Less where no model takes so much (`app.api.chat.sizes.largest_body`)."""
    unzipped_bytes: int = 2 * 1024 * 1024
    """Of a batch after gunzip, which is read in one piece like any other: a chat has its own bound, packed or not."""
    gzip_ratio: int = 100
    depth: int = 32
    keys_per_object: int = 256
    nodes: int = 20_000
    """JSON values in one event, one list of messages or one list of tools: looking at each costs about half a microsecond."""
    tool_chars: int = 256 * 1024
    """Characters in one request's tools, all texts and names together."""
    summarised_chars: int = 1024 * 1024
    """Characters of a conversation that the gateway may still shorten by a summary of the model's own."""
    redacted_chars: int = 64 * 1024
    """Characters in one event or body that may be searched for personal data: at worst 20 µs each."""
    body_s: float = 15.0
    """A body that is not complete after this long is answered 408."""
    header_bytes: int = 16 * 1024
    in_flight_bytes: int = 32 * 1024 * 1024
    """Bodies being worked on, all requests together; above it 429."""


class Intake:
    """Hands out bodies; every body read must be released when its request is done (`release`)."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.in_flight = 0
        self._reading: dict[asyncio.Task[Any], float] = {}
        """When each body that is being read must be complete."""
        self._late: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def read(self, scope: Scope, receive: Receive, *, max_bytes: int | None = None) -> bytes:
        """The whole body, decompressed. Raises `HttpError` 408, 413, 415, 431 and `Overloaded`.

        On success `len(body)` bytes are counted as in flight until `release`; on an error nothing is.
        """
        limit = self.limits.batch_bytes if max_bytes is None else max_bytes
        encoding = self._check_headers(dict(scope["headers"]), limit)
        body = await self._in_time(receive, limit)
        if encoding == b"gzip":
            packed = body
            try:
                most = self.limits.unzipped_bytes if max_bytes is None else max_bytes
                body = self._gunzip(packed, most) if len(packed) <= SMALL_GZIP else await asyncio.to_thread(self._gunzip, packed, most)
            finally:
                self.release(len(packed))
            self._reserve(len(body))
        return body

    def release(self, size: int) -> None:
        """The request that had a body of this size is done."""
        self.in_flight -= size

    async def _in_time(self, receive: Receive, limit: int) -> bytes:
        """The body, or 408. One watcher looks after all readers: a timer for each would cost more than the rest of an event."""
        task = asyncio.current_task()
        assert task is not None
        self._reading[task] = time.monotonic() + self.limits.body_s
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            return await self._receive(receive, limit)
        except asyncio.CancelledError as error:
            if task not in self._late:
                raise
            task.uncancel()
            raise HttpError(
                408, f"the body was not complete after {self.limits.body_s:g} s: send it faster or in smaller batches", code="slow_body"
            ) from error
        finally:
            del self._reading[task]
            self._late.discard(task)

    async def _watch(self) -> None:
        """Stop readers whose time is over; ends when nobody reads."""
        while self._reading:
            await asyncio.sleep(min(1.0, self.limits.body_s / 4))
            now = time.monotonic()
            for task, deadline in self._reading.items():
                if now > deadline and task not in self._late:
                    self._late.add(task)
                    task.cancel()

    def _check_headers(self, headers: Headers, limit: int) -> bytes:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            raise HttpError(413, f"the body is larger than {limit} bytes: send smaller batches", code=TOO_LARGE)
        encoding = headers.get(b"content-encoding", b"").strip().lower()
        total = sum(map(len, headers)) + sum(map(len, headers.values()))
        if total > self.limits.header_bytes:
            raise HttpError(431, f"the headers are larger than {self.limits.header_bytes} bytes", code="headers_too_large")
        if encoding not in (b"", b"identity", b"gzip"):
            raise HttpError(415, f"content-encoding {encoding.decode('latin-1')!r} is not known: use gzip or none", code="encoding")
        return encoding

    async def _receive(self, receive: Receive, limit: int) -> bytes:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body = cast(bytes, message.get("body", b""))
            self._refuse_above(len(body), limit)
            self._reserve(len(body))
            return body
        return await self._receive_chunks(message, receive, limit)

    async def _receive_chunks(self, message: object, receive: Receive, limit: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        current = cast("dict[str, object]", message)
        try:
            while True:
                if current["type"] == "http.disconnect":
                    raise HttpError(400, "the connection was closed before the body was complete", code="disconnected")
                chunk = cast(bytes, current.get("body", b""))
                self._refuse_above(size + len(chunk), limit)
                self._reserve(len(chunk))
                size += len(chunk)
                chunks.append(chunk)
                if not current.get("more_body", False):
                    return b"".join(chunks)
                current = cast("dict[str, object]", await receive())
        except BaseException:
            self.release(size)
            raise

    def _refuse_above(self, size: int, limit: int) -> None:
        if size > limit:
            raise HttpError(413, f"the body is larger than {limit} bytes: send smaller batches", code=TOO_LARGE)

    def _reserve(self, size: int) -> None:
        if self.in_flight + size > self.limits.in_flight_bytes:
            raise Overloaded("too many bytes in flight: come back in a second", retry_after_s=1.0)
        self.in_flight += size

    def _gunzip(self, body: bytes, most: int) -> bytes:
        """Decompress within the limits, a piece at a time: a bomb is given up as soon as what was read of it made too much."""
        decoder, pieces, size, at = zlib.decompressobj(wbits=31), list[bytes](), 0, 0
        while not decoder.eof:
            packed = decoder.unconsumed_tail or body[at : at + GZIP_BYTES]
            at += 0 if decoder.unconsumed_tail else len(packed)
            try:
                piece = decoder.decompress(packed, GUNZIP_BYTES)
            except zlib.error as error:
                raise BadRequest(f"the body is not gzip: {error}", code="encoding") from error
            if not piece and not packed:
                break
            pieces.append(piece)
            size += len(piece)
            if size > min(most, GUNZIP_BYTES + at * self.limits.gzip_ratio):
                raise HttpError(413, f"the body is larger than {most} bytes or {self.limits.gzip_ratio} times its gzip size", code="gzip")
        if not decoder.eof or decoder.unused_data or at < len(body):
            raise BadRequest("the gzip body is cut off or has something behind its end", code="encoding")
        return b"".join(pieces)


NODES_A_STEP = 1000


def check_tree(value: object, limits: Limits) -> None:
    """Refuse JSON nested too deep or with too many keys in one object, and text that no database can hold."""
    if isinstance(value, str):
        _refuse_nul(value)
        return
    level: list[object] = [value]
    left = limits.nodes
    for _ in range(limits.depth):
        deeper: list[object] = []
        left -= len(level)
        if left < 0:
            raise BadRequest(f"there are more than {limits.nodes} values in it", param="value", code="too_many_values")
        for number, node in enumerate(level):
            if number % NODES_A_STEP == 0:
                breathe()
            if isinstance(node, dict):
                fields = cast("dict[str, object]", node)
                if len(fields) > limits.keys_per_object:
                    raise BadRequest(f"an object has more than {limits.keys_per_object} keys", param="value", code="too_many_keys")
                deeper.extend(fields)
                deeper.extend(fields.values())
            elif isinstance(node, list):
                deeper.extend(cast("list[object]", node))
            elif isinstance(node, str):
                _refuse_nul(node)
        if not deeper:
            return
        level = deeper
    raise BadRequest(f"the value is nested deeper than {limits.depth} levels", param="value", code="too_deep")


BRACKETS = (b"{", b"[")
"""Decoding makes a list or an object of each, 0.3 us in one piece; those in texts count too."""
COUNTED_BYTES = 32 * 1024
"""Looked through at once: a tenth of a millisecond where there is nothing else."""


def more_than(most: int, raw: bytes, *marks: bytes) -> bool:
    """Whether the marks stand more than `most` times in it, together; looked for a piece at a time, and no further than that."""
    found = 0
    for start in range(0, len(raw), COUNTED_BYTES):
        found += sum(raw.count(mark, start, start + COUNTED_BYTES + len(mark) - 1) for mark in marks)
        if found > most:
            return True
        breathe()
    return False


def characters(value: object, *, at_most: int) -> int:
    """Characters of all texts in a JSON value, names of fields included; stops counting above `at_most`."""
    waiting, total = [value], 0
    while waiting and total <= at_most:
        node = waiting.pop()
        if isinstance(node, str):
            total += len(node)
        elif isinstance(node, dict):
            waiting += (part for pair in cast("dict[str, object]", node).items() for part in pair)
        elif isinstance(node, list):
            waiting += cast("list[object]", node)
    return total


def check_tags(tags: dict[str, str], limits: Limits) -> None:
    """`check_tree` for what cannot be nested, at a fraction of its cost."""
    if len(tags) > limits.keys_per_object:
        raise BadRequest(f"there are more than {limits.keys_per_object} tags", param="tags", code="too_many_keys")
    for name, value in tags.items():
        _refuse_nul(name, param="tags")
        _refuse_nul(value, param="tags")


def _refuse_nul(text: str, *, param: str = "value") -> None:
    if "\x00" in text:
        raise BadRequest("a text contains the character U+0000, which no database can hold: remove it", param=param, code="nul")
