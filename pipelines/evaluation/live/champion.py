"""After the promotion: is the champion worse than the version its holdback serves? (`facts/gates.md`, section 4.7)

Two questions at once: a family e-process (the champion was worse all along) and a Shiryaev-Roberts detector per primary metric (it became
worse: early good evidence cannot mask a later fall). Without a holdback nothing but the absolute limits can tell.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.release.gates import CanaryAction
from pipelines.evaluation.config import GatesConfig, Good, MetricClass
from pipelines.evaluation.counting.evidence import Evidence, hash_of
from pipelines.evaluation.live import hacking
from pipelines.evaluation.live.decide import Cause, Decision, require_right_signs
from pipelines.evaluation.live.harm import effect_of, family_of, steps_of, turn_effects
from pipelines.evaluation.live.slo import burnt, incident, keeps_limits, to_blame
from pipelines.evaluation.statistics import betting, shiryaev_roberts
from pipelines.evaluation.statistics.betting import evidence_needed
from pipelines.evaluation.statistics.family import FamilyEvidence, Member, family_evidence
from pipelines.evaluation.statistics.shiryaev_roberts import Detection, Detector
from pipelines.evaluation.statistics.units import Units

WATCHED = frozenset({MetricClass.GOLD, MetricClass.PROXY, MetricClass.HARD})


@dataclass(frozen=True, kw_only=True)
class Fall:
    """One metric's detector."""

    metric: str
    detection: Detection
    log_threshold: float

    @property
    def found(self) -> bool:
        return self.detection.alarmed_at is not None

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        newest = max(self.detection.log_statistic)
        return {
            "metric": self.metric, "alarmed_at": self.detection.alarmed_at, "units": self.detection.units,
            "log_statistic": newest if math.isfinite(newest) else None, "log_threshold": self.log_threshold,
        }  # fmt: skip


def decide_champion(config: GatesConfig, evidence: Evidence) -> Decision:
    """ABORT (roll back), HOLD (an incident, or the reward being gamed: nothing moves forward) or CONTINUE."""
    require_right_signs()
    evidence_hash = hash_of(evidence)
    family: FamilyEvidence | None = None
    falls: list[Fall] = []
    effects: dict[str, dict[str, float]] = {}
    unusable: str | None = None
    if evidence.lanes and any(len(lane) for lane in evidence.lanes) and evidence.champion != evidence.digest:
        try:
            family, falls, effects = _compared(config, evidence)
        except ValueError as error:
            unusable = str(error)
    monitored = hacking.monitored(config.health, evidence)
    action, cause, reason = _judge(config, evidence, family, falls, hacking.suspicions(monitored))
    numbers: dict[str, Any] = {
        "units": evidence.units,
        "harm": None if family is None else {"log_e": family.log_e, "peak_log_e": family.peak_log_e, "cause": family.cause},
        "needed": evidence_needed(config.alpha_post),
        "falls": [fall.numbers() for fall in falls],
        "effects": effects,
        "burnt": burnt(config, evidence),
        "reference_burnt": to_blame(config, evidence, arm="control"),
        "keeps_limits": keeps_limits(evidence),
        "unusable": unusable,
        "monitors": hacking.numbers(monitored),
    }
    return Decision(action=action, cause=cause, reason=reason, numbers=numbers, config_hash=config.hash, evidence_hash=evidence_hash)


def is_worse(config: GatesConfig, evidence: Evidence) -> bool:
    """Whether the champion was worse all along or became so, whatever its limits say. Raises ValueError on unusable evidence."""
    family, falls, _ = _compared(config, evidence)
    return family.rejected or any(fall.found for fall in falls)


def anchor_guard(config: GatesConfig, eras: Sequence[Units], *, units_per_slot: float, variance: float) -> Fall:
    """The champions since the last renewal against the anchor, on the gold metric, one detector over all eras in order."""
    run_length = max(config.units_per_look, round(config.anchor_run_length_slots * max(units_per_slot, 1.0)))
    process = betting.harm(margin=config.anchor_margin, variance=variance, targets=config.e_targets)
    detector = Detector(process=process, run_length_units=run_length, units_per_look=config.units_per_look)
    detection = shiryaev_roberts.start(detector)
    for units in eras:
        detection = shiryaev_roberts.advance(detector, detection, units)
    return Fall(metric="anchor", detection=detection, log_threshold=detector.log_threshold)


def _compared(config: GatesConfig, evidence: Evidence) -> tuple[FamilyEvidence, list[Fall], dict[str, dict[str, float]]]:
    members = family_of(config, evidence, margin=config.post_margin)  # people have seen how its behaviour differs, and said yes
    family = family_evidence(members, alpha=config.alpha_post, steps=steps_of(config, evidence))
    watched = {metric.name for metric in config.metrics if metric.kind in WATCHED and metric.good is not Good.SAME}
    falls = [_fall(config, member, of=len(watched)) for member in members if member.name in watched]
    return family, falls, {**{member.name: effect_of(member.units) for member in members}, **turn_effects(evidence)}


def _fall(config: GatesConfig, member: Member, *, of: int) -> Fall:
    """The detector of one of `of` metrics: each gets a run length `of` times as long, so that all together keep theirs."""
    detector = Detector(process=member.process, run_length_units=config.run_length_units * of, units_per_look=config.units_per_look)
    return Fall(metric=member.name, detection=shiryaev_roberts.detect(detector, member.units), log_threshold=detector.log_threshold)


def _judge(
    config: GatesConfig, evidence: Evidence, family: FamilyEvidence | None, falls: Sequence[Fall], suspicions: Sequence[str]
) -> tuple[CanaryAction, Cause, str]:
    if evidence.hard:
        return CanaryAction.ABORT, Cause.HARD, "; ".join(evidence.hard)
    blamed = to_blame(config, evidence, arm="treated")
    if blamed:
        return CanaryAction.ABORT, Cause.SLO, blamed[0]
    if family is not None and family.rejected:
        return CanaryAction.ABORT, Cause.HARM, f"worse than its holdback on {family.cause}: log E {family.peak_log_e:.2f}"
    fallen = [fall for fall in falls if fall.found]
    if fallen:
        return CanaryAction.ABORT, Cause.FALL, f"{fallen[0].metric} fell after {fallen[0].detection.alarmed_at} units"
    trouble = [*evidence.incident, *filter(None, [incident(config, evidence)])]
    if trouble:
        return CanaryAction.HOLD, Cause.INCIDENT, trouble[0]
    if suspicions:
        return CanaryAction.HOLD, Cause.MONITORS, suspicions[0]
    return CanaryAction.CONTINUE, Cause.WATCHED, "no sign of harm"
