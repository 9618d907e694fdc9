"""Servers of other make behind the `Engines` port: one adapter, whatever they speak.

    chat ─▶ tokenised by the server (its chat template) ─▶ sampled from the tokens: text, tokens, log-probabilities out

Tokens in and out and no chat completion, because there nothing says which weights sampled each token, and parsing tool calls loses token
ids (vllm-project/vllm#27482). A version is held by a server whose base has its digest (by label, else by name) or that has an adapter of
that name. A turn whose tokens were not all sampled by the version that was asked for says so, and is not trained on.

Before the first token a refusal, and a server that breaks, moves the request to the next server that holds the version; after it nothing is
asked again. Servers that fail again and again are passed over for a while (`app.serving.replicas`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import httpx
import msgspec

from app.domain.errors import BadRequest, Overloaded, RatchetError, Unavailable
from app.domain.ports import Holder
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import FinishReason
from app.serving.pieces import fields_of
from app.serving.refusals import HEALTH_TIMEOUT_S, require_one_healthy, worst
from app.serving.replicas import Replicas, far_from
from app.serving.servers.held import Held, Place
from app.serving.servers.wire import aborted, gone, whole
from app.serving.whereabouts import Whereabouts

FORGET_S = 0.5
"""How long it is remembered who holds what."""
PATIENCE_S = 10.0
"""How long a request waits for a version that no server holds: one that is being replaced in place comes back within seconds."""
POLL_S = 0.2

Holders = Callable[[str], Mapping[str, Holder]]
Asking = tuple[str, dict[str, Any]]
"""A path and its body."""


class Dialect(Protocol):
    """What one make of servers speaks."""

    name: str
    scheme: str
    """Before a server's URL where several makes are named: in the ledger, in RATCHET_ENGINES."""

    async def held(self, client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> Held:
        """What a server holds now. Raises `Unavailable`."""
        ...

    def tokenizing(self, place: Place, request: GenerateRequest) -> Asking:
        """Asks for the prompt's tokens, which the answer has as `tokens`."""
        ...

    def generating(self, place: Place, prompt: Sequence[int], request: GenerateRequest) -> Asking:
        """Asks for a streamed answer. Raises `BadRequest` for what this make cannot do."""
        ...

    def answer(
        self, response: httpx.Response, place: Place, prompt: Sequence[int], asked: GenerateRequest
    ) -> AsyncIterator[GenerationChunk]:
        """The stream as chunks; the last one says how it ended and whether it may be trained on. Raises what refuses it before that."""
        ...

    def scoring(self, place: Place, tokens: Sequence[int]) -> Asking:
        """Asks for the log-probability of each token at temperature 1."""
        ...

    def scored(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
        """Of each token but the first. Raises `BadRequest`."""
        ...

    def refusal(self, url: str, status: int, content: bytes, headers: Mapping[str, str]) -> RatchetError:
        """A refusal as the error it stands for."""
        ...

    def sight(self, url: str, metrics: str) -> EngineSight:
        """A server as its Prometheus text tells it; what it does not tell is None."""
        ...


class ServerEngines:
    """The `Engines` port over servers of one make. `holders` (the ledger) says which of them are ready with a digest, and what is wrong
    with their log-probabilities; without it, or where it knows none, each server is asked itself. `region`: servers of it first, by the
    region of the process that looks after them. Belongs to one event loop."""

    def __init__(
        self,
        dialect: Dialect,
        urls: Sequence[str],
        *,
        holders: Holders | None = None,
        region: str = "",
        api_key: str | None = None,
        client: httpx.AsyncClient | None = None,
        timeout_s: float = 120.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._dialect = dialect
        self._urls = [url.rstrip("/") for url in urls]
        self._whereabouts = None if holders is None else Whereabouts(holders, nothing=dict[str, Holder](), forget_s=FORGET_S)
        self._region = region
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._client = client or httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=2.0), trust_env=False)
        self._patience_s = patience_s
        self._held: dict[str, tuple[float, Held]] = {}
        self._replicas = Replicas()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._whereabouts is not None:
            self._whereabouts.close()
        await self._client.aclose()

    async def ping(self) -> None:
        """Raise `Unavailable` when no server answers."""
        kind = f"{self._dialect.name} server"
        await require_one_healthy(self._client, self._urls, kind=kind, cure="start one, or correct RATCHET_ENGINES")

    async def sights(self) -> list[EngineSight]:
        """Every server of the list, by its own metrics."""
        return list(await asyncio.gather(*map(self._sight, self._urls)))

    async def _sight(self, url: str) -> EngineSight:
        ejected, fault = self._replicas.ejected(url), self._replicas.health(url).fault
        try:
            said = await self._client.get(f"{url}/metrics", headers=self._headers, timeout=HEALTH_TIMEOUT_S)
            said.raise_for_status()
        except httpx.HTTPError as error:
            return EngineSight(address=url, answers=False, ejected=ejected, fault=f"it does not answer ({type(error).__name__}): start it")
        return msgspec.structs.replace(self._dialect.sight(url, said.text), ejected=ejected, fault=fault)

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Length of the prompt as the server would feed it."""
        _, prompt = await self._tokenized(request)
        return len(prompt)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        """Sample one completion. Raises `Unavailable`, `Overloaded`, `BadRequest`, all before the first chunk only.

        Requests that end before their first token (the server's weights were replaced, it broke, it is full) are sent again, to another
        server where there is one, as long as patience lasts.
        """
        until = time.monotonic() + self._patience_s
        while True:
            place, prompt, response = await self._begin(request)
            sampled = ended = False
            try:
                async for chunk in self._dialect.answer(response, place, prompt, request):
                    if not sampled:
                        self._note_first(place.url, chunk)
                        if chunk.finish_reason is FinishReason.ERROR and time.monotonic() < until:
                            break
                    sampled = sampled or bool(chunk.tokens)
                    ended = chunk.finish_reason is not None
                    yield chunk
            except Unavailable as error:
                self._note(place.url, error)
                if sampled or time.monotonic() >= until:
                    raise
            finally:
                await response.aclose()
            if ended:
                return
            await asyncio.sleep(POLL_S)

    async def score(self, request: ScoreRequest) -> list[float]:
        """Log-probability of each completion token, as the server scores a prompt.

        That is of the model itself, before temperature, top-k and top-p, so anything that changes it is refused with `BadRequest`.
        """
        if (request.temperature, request.top_p, request.top_k) != (1.0, 1.0, 0):
            raise BadRequest(
                f"{self._dialect.name} scores given tokens at temperature 1 and top_p 1 without top_k only: such turns cannot be judged "
                "off policy"
            )
        tokens = [*request.prompt_tokens, *request.completion_tokens]
        _, response = await self._first_willing(request.digest, lambda place: self._dialect.scoring(place, tokens))
        answer = msgspec.json.decode(await whole(self._dialect.name, response), type=dict[str, Any])
        return self._dialect.scored(answer, tokens)[len(request.prompt_tokens) - 1 :]

    # --- one request ----------------------------------------------------------------------------------------------------------------

    async def _tokenized(self, request: GenerateRequest) -> tuple[Place, Sequence[int]]:
        name = self._dialect.name
        place, response = await self._first_willing(request.digest, lambda place: self._dialect.tokenizing(place, request))
        try:
            _, prompt = await fields_of(await whole(name, response), long="tokens")
        except msgspec.DecodeError:
            prompt = None
        if prompt is None:
            raise Unavailable(
                f"{name} at {place.url} tokenised a prompt and sent no tokens: its version is another one than this was made for"
            )
        return place, prompt

    async def _begin(self, request: GenerateRequest) -> tuple[Place, Sequence[int], httpx.Response]:
        """The prompt as one server tokenised it, and the stream of the first that samples from it."""
        _, prompt = await self._tokenized(request)
        place, response = await self._first_willing(request.digest, lambda place: self._dialect.generating(place, prompt, request))
        return place, prompt, response

    async def _first_willing(self, digest: str, asking: Callable[[Place], Asking]) -> tuple[Place, httpx.Response]:
        """The first server's answer that is not a refusal, not read yet. Raises what they said when all refused."""
        refusals: list[RatchetError] = []
        for place in await self._places(digest, refusals):
            path, body = asking(place)
            content = msgspec.json.encode(body, enc_hook=list)
            sent = self._client.build_request("POST", place.url + path, content=content, headers=self._headers)
            try:
                response = await self._client.send(sent, stream=True)
            except httpx.HTTPError as error:
                self._forget(digest, place.url)
                refusals.append(gone(self._dialect.name, place.url, error))
                self._note(place.url, refusals[-1])
                continue
            if response.status_code == 200:
                return place, response
            refusals.append(self._dialect.refusal(place.url, response.status_code, await response.aread(), response.headers))
            self._note(place.url, refusals[-1])
            await response.aclose()
            self._forget(digest, place.url)
        raise worst(refusals, otherwise=f"no {self._dialect.name} server holds the weights {digest[:12]}")

    # --- who holds what -------------------------------------------------------------------------------------------------------------

    async def _places(self, digest: str, refusals: list[RatchetError]) -> list[Place]:
        """Where the version can be sampled from, beginning with another server each time; waits a while for one."""
        until = time.monotonic() + self._patience_s
        while True:
            refusals.clear()
            places = await self._places_now(digest, refusals)
            answering = len(refusals) < len(self._urls)
            if places or not answering or time.monotonic() >= until:
                return places
            await asyncio.sleep(POLL_S)

    async def _places_now(self, digest: str, refusals: list[RatchetError]) -> list[Place]:
        ready = await self._ready_with(digest)
        places: list[Place] = []
        named = [url for url in self._urls if url in ready] or self._urls
        for url in self._replicas.ordered(named, far=far_from(self._region, ready)):
            if places and self._replicas.ejected(url):  # those come last, and are asked where nobody else has it
                break
            try:
                held = await self._held_by(url)
            except RatchetError as error:
                refusals.append(error)
                self._note(url, error)
                continue
            if (place := held.place(digest, url, doubt=ready.get(url, Holder()).doubt)) is not None:
                places.append(place)
        return places

    async def _ready_with(self, digest: str) -> Mapping[str, Holder]:
        if self._whereabouts is None:
            return {}
        found = await self._whereabouts.of(digest)
        return {url.removeprefix(self._dialect.scheme).rstrip("/"): holder for url, holder in found.items()}

    async def _held_by(self, url: str) -> Held:
        known_at, held = self._held.get(url, (0.0, None))
        if held is None or time.monotonic() - known_at > FORGET_S:
            held = await self._dialect.held(self._client, url, self._headers)
            self._held[url] = (time.monotonic(), held)
        return held

    def _note_first(self, url: str, chunk: GenerationChunk) -> None:
        """What the beginning of an answer says about the server."""
        if chunk.finish_reason is not FinishReason.ERROR:
            self._replicas.answered(url)
        elif chunk.message != aborted(self._dialect.name):  # whose weights are being replaced is well
            self._replicas.failed(url, str(chunk.message))

    def _note(self, url: str, refusal: RatchetError) -> None:
        """What a refusal says about the server: words are an answer, and so is being full; anything else is a failure."""
        if isinstance(refusal, Unavailable) and not isinstance(refusal, Overloaded):
            self._replicas.failed(url, str(refusal))
        else:
            self._replicas.answered(url)

    def _forget(self, digest: str, url: str) -> None:
        self._held.pop(url, None)
        if self._whereabouts is not None:
            self._whereabouts.forget(digest)
