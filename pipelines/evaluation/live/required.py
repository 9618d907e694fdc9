"""Non-inferiority of every required metric, and the gap between the reward and what it stands for."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.evaluation.config import GatesConfig, MetricClass, MetricConfig
from pipelines.evaluation.counting.evidence import Evidence
from pipelines.evaluation.counting.references import bounded
from pipelines.evaluation.live.harm import LEAST_LOOKS, reference_of, units_of
from pipelines.evaluation.statistics.betting import evidence_needed, log_e_path_so_far
from pipelines.evaluation.statistics.confidence import betting_interval
from pipelines.evaluation.statistics.non_inferiority import NonInferiority, NonInferiorityPlan, judge
from pipelines.evaluation.statistics.proxy_gold import gap_process, gap_units

GAP_MARGIN = 0.03
"""By how much the reward's lift may exceed the gold metric's before people are warned (on the scale 0 … 1)."""


@dataclass(frozen=True, kw_only=True)
class Required:
    """One required metric."""

    metric: str
    margin: float
    n_max: int
    judged: NonInferiority
    missing: bool
    """No unit had any signal of it: nothing was measured, so nothing can be concluded."""

    @property
    def rejected(self) -> bool:
        """ "Worse by the margin" is rejected: the metric is non-inferior."""
        return self.judged.rejected and not self.missing

    @property
    def is_exhausted(self) -> bool:
        return self.judged.group_sequential.is_exhausted

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        looks = self.judged.group_sequential.looks
        return {
            "metric": self.metric, "margin": self.margin, "n_max": self.n_max, "non_inferior": self.rejected, "missing": self.missing,
            "constant": self.judged.is_constant, "peak_log_e": self.judged.peak_log_e, "needed": self.judged.evidence_needed,
            "looks": len(looks), "z": looks[-1].z if looks else None, "boundary": looks[-1].boundary if looks else None,
            "exhausted": self.is_exhausted,
        }  # fmt: skip


def required_of(config: GatesConfig, evidence: Evidence) -> list[Required]:
    """Every required metric judged. Raises ValueError on evidence that must not be used."""
    return [_required(config, evidence, metric) for metric in config.required]


def intervals(config: GatesConfig, evidence: Evidence, *, alpha: float = 0.05) -> dict[str, tuple[float, float]]:
    """Betting interval of the effect on each required metric, for people to look at; no decision is made from it."""
    found: dict[str, tuple[float, float]] = {}
    for metric in config.required:
        reference = evidence.references[metric.name]
        units = units_of(evidence.lane_of(config.window_of(metric)), metric.name, prior=reference.mean)
        interval = betting_interval(units, variance=reference.variance, alpha=alpha)
        found[metric.name] = (interval.low, interval.high)
    return found


def gap_found(config: GatesConfig, evidence: Evidence) -> bool:
    """Whether the reward rises for sure more than the gold metric does: the sign of a reward that is being gamed (section 4.7)."""
    proxy = next((m for m in config.required if m.kind is MetricClass.PROXY), None)
    gold = next((m for m in config.required if m.kind is MetricClass.GOLD), None)
    if proxy is None or gold is None or config.window_of(proxy) != config.window_of(gold):
        return False
    lane = evidence.lane_of(config.window_of(gold))
    if len(lane) == 0 or lane.missing[gold.name] == len(lane):
        return False
    before = evidence.references[proxy.name].mean - evidence.references[gold.name].mean
    units = gap_units(
        proxy=lane.array(proxy.name), gold=lane.array(gold.name), treated=np.frombuffer(lane.treated, dtype="u1").astype(bool),
        probability=np.frombuffer(lane.probability, dtype="<f8"), baseline=before,
    )  # fmt: skip
    variance = evidence.references[proxy.name].variance + evidence.references[gold.name].variance
    path = log_e_path_so_far(gap_process(margin=GAP_MARGIN, variance=variance), units)
    return float(path.max(initial=0.0)) >= evidence_needed(config.alpha_data)


def _required(config: GatesConfig, evidence: Evidence, metric: MetricConfig) -> Required:
    assert metric.margin is not None
    lane = evidence.lane_of(config.window_of(metric))
    reference = reference_of(config, evidence, metric)
    units = units_of(lane, metric.name, prior=reference.mean)
    margin = bounded(config, metric, metric.margin, reference)
    n_max = max(evidence.n_max.get(metric.name, 0), LEAST_LOOKS * config.gst_looks)
    plan = NonInferiorityPlan(
        margin=margin, variance=reference.variance, n_max=n_max, share=evidence.declared_share,
        alpha_betting=config.alpha_ni_e, alpha_group_sequential=config.alpha_ni_gst, looks=config.gst_looks,
    )  # fmt: skip
    return Required(
        metric=metric.name, margin=margin, n_max=n_max, judged=judge(plan, units), missing=lane.missing[metric.name] >= len(lane)
    )
