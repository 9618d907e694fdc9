"""Data health: reasons to doubt the evidence. They hold a release back, and never mask harm (`facts/gates.md`, sections 3.6 and 4.4)."""

import numpy as np

from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Evidence
from pipelines.evaluation.live.turn_tests import COVERAGE as PER_TURN
from pipelines.evaluation.statistics.betting import evidence_needed
from pipelines.evaluation.statistics.growing import log_sums
from pipelines.evaluation.statistics.srm import ArmCounts, sample_ratio

RATIO = "sample-ratio mismatch"
COVERAGE = "feedback coverage"
STICKY = (RATIO, COVERAGE)
"""Tests that are e-processes: what they found once stays found, however the counts move afterwards."""


def doubts(config: GatesConfig, evidence: Evidence) -> list[str]:
    """Why the evidence must not be concluded from, each in a sentence; none where it is sound."""
    found = [
        _mismatch(config, evidence),
        _coverage(config, evidence),
        _coverage_per_turn(config, evidence),
        _duplicates(config, evidence),
        _swapped(evidence),
        _lag(config, evidence),
        _silence(config, evidence),
    ]
    return [doubt for doubt in found if doubt is not None]


def _mismatch(config: GatesConfig, evidence: Evidence) -> str | None:
    ratio = sample_ratio(
        [ArmCounts(treated=a.treated, control=a.control, probability=a.probability) for a in evidence.assigned],
        alpha=config.alpha_data,
    )
    if not ratio.is_mismatch and RATIO not in evidence.found_earlier:
        return None
    return f"{RATIO}: {ratio.observed_share or 0.0:.3f} of the units got the candidate, which chance does not explain"


def _coverage(config: GatesConfig, evidence: Evidence) -> str | None:
    ratio = sample_ratio(
        [ArmCounts(treated=a.covered_treated, control=a.covered_control, probability=a.probability) for a in evidence.assigned],
        alpha=config.alpha_data,
    )
    if not ratio.is_mismatch and COVERAGE not in evidence.found_earlier:
        return None
    return f"{COVERAGE}: the arms differ in how often anybody reacts ({ratio.observed_share or 0.0:.3f} of covered units got the candidate)"


def _coverage_per_turn(config: GatesConfig, evidence: Evidence) -> str | None:
    """Looks at all turns: the sum of what they said only grows, so what was found stays found."""
    looks = [look for look in evidence.turn_looks or () if look.test == PER_TURN.name]
    said = log_sums(np.array([look.log_e for look in looks]))
    if not len(said) or said[-1] < evidence_needed(config.alpha_data):
        return None
    treated, control = 1.0 - looks[-1].treated, 1.0 - looks[-1].control
    return f"{COVERAGE} per turn: somebody reacts to {control:.1%} of the champion's turns and to {treated:.1%} of the candidate's"


def _duplicates(config: GatesConfig, evidence: Evidence) -> str | None:
    total = evidence.units + evidence.duplicates
    if total == 0 or evidence.duplicates / total <= config.duplicates_max:
        return None
    return f"{evidence.duplicates} of {total} units were seen in two arms"


def _swapped(evidence: Evidence) -> str | None:
    return None if evidence.swapped == 0 else f"{evidence.swapped} sessions name an arm that their version contradicts"


def _lag(config: GatesConfig, evidence: Evidence) -> str | None:
    if evidence.lag_s <= config.data_lag_max_s:
        return None
    return f"labels are {evidence.lag_s:.0f} s overdue: are `ratchet ingest` and `ratchet label` running?"


def _silence(config: GatesConfig, evidence: Evidence) -> str | None:
    """Traffic, not new people: everybody may have been seen. A release that waits for people has its evidence already, and the next
    canary may have its traffic."""
    if evidence.state != "CANARY":
        return None
    last = evidence.last_session_at if evidence.last_session_at is not None else evidence.since
    silent_s = (evidence.at - max(last, evidence.stage_since)) / 1e6
    longer = max(1.0, (evidence.lasts_s or 0.0) / config.canary_max_s)  # a canary of days has quiet nights
    return None if silent_s <= config.no_data_hold_s * longer else f"no request for {silent_s / 60:.0f} min: is there traffic?"
