"""What the gateway asks of an engine and what comes back, token by token."""

from collections.abc import Sequence
from typing import Any

import msgspec

from app.domain.telemetry.turns import FinishReason, SamplingParams, Shape


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One completion to sample from one pinned version."""

    policy: str
    digest: str
    """Weights to sample from; an engine that does not hold them refuses, it never substitutes."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    sampling: SamplingParams
    shape: Shape | None = None
    """What else bends the distribution; an engine that cannot refuses."""
    record_experts: bool = False
    likely: int | None = None
    """How many of the most likely tokens are wanted beside each sampled one, with their texts; None where nobody reads them."""
    stream: bool = True
    """Whether every token is wanted when it is there; otherwise the first, and the others together (every second as a sign of life): a
    line per token costs gateway and engine a quarter of a small model's decoding time."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tokens that were sampled some time: how likely would one pinned version have sampled them?"""

    policy: str
    digest: str
    """Weights to score with; an engine that does not hold them refuses."""
    prompt_tokens: list[int]
    """[P], as they were fed."""
    completion_tokens: list[int]
    """[T], as they were sampled."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is all."""


class Likely(msgspec.Struct, frozen=True, array_like=True):
    """One token that was, or could have been drawn at a place."""

    token: int | None
    """None where the engine names it by its text alone."""
    logprob: float
    piece: bytes | None = None
    """What it writes; a character may take several tokens. None where the engine does not say."""


class GenerationChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A few sampled tokens; the last chunk of a generation, and only it, has a `finish_reason`."""

    text: str
    """Newly completed text; may lag behind the tokens while a character is incomplete."""
    tokens: list[int]
    logprobs: list[float]
    """Natural logarithm, of the distribution actually sampled (after shape, temperature, top-k and top-p)."""
    likely: list[list[Likely]] | None = None
    """Where asked for: for each token itself, then the most likely ones of its place, the likeliest first."""
    finish_reason: FinishReason | None = None
    prompt_tokens: Sequence[int] | None = None
    """On the last chunk: the prompt as the engine fed it; a long one as an array (`app.serving.pieces`)."""
    routed_experts: list[list[list[int]]] | None = None
    """On the last chunk, where asked for and the model has experts: [T, L, K]."""
    kept_log_mass: list[float] | None = None
    """On the last chunk, where the draw `is_cut` and the engine says it: [T], log of the probability mass that top-k and top-p kept."""
    mixed_versions: str | None = None
    """On the last chunk, where not every token was sampled by the version that was asked for: a sentence. Such a turn is not trained on."""
    unscorable: str | None = None
    """On the last chunk, where nobody can work out again from which distribution its tokens were drawn: why. Not trained on either."""
    precision: str | None = None
    """On the last chunk, where the weights were rounded from what was published before they were served: to what (`mxfp8`, `nvfp4`)."""
    message: str | None = None
    """On the last chunk, with finish_reason `error`: what went wrong."""


class EngineSight(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine says of itself when the gateway asks it, and what the gateway remembers about it."""

    address: str
    answers: bool
    ejected: bool = False
    """Passed over because it failed several times in a row."""
    draining: bool = False
    """Finishes what it has and takes nothing new."""
    fault: str | None = None
    """Why it does not answer, or how it failed last."""
    queue: int | None = None
    """Answers that are sampled or wait to be; None where it does not say."""
    sampled_tokens: int | None = None
    """Since it was started."""
    acceptance: float | None = None
    """Share of the speculated tokens that were the ones drawn; None where nothing was speculated."""
    drafters: dict[str, Any] | None = None
    """By digest, then by drafter (`lookup`, `head`): tokens drafted and drawn; of a head which version it was trained for, whether it
    drafts, rests because it lost or is being measured, and what it gained. None where it does not say."""
    precision: str | None = None
    """What it serves its versions in (`bf16` is as published); None where it does not say."""
    mismatch: dict[str, Any] | None = None
    """By digest of a version that it serves rounded: how far that is from the version as published (`app.serving.probe.Mismatch`)."""
    last_swap: dict[str, Any] | None = None
    """The newest version it took up: digest, when, seconds it took, milliseconds for which sampling stood still, by which way."""
