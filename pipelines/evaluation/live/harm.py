"""Harm: is the canary worse? The e-process of the metric family, and the group-sequential half on the primary metrics (section 3).

Only a metric with a direction can say "worse". A metric whose good is "the same" says "otherwise", which an improvement is as well: fewer
clarifying questions, shorter answers. Those form a family of their own, whose finding is told to people and asks two of them (`alarms`);
it stops a canary only together with a metric that has a direction, which then needs half as much evidence. False aborts: at most
`alpha_abort_e` where nothing changed, at most twice that where behaviour changed and nothing got worse.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig
from pipelines.evaluation.counting.evidence import Evidence, Lane
from pipelines.evaluation.counting.references import Reference, bounded
from pipelines.evaluation.live.turn_tests import TurnTest, lane_share, turn_tests
from pipelines.evaluation.statistics import betting
from pipelines.evaluation.statistics.betting import EProcess, Tail, evidence_needed
from pipelines.evaluation.statistics.family import FamilyEvidence, Member, Steps, family_evidence
from pipelines.evaluation.statistics.group_sequential import GroupSequentialPlan, evaluate
from pipelines.evaluation.statistics.growing import log_sums
from pipelines.evaluation.statistics.units import FloatArray, Units, running_mean, with_usual

PRIMARY = frozenset({MetricClass.GOLD, MetricClass.PROXY})
LEAST_LOOKS = 10
"""Units per look that the group-sequential half needs at least."""


@dataclass(frozen=True, kw_only=True)
class LookSummary:
    """The group-sequential half of one primary metric."""

    metric: str
    rejected_at: int | None
    looks: int
    z: float | None
    """At the newest look, positive towards harm."""
    boundary: float | None


@dataclass(frozen=True, kw_only=True)
class Harm:
    """Whether the canary does harm, and by which half of the test."""

    family: FamilyEvidence
    needed: float
    looks: tuple[LookSummary, ...]
    behaviour: FamilyEvidence | None = None
    """The metrics without a direction; None where there are none."""
    effects: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    @property
    def found(self) -> bool:
        return self.family.rejected or self._is_seconded or any(look.rejected_at is not None for look in self.looks)

    @property
    def changed(self) -> str | None:
        """The metric without a direction that changed for sure."""
        return self.behaviour.cause if self.behaviour is not None and self.behaviour.rejected else None

    @property
    def _is_seconded(self) -> bool:
        """Behaviour changed for sure, and the metrics with a direction say with half the evidence that it got worse."""
        return self.changed is not None and self.family.peak_log_e >= self.needed - math.log(2.0)

    @property
    def reason(self) -> str:
        """Which metric, with its means."""
        if self.family.rejected:
            cause = self.family.cause
            return f"harm on {cause}: log E {self.family.peak_log_e:.2f} reached {self.needed:.2f}; {self._means(cause)}"
        if self._is_seconded:
            cause, needed = self.family.cause, self.needed - math.log(2.0)
            said = f"harm on {cause}: log E {self.family.peak_log_e:.2f} reached {needed:.2f}; {self._means(cause)}"
            return f"{said}, and {self.changed} changed: {self._means(self.changed)}"
        crossed = next(look for look in self.looks if look.rejected_at is not None)
        return f"harm on {crossed.metric}: group-sequential look crossed at {crossed.rejected_at} units; {self._means(crossed.metric)}"

    def _means(self, metric: str | None) -> str:
        shown = self.effects.get(metric or "")
        return f"{shown['treated']:.3f} against {shown['control']:.3f} (good is up)" if shown else "no units"

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {
            "found": self.found,
            "log_e": self.family.log_e,
            "peak_log_e": self.family.peak_log_e,
            "needed": self.needed,
            "cause": self.family.cause,
            "rejected_at": self.family.rejected_at,
            "log_weighted": dict(self.family.log_weighted),
            "changed": self.changed,
            "behaviour": None if self.behaviour is None else dict(self.behaviour.log_weighted),
            "looks": [vars(look) for look in self.looks],
            "effects": self.effects,
        }


def harm_of(config: GatesConfig, evidence: Evidence) -> Harm:
    """Ask both halves. Raises ValueError on evidence that must not be used."""
    members = family_of(config, evidence)
    behaviour = behaviour_of(config, evidence)
    units = {member.name: member.units for member in (*members, *behaviour)}
    primary = [metric for metric in config.required if metric.kind in PRIMARY]
    looks = [_looks(config, evidence, metric, units[metric.name], alpha=config.alpha_abort_gst / len(primary)) for metric in primary]
    return Harm(
        family=family_evidence(members, alpha=config.alpha_abort_e, steps=steps_of(config, evidence)),
        needed=evidence_needed(config.alpha_abort_e), looks=tuple(looks),
        behaviour=family_evidence(behaviour, alpha=config.alpha_abort_e) if behaviour else None,
        effects={**{name: effect_of(u) for name, u in units.items()}, **turn_effects(evidence)},
    )  # fmt: skip


def family_of(config: GatesConfig, evidence: Evidence, *, margin: float | None = None) -> list[Member]:
    """The metrics with a direction, each with its share of the family; `margin` as in `member_of`."""
    directed = [metric for metric in config.metrics if metric.good is not Good.SAME]
    kept = {metric.name: 1.0 if evidence.turn_looks is None else lane_share(metric) for metric in directed}
    return [member_of(config, evidence, m, weight=config.weight_of(m) * kept[m.name], margin=margin) for m in directed]


def steps_of(config: GatesConfig, evidence: Evidence) -> list[Steps]:
    """What all turns say, each test with its share of the family; none in evidence without looks at them."""
    found = [_steps(config, evidence, test) for test in turn_tests(config)] if evidence.turn_looks is not None else []
    return [steps for steps in found if len(steps.at)]


def turn_effects(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Means per arm at the newest look of each test, for people."""
    newest = {look.test: look for look in evidence.turn_looks or ()}
    return {
        test: {"treated": x.treated, "control": x.control, "n_treated": float(x.n_treated), "n_control": float(x.units - x.n_treated)}
        for test, x in newest.items()
    }


def _steps(config: GatesConfig, evidence: Evidence, test: TurnTest) -> Steps:
    looks = [look for look in evidence.turn_looks or () if look.test == test.name]
    if not all(math.isfinite(look.log_e) for look in looks):
        raise ValueError(f"{test.name} has looks that are no numbers")
    return Steps(
        name=test.name, weight=config.weight_of(test.metric) * test.share, at=np.array([look.at for look in looks], dtype=np.int64),
        log_sums=log_sums(np.array([look.log_e for look in looks], dtype=np.float64)),
    )  # fmt: skip


def behaviour_of(config: GatesConfig, evidence: Evidence) -> list[Member]:
    """The metrics without a direction: a family of their own, its shares adding up to one."""
    same = [metric for metric in config.metrics if metric.good is Good.SAME]
    total = sum(config.weight_of(metric) for metric in same)
    return [member_of(config, evidence, metric, weight=config.weight_of(metric) / total) for metric in same]


def member_of(config: GatesConfig, evidence: Evidence, metric: MetricConfig, *, weight: float, margin: float | None = None) -> Member:
    """One abort metric of the family; `margin` replaces its own abort margin where that is smaller."""
    return Member(
        name=metric.name,
        weight=weight,
        process=process_of(config, evidence, metric, margin=margin),
        units=units_of(evidence.lane_of(config.window_of(metric)), metric.name, prior=evidence.references[metric.name].mean),
    )


def process_of(config: GatesConfig, evidence: Evidence, metric: MetricConfig, *, margin: float | None = None) -> EProcess:
    """The e-process of one metric of this evidence."""
    return process_for(config, metric, reference_of(config, evidence, metric), margin=margin)


def process_for(config: GatesConfig, metric: MetricConfig, reference: Reference, *, margin: float | None = None) -> EProcess:
    """The e-process of one metric: two-sided for behaviour, targets fitted to the rate where that is rare."""
    allowed = metric.abort_margin if margin is None else max(margin, metric.abort_margin)
    if metric.good is Good.SAME:
        return betting.two_sided(margin=allowed, variance=reference.variance, targets=config.e_targets)
    allowed = bounded(config, metric, allowed, reference)
    targets = betting.harm_targets(reference.mean, points=config.e_targets)
    return betting.harm(margin=allowed, variance=reference.variance, targets=targets)


def units_of(lane: Lane, metric: str, *, prior: float) -> Units:
    """The lane's units of one metric, with a predictable baseline: the running mean, or what is usual for each person."""
    outcome, usual = lane.array(metric), usual_of(lane, metric)
    if not np.all(np.isfinite(outcome)):
        raise ValueError(f"{metric} has outcomes that are no numbers")
    return Units.observed(
        outcome=outcome,
        treated=np.frombuffer(lane.treated, dtype="u1").astype(bool),
        probability=np.frombuffer(lane.probability, dtype="<f8"),
        baseline=np.clip(running_mean(outcome, prior=prior), 0.0, 1.0) if usual is None else with_usual(outcome, usual),
        usual=usual,
        stratum=np.frombuffer(lane.stratum, dtype="<i8"),
        closed_at=np.frombuffer(lane.closed_at, dtype="<i8"),
    )


def usual_of(lane: Lane, metric: str) -> FloatArray | None:
    """What was to be expected of each unit; None where that is not known. [N]"""
    return np.frombuffer(lane.usual[metric], dtype="<f8") if metric in lane.usual else None


def reference_of(config: GatesConfig, evidence: Evidence, metric: MetricConfig) -> Reference:
    """The metric's reference, with the variance that is left where what is usual for people is taken off."""
    reference = evidence.references[metric.name]
    if metric.name not in evidence.lane_of(config.window_of(metric)).usual:
        return reference
    return msgspec.structs.replace(reference, variance=reference.residual)


def plan_of(config: GatesConfig, evidence: Evidence, metric: MetricConfig, *, alpha: float) -> GroupSequentialPlan:
    """The declared plan of one primary metric."""
    n_max = max(evidence.n_max.get(metric.name, 0), LEAST_LOOKS * config.gst_looks)
    return GroupSequentialPlan(n_max=n_max, alpha=alpha, share=evidence.declared_share, looks=config.gst_looks)


def effect_of(units: Units) -> dict[str, float]:
    """Units and means per arm, for people."""
    treated, control = units.outcome[units.treated], units.outcome[~units.treated]
    return {
        "treated": float(treated.mean()) if len(treated) else 0.0,
        "control": float(control.mean()) if len(control) else 0.0,
        "n_treated": float(len(treated)),
        "n_control": float(len(control)),
    }


def _looks(config: GatesConfig, evidence: Evidence, metric: MetricConfig, units: Units, *, alpha: float) -> LookSummary:
    allowed = bounded(config, metric, metric.abort_margin, evidence.references[metric.name])
    result = evaluate(plan_of(config, evidence, metric, alpha=alpha), units, threshold=-allowed, tail=Tail.BELOW)
    last = result.looks[-1] if result.looks else None
    return LookSummary(
        metric=metric.name, rejected_at=result.rejected_at, looks=len(result.looks), z=last.z if last else None,
        boundary=last.boundary if last else None,
    )  # fmt: skip
