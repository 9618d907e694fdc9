"""What a trainer is given and what it answers: plain data, so that the same words travel to a Ray worker or to somebody else's service.

Legend of shapes: S tokens of a sequence, T scored tokens of it (its last T), L layers with experts, K experts a token.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from app.domain.telemetry.turns import Shape

Place = Path | str
"""A folder on this machine, or the URL of one in object storage, which every worker reaches."""


class LossName(StrEnum):
    """The losses of the trainer's port, named as Tinker names them."""

    IMPORTANCE_SAMPLING = "importance_sampling"
    CROSS_ENTROPY = "cross_entropy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """One sequence to learn from."""

    tokens: tuple[int, ...]
    """[S]"""
    first_scored: int
    """Index of the first scored token; S - first_scored = T."""
    logprobs: tuple[float, ...] = ()
    """[T] as logged when they were sampled; unused by cross-entropy."""
    advantages: tuple[float, ...] = ()
    """[T]; with cross-entropy: the weight of each token, 1 where empty."""
    teacher: tuple[float, ...] = ()
    """[T] log-probabilities of the same tokens under the same weights that also read what the person said afterwards; empty without it."""
    pull: float = 0.0
    """How much log π_teacher − log π_θ of each token adds to its advantage."""
    temperature: float = 1.0
    kept_log_mass: tuple[float, ...] = ()
    """[T] log of the probability mass that top-k and top-p kept when each token was sampled; empty where neither cut anything."""
    top_p: float = 1.0
    top_k: int = 0
    """`top_p` below 1 or `top_k` above 0, and no `kept_log_mass`: a forward pass works out what they keep under the current weights."""
    shape: Shape | None = None
    """What else bent the distribution when the tokens were sampled: they are scored under the same."""
    routes: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    """[T, L, K] experts that ran when each scored token was sampled."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Which loss, and the constants in it."""

    name: LossName = LossName.IMPORTANCE_SAMPLING
    normaliser: float
    """The sum over tokens is divided by this constant, never by a count of tokens that depends on the sample."""
    correction: str = "tis"
    clip_low: float = 0.0
    clip_high: float = 2.0
    delta: float = 0.0
    """Of `opsm`: how far, in nats per token, a sequence may have moved away before it is masked where its advantage is negative."""
    teacher_clip: float = 5.0
    """Nats by which one token's log π_teacher − log π_θ counts at the most, either way."""
    more_follows: bool = False
    """The step's gradient is not whole with this: workers that share a model may sum later what they found here."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """What one micro-step found, before its gradient is applied."""

    loss: float
    logprobs: tuple[tuple[float, ...], ...]
    """[T] per datum, under the current weights."""
    entropy: tuple[tuple[float, ...], ...]
    """[T] per datum, nats."""
    kept_log_mass: tuple[tuple[float, ...], ...] = ()
    """[T] per datum, where a forward pass was asked for it."""
    tokens: int
    """Tokens that went through the model, shared beginnings counted once."""


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """One AdamW step (Loshchilov & Hutter 2019), with the gradient clipped to a norm first."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """0 switches clipping off."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What the optimizer did."""

    grad_norm: float
    """Before clipping."""
    applied: bool
    """False where the gradient was not finite: then nothing was changed."""
