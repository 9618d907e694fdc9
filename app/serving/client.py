"""What the gateway holds: the `Engines` port over HTTP, several engines, the one that has the version.

Before the first token a refusal moves the request to the next engine; after it nothing is retried: the caller hears how it ended.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

import httpx
import msgspec

from app.domain.errors import BadRequest, Overloaded, RatchetError, Unavailable
from app.domain.serving import GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.turns import FinishReason
from app.serving.refusals import require_one_healthy, worst

FORGET_S = 2.0
"""How long the client remembers which engines hold a version before it asks again."""


class HttpEngines:
    """The `Engines` port over the embedded engine's HTTP side.

    `addresses` (the ledger) says which engines hold a digest; without it, or when it knows none, every URL is tried. Engines are
    taken in turn, so that equal ones share the load. Belongs to the event loop it is first used on.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        addresses: Callable[[str], list[str]] | None = None,
        client: httpx.AsyncClient | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._addresses = addresses
        # reading waits for the next token, not for the whole answer; the pool is as large as a gateway has clients
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(timeout_s, connect=2.0)
        self._client = client or httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._turn = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        """Sample one completion. Raises `Unavailable`, `Overloaded`, `BadRequest`, all before the first chunk only.

        An engine that dies in the middle yields a last chunk with finish_reason `error`. Closing the iterator aborts the request.
        """
        async with self._open("/generate", request) as response:
            chunk: GenerationChunk | None = None
            try:
                async for line in response.aiter_lines():
                    chunk = msgspec.json.decode(line, type=GenerationChunk)
                    yield chunk
            except httpx.HTTPError as error:
                yield _broken(f"the engine went away while answering ({type(error).__name__})")
                return
            if chunk is None or chunk.finish_reason is None:
                yield _broken("the engine ended its answer too early")

    async def ping(self) -> None:
        """Raise `Unavailable` when no engine answers."""
        await require_one_healthy(self._client, self._urls, kind="engine", cure="start one with `ratchet engine`")

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Length of the prompt as the engine would feed it."""
        async with self._open("/count", request) as response:
            return int(msgspec.json.decode(await response.aread())["prompt_tokens"])

    async def score(self, request: ScoreRequest) -> list[float]:
        """Log-probability of each completion token."""
        async with self._open("/score", request) as response:
            scored = msgspec.json.decode(await response.aread(), type=_Scored)
        return [-math.inf if value is None else value for value in scored.logprobs]

    @asynccontextmanager
    async def _open(self, path: str, request: GenerateRequest | ScoreRequest) -> AsyncIterator[httpx.Response]:
        """The first engine's answer that is not a refusal. Raises what the engines said when all refused."""
        body = msgspec.json.encode(request)
        refusals: list[RatchetError] = []
        for url in await self._candidates(request.digest):
            try:
                sent = self._client.build_request("POST", url + path, content=body, headers={"content-type": "application/json"})
                response = await self._client.send(sent, stream=True)
            except httpx.HTTPError as error:
                self._known.pop(request.digest, None)
                refusals.append(
                    Unavailable(f"the engine at {url} does not answer ({type(error).__name__}): start it with `ratchet engine`")
                )
                continue
            try:
                if response.status_code == 200:
                    yield response
                    return
                refusals.append(await _refusal(response))
            finally:
                await response.aclose()
            if isinstance(refusals[-1], BadRequest):
                break
        raise worst(refusals, otherwise=f"no engine holds the weights {request.digest[:12]}")

    async def _candidates(self, digest: str) -> list[str]:
        """Engines to try: those said to hold the version, beginning with another one each time; else all."""
        known_at, urls = self._known.get(digest, (0.0, []))
        if self._addresses is not None and time.monotonic() - known_at > FORGET_S:
            urls = await asyncio.to_thread(self._addresses, digest)
            self._known[digest] = (time.monotonic(), urls)
        urls = urls or self._urls
        self._turn += 1
        first = self._turn % len(urls) if urls else 0
        return urls[first:] + urls[:first]


def _broken(message: str) -> GenerationChunk:
    return GenerationChunk(text="", tokens=[], logprobs=[], finish_reason=FinishReason.ERROR, message=message)


async def _refusal(response: httpx.Response) -> RatchetError:
    """The engine's refusal as the error it stands for."""
    try:
        error = msgspec.json.decode(await response.aread())["error"]
        message, param, code = str(error["message"]), error.get("param"), error.get("code") or "invalid_request"
    except (msgspec.DecodeError, KeyError, TypeError, httpx.HTTPError):
        message, param, code = f"the engine answered {response.status_code}", None, "invalid_request"
    if response.status_code == 429:
        return Overloaded(message, retry_after_s=float(response.headers.get("retry-after", "1")))
    if response.status_code == 400:
        return BadRequest(message, param=param, code=code)
    return Unavailable(message)


class _Scored(msgspec.Struct):
    """The engine's answer to `/score`."""

    logprobs: list[float | None]
