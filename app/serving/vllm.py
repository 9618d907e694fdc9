"""vLLM behind the `Engines` port: an adapter to its servers.

    chat ─▶ /tokenize (the server's chat template) ─▶ /inference/v1/generate (tokens in; text, tokens, log-probabilities out)

That endpoint and no chat completion, because it alone says which weights sampled each token (`weight_versions`), and because it parses
no tool calls, which loses token ids (vllm-project/vllm#27482). Served and tested with vLLM 0.32 (`make test-real`), started with

    --logprobs-mode processed_logprobs      log-probabilities of the distribution that was sampled
    --served-model-name DIGEST              the version it is started on
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True   adapters come and go (`app.serving.vllm_residency`), with --enable-lora
    VLLM_SERVER_DEV_MODE=1                  weights are replaced in place and labelled, with --weight-transfer-config (infra/vllm)

A version is held by a server whose base has its digest (by label, else by name) or that has an adapter of that name. A turn whose tokens
were not all sampled by the version that was asked for says so, and is not trained on. vLLM does not say what top-p kept: the update
works it out (`pipelines.training.numerics.nucleus`). Not covered: routed experts (their wire format says nothing of the last token).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
import msgspec

from app.domain.errors import BadRequest, RatchetError, Unavailable
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, Likely, ScoreRequest
from app.domain.telemetry.turns import FinishReason
from app.serving.pieces import fields_of
from app.serving.refusals import HEALTH_TIMEOUT_S, require_one_healthy, worst
from app.serving.vllm_wire import Held, ask_held, gone, other_weights, refusal, sampling_body, sight_of
from app.serving.whereabouts import Whereabouts

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
FORGET_S = 0.5
"""How long it is remembered who holds what."""
PATIENCE_S = 10.0
"""How long a request waits for a version that no server holds: one that is being replaced in place comes back within seconds."""
POLL_S = 0.2

Holders = Callable[[str], Mapping[str, str | None]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a version can be sampled from."""

    url: str
    model: str
    label: str | None
    """What the server calls the base's weights."""
    doubt: str | None = None
    """Why its log-probabilities are not to be trained on."""


class VllmEngines:
    """The `Engines` port over vLLM servers. `holders` (the ledger) says which of them are ready with a digest, and what is wrong with
    their log-probabilities; without it, or where it knows none, each server is asked itself. Belongs to one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        holders: Holders | None = None,
        api_key: str | None = None,
        client: httpx.AsyncClient | None = None,
        timeout_s: float = 120.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._whereabouts = None if holders is None else Whereabouts(holders, nothing={}, forget_s=FORGET_S)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._client = client or httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=2.0), trust_env=False)
        self._patience_s = patience_s
        self._held: dict[str, tuple[float, Held]] = {}
        self._turn = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._whereabouts is not None:
            self._whereabouts.close()
        await self._client.aclose()

    async def ping(self) -> None:
        """Raise `Unavailable` when no server answers."""
        await require_one_healthy(self._client, self._urls, kind="vLLM server", cure="start one, or correct RATCHET_ENGINES")

    async def sights(self) -> list[EngineSight]:
        """Every server of the list, by its own metrics."""
        return list(await asyncio.gather(*map(self._sight, self._urls)))

    async def _sight(self, url: str) -> EngineSight:
        try:
            said = await self._client.get(f"{url}/metrics", headers=self._headers, timeout=HEALTH_TIMEOUT_S)
            said.raise_for_status()
        except httpx.HTTPError as error:
            return EngineSight(address=url, answers=False, fault=f"it does not answer ({type(error).__name__}): start it")
        return sight_of(url, said.text)

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Length of the prompt as the server would feed it."""
        _, prompt = await self._tokenized(request)
        return len(prompt)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        """Sample one completion. Raises `Unavailable`, `Overloaded`, `BadRequest`, all before the first chunk only.

        Requests that a server aborts before their first token (its weights were replaced) are sent again, as long as patience lasts.
        """
        until, again = time.monotonic() + self._patience_s, True
        while again:
            again = False
            place, prompt, response = await self._begin(request)
            sampled = False
            try:
                async for chunk in _chunks(response, place, prompt, request):
                    aborted = chunk.finish_reason is FinishReason.ERROR and chunk.message == ABORTED
                    if aborted and not sampled and time.monotonic() < until:
                        again = True
                        break
                    sampled = sampled or bool(chunk.tokens)
                    yield chunk
            finally:
                await response.aclose()
            if again:
                await asyncio.sleep(POLL_S)

    async def score(self, request: ScoreRequest) -> list[float]:
        """Log-probability of each completion token, from `prompt_logprobs` of `/v1/completions`.

        vLLM gives those of the model itself, before temperature and top-p, so anything but 1 and 1 is refused with `BadRequest`.
        """
        if (request.temperature, request.top_p) != (1.0, 1.0):
            raise BadRequest("vLLM scores given tokens at temperature 1 and top_p 1 only: such turns cannot be judged off policy")
        tokens = [*request.prompt_tokens, *request.completion_tokens]
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        _, response = await self._first_willing(request.digest, "/v1/completions", lambda place: body | {"model": place.model})
        return scored_tokens(msgspec.json.decode(await _whole(response), type=dict[str, Any]), tokens)[len(request.prompt_tokens) - 1 :]

    # --- one request ----------------------------------------------------------------------------------------------------------------

    async def _tokenized(self, request: GenerateRequest) -> tuple[Place, Sequence[int]]:
        body = {"messages": request.messages, "tools": request.tools, "add_generation_prompt": True}
        place, response = await self._first_willing(request.digest, "/tokenize", lambda place: body | {"model": place.model})
        try:
            _, prompt = await fields_of(await _whole(response), long="tokens")
        except msgspec.DecodeError:
            prompt = None
        if prompt is None:
            raise Unavailable(
                f"vLLM at {place.url} tokenised a prompt and sent no tokens: its version is another one than this was made for"
            )
        return place, prompt

    async def _begin(self, request: GenerateRequest) -> tuple[Place, Sequence[int], httpx.Response]:
        """The prompt as one server tokenised it, and the stream of the first that samples from it."""
        _, prompt = await self._tokenized(request)
        sampling = sampling_body(request.sampling, shape=request.shape, likely=request.likely)

        def body(place: Place) -> dict[str, Any]:
            return {"model": place.model, "token_ids": prompt, "sampling_params": sampling, "stream": True, "output_mode": "text"}

        place, response = await self._first_willing(request.digest, "/inference/v1/generate", body)
        return place, prompt, response

    async def _first_willing(self, digest: str, path: str, body: Callable[[Place], dict[str, Any]]) -> tuple[Place, httpx.Response]:
        """The first server's answer that is not a refusal, not read yet. Raises what they said when all refused."""
        refusals: list[RatchetError] = []
        for place in await self._places(digest, refusals):
            content = msgspec.json.encode(body(place), enc_hook=list)
            sent = self._client.build_request("POST", place.url + path, content=content, headers=self._headers)
            try:
                response = await self._client.send(sent, stream=True)
            except httpx.HTTPError as error:
                self._forget(digest, place.url)
                refusals.append(gone(place.url, error))
                continue
            if response.status_code == 200:
                return place, response
            refusals.append(refusal(place.url, response.status_code, await response.aread(), response.headers))
            await response.aclose()
            self._forget(digest, place.url)
        raise worst(refusals, otherwise=f"no vLLM server holds the weights {digest[:12]}")

    # --- who holds what -------------------------------------------------------------------------------------------------------------

    async def _places(self, digest: str, refusals: list[RatchetError]) -> list[Place]:
        """Where the version can be sampled from, beginning with another server each time; waits a while for one."""
        until = time.monotonic() + self._patience_s
        while True:
            refusals.clear()
            places = await self._places_now(digest, refusals)
            answering = len(refusals) < len(self._urls)
            if places or not answering or time.monotonic() >= until:
                self._turn += 1
                first = self._turn % len(places) if places else 0
                return places[first:] + places[:first]
            await asyncio.sleep(POLL_S)

    async def _places_now(self, digest: str, refusals: list[RatchetError]) -> list[Place]:
        ready = await self._ready_with(digest)
        places: list[Place] = []
        for url in [url for url in self._urls if url in ready] or self._urls:
            try:
                held = await self._held_by(url)
            except RatchetError as error:
                refusals.append(error)
                continue
            if (model := held.model(digest)) is not None:
                places.append(Place(url=url, model=model, label=held.version, doubt=ready.get(url)))
        return places

    async def _ready_with(self, digest: str) -> Mapping[str, str | None]:
        if self._whereabouts is None:
            return {}
        found = await self._whereabouts.of(digest)
        return {url.removeprefix("vllm+").rstrip("/"): doubt for url, doubt in found.items()}

    async def _held_by(self, url: str) -> Held:
        known_at, held = self._held.get(url, (0.0, None))
        if held is None or time.monotonic() - known_at > FORGET_S:
            held = await ask_held(self._client, url, self._headers)
            self._held[url] = (time.monotonic(), held)
        return held

    def _forget(self, digest: str, url: str) -> None:
        self._held.pop(url, None)
        if self._whereabouts is not None:
            self._whereabouts.forget(digest)


ABORTED = "vLLM aborted it: its weights were replaced, or somebody told it to"


MASKED = "drawn under vLLM's own token masks, which may differ from ours: what it was drawn from cannot be worked out again"


async def _chunks(response: httpx.Response, place: Place, prompt: Sequence[int], asked: GenerateRequest) -> AsyncIterator[GenerationChunk]:
    """The stream of one answer as chunks; the last one says how it ended and whether it may be trained on."""
    reason: str | None = None
    spans: list[dict[str, Any]] | None = None
    try:
        async for event in _events(response):
            for choice in event.get("choices", []):
                reason = choice.get("finish_reason") or reason
                spans = choice.get("weight_versions") or spans
                if chunk := chunk_of(choice, logged=place.doubt is None, likely=asked.likely):
                    yield chunk
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        yield _last(FinishReason.ERROR, prompt, message=f"vLLM went away while answering ({type(error).__name__})")
        return
    if reason is None:
        yield _last(FinishReason.ERROR, prompt, message="vLLM ended its answer too early")
    elif reason == "abort":
        yield _last(FinishReason.ERROR, prompt, message=ABORTED)
    else:
        masked = MASKED if asked.shape is not None and asked.shape.form is not None else None
        mixed = other_weights(spans, asked=place.label)
        yield _last(FINISH.get(reason, FinishReason.STOP), prompt, mixed=mixed, unscorable=masked)


def chunk_of(choice: Mapping[str, Any], *, logged: bool, likely: int | None = None) -> GenerationChunk | None:
    """One streamed choice; None when it carries nothing. Where counts differ, both are passed on: the gateway then marks the turn as
    one without log-probabilities rather than guess which belong together."""
    tokens = [int(token) for token in choice.get("token_ids") or []]
    items: list[dict[str, Any]] = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [float(item["logprob"]) for item in items] if logged else []
    text = choice.get("text") or ""
    best = None
    if likely and logged and len(items) == len(tokens):
        best = [_likely(token, item, likely) for token, item in zip(tokens, items, strict=True)]
    return GenerationChunk(text=text, tokens=tokens, logprobs=logprobs, likely=best) if tokens or logprobs or text else None


def _likely(token: int, item: Mapping[str, Any], count: int) -> list[Likely]:
    """A token and the likeliest of its place, which vLLM names by their texts."""
    others = sorted(item.get("top_logprobs") or [], key=lambda other: -float(other["logprob"]))[:count]
    return [Likely(token, float(item["logprob"]), _piece(item)), *(Likely(None, float(one["logprob"]), _piece(one)) for one in others)]


def _piece(item: Mapping[str, Any]) -> bytes:
    written = item.get("bytes")
    return str(item["token"]).encode("utf-8", "replace") if written is None else bytes(written)


def _last(
    reason: FinishReason, prompt: Sequence[int], *, message: str | None = None, mixed: str | None = None, unscorable: str | None = None
) -> GenerationChunk:
    return GenerationChunk(
        text="", tokens=[], logprobs=[], finish_reason=reason, prompt_tokens=prompt, message=message, mixed_versions=mixed,
        unscorable=unscorable,
    )  # fmt: skip


async def _whole(response: httpx.Response) -> bytes:
    try:
        return await response.aread()
    except httpx.HTTPError as error:
        raise Unavailable(f"vLLM went away while answering ({type(error).__name__})") from error
    finally:
        await response.aclose()


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, to `[DONE]`."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield msgspec.json.decode(data, type=dict[str, Any])


def scored_tokens(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Log-probability of each token but the first, out of an answer with `prompt_logprobs`. Raises `BadRequest`."""
    places: list[dict[str, Any] | None] = answer["choices"][0].get("prompt_logprobs") or []
    if len(places) != len(tokens):
        raise BadRequest(f"vLLM gave {len(places)} prompt log-probabilities for {len(tokens)} tokens: it cannot score here")
    return [float((place or {})[str(token)]["logprob"]) for place, token in list(zip(places, tokens, strict=True))[1:]]
