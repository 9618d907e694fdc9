"""Non-inferiority for promotion: 0.01 betting + 0.04 group-sequential, and nothing else promotes (sheet 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.evaluation.statistics import betting, group_sequential
from pipelines.evaluation.statistics.betting import Tail
from pipelines.evaluation.statistics.group_sequential import LOOKS, GroupSequentialPlan, GroupSequentialResult
from pipelines.evaluation.statistics.units import Units

ALPHA_BETTING = 0.01
ALPHA_GROUP_SEQUENTIAL = 0.04


@dataclass(frozen=True, kw_only=True)
class NonInferiorityPlan:
    """Declared before the canary for each required metric."""

    margin: float
    """delta; H0: effect <= -delta."""
    variance: float
    n_max: int
    share: float = 0.5
    alpha_betting: float = ALPHA_BETTING
    alpha_group_sequential: float = ALPHA_GROUP_SEQUENTIAL
    looks: int = LOOKS

    def __post_init__(self) -> None:
        if not self.margin > 0.0:
            raise ValueError(f"margin {self.margin} is not positive; non-inferiority needs a margin such as 0.015")

    @property
    def group_sequential(self) -> GroupSequentialPlan:
        return GroupSequentialPlan(n_max=self.n_max, alpha=self.alpha_group_sequential, share=self.share, looks=self.looks)


@dataclass(frozen=True, kw_only=True)
class NonInferiority:
    """The verdict on one metric."""

    rejected: bool
    """H0 "worse by the margin" is rejected: the metric is non-inferior. False is no evidence, not bad evidence."""
    peak_log_e: float
    evidence_needed: float
    group_sequential: GroupSequentialResult
    is_constant: bool
    """No variation in the outcomes; never rejected then (spinnaker's identical data, sheet 6.2)."""


def judge(plan: NonInferiorityPlan, units: Units) -> NonInferiority:
    """Ask both halves at every unit and every planned look so far."""
    process = betting.non_inferiority(margin=plan.margin, variance=plan.variance)
    path = betting.log_e_path_so_far(process, units)
    peak = float(path.max(initial=0.0))
    needed = betting.evidence_needed(plan.alpha_betting)
    looks = group_sequential.evaluate(plan.group_sequential, units, threshold=-plan.margin, tail=Tail.ABOVE)
    return NonInferiority(
        rejected=not units.is_constant and (peak >= needed or looks.rejected),
        peak_log_e=peak,
        evidence_needed=needed,
        group_sequential=looks,
        is_constant=units.is_constant,
    )
