"""A turn: one model answer, exactly as it was sampled.

Readers pass over fields that they do not know, see `app.domain.telemetry.events`.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

MIXED_VERSIONS = "mixed_versions"
"""Tag of a turn that its version did not sample alone; its value says how."""

UNSCORABLE = "unscorable"
"""Tag of a turn that was drawn from a distribution that nobody can work out again; its value says why."""


class FinishReason(StrEnum):
    """Why sampling ended. Every one has an explicit consequence in labelling; none pays zero silently."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORTED = "aborted"
    """The client went away."""
    TIMEOUT = "timeout"
    ERROR = "error"


class ToolVerdict(StrEnum):
    """What parsing a tool call found."""

    VALID = "valid"
    UNPARSABLE = "unparsable"
    """Not JSON, or cut off."""
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    """Parsed, but does not satisfy the tool's JSON schema."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call found in the completion, with its parse verdict."""

    id: str
    name: str
    arguments: str
    """Raw text as sampled."""
    verdict: ToolVerdict


class Form(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer has to be: JSON that satisfies a schema, calls of tools, or either. Where both are None it may be anything."""

    answer: dict[str, Any] | None = None
    """JSON schema of an answer in JSON."""
    call: dict[str, Any] | None = None
    """JSON schema of a tool call, an object with `name` and `arguments`."""
    many: bool = False
    """Whether more calls may follow the first."""


class Shape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What bends the distribution that tokens are drawn from before temperature, top-k and top-p do, as OpenAI defines it: a token's logit
    is lowered by `frequency_penalty` for each time that the answer has it, by `presence_penalty` if it has it at all, and raised by its
    `logit_bias`; tokens that `form` does not allow are never drawn. It follows from the tokens before, so whoever scores the turn later
    works it out again (`app.policy.decoding.shaping`).
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    form: Form | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens were drawn; the logged probabilities are those of the distribution after all of these: temperature, then `top_k`,
    then `top_p` of what that left (vLLM's order and transformers')."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_k: int | msgspec.UnsetType = msgspec.UNSET
    """Only so many of the most probable tokens can be drawn, where a client asked for that; 0 is all. Else it is not written, because
    consumers of the first version refuse it."""

    @property
    def is_cut(self) -> bool:
        """Whether some tokens that temperature leaves are never drawn: then what was kept belongs to a log-probability."""
        return self.top_p < 1 or bool(self.top_k)


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """What may be done with the turn."""

    train: bool = True


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Which arm served the turn, and how likely that was; copied from the turn's exposure."""

    release_id: str | None = None
    stage: str = "champion"
    arm: str = "champion"
    probability: float = 1.0


class PayloadClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Where the payload of a turn lies that is too large for an event: a segment of that one turn, written before the event."""

    segment: str
    digest: str
    """SHA-256 of the segment as it was written."""
    bytes: int
    has_logprobs: bool


class TurnServed(msgspec.Struct, frozen=True, kw_only=True):
    """What was served: made by the gateway (or an importer), eaten by ingestion.

    `logprobs[i]` is the natural log-probability of `completion_tokens[i]` under the sampled distribution, so both have the
    same length, or `logprobs` is None: then the turn is kept, marked, and never trained on.
    """

    inference_id: str
    episode_id: str
    policy: str
    version: str
    """Digest of the weights that sampled it."""
    started_at: datetime
    finished_at: datetime
    messages: list[dict[str, Any]]
    """The chat as received (after redaction where the policy asks for it)."""
    completion: str
    prompt_tokens: Sequence[int]
    """Token ids [P] as fed to the model."""
    completion_tokens: list[int]
    """Token ids [T] as sampled, including the end-of-sequence token where one was sampled."""
    logprobs: list[float] | None
    routed_experts: list[list[list[int]]] | None = None
    """Expert ids [T, L, K] for mixture-of-experts models."""
    kept_log_mass: list[float] | None = None
    """[T] log of the probability mass that top-k and top-p kept; None where neither was asked for, or the engine does not say."""
    sampling: SamplingParams
    shape: Shape | msgspec.UnsetType = msgspec.UNSET
    """How the draw was bent, where a client asked for it; else it is not written, because consumers of the first version refuse it."""
    precision: str | msgspec.UnsetType = msgspec.UNSET
    """What its version was rounded to where it was served in less than was published (`mxfp8`, `nvfp4`); else not written either."""
    finish_reason: FinishReason
    tool_calls: list[ToolCall] = []
    usage: Usage
    actor: str | None = None
    segment: dict[str, str] = {}
    """Tags such as task, language, tier; the baseline is kept per combination."""
    consent: Consent = Consent()
    assignment: Assignment = Assignment()
    kind: str = "answer"
    """`answer` or `summary` (a self-written summary, part of the episode's chain)."""
    source: str = "gateway"
    """`gateway`, `import:<name>` (history: labelled, never trained on) or `rollout:<taskset>` (practice: nobody was served)."""
    time_to_first_token_s: float | None = None
    tags: dict[str, str] = {}
    payload: PayloadClaim | msgspec.UnsetType = msgspec.UNSET
    """Set where messages, tokens and what belongs to them are in the trajectory store; then those fields are empty here."""
