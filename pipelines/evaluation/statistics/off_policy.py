"""Off-policy estimate of a candidate from logged responses: a veto or a ramp hint, never a pass (sheet 4.3).

Weights are per response, in log space. Token-mean and geometric-mean weights return the logger's value, not the
candidate's (sheet S12), and ESS/n falls like exp(-2 KL), so only small steps can be judged this way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipelines.evaluation.statistics.units import FloatArray

ESS_MIN_FRACTION = 0.10
ESS_MIN = 1000.0
MAX_WEIGHT_SHARE = 0.05
ENGINE_GAP_LIMIT = 0.01
"""Absolute mean token difference of log-probabilities in a champion-against-champion replay."""
WEIGHT_CAP = 50.0
_STAKES = tuple(0.95 / 2**k for k in range(11))


class OffPolicyStatus(StrEnum):
    UNSUPPORTED = "unsupported"
    """The weights do not mean anything: cut support, no log-probabilities, or engines that disagree."""
    UNINFORMATIVE = "uninformative"
    """The weights are right but too uneven to estimate from."""
    INFORMATIVE = "informative"


class OffPolicyHint(StrEnum):
    VETO = "veto"
    FAST = "fast"
    """Start the ramp at 25 %."""
    NONE = "none"
    """Start the ramp at 5 %."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedResponses:
    """Responses of the logging policy, in the order of time."""

    log_candidate: FloatArray
    """Sum over tokens of the candidate's log-probability. [N]"""
    log_logged: FloatArray
    """The same under the distribution that was actually sampled: temperature, top-p and all. [N]"""
    reward: FloatArray
    """In [0, 1]. [N]"""
    is_fully_supported: bool
    """False if sampling cut the support (top-p, top-k, constrained) in a way the candidate does not share."""
    engine_gap: float
    """Absolute mean token log-probability difference of the replay check; NaN if it was not run."""


@dataclass(frozen=True, kw_only=True)
class WeightHealth:
    """Whether the weights can carry an estimate."""

    n: int
    ess: float
    """(sum w)^2 / sum w^2."""
    mean: float
    mean_error: float
    """Standard error of the mean weight; the mean must be within three of 1."""
    max_share: float
    """Largest weight over the sum of weights."""

    @property
    def is_informative(self) -> bool:
        return (
            self.ess >= ESS_MIN_FRACTION * self.n
            and self.ess >= ESS_MIN
            and abs(self.mean - 1.0) <= 3.0 * self.mean_error
            and self.max_share <= MAX_WEIGHT_SHARE
        )


@dataclass(frozen=True, kw_only=True)
class OffPolicyEstimate:
    status: OffPolicyStatus
    hint: OffPolicyHint
    reason: str
    health: WeightHealth | None
    """None when unsupported."""
    effect: float | None
    """Candidate minus logger; None unless informative."""
    low: float | None
    high: float | None


def estimate(responses: LoggedResponses, *, margin: float, alpha: float = 0.01) -> OffPolicyEstimate:
    """Judge the candidate from the log. VETO iff even the upper bound is below -margin, FAST iff the lower is above."""
    trouble = _why_unsupported(responses)
    if trouble is not None:
        return _unjudged(OffPolicyStatus.UNSUPPORTED, trouble, None)
    log_w = responses.log_candidate - responses.log_logged
    health = weight_health(log_w)
    if not health.is_informative:
        reason = f"ESS {health.ess:.0f} of {health.n}, mean weight {health.mean:.2f}, largest {health.max_share:.0%}"
        return _unjudged(OffPolicyStatus.UNINFORMATIVE, reason, health)
    low, high = effect_bounds(np.exp(log_w), responses.reward, alpha=alpha)
    return OffPolicyEstimate(
        status=OffPolicyStatus.INFORMATIVE,
        hint=_hint(low, high, margin),
        reason=f"effect between {low:+.3f} and {high:+.3f} against a margin of {margin:.3f}",
        health=health,
        effect=effect_estimate(np.exp(log_w), responses.reward),
        low=low,
        high=high,
    )


def weight_health(log_weights: FloatArray) -> WeightHealth:
    """Effective sample size, mean and largest weight, without overflow for very unlikely responses."""
    n = len(log_weights)
    if n == 0:
        return WeightHealth(n=0, ess=0.0, mean=0.0, mean_error=0.0, max_share=1.0)
    top = float(log_weights.max())
    scaled = np.exp(log_weights - top)
    total = float(scaled.sum())
    scale = math.exp(min(top, 700.0))
    return WeightHealth(
        n=n,
        ess=total**2 / float((scaled**2).sum()),
        mean=total / n * scale,
        mean_error=float(scaled.std()) / math.sqrt(n) * scale,
        max_share=1.0 / total,
    )


def effect_estimate(weights: FloatArray, reward: FloatArray, model: FloatArray | float | None = None) -> float:
    """mean((w - 1)(r - q)); doubly robust if q predicts the reward, else q is the logger's mean reward."""
    q = float(reward.mean()) if model is None else model
    return float(np.mean((weights - 1.0) * (reward - q)))


def effect_bounds(weights: FloatArray, reward: FloatArray, *, alpha: float, cap: float = WEIGHT_CAP) -> tuple[float, float]:
    """Lower and upper confidence bound of candidate minus logger, each at level alpha at every n.

    Lower: (min(w, C) - 1) r is at least -1, and capping can only lower its mean. Upper: because E[w] = 1, the effect is
    also -E[(w - 1)(1 - r)], again at least -1 inside, uncapped (mirrored pseudo-outcome, Waudby-Smith et al. 2022,
    arXiv 2210.10768). So neither needs a bound on w.
    """
    low = mean_lower_bound((np.minimum(weights, cap) - 1.0) * reward, floor=-1.0, alpha=alpha)
    high = -mean_lower_bound((weights - 1.0) * (1.0 - reward), floor=-1.0, alpha=alpha)
    return low, high


def mean_lower_bound(values: FloatArray, *, floor: float, alpha: float) -> float:
    """Betting confidence bound for a mean whose values are only bounded below: means not rejected as too small.

    Capital against mean mu: average over stakes c of prod(1 - c + c (x - floor)/(mu - floor)); falls in mu, so bisect.
    """
    above = values - floor

    def is_rejected(excess: float) -> bool:
        factors = np.log(np.outer(above / excess, _STAKES) + (1.0 - np.array(_STAKES)))
        capital = np.cumsum(factors, axis=0)
        top = capital.max(axis=1)
        return bool(np.max(top + np.log(np.exp(capital - top[:, None]).mean(axis=1)), initial=0.0) >= -math.log(alpha))

    rejected, kept = 0.0, float(above.mean()) if len(above) else 0.0
    while kept - rejected > 1e-5:
        middle = (rejected + kept) / 2.0
        if is_rejected(middle):
            rejected = middle
        else:
            kept = middle
    return floor + rejected


def _why_unsupported(responses: LoggedResponses) -> str | None:
    if not responses.is_fully_supported:
        return "sampling cut the support; log full-support turns or share the truncation set"
    if not len(responses.reward):
        return "there is no turn to judge it on; hold people out (policies.NAME.held_out_share)"
    logs = np.concatenate([responses.log_candidate, responses.log_logged])
    if not np.all(np.isfinite(logs)):
        return "log-probabilities are missing; serve with log-probabilities on"
    if not np.all((responses.reward >= 0.0) & (responses.reward <= 1.0)):
        return "rewards are missing or outside [0, 1]; rescale the reward"
    if not responses.engine_gap <= ENGINE_GAP_LIMIT:
        return f"engines disagree by {responses.engine_gap:.4f} nat a token; the replay allows {ENGINE_GAP_LIMIT}"
    return None


def _unjudged(status: OffPolicyStatus, reason: str, health: WeightHealth | None) -> OffPolicyEstimate:
    return OffPolicyEstimate(status=status, hint=OffPolicyHint.NONE, reason=reason, health=health, effect=None, low=None, high=None)


def _hint(low: float, high: float, margin: float) -> OffPolicyHint:
    if high < -margin:
        return OffPolicyHint.VETO
    return OffPolicyHint.FAST if low > -margin else OffPolicyHint.NONE
