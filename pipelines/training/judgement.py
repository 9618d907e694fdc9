"""The finished candidate beside champion and anchor: how far it went, and whether that is inside the budgets.

Every figure is per token over turns that the champion sampled and scored before the first step. Where a budget is exceeded, the candidate
goes back on the straight line to its parent until it is inside (the line search of TRPO, arXiv 1502.05477, appendix C): what a batch
taught is published as far as the budget reaches, instead of being thrown away whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.errors import Held
from app.domain.release.versions import HoldReason
from pipelines.training import guards
from pipelines.training.config import GuardLimits, TrainingConfig
from pipelines.training.guards import Estimate, estimate
from pipelines.training.measurement import mean, terms_from_sampler, terms_to_reference

RETREATS = 4
"""So often a candidate is brought back before the run is held."""


@dataclass(frozen=True, kw_only=True)
class JudgedTurn:
    """One turn's tokens, [T] each: log-probabilities under champion, anchor and candidate, and entropies before and after."""

    champion: Sequence[float]
    anchor: Sequence[float]
    candidate: Sequence[float]
    entropy_before: Sequence[float]
    entropy_after: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the comparison says."""

    champion: Estimate
    """KL(champion ‖ candidate)."""
    anchor: Estimate
    """KL(candidate ‖ anchor)."""
    anchor_before: Estimate
    """KL(champion ‖ anchor)."""
    entropy_before: float
    entropy_after: float
    drift: float
    """Mean |Δ log π| from the champion."""

    def metrics(self, limits: GuardLimits) -> dict[str, Any]:
        """For the run's record."""
        return {
            "entropy_before": self.entropy_before, "entropy_after": self.entropy_after, "drift": self.drift,
            "kl_champion": self.champion.mean, "kl_champion_upper": self.champion.upper, "kl_anchor": self.anchor.mean,
            "kl_anchor_upper": self.anchor.upper, "kl_anchor_before": self.anchor_before.mean,
            "anchor_budget_used": self.anchor.upper / limits.max_kl_anchor,
        }  # fmt: skip

    def check(self, limits: GuardLimits) -> None:
        """Raises `Held` where a budget is exceeded. Whoever came nearer to the anchor is not stopped for being far from it."""
        guards.check_entropy(self.entropy_before, self.entropy_after, limits)
        guards.check_kl(HoldReason.KL_CHAMPION, self.champion, limits.max_kl_champion)
        if not self.anchor.mean < self.anchor_before.mean:
            guards.check_kl(HoldReason.KL_ANCHOR, self.anchor, limits.max_kl_anchor)

    def kept(self, limits: GuardLimits) -> float | None:
        """The share of the way from the parent that should be inside; None where all of it is, or none of it would be.

        Divergence from the parent grows with the square of the way, that from the anchor at least in a straight line from the champion's,
        whose own uncertainty no step back takes away, and entropy falls with the way. A figure that is no number raises `Held`: no step
        back makes it one.
        """
        try:
            self.check(limits)
        except Held as held:
            if held.reason is HoldReason.NOT_FINITE:
                raise
            if held.reason is HoldReason.KL_CHAMPION:
                return guards.BACK * math.sqrt(limits.max_kl_champion / self.champion.upper)
            if held.reason is HoldReason.ENTROPY_COLLAPSE:
                return 0.5
            left = limits.max_kl_anchor - self.anchor_before.upper
            return guards.BACK * left / (self.anchor.upper - self.anchor_before.upper) if left > 0 else None
        return None


def compare(turns: Sequence[JudgedTurn], *, before: Estimate) -> Judgement:
    """All figures over the turns; `before` is KL(champion ‖ anchor) over every turn of the batch.

    KL(candidate ‖ anchor) is that, plus the difference that the update made on the turns of the final pass: they are few, and the
    difference of two estimates on the same tokens varies less than either (a control variate).
    """
    return Judgement(
        champion=estimate([terms_from_sampler(t.champion, t.candidate) for t in turns]),
        anchor=before.plus(estimate([_moved(t) for t in turns])),
        anchor_before=before,
        entropy_before=mean([value for t in turns for value in t.entropy_before]),
        entropy_after=mean([value for t in turns for value in t.entropy_after]),
        drift=mean([abs(new - old) for t in turns for new, old in zip(t.candidate, t.champion, strict=True)]),
    )


def wish_for_renewal(judged: Judgement, config: TrainingConfig, *, beta: float, policy: str) -> str | None:
    """What to ask a person before the anchor's budget is gone and the penalty stops learning: to look, and to renew it."""
    limits, used = config.guards, judged.anchor.upper / config.guards.max_kl_anchor
    if used < limits.anchor_alarm:
        return None
    far = f"{judged.anchor.mean:.3f}, up to {judged.anchor.upper:.3f}, of {limits.max_kl_anchor} nats per token"
    return (
        f"{used:.0%} of the KL budget to the anchor is used ({far}; the penalty has risen from {config.kl_beta:g} to {beta:.3g}): look at "
        f"the champion beside the anchor and renew it with `ratchet release anchor {policy}`, or learning slows to a halt"
    )


def _moved(turn: JudgedTurn) -> list[float]:
    after = terms_to_reference(turn.champion, turn.candidate, turn.anchor)
    return [new - (old - far) for new, old, far in zip(after, turn.champion, turn.anchor, strict=True)]
