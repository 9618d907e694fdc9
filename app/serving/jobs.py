"""One request on its way through the sampling thread, and what is told of it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason
from app.policy.decoding.sampling import Decoder, Generation
from app.policy.precision import Precision


@dataclass(eq=False, kw_only=True)
class Job:
    """One request on its way; `updates` belongs to the event loop, everything else to the worker."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    deadline: float
    """On `time.monotonic()`."""
    updates: asyncio.Queue[GenerationChunk | Exception] = field(default_factory=asyncio.Queue[GenerationChunk | Exception])
    generation: Generation | None = None
    decoder: Decoder | None = None
    logged: bool = True
    """False where the version's log-probabilities are known to be wrong: none are sent, so that nobody trains on them."""
    sent_tokens: int = 0
    sent_text: int = 0
    sent_at: float = 0.0
    """On `time.monotonic()`."""


def _fresh(job: Job) -> dict[str, Any]:
    """Tokens, log-probabilities and text not sent yet; marks them sent."""
    generation = job.generation
    assert generation is not None
    first, start = job.sent_tokens, job.sent_text
    job.sent_tokens, job.sent_text = len(generation.tokens), len(generation.text)
    logprobs = generation.logprobs[first:] if job.logged else []
    likely = generation.likely[first:] if generation.wants is not None and job.logged else None
    return {"text": generation.text[start:], "tokens": generation.tokens[first:], "logprobs": logprobs, "likely": likely}


def news_of(job: Job) -> GenerationChunk:
    """What was sampled since the last chunk."""
    return GenerationChunk(**_fresh(job))


def last_of(job: Job, reason: FinishReason, *, message: str | None = None) -> GenerationChunk:
    """The chunk that ends the answer."""
    generation = job.generation
    assert generation is not None
    experts = generation.experts if generation.record_experts else None
    precision = Precision.BF16 if job.decoder is None else job.decoder.policy.precision
    return GenerationChunk(
        **_fresh(job), finish_reason=reason, prompt_tokens=generation.prompt, routed_experts=experts,
        kept_log_mass=generation.kept_log_mass or None, message=message or generation.fault,
        precision=None if precision is Precision.BF16 else precision.value,
    )  # fmt: skip
