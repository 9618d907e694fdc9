"""Guards: when the update refuses, by name. A refused run is HELD with one of these reasons; it never publishes.

Legend: ρ importance ratio per token, b behaviour (logged), θ current weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from app.domain.errors import Held
from app.domain.release.versions import HoldReason
from pipelines.training.config import GuardLimits

BACK = 0.95
"""Of the way that would end exactly at a bound: the bound is met on a sample."""


@dataclass(frozen=True, kw_only=True)
class RatioReport:
    """How far the policy is from the one that sampled, over tokens."""

    tokens: int
    mean_ratio: float
    effective_share: float
    """(Σρ)² / (n Σρ²): the effective sample size (Kish 1965) as a share of the tokens."""
    kl: float
    """Mean of ρ − 1 − log ρ: an unbiased estimate of KL(b ‖ θ) in nats per token, no term of which is negative."""
    mean_gap: float
    """Mean |log π_θ − log π_b|."""
    p99_gap: float


def ratio_report(logprobs: Sequence[float], behaviour: Sequence[float]) -> RatioReport:
    """Compare two sets of log-probabilities of the same tokens."""
    gaps = [new - old for new, old in zip(logprobs, behaviour, strict=True)]
    ratios = [math.exp(min(gap, 50.0)) if not math.isnan(gap) else math.nan for gap in gaps]
    count, total, squares = len(ratios), math.fsum(ratios), math.fsum(r * r for r in ratios)
    distances = sorted(abs(gap) for gap in gaps)
    return RatioReport(
        tokens=count,
        mean_ratio=total / count,
        effective_share=total * total / (count * squares) if squares > 0 else 0.0,
        kl=math.fsum(r - 1 - gap for r, gap in zip(ratios, gaps, strict=True)) / count,
        mean_gap=math.fsum(distances) / count,
        p99_gap=distances[min(count - 1, int(0.99 * count))],
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean per token over turns, which are what varies independently."""

    mean: float
    error: float
    """Standard error."""

    @property
    def upper(self) -> float:
        """Of a one-sided 95 % interval."""
        return self.mean + 1.645 * self.error

    def plus(self, other: "Estimate") -> "Estimate":
        """The sum of two, taken as independent."""
        return Estimate(mean=self.mean + other.mean, error=math.hypot(self.error, other.error))


def estimate(turns: Sequence[Sequence[float]]) -> Estimate:
    """The ratio estimate Σ sums / Σ lengths and its linearised standard error (Cochran 1977, 6.4): turns are the clusters, tokens of one
    are not independent. One turn alone says nothing about the spread: its upper end is infinite."""
    tokens, count = sum(len(turn) for turn in turns), len(turns)
    middle = math.fsum(value for turn in turns for value in turn) / tokens
    rest = math.fsum((math.fsum(turn) - middle * len(turn)) ** 2 for turn in turns)
    error = math.sqrt(rest * count / (count - 1)) / tokens if count > 1 else math.inf
    return Estimate(mean=middle, error=error)


def check_turns(count: int, limits: GuardLimits) -> None:
    """Enough turns could be read."""
    if count < limits.min_turns:
        raise Held(
            HoldReason.TOO_FEW_LABELS,
            f"{count} turns could be read and {limits.min_turns} are needed: wait for more labels, or lower training.guards.min_turns",
        )


def check_compared(count: int) -> None:
    """A spread can be seen among the turns that the candidate is compared on."""
    if count < 2:
        raise Held(
            HoldReason.TOO_FEW_LABELS,
            f"{count} of the turns that the candidate is compared with its parent on are left and 2 are needed: the others were erased "
            "while it was trained; nothing is to be done, the next slot learns from the turns that are left",
        )


def check_rewards(advantages: Sequence[float]) -> None:
    """Some turn did better or worse than expected."""
    if all(abs(advantage) < 1e-9 for advantage in advantages):
        raise Held(HoldReason.EQUAL_REWARDS, "every turn got exactly the reward its baseline expects, so there is nothing to learn from")


def check_mismatch(report: RatioReport, limits: GuardLimits, *, rounded: Mapping[str, int] = MappingProxyType({})) -> None:
    """At step zero the trainer computes what the engine logged. `rounded`: turns by what their version was rounded to to be served."""
    if not (report.kl <= limits.max_mismatch and report.p99_gap <= limits.max_mismatch_p99):
        raise Held(
            HoldReason.ENGINE_MISMATCH,
            f"before the first step KL(logged ‖ computed) is {report.kl:.4f} nats per token and one token in a hundred is off by "
            f"{report.p99_gap:.2f}, the limits are {limits.max_mismatch} and {limits.max_mismatch_p99}: the engine and the trainer "
            f"disagree about the same weights; {_likely_cause(rounded)}",
        )


def _likely_cause(rounded: Mapping[str, int]) -> str:
    if not rounded:
        return "compare their versions, templates, sampling parameters and dtypes"
    counted = " and ".join(f"{count} in {precision}" for precision, count in sorted(rounded.items()))
    return (
        f"turns were served in low precision ({counted}), which is the likely cause: serve with --precision bf16, or mxfp8 instead of "
        "nvfp4, or raise training.guards.max_mismatch and max_mismatch_p99 if learning from so far off is meant"
    )


def check_ratio(report: RatioReport, limits: GuardLimits) -> None:
    """The data still say something about the current policy."""
    if not report.effective_share >= limits.min_effective_sample_share:
        raise Held(
            HoldReason.LOW_ESS,
            f"the effective sample is {report.effective_share:.0%} of the tokens, below {limits.min_effective_sample_share:.0%}: "
            "the data are too far off-policy; lower the learning rate or the allowed staleness",
        )
    if not limits.min_mean_ratio <= report.mean_ratio <= limits.max_mean_ratio:
        raise Held(
            HoldReason.MEAN_RATIO,
            f"the mean importance ratio is {report.mean_ratio:.3f}, outside {limits.min_mean_ratio} to {limits.max_mean_ratio}: "
            "the logged log-probabilities are not those of a nearby policy",
        )


def share_within(report: RatioReport, limits: GuardLimits) -> float:
    """The share of the way from the parent at which these turns' ratios should be within their bounds; 1 where they are.

    For ratios that are about log-normal the effective share is exp(−σ²), and σ grows with the way; the log of their mean grows with its
    square, so a straight line stays inside. Raises `Held` where no step back helps: not a number, or nothing left of the data.
    """
    if not (report.effective_share > 0 and 0 < report.mean_ratio < math.inf):
        check_ratio(report, limits)
    shares = [1.0]
    if report.effective_share < limits.min_effective_sample_share:
        shares.append(BACK * math.sqrt(math.log(limits.min_effective_sample_share) / math.log(report.effective_share)))
    if not limits.min_mean_ratio <= report.mean_ratio <= limits.max_mean_ratio:
        bound = limits.min_mean_ratio if report.mean_ratio < 1 else limits.max_mean_ratio
        shares.append(BACK * math.log(bound) / math.log(report.mean_ratio))
    return min(shares)


def check_finite(what: str, value: float) -> None:
    """No NaN and no infinity."""
    if not math.isfinite(value):
        raise Held(HoldReason.NOT_FINITE, f"the {what} is {value}: lower the learning rate, or train in float32")


def check_entropy(before: float, after: float, limits: GuardLimits) -> None:
    """The policy still has a choice."""
    check_finite("entropy", after)
    if after < limits.min_entropy_share * before:
        raise Held(
            HoldReason.ENTROPY_COLLAPSE,
            f"entropy fell from {before:.3f} to {after:.3f} nats per token, below {limits.min_entropy_share:.0%} of it: "
            "lower the learning rate or raise training.kl_beta",
        )


def check_kl(reason: HoldReason, kl: Estimate, limit: float) -> None:
    """The policy stays within its budget, as far as one can tell: the interval's upper end is inside too."""
    check_finite("divergence", kl.upper)
    if kl.upper > limit:
        whom = "champion" if reason is HoldReason.KL_CHAMPION else "anchor"
        raise Held(
            reason, f"the candidate is {kl.mean:.4f} (up to {kl.upper:.4f}) nats per token from the {whom}, above the budget of {limit}, "
            "even with most of the last step taken back: lower the learning rate"
            + ("" if reason is HoldReason.KL_CHAMPION else ", or look at the champion and renew the anchor (`ratchet release anchor`)")
        )  # fmt: skip
