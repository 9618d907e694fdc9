"""One completion on its way."""

import random
from dataclasses import dataclass, field

from torch import Tensor

from app.domain.errors import BadRequest
from app.domain.telemetry.serving import Likely
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.policy.decoding.logits import LogitsProcessor
from app.policy.decoding.lookup import PromptLookup
from app.policy.decoding.payoff import Pace
from app.policy.decoding.textstream import TextStream


@dataclass(eq=False, kw_only=True)
class Generation:
    """One completion on its way; `Decoder.step` appends to it."""

    prompt: list[int]
    sampling: SamplingParams
    record_experts: bool
    max_tokens: int
    """`sampling.max_tokens`, or what the context leaves."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """Natural logarithm, of the distribution the token was drawn from."""
    kept_log_mass: list[float] = field(default_factory=list[float])
    """[T] log of the mass that top-k and top-p kept of the processed distribution when each token was drawn; empty where neither cuts."""
    processor: LogitsProcessor | None = None
    wants: int | None = None
    """How many of the likeliest tokens are noted beside each sampled one; None for not even that one."""
    likely: list[list[Likely]] = field(default_factory=list[list[Likely]])
    """[T, 1 + wants]"""
    fault: str | None = None
    """With finish_reason `error`: why."""
    experts: list[list[list[int]]] = field(default_factory=list[list[list[int]]])
    """[T, L, K]: entry t is the routing of the forward pass that predicted token t (at the position before it)."""
    text: str = ""
    finish_reason: FinishReason | None = None
    stream: TextStream
    random: random.Random
    uniforms: list[float] = field(default_factory=list[float])
    """Drawn from `random` and not used yet: one per token, in order."""
    lookup: PromptLookup | None = None
    """Where drafts come from first; None where none are made."""
    pace: Pace = field(default_factory=Pace)
    state: Tensor | None = None
    """[D] that the newest token was drawn from, where a draft head goes on from there."""
    by_head: bool = False
    """Whether it was the head that drafted what is being fed."""
    cached: int = 0
    """Tokens of prompt and completion whose keys and values are in the cache."""

    @property
    def newest(self) -> int:
        """The token that is fed next when it decodes."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def unfed(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        return len(self.prompt) - self.cached

    def upcoming(self, count: int) -> list[float]:
        """The next uniform numbers of this answer."""
        self.uniforms += [self.random.random() for _ in range(count - len(self.uniforms))]
        return self.uniforms[:count]


def check(sampling: SamplingParams) -> None:
    """Raises `BadRequest` naming the parameter that is out of range."""
    if not 0 <= sampling.temperature <= 100:
        raise BadRequest(f"temperature is {sampling.temperature}: use 0 (most probable token) to 100", param="temperature")
    if not 0 < sampling.top_p <= 1:
        raise BadRequest(f"top_p is {sampling.top_p}: use a number above 0, at most 1", param="top_p")
    if (sampling.top_k or 0) < 0:
        raise BadRequest(f"top_k is {sampling.top_k}: use the number of tokens to draw from, or 0 for all", param="top_k")
    if sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens is {sampling.max_tokens}: use at least 1", param="max_tokens")
