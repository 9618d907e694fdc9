"""What the dialects of servers share: refusals as errors of ours, server-sent events, the last chunk of an answer, metrics."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from app.domain.errors import BadRequest, NotFound, Overloaded, RatchetError, Unavailable, asked_to_wait_s
from app.domain.telemetry.serving import GenerationChunk
from app.domain.telemetry.turns import FinishReason, Form


def gone(name: str, url: str, error: Exception) -> Unavailable:
    """A server that does not answer; `name` is its make."""
    return Unavailable(f"{name} at {url} does not answer ({type(error).__name__}): start it, or correct RATCHET_ENGINES")


def refusal(name: str, url: str, status: int, content: bytes, headers: Mapping[str, str], *, needs: str) -> RatchetError:
    """A refusal as the error it stands for; `needs` is said where the server does not know the endpoint."""
    try:
        body = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError:
        body = {}
    error = body.get("error", body)
    message = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    if status == 404 and body.get("detail") == "Not Found":
        return NotFound(f"{name} at {url} has no such endpoint: use {needs}")
    return refused(status, message if body else f"{name} at {url} answered {status}", retry_after=headers.get("retry-after"))


def refused(status: int, message: str, *, retry_after: str | None = None) -> RatchetError:
    """By its status."""
    if status == 429:
        return Overloaded(message, retry_after_s=asked_to_wait_s(retry_after))
    if status in (400, 422):
        return BadRequest(message, code="context_length_exceeded" if "context length" in message else "invalid_request")
    return Unavailable(message)


def aborted(name: str) -> str:
    """What is said of an answer that the server ended by itself; one that had no token yet is asked for again."""
    return f"{name} aborted it: its weights were replaced, or somebody told it to"


def masked(name: str) -> str:
    """Why a turn that was kept to a form by the server is not trained on."""
    return f"drawn under {name}'s own token masks, which may differ from ours: what it was drawn from cannot be worked out again"


def schema_of(form: Form, name: str) -> dict[str, Any]:
    """The JSON schema that an answer is kept to. Raises `BadRequest` for forced calls of tools."""
    if form.call is not None or form.answer is None:
        raise BadRequest(f"{name} cannot be made to call a tool here: use tool_choice `auto`, or no response_format beside tools",
                         param="tool_choice", code="unsupported_parameter")  # fmt: skip
    return form.answer


def last(
    reason: FinishReason, prompt: Sequence[int], *, message: str | None = None, mixed: str | None = None, unscorable: str | None = None,
    kept_log_mass: list[float] | None = None,
) -> GenerationChunk:  # fmt: skip
    """The chunk that ends an answer."""
    return GenerationChunk(
        text="", tokens=[], logprobs=[], finish_reason=reason, prompt_tokens=prompt, message=message, mixed_versions=mixed,
        unscorable=unscorable, kept_log_mass=kept_log_mass,
    )  # fmt: skip


async def whole(name: str, response: httpx.Response) -> bytes:
    """The body of an answer that is not streamed."""
    try:
        return await response.aread()
    except httpx.HTTPError as error:
        raise Unavailable(f"{name} went away while answering ({type(error).__name__})") from error
    finally:
        await response.aclose()


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, to `[DONE]`."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield msgspec.json.decode(data, type=dict[str, Any])


def sums_of(metrics: str) -> dict[str, float]:
    """Prometheus text as one number per name, labels added up."""
    sums: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        with suppress(ValueError):
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums
