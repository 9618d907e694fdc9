"""`POST /v1/chat/completions` as an ASGI application: it must notice when the client goes away, streaming or not."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from app.api.chat import answer
from app.api.chat.gateway import Gateway, Opened
from app.api.chat.recording import Recording
from app.api.chat.sizes import BYTES_PER_WORK, largest_body
from app.api.chat.style import Read, Stream, Style
from app.api.entry.access import Access
from app.api.errors import problem
from app.api.telemetry.intake import Intake
from app.domain.access import Scope
from app.domain.errors import BadRequest, RatchetError
from app.domain.telemetry.serving import GenerationChunk
from app.listening.bodies import TOO_LARGE
from app.listening.errors import HttpError
from app.listening.leaving import while_connected

Chunks = AsyncGenerator[tuple[int, GenerationChunk], None]
"""Chunks of the answers to one request, each with its answer's index."""
_JSON, _SSE = b"application/json", b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class ChatRoute:
    """The endpoint."""

    access: Access
    intake: Intake
    gateway: Gateway
    read: Read = answer.read
    """How it is asked here, and answered."""
    running: set["asyncio.Future[None]"] = field(default_factory=set["asyncio.Future[None]"])
    """Answers under way, so that a stop can end and record them."""

    async def finish(self, *, drain_s: float, grace_s: float) -> None:
        """Wait for the running answers, then end those that take too long; all of them are recorded when this returns."""
        if self.running:
            await asyncio.wait(set(self.running), timeout=drain_s)
        for answering in self.running:
            answering.cancel()
        if self.running:
            await asyncio.wait(set(self.running), timeout=grace_s)
        await self.gateway.shadows.close()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer one request; stop sampling when the client goes away."""
        try:
            opened, style = await self._open(scope, receive)
        except RatchetError as error:
            await _send_problem(send, error)
            return
        answering = self._started(self._answer(opened, style, send))
        answering.add_done_callback(lambda _: [one.release() for one in opened])
        await while_connected(receive, answering)

    def _started(self, work: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
        answering = asyncio.ensure_future(work)
        self.running.add(answering)
        answering.add_done_callback(self.running.discard)
        return answering

    async def _open(self, scope: AsgiScope, receive: Receive) -> tuple[tuple[Opened, ...], Style]:
        headers = dict(scope["headers"])
        caller = await self.access.caller(headers, Scope.SAMPLE)
        body = await self._body(scope, receive)
        try:
            chars = len(body) // BYTES_PER_WORK
            asked, style = await self.gateway.workshop.do(lambda: self.read(body), chars=chars, share=caller.share)
            return await self.gateway.open(asked, headers, caller), style
        finally:
            self.intake.release(len(body))

    async def _body(self, scope: AsgiScope, receive: Receive) -> bytes:
        """The body; one that is too large is said to be what clients know how to shorten."""
        most = largest_body(self.gateway.policies.values(), self.intake.limits)
        try:
            return await self.intake.read(scope, receive, max_bytes=most)
        except HttpError as error:
            if error.code != TOO_LARGE:
                raise
            raise BadRequest(
                f"this model's maximum context length is exceeded: the body is larger than {most} bytes, more than any model here takes; "
                "shorten the conversation or its tools",
                param="messages", code="context_length_exceeded",
            ) from error  # fmt: skip

    async def _answer(self, opened: Sequence[Opened], style: Style, send: Send) -> None:
        recordings = [self.gateway.recording(one) for one in opened]
        served = [self.gateway.serve(one, recording) for one, recording in zip(opened, recordings, strict=True)]
        async with aclosing(merged(served)) as chunks:
            answering = self._stream if opened[0].request.stream else self._whole
            await answering(recordings, chunks, style, send)

    async def _whole(self, recordings: Sequence[Recording], chunks: Chunks, style: Style, send: Send) -> None:
        items: list[answer.Items] = [[] for _ in recordings]
        try:
            async for index, chunk in chunks:
                items[index] += answer.logprob_items(chunk) if recordings[index].request.logprobs else []
        except RatchetError as error:
            await _send_problem(send, error)
            return
        await _send(send, 200, _JSON, style.whole(list(zip(recordings, items, strict=True))), _named(recordings[0]))

    async def _stream(self, recordings: Sequence[Recording], chunks: Chunks, style: Style, send: Send) -> None:
        """The status line waits for the first token, so that an engine's refusal is an HTTP error and not half a stream."""
        try:
            first = await anext(chunks)
        except RatchetError as error:
            await _send_problem(send, error)
            return
        headers = [(b"content-type", _SSE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *_named(recordings[0])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        writers = [style.streaming(recordings, index) for index in range(len(recordings))]
        await _send_more(send, b"".join(writer.first() for writer in writers))
        try:
            await _send_more(send, _written(writers, *first))
            async for index, chunk in chunks:
                await _send_more(send, _written(writers, index, chunk))
            await _send_more(send, style.end(recordings))
        except RatchetError as error:
            await _send_more(send, writers[0].failure(problem(error).body))
        await send({"type": "http.response.body", "body": b""})


def _written(writers: Sequence[Stream], index: int, chunk: GenerationChunk) -> bytes:
    return writers[index].chunk(chunk) if chunk.finish_reason is None else writers[index].last(chunk)


async def merged(served: Sequence[AsyncGenerator[GenerationChunk, None]]) -> Chunks:
    """The chunks of several answers as they come, each with its answer's index. When one fails, or nobody listens any more, all end."""
    if len(served) == 1:
        async with aclosing(served[0]) as only:
            async for chunk in only:
                yield 0, chunk
        return
    heard: asyncio.Queue[tuple[int, GenerationChunk | None]] = asyncio.Queue()

    async def listen(index: int) -> None:
        try:
            async with aclosing(served[index]) as one:
                async for chunk in one:
                    heard.put_nowait((index, chunk))
        finally:
            heard.put_nowait((index, None))

    listening = [asyncio.create_task(listen(index)) for index in range(len(served))]
    try:
        left = len(listening)
        while left:
            index, chunk = await heard.get()
            if chunk is None:
                await listening[index]
                left -= 1
            else:
                yield index, chunk
    finally:
        for task in listening:
            task.cancel()
        await asyncio.wait(listening)


def _named(recording: Recording) -> list[tuple[bytes, bytes]]:
    request = recording.request
    return [
        (b"x-ratchet-version", recording.arm.digest.encode()),
        (b"x-ratchet-inference-id", request.inference_id.encode()),
        (b"x-ratchet-episode-id", request.episode_id.encode("ascii", "replace")),
    ]


async def _send_problem(send: Send, error: RatchetError) -> None:
    answer_ = problem(error)
    extra = [(name.lower().encode(), value.encode()) for name, value in answer_.headers.items()]
    await _send(send, answer_.status, _JSON, answer_.body, extra)


async def _send(send: Send, status: int, kind: bytes, body: bytes, extra: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_more(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
