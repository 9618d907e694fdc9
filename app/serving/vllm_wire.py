"""vLLM's wire, as far as Ratchet speaks it: what a server holds, its refusals, its sampling parameters, its spans of weight versions."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from app.domain.errors import BadRequest, NotFound, Overloaded, RatchetError, Unavailable, asked_to_wait_s
from app.domain.telemetry.serving import EngineSight
from app.domain.telemetry.turns import Form, SamplingParams, Shape

UNVERSIONED = "default"
"""What a vLLM server calls its weights until somebody replaced them."""
DIGEST_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one server holds, as it says itself."""

    base: str
    """Name of the base model, under which it was started."""
    version: str | None
    """Label of the base's weights: `default`, or the digest that the last update in place gave; None where the server does not tell."""
    adapters: frozenset[str]

    @property
    def base_digest(self) -> str | None:
        """Digest of the base's weights: by its label where it has one, else by the name it was started under."""
        label = self.base if self.version in (None, UNVERSIONED) else self.version
        return label if label is not None and is_digest(label) else None

    def model(self, digest: str) -> str | None:
        """The name under which this server samples from a version; None where it does not hold it."""
        if digest in self.adapters:
            return digest
        return self.base if digest == self.base_digest else None


def is_digest(name: str) -> bool:
    """Whether a name can be a digest of weights."""
    return len(name) == DIGEST_LENGTH and set(name) <= set("0123456789abcdef")


def held_of(models: Mapping[str, Any], version: str | None, *, url: str) -> Held:
    """From the answers of `/v1/models` and `/weight_info`. Raises `Unavailable` for a server without a base."""
    cards = models.get("data", [])
    base = next((str(card["id"]) for card in cards if not card.get("parent")), None)
    if base is None:
        raise Unavailable(f"{url}/v1/models names no base model: is a vLLM server there?")
    return Held(base=base, version=version, adapters=frozenset(str(card["id"]) for card in cards if card.get("parent")))


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
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": shape.presence_penalty,
        "frequency_penalty": shape.frequency_penalty, "logprobs": likely + 1 if likely else 0,
    }  # fmt: skip
    if shape.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in shape.logit_bias.items()}
    if shape.form is not None:
        body["structured_outputs"] = _structured(shape.form)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body | more


def _structured(form: Form) -> dict[str, Any]:
    if form.call is not None or form.answer is None:
        raise BadRequest("vLLM cannot be made to call a tool here: use tool_choice `auto`, or no response_format beside tools",
                         param="tool_choice", code="unsupported_parameter")  # fmt: skip
    return {"json": form.answer}


def other_weights(spans: Sequence[Mapping[str, Any]] | None, *, asked: str | None) -> str | None:
    """Why tokens with these `weight_versions` were not all sampled by the version labelled `asked`; None where they were, or where the
    server keeps no labels."""
    if not spans or asked is None:
        return None
    found = [(str(span["version"]), int(span["start"])) for span in spans]
    if [version for version, _ in found] == [asked]:
        return None
    if len(found) == 1:
        return f"sampled by the weights {found[0][0][:12]}, not by {asked[:12]}: the server's weights were replaced before it began"
    parts = ", ".join(f"{version[:12]} from token {start}" for version, start in found)
    return f"sampled by more than one version ({parts}): the server's weights were replaced meanwhile"


def gone(url: str, error: Exception) -> Unavailable:
    """A server that does not answer."""
    return Unavailable(f"vLLM at {url} does not answer ({type(error).__name__}): start it, or correct RATCHET_ENGINES")


def refusal(url: str, status: int, content: bytes, headers: Mapping[str, str]) -> RatchetError:
    """A refusal as the error it stands for."""
    try:
        body = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError:
        body = {}
    error = body.get("error", body)
    message = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    if status == 404 and body.get("detail") == "Not Found":
        return NotFound(
            f"vLLM at {url} has no such endpoint: use vLLM 0.32 or newer, and VLLM_SERVER_DEV_MODE=1 to replace weights in place"
        )
    message = message if body else f"vLLM at {url} answered {status}"
    if status == 429:
        return Overloaded(message, retry_after_s=asked_to_wait_s(headers.get("retry-after")))
    if status in (400, 422):
        return BadRequest(message, code="context_length_exceeded" if "context length" in message else "invalid_request")
    return Unavailable(message)


async def ask_held(client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> Held:
    """What a server holds now. Raises `Unavailable`."""
    try:
        models = await client.get(f"{url}/v1/models", headers=dict(headers))
        label = await client.get(f"{url}/weight_info", headers=dict(headers))
    except httpx.HTTPError as error:
        raise gone(url, error) from error
    if models.status_code != 200:
        raise refusal(url, models.status_code, models.content, models.headers)
    return held_of(models.json(), label.json()["weight_version"] if label.status_code == 200 else None, url=url)


def sight_of(url: str, metrics: str) -> EngineSight:
    """A server as its Prometheus text tells it; what it does not tell is None."""
    sums: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        with suppress(ValueError):
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    running, waiting = sums.get("vllm:num_requests_running"), sums.get("vllm:num_requests_waiting")
    drafted, sampled = sums.get("vllm:spec_decode_num_draft_tokens_total"), sums.get("vllm:generation_tokens_total")
    return EngineSight(
        address=url, answers=True, queue=None if running is None or waiting is None else int(running + waiting),
        sampled_tokens=None if sampled is None else int(sampled),
        acceptance=sums.get("vllm:spec_decode_num_accepted_tokens_total", 0.0) / drafted if drafted else None,
    )  # fmt: skip
