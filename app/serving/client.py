"""What the gateway holds: the `Engines` port over HTTP, several engines, the one that has the version.

Before the first token a refusal, and an engine that breaks or falls silent (`app.serving.silence`), moves the request to the next engine;
after it nothing is retried: the caller hears how it ended. Engines that fail again and again are passed over for a while
(`app.serving.replicas`). Engines of another region are asked where none of one's own that holds the version answers.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Self

import httpx
import msgspec

from app.domain.errors import BadRequest, Overloaded, RatchetError, Unavailable, asked_to_wait_s
from app.domain.ports import Holder
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import FinishReason
from app.serving.pieces import PIECE_BYTES, fields_of
from app.serving.refusals import DRAINING, HEALTH_TIMEOUT_S, NOT_CALLED_SO, Leaving, require_one_healthy, worst
from app.serving.replicas import Replicas, far_from
from app.serving.silence import Listening, Patience
from app.serving.whereabouts import Whereabouts

FORGET_S = 2.0
"""How long the client remembers which engines hold a version before it asks again."""


class HttpEngines:
    """The `Engines` port over the embedded engine's HTTP side.

    `holders` (the ledger) says which engines hold a digest; without it, or when it knows none, every URL is tried. Engines are
    taken in turn, so that equal ones share the load; `region`: those of it first. `key`: what they were started with. Belongs to the
    event loop it is first used on.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        holders: Callable[[str], Mapping[str, Holder]] | None = None,
        everywhere: Callable[[], list[str]] | None = None,
        region: str = "",
        key: str | None = None,
        client: httpx.AsyncClient | None = None,
        timeout_s: float = 120.0,
        patience: Patience | None = None,
        forget_s: float = FORGET_S,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._patience = patience or Patience()
        self._whereabouts = None if holders is None else Whereabouts(holders, nothing=dict[str, Holder](), forget_s=forget_s)
        self._region = region
        self._everywhere = everywhere
        """All engines that report, whatever they hold."""
        self._replicas = Replicas()
        # reading waits for the next token, not for the whole answer; the pool is as large as a gateway has clients
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(timeout_s, connect=2.0)
        self._client = client or httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self._client.headers.update({"authorization": f"Bearer {key}"} if key else {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._whereabouts is not None:
            self._whereabouts.close()
        await self._client.aclose()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        """Sample one completion. Raises `Unavailable`, `Overloaded`, `BadRequest`, all before the first chunk only.

        An engine that dies before its first token is passed over for the next; one that dies later yields a last chunk with
        finish_reason `error`. Closing the iterator aborts the request.
        """
        refusals: list[RatchetError] = []
        async with aclosing(self._willing("/generate", request, refusals)) as willing:
            async for url, response, listening in willing:
                lines = response.aiter_lines()
                chunk = await self._first(url, lines, listening, refusals)
                while chunk is not None:
                    yield _cut_known(request, chunk)
                    if chunk.finish_reason is not None:
                        return
                    chunk = await self._next(url, lines, listening)
        raise worst(refusals, otherwise=f"no engine holds the weights {request.digest[:12]}")

    async def _first(
        self, url: str, lines: AsyncIterator[str], listening: Listening, refusals: list[RatchetError]
    ) -> GenerationChunk | None:
        """The first chunk; None where the engine broke before it had sampled anything, which is added to the refusals."""
        chunk = await self._next(url, lines, listening)
        if chunk.finish_reason is FinishReason.ERROR and not chunk.tokens and not chunk.text:
            refusals.append(Unavailable(f"the engine at {url} broke before its first token: {chunk.message}"))
            return None
        if chunk.finish_reason is not FinishReason.ERROR:
            self._replicas.answered(url)
        return chunk

    async def _next(self, url: str, lines: AsyncIterator[str], listening: Listening) -> GenerationChunk:
        """The next chunk; one that ends the answer where there is none."""
        try:
            return await _read(await listening.hear(anext(lines)))
        except httpx.ReadTimeout as error:
            fault = f"the engine fell silent ({error})"
            self._replicas.silent(url, fault)
            return _broken(fault)
        except httpx.HTTPError as error:
            fault = f"the engine went away while answering ({type(error).__name__})"
        except StopAsyncIteration:
            fault = "the engine ended its answer too early"
        self._replicas.failed(url, fault)
        return _broken(fault)

    async def ping(self) -> None:
        """Raise `Unavailable` when no engine answers."""
        await require_one_healthy(self._client, self._urls, kind="engine", cure="start one with `ratchet engine`")

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Length of the prompt as the engine would feed it."""
        return int(msgspec.json.decode(await self._answer("/count", request))["prompt_tokens"])

    async def score(self, request: ScoreRequest) -> list[float]:
        """Log-probability of each completion token."""
        scored = msgspec.json.decode(await self._answer("/score", request), type=_Scored)
        return [-math.inf if value is None else value for value in scored.logprobs]

    async def sights(self) -> list[EngineSight]:
        """Every engine of the ledger and of the list."""
        held = await asyncio.to_thread(self._everywhere) if self._everywhere is not None else []
        return list(await asyncio.gather(*map(self._sight, dict.fromkeys([*held, *self._urls]))))

    async def _sight(self, url: str) -> EngineSight:
        health, ejected = self._replicas.health(url), self._replicas.ejected(url)
        try:
            said = (await self._client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)).json()
        except (httpx.HTTPError, ValueError) as error:
            fault = f"it does not answer ({type(error).__name__}): start it with `ratchet engine`"
            return EngineSight(address=url, answers=False, ejected=ejected, fault=fault)
        is_leaving = said.get("status") == "draining"
        return EngineSight(
            address=url, answers=True, ejected=ejected, draining=is_leaving, fault=health.fault, queue=said.get("load"),
            sampled_tokens=said.get("sampled_tokens"), acceptance=said.get("acceptance"), last_swap=said.get("last_swap"),
            precision=said.get("precision"), mismatch=said.get("mismatch") or None,
            drafters=said.get("drafters") or None,
        )  # fmt: skip

    async def _answer(self, path: str, request: GenerateRequest | ScoreRequest) -> bytes:
        """The first engine's whole answer that is not a refusal. Raises what the engines said when all refused."""
        refusals: list[RatchetError] = []
        async with aclosing(self._willing(path, request, refusals)) as willing:
            async for url, response, listening in willing:
                try:
                    answer = await listening.hear(response.aread())
                except httpx.HTTPError as error:
                    self._replicas.failed(url, type(error).__name__)
                    refusals.append(Unavailable(f"the engine at {url} broke off ({type(error).__name__}): start it with `ratchet engine`"))
                else:
                    self._replicas.answered(url)
                    return answer
        raise worst(refusals, otherwise=f"no engine holds the weights {request.digest[:12]}")

    async def _willing(
        self, path: str, request: GenerateRequest | ScoreRequest, refusals: list[RatchetError]
    ) -> AsyncGenerator[tuple[str, httpx.Response, Listening]]:
        """Engines that do not refuse, one after the other, each with its answer, which is closed when the next one is asked for."""
        body = msgspec.json.encode(request)
        for url in await self._candidates(request.digest):
            async with Listening(self._client, url, self._patience) as listening:
                response = await self._sent(url, path, body, listening, refusals)
                if response is None:
                    if self._whereabouts is not None:
                        self._whereabouts.forget(request.digest)
                    continue
                try:
                    if response.status_code == 200:
                        yield url, response, listening
                        continue
                    refusals.append(await _refusal(response))
                    self._note(url, response.status_code, refusals[-1])
                finally:
                    await response.aclose()
            if isinstance(refusals[-1], BadRequest):
                return

    async def _sent(self, url: str, path: str, body: bytes, listening: Listening, refusals: list[RatchetError]) -> httpx.Response | None:
        """The head of the engine's answer; None where it does not answer, which is added to the refusals."""
        try:
            sent = self._client.build_request("POST", url + path, content=body, headers={"content-type": "application/json"})
            return await listening.hear(self._client.send(sent, stream=True))
        except httpx.ReadTimeout as error:
            self._replicas.silent(url, str(error))
            refusals.append(Unavailable(f"the engine at {url} is gone ({error}): start it with `ratchet engine`"))
        except httpx.HTTPError as error:
            self._replicas.failed(url, type(error).__name__)
            refusals.append(Unavailable(f"the engine at {url} does not answer ({type(error).__name__}): start it with `ratchet engine`"))
        return None

    def _note(self, url: str, status: int, refusal: RatchetError) -> None:
        """What a refusal says about the engine."""
        if isinstance(refusal, Leaving):
            self._replicas.leaves(url)
        elif status >= 500 or status == DRAINING:
            self._replicas.failed(url, str(refusal))
        else:
            self._replicas.answered(url)

    async def _candidates(self, digest: str) -> list[str]:
        """Engines to try: those said to hold the version, of this region first, beginning with another one each time; else all."""
        found = {} if self._whereabouts is None else await self._whereabouts.of(digest)
        return self._replicas.ordered(list(found) or self._urls, far=far_from(self._region, found))


async def _read(line: str) -> GenerationChunk:
    """A chunk; a long prompt in it is read a piece at a time."""
    if len(line) <= PIECE_BYTES:
        return msgspec.json.decode(line, type=GenerationChunk)
    fields, prompt = await fields_of(line.encode(), long="prompt_tokens")
    return msgspec.structs.replace(msgspec.json.decode(msgspec.json.encode(fields), type=GenerationChunk), prompt_tokens=prompt)


def _cut_known(request: GenerateRequest, chunk: GenerationChunk) -> GenerationChunk:
    """An engine of before `top_k` passes over it and draws from everything; one that knows it says on the last chunk what it kept."""
    if not request.sampling.top_k or chunk.finish_reason is None or chunk.kept_log_mass is not None:
        return chunk
    return msgspec.structs.replace(chunk, unscorable="the engine is older than top_k and may have drawn from all tokens: upgrade it")


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
        return Overloaded(message, retry_after_s=asked_to_wait_s(response.headers.get("retry-after")))
    if response.status_code == 400:
        return BadRequest(message, param=param, code=code)
    return Leaving(message) if response.status_code == DRAINING and code != NOT_CALLED_SO else Unavailable(message)


class _Scored(msgspec.Struct):
    """The engine's answer to `/score`."""

    logprobs: list[float | None]
