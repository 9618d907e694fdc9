"""vLLM's dialect, as of 0.32 (`make test-real`); its servers are started with

    --logprobs-mode processed_logprobs      log-probabilities of the distribution that was sampled
    --served-model-name DIGEST              the version it is started on
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True   adapters come and go (`app.serving.servers.residency`), with --enable-lora
    VLLM_SERVER_DEV_MODE=1                  weights are replaced in place and labelled, with --weight-transfer-config (infra/vllm)

Answers come from /inference/v1/generate, which labels every token with the weights' version. vLLM does not say what top-k and top-p
kept: the update works it out (`pipelines.training.numerics.nucleus`). Not covered: routed experts (their wire format says nothing of the
last token).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from app.domain.errors import BadRequest, RatchetError
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, Likely
from app.domain.telemetry.turns import FinishReason, SamplingParams, Shape
from app.serving.servers.engines import Asking
from app.serving.servers.held import Held, Place, held_of, other_weights
from app.serving.servers.wire import aborted, events, gone, last, masked, refusal, schema_of, sums_of

NAME, SCHEME = "vLLM", "vllm+"
NEEDS = "vLLM 0.32 or newer, and VLLM_SERVER_DEV_MODE=1 to replace weights in place"
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Vllm:
    """The `Dialect` of vLLM servers."""

    name, scheme = NAME, SCHEME

    async def held(self, client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> Held:
        """From `/v1/models` and `/weight_info`, which only servers in development mode have."""
        try:
            models = await client.get(f"{url}/v1/models", headers=dict(headers))
            label = await client.get(f"{url}/weight_info", headers=dict(headers))
        except httpx.HTTPError as error:
            raise gone(NAME, url, error) from error
        if models.status_code != 200:
            raise self.refusal(url, models.status_code, models.content, models.headers)
        return held_of(models.json(), label.json()["weight_version"] if label.status_code == 200 else None, url=url)

    def tokenizing(self, place: Place, request: GenerateRequest) -> Asking:
        """By the server's chat template."""
        return "/tokenize", {
            "messages": request.messages, "tools": request.tools, "add_generation_prompt": True, "model": place.model,
        }  # fmt: skip

    def generating(self, place: Place, prompt: Sequence[int], request: GenerateRequest) -> Asking:
        """Raises `BadRequest` for forced calls of tools."""
        sampling = sampling_body(request.sampling, shape=request.shape, likely=request.likely)
        return "/inference/v1/generate", {
            "model": place.model, "token_ids": prompt, "sampling_params": sampling, "stream": True, "output_mode": "text",
        }  # fmt: skip

    async def answer(
        self, response: httpx.Response, place: Place, prompt: Sequence[int], asked: GenerateRequest
    ) -> AsyncIterator[GenerationChunk]:
        """The stream of one answer as chunks."""
        reason: str | None = None
        spans: list[dict[str, Any]] | None = None
        try:
            async for event in events(response):
                for choice in event.get("choices", []):
                    reason = choice.get("finish_reason") or reason
                    spans = choice.get("weight_versions") or spans
                    if chunk := chunk_of(choice, logged=place.doubt is None, likely=asked.likely):
                        yield chunk
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            yield last(FinishReason.ERROR, prompt, message=f"vLLM went away while answering ({type(error).__name__})")
            return
        if reason is None:
            yield last(FinishReason.ERROR, prompt, message="vLLM ended its answer too early")
        elif reason == "abort":
            yield last(FinishReason.ERROR, prompt, message=aborted(NAME))
        else:
            unscorable = masked(NAME) if asked.shape is not None and asked.shape.form is not None else None
            mixed = other_weights(spans, asked=place.label)
            yield last(FINISH.get(reason, FinishReason.STOP), prompt, mixed=mixed, unscorable=unscorable)

    def scoring(self, place: Place, tokens: Sequence[int]) -> Asking:
        """`prompt_logprobs`: those of the model itself."""
        return "/v1/completions", scoring_body(place.model, tokens)

    def scored(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
        """Of each token but the first."""
        return scored_tokens(answer, tokens)

    def refusal(self, url: str, status: int, content: bytes, headers: Mapping[str, str]) -> RatchetError:
        """In OpenAI's shape, or FastAPI's."""
        return refusal(NAME, url, status, content, headers, needs=NEEDS)

    def sight(self, url: str, metrics: str) -> EngineSight:
        """From vLLM's metrics."""
        sums = sums_of(metrics)
        running, waiting = sums.get("vllm:num_requests_running"), sums.get("vllm:num_requests_waiting")
        drafted, sampled = sums.get("vllm:spec_decode_num_draft_tokens_total"), sums.get("vllm:generation_tokens_total")
        return EngineSight(
            address=url, answers=True, queue=None if running is None or waiting is None else int(running + waiting),
            sampled_tokens=None if sampled is None else int(sampled),
            acceptance=sums.get("vllm:spec_decode_num_accepted_tokens_total", 0.0) / drafted if drafted else None,
        )  # fmt: skip


def sampling_body(
    sampling: SamplingParams,
    *,
    shape: Shape | None = None,
    likely: int | None = None,
    **more: Any,  # noqa: ANN401 - vLLM's own
) -> dict[str, Any]:
    """Sampling parameters as vLLM takes them: everything that would bend the distribution beyond what was asked for is switched off
    (vLLM else takes it from the model's generation_config.json), the log-probability of the sampled token is asked for.

    Raises `BadRequest` for forced calls of tools: vLLM has no form for them that our tool calls are read from.
    """
    shape = shape or Shape()
    body: dict[str, Any] = {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens, "stop": list(sampling.stop),
        "top_k": sampling.top_k or 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": shape.presence_penalty,
        "frequency_penalty": shape.frequency_penalty, "logprobs": likely + 1 if likely else 0,
    }  # fmt: skip
    if shape.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in shape.logit_bias.items()}
    if shape.form is not None:
        body["structured_outputs"] = {"json": schema_of(shape.form, NAME)}
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body | more


def scoring_body(model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Of `/v1/completions`."""
    return {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def scored_tokens(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Log-probability of each token but the first, out of an answer with `prompt_logprobs`. Raises `BadRequest`."""
    places: list[dict[str, Any] | None] = answer["choices"][0].get("prompt_logprobs") or []
    if len(places) != len(tokens):
        raise BadRequest(f"vLLM gave {len(places)} prompt log-probabilities for {len(tokens)} tokens: it cannot score here")
    return [float((place or {})[str(token)]["logprob"]) for place, token in list(zip(places, tokens, strict=True))[1:]]


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
