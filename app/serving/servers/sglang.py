"""SGLang's dialect, as read in the wheel of 0.5.23; its servers are started with

    --served-model-name DIGEST --weight-version DIGEST    the version they are started on, and its label
    --sampling-mask-max-tokens VOCABULARY                 answers with a wide top-p are not ended for it
    --enable-lora --max-lora-rank N                       where versions come as adapters
    --enable-metrics                                      `GET /v1/engines` says more
    without SGLANG_RETURN_ORIGINAL_LOGPROB                log-probabilities are those after temperature

Answers come from /generate: every token is labelled with the weights' version (`weight_versions`), and with it comes what top-k and top-p
kept:

    log-probability of the sampled distribution   output_token_sampling_logprobs, asked for where top-k, top-p or greedy sampling cut it
    log of the mass that these kept               output_token_logprobs (before them) minus that

Streams carry all of an answer anew, or with --incremental-streaming-output what is new; both are read. Not covered: routed experts, and
weights from tensors in memory (`/update_weights_from_tensor` takes handles of the same machine's GPU: snapshots come from the store).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from app.domain.errors import BadRequest, RatchetError
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, Likely
from app.domain.telemetry.turns import FinishReason, SamplingParams, Shape
from app.serving.servers.engines import Asking
from app.serving.servers.held import Held, Place, held_of, other_weights
from app.serving.servers.wire import aborted, events, gone, last, masked, refusal, refused, schema_of, sums_of

NAME, SCHEME = "SGLang", "sglang+"
NEEDS = "SGLang 0.5.23 or newer"
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Sglang:
    """The `Dialect` of SGLang servers."""

    name, scheme = NAME, SCHEME

    async def held(self, client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> Held:
        """From `/v1/models` and `/model_info`."""
        try:
            models = await client.get(f"{url}/v1/models", headers=dict(headers))
            told = await client.get(f"{url}/model_info", headers=dict(headers))
        except httpx.HTTPError as error:
            raise gone(NAME, url, error) from error
        for said in (models, told):
            if said.status_code != 200:
                raise self.refusal(url, said.status_code, said.content, said.headers)
        return held_of(models.json(), told.json().get("weight_version"), url=url)

    def tokenizing(self, place: Place, request: GenerateRequest) -> Asking:
        """As for a chat completion: with the beginning of the answer."""
        return "/v1/tokenize", {"messages": request.messages} | ({"tools": request.tools} if request.tools else {})

    def generating(self, place: Place, prompt: Sequence[int], request: GenerateRequest) -> Asking:
        """Raises `BadRequest` for forced calls of tools."""
        body = generating_body(place, prompt, request.sampling, shape=request.shape, likely=request.likely)
        return "/generate", body | {"stream": True, "return_text_in_logprobs": bool(request.likely)}

    async def answer(
        self, response: httpx.Response, place: Place, prompt: Sequence[int], asked: GenerateRequest
    ) -> AsyncIterator[GenerationChunk]:
        """The stream of one answer as chunks; raises what an error in it stands for, as long as nothing was sampled."""
        reading = Reading(cut=is_cut(asked.sampling), likely=asked.likely, logged=place.doubt is None)
        try:
            async for event in events(response):
                chunk = reading.take(event)
                if chunk is not None:
                    yield chunk
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            yield last(FinishReason.ERROR, prompt, message=f"SGLang went away while answering ({type(error).__name__})")
            return
        yield self._end(reading, place, prompt, asked)

    def _end(self, reading: "Reading", place: Place, prompt: Sequence[int], asked: GenerateRequest) -> GenerationChunk:
        reason = str(reading.reason.get("type")) if reading.reason else None
        if reason is None:
            return last(FinishReason.ERROR, prompt, message="SGLang ended its answer too early")
        if reason == "abort":
            told = reading.reason.get("status_code")  # one without a status was ended by somebody who replaces weights
            return last(FinishReason.ERROR, prompt, message=aborted(NAME) if told is None else f"SGLang: {reading.reason.get('message')}")
        unscorable = masked(NAME) if asked.shape is not None and asked.shape.form is not None else None
        mixed = other_weights(reading.spans, asked=place.label)
        kept = reading.kept if asked.sampling.is_cut and reading.logged else None
        return last(FINISH.get(reason, FinishReason.STOP), prompt, mixed=mixed, unscorable=unscorable, kept_log_mass=kept or None)

    def scoring(self, place: Place, tokens: Sequence[int]) -> Asking:
        """The prompt's own log-probabilities."""
        return "/generate", scoring_body(place.model if place.adapter else None, tokens)

    def scored(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
        """Of each token but the first."""
        return scored_tokens(answer, tokens)

    def refusal(self, url: str, status: int, content: bytes, headers: Mapping[str, str]) -> RatchetError:
        """In OpenAI's shape, or FastAPI's."""
        return refusal(NAME, url, status, content, headers, needs=NEEDS)

    def sight(self, url: str, metrics: str) -> EngineSight:
        """From SGLang's metrics, which it has with --enable-metrics."""
        sums = sums_of(metrics)
        running, waiting = sums.get("sglang:num_running_reqs"), sums.get("sglang:num_queue_reqs")
        sampled = sums.get("sglang:generation_tokens_total")
        return EngineSight(
            address=url, answers=True, queue=None if running is None or waiting is None else int(running + waiting),
            sampled_tokens=None if sampled is None else int(sampled), acceptance=sums.get("sglang:spec_accept_rate") or None,
        )  # fmt: skip


@dataclass
class Reading:
    """An answer as far as it was heard."""

    cut: bool
    """Whether the sampled distribution is narrower than the one after temperature: its log-probabilities come apart."""
    likely: int | None
    logged: bool
    tokens: int = 0
    characters: int = 0
    reason: dict[str, Any] = field(default_factory=dict[str, Any])
    spans: list[dict[str, Any]] | None = None
    kept: list[float] = field(default_factory=list[float])
    """[T], log of the mass that was kept."""

    def take(self, event: Mapping[str, Any]) -> GenerationChunk | None:
        """What an event adds. Raises the error that it is, where nothing was sampled before."""
        if (error := event.get("error")) is not None:
            self._fail(int(error.get("code") or 500), str(error.get("message")))
            return None
        told: dict[str, Any] = event.get("meta_info") or {}
        self.reason = told.get("finish_reason") or self.reason
        self.spans = told.get("weight_versions") or self.spans
        if self.reason.get("type") == "abort" and self.reason.get("status_code") is not None:
            self._fail(int(self.reason["status_code"]), str(self.reason.get("message")))
            return None
        ids: list[int] = event.get("output_ids") or []
        is_new = self.tokens + len(ids) == int(told.get("completion_tokens") or 0)  # else all of it anew
        fresh, text = (ids if is_new else ids[self.tokens :]), str(event.get("text") or "")
        text = text if is_new else text[self.characters :]
        self.tokens, self.characters = self.tokens + len(fresh), self.characters + len(text)
        logprobs, likely = self._logged(told, len(fresh))
        return GenerationChunk(text=text, tokens=fresh, logprobs=logprobs, likely=likely) if fresh or text else None

    def _fail(self, status: int, message: str) -> None:
        if not self.tokens:
            raise refused(status, message)
        self.reason = {"type": "abort", "status_code": status, "message": message}

    def _logged(self, told: Mapping[str, Any], count: int) -> tuple[list[float], list[list[Likely]] | None]:
        """Of the newest tokens: log-probabilities and the likeliest others. Where a server gives fewer, none are passed on for them, and
        the gateway marks the turn as one without."""
        full = [float(item[0]) for item in _newest(told, "output_token_logprobs", count)]
        sampled = [float(value) for value in _newest(told, "output_token_sampling_logprobs", count)] if self.cut else full
        if not self.logged or len(sampled) != count or len(full) != count:
            return [], None
        self.kept += [one - other for one, other in zip(full, sampled, strict=True)]
        if not self.likely:
            return sampled, None
        named = zip(_newest(told, "output_token_logprobs", count), sampled, _newest(told, "output_top_logprobs", count), strict=True)
        return sampled, [[_likely(own, value), *(_likely(other) for other in others[: self.likely])] for own, value, others in named]


def _newest(told: Mapping[str, Any], name: str, count: int) -> list[Any]:
    found: list[Any] = told.get(name) or []
    return found[len(found) - count :] if count <= len(found) else []


def _likely(item: Sequence[Any], logprob: float | None = None) -> Likely:
    """From `[log-probability, token, text]`."""
    piece = None if item[2] is None else str(item[2]).encode("utf-8", "replace")
    return Likely(int(item[1]), float(item[0]) if logprob is None else logprob, piece)


def is_cut(sampling: SamplingParams) -> bool:
    """Whether what is sampled from is narrower than the distribution after temperature."""
    return sampling.is_cut or sampling.temperature <= 0.0


def generating_body(
    place: Place,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    shape: Shape | None = None,
    likely: int | None = None,
    **more: Any,  # noqa: ANN401 - SGLang's own sampling parameters
) -> dict[str, Any]:
    """Of `/generate`: everything that would bend the distribution beyond what was asked for is switched off (SGLang else takes it from the
    model's generation_config.json). Raises `BadRequest` for forced calls of tools."""
    shape = shape or Shape()
    params: dict[str, Any] = {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "max_new_tokens": sampling.max_tokens, "stop": list(sampling.stop),
        "top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": shape.presence_penalty,
        "frequency_penalty": shape.frequency_penalty,
    }  # fmt: skip
    if shape.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in shape.logit_bias.items()}
    if shape.form is not None:
        params["json_schema"] = msgspec.json.encode(schema_of(shape.form, NAME)).decode()
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "input_ids": prompt, "sampling_params": params | more, "return_logprob": True, "top_logprobs_num": likely or 0,
        "return_sampling_mask": is_cut(sampling),
    }  # fmt: skip
    return body | ({"lora_path": place.model} if place.adapter else {})


def scoring_body(adapter: str | None, tokens: Sequence[int]) -> dict[str, Any]:
    """Of `/generate`, for the log-probabilities of given tokens."""
    params = {"temperature": 1.0, "max_new_tokens": 1, "top_k": -1, "top_p": 1.0}
    body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    return body | ({} if adapter is None else {"lora_path": adapter})


def scored_tokens(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Log-probability of each token but the first, out of an answer with `input_token_logprobs`. Raises `BadRequest`."""
    places: list[Sequence[Any]] = (answer.get("meta_info") or {}).get("input_token_logprobs") or []
    if [int(place[1]) for place in places] != list(tokens):
        raise BadRequest(f"SGLang gave log-probabilities of {len(places)} other tokens for {len(tokens)}: it cannot score here")
    return [float(place[0]) for place in places[1:]]
