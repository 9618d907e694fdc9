"""Whether a head is worth keeping: how often what it drafts is what people were answered, against what drafting costs here.

On answers of held-out people, at every place from which a draft could start:

    first-draft acceptance    how often the first drafted token is the one that was drawn
    tokens per verification   1 + the drafted tokens that were drawn, up to the first that was not (k drafted)
    gain                      tokens per verification over what it costs: feeding 1 + k tokens and drafting k, in steps of one token

The sampler's replay accepts exactly those tokens. Places count alike, though a long draft that was drawn leaves places out; costs are this
machine's at one row, and the engine measures its own. Intervals: one-sided, 95 % for all lengths of a draft together, by person.

Shapes: N places, K drafted tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from app.policy.decoding.draft_head import HeadDrafter
from app.policy.decoding.payoff import LONGEST
from app.policy.decoding.scores import AT_ONCE
from pipelines.training.drafting.answers import ReadAnswer
from pipelines.training.drafting.config import DraftingConfig

LENGTHS = range(1, LONGEST + 1)
Z = NormalDist().inv_cdf(1 - 0.05 / LONGEST)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A mean over places with its lower bound."""

    mean: float
    lower: float

    def over(self, cost: float) -> "Rate":
        """The same per unit of a cost that is taken as known."""
        return Rate(mean=self.mean / cost, lower=self.lower / cost)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the gate says."""

    passes: bool
    reason: str
    figures: dict[str, Any]


def judge(
    drafter: HeadDrafter, answers: Sequence[ReadAnswer], uniforms: Sequence[Tensor], costs: Mapping[int, float], config: DraftingConfig
) -> Verdict:
    """Ask the gate; `uniforms` [T] of each answer are the numbers that it was drawn with, `costs` by length of the draft, in steps of one
    token."""
    units = [answer.unit for answer in answers]
    if len(set(units)) < config.least_people:
        reason = f"{len(set(units))} held-out people answered for, {config.least_people} are the least: try again when more have asked"
        return Verdict(passes=False, reason=reason, figures={"held_out_people": len(set(units))})
    drawn = [_drawn(drafter, answer, uniforms_T) for answer, uniforms_T in zip(answers, uniforms, strict=True)]
    tokens = {k: rate(units, [1 + matched_NK[:, :k].sum(1) for matched_NK in drawn]) for k in LENGTHS}
    gains = {k: tokens[k].over(costs[k]) for k in LENGTHS}
    best = max(LENGTHS, key=lambda k: gains[k].mean)
    first, gain = rate(units, [matched_NK[:, 0] for matched_NK in drawn]), gains[best]
    figures = {
        "first_draft_acceptance": _said(first), "tokens_per_verification": {str(k): _said(tokens[k]) for k in LENGTHS},
        "cost": {str(k): round(costs[k], 4) for k in LENGTHS}, "gain": {str(k): _said(gains[k]) for k in LENGTHS}, "best_length": best,
        "held_out_people": len(set(units)), "held_out_places": sum(map(len, drawn)),
    }  # fmt: skip
    said = (
        f"{first.mean:.1%} of first drafts were drawn, {tokens[best].mean:.2f} tokens per verification of {best} drafted at "
        f"{costs[best]:.2f} times a step: gain {gain.mean:.2f}, at least {gain.lower:.2f}"
    )
    need = 1 + config.margin
    passes = math.isfinite(gain.lower) and gain.lower > need
    return Verdict(passes=passes, reason=f"{said}; above {need:.2f}" if passes else f"{said}, and {need:.2f} is the least", figures=figures)


def rate(units: Sequence[str], values: Sequence[Tensor]) -> Rate:
    """The mean over all places, with a lower bound by unit: the variance of a ratio of sums (Cochran 1977, section 6.4)."""
    sums: dict[str, tuple[float, int]] = {}
    for unit, value_N in zip(units, values, strict=True):
        total, count = sums.get(unit, (0.0, 0))
        sums[unit] = total + float(value_N.sum()), count + len(value_N)
    places = sum(count for _, count in sums.values())
    mean = sum(total for total, _ in sums.values()) / places
    spread = sum((total - mean * count) ** 2 for total, count in sums.values()) * len(sums) / (len(sums) - 1)
    return Rate(mean=mean, lower=mean - Z * math.sqrt(spread) / places)


def _drawn(drafter: HeadDrafter, answer: ReadAnswer, uniforms_T: Tensor) -> Tensor:
    """[N, K] 1 where a drafted token and all before it are what was drawn; what would lie behind the answer's end was not."""
    count = len(answer.tokens_T) - 1
    at_NK = torch.arange(count)[:, None] + torch.arange(1, LONGEST + 1)
    tokens, uniforms = (functional.pad(values, (0, LONGEST), value=-1) for values in (answer.tokens_T, uniforms_T))
    drafted = list[Tensor]()
    for first in range(0, count, AT_ONCE):
        some = slice(first, min(first + AT_ONCE, count))
        sampling = [answer.sampling] * len(at_NK[some])
        drafted.append(drafter.draft_all(answer.states_TD[some], tokens[some], uniforms[at_NK[some]], sampling))
    return (torch.cat(drafted) == tokens[at_NK]).long().cumprod(1)


def _said(found: Rate) -> list[float]:
    return [round(found.mean, 4), round(found.lower, 4)]
