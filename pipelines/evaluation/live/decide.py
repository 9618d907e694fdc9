"""decide(): the live gate, a pure function of configuration and evidence, in the order of `facts/gates.md`, section 4.5.

    1. hard reason, or an absolute limit burnt by the candidate while the champion is healthier   ABORT
    2. harm (family e-process, or group-sequential) ABORT            (a change of behaviour alone is an alarm: two people decide)
    3. an incident: limits burnt, nothing healthier HOLD
       data in doubt, or the reward being gamed    HOLD, after two hours ABORT
    4. deadline over, or N_max reached in vain     INCONCLUSIVE      (unless 6 holds)
    5. stage not done                              CONTINUE
    6. stage done: not the last                    RAMP
       the last, and every required metric non-inferior  READY; else CONTINUE

Harm is asked before the data are doubted, so a sample-ratio mismatch cannot mask it. The judge never acts: it returns a Decision, whose
numbers can be computed again from the stored evidence by whoever doubts it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from app.domain.release.gates import CanaryAction, Verdict
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Evidence, hash_of
from pipelines.evaluation.live import hacking
from pipelines.evaluation.live.doubts import COVERAGE, doubts
from pipelines.evaluation.live.harm import Harm, harm_of
from pipelines.evaluation.live.required import Required, gap_found, required_of
from pipelines.evaluation.live.slo import burnt, incident, to_blame
from pipelines.evaluation.self_test import signs_are_right

VERDICTS = {
    CanaryAction.READY: Verdict.PASS,
    CanaryAction.ABORT: Verdict.FAIL,
}


class Cause(StrEnum):
    """Which question decided, of those to a canary (in their order) and to a champion."""

    HARD = "hard"
    """A reason that needs no statistics, such as an engine that cannot load it."""
    SLO = "slo"
    """An absolute limit burnt, and the version beside it is healthier."""
    HARM = "harm"
    FALL = "fall"
    """A champion that became worse."""
    INCIDENT = "incident"
    """Limits burnt, and nothing is shown to be healthier."""
    DATA = "data"
    MONITORS = "monitors"
    """A champion that games its reward; a canary's monitors are doubts about its data."""
    REQUIRED = "required"
    """Every required metric non-inferior, or not yet."""
    DEADLINE = "deadline"
    DWELL = "dwell"
    STAGE = "stage"
    N_MAX = "n_max"
    WATCHED = "watched"
    """Nothing to say against a champion."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do with a canary, and every number it follows from."""

    action: CanaryAction
    reason: str
    """One sentence a person can act on."""
    cause: Cause
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    config_hash: str
    evidence_hash: str

    @property
    def verdict(self) -> Verdict:
        """Only READY passes; ABORT fails; everything else decides nothing."""
        return VERDICTS.get(self.action, Verdict.INCONCLUSIVE)

    @property
    def brief(self) -> dict[str, Any]:
        """The few numbers that people look at while it runs."""
        harm: dict[str, Any] = self.numbers.get("harm") or {}
        return {
            "action": self.action,
            "cause": self.cause,
            "reason": self.reason,
            "units": self.numbers.get("units"),
            "log_e": harm.get("log_e"),
            "needed": harm.get("needed", self.numbers.get("needed")),
            "required": self.numbers.get("required", []),
            "effects": harm.get("effects", self.numbers.get("effects", {})),
        }


def decide(config: GatesConfig, evidence: Evidence) -> Decision:
    """What to do with the canary that this is the evidence of."""
    require_right_signs()
    evidence_hash = hash_of(evidence)
    case = _Case(config, evidence)
    action, cause, reason = case.judge()
    return Decision(action=action, cause=cause, reason=reason, numbers=case.numbers(), config_hash=config.hash, evidence_hash=evidence_hash)


_signs: list[bool] = []


def require_right_signs() -> None:
    """Refuse to judge with a sign turned round: a planted harm has to look like harm (invariant I7). Asked once per process."""
    if not _signs:
        _signs.append(signs_are_right())
    assert _signs[0], "the sign convention is broken: a planted harm does not look like harm"


class _Case:
    """One decision in the making."""

    def __init__(self, config: GatesConfig, evidence: Evidence) -> None:
        self._config = config
        self._evidence = evidence
        self._blamed = to_blame(config, evidence, arm="treated")
        self._incident = incident(config, evidence)
        self._monitored = hacking.monitored(config.health, evidence)
        self._doubts = [*doubts(config, evidence), *hacking.suspicions(self._monitored)]
        self._harm: Harm | None = None
        self._required: list[Required] = []
        self._gap = False
        try:
            self._harm = harm_of(config, evidence)
            self._required = required_of(config, evidence)
            self._gap = gap_found(config, evidence)
            self._doubts = [*self._doubts, *self._silenced()]
        except ValueError as error:  # evidence that must not be used: NaN, outside its range, impossible probabilities
            self._doubts = [*self._doubts, f"unusable evidence: {error}"]

    def judge(self) -> tuple[CanaryAction, Cause, str]:
        """(action, cause, reason), in order."""
        act, evidence = CanaryAction, self._evidence
        if evidence.hard:
            return act.ABORT, Cause.HARD, "; ".join(evidence.hard)
        if self._blamed:
            return act.ABORT, Cause.SLO, self._blamed[0]
        if self._harm is not None and self._harm.found:
            return act.ABORT, Cause.HARM, self._harm.reason
        lasts_s = self._config.canary_max_s if evidence.lasts_s is None else evidence.lasts_s
        late = evidence.at - evidence.since - evidence.still_us >= lasts_s * 1e6
        trouble = [*evidence.incident, *([] if self._incident is None else [self._incident])]
        if trouble and not (late and evidence.state == "CANARY"):
            return act.HOLD, Cause.INCIDENT, trouble[0]
        if self._doubts:
            return self._hold()
        if self._is_last and self._stage_done and self._all_non_inferior and not trouble:
            return act.READY, Cause.REQUIRED, f"{', '.join(r.metric for r in self._required)}: non-inferior{self._asks}"
        if late:
            return act.INCONCLUSIVE, Cause.DEADLINE, f"no decision within {lasts_s / 60:.0f} min: the champion stays"
        if not self._stage_done:
            return act.CONTINUE, Cause.DWELL, f"stage {evidence.stage}: {self._stage_units} units so far"
        if not self._is_last:
            return act.RAMP, Cause.STAGE, f"stage {evidence.stage} is done with {self._stage_units} units and no harm"
        if self._required and all(r.is_exhausted and not r.rejected for r in self._required):
            return act.INCONCLUSIVE, Cause.N_MAX, "all declared units were seen without an answer: the champion stays"
        waiting = [r.metric for r in self._required if not r.rejected]
        return act.CONTINUE, Cause.REQUIRED, f"not yet non-inferior: {', '.join(waiting) or 'no metric has evidence'}"

    def _silenced(self) -> list[str]:
        """Feedback that comes on more or fewer turns than the champion's: what is missing counts as failed, so no metric means the same."""
        sources = {metric.name: metric.source for metric in self._config.metrics}
        if self._changed is None or sources[self._changed] != "abandoned":
            return []
        return [f"{COVERAGE} per turn: the arms differ in {self._changed}, which chance does not explain"]

    def _hold(self) -> tuple[CanaryAction, Cause, str]:
        held_s = 0.0 if self._evidence.held_since is None else (self._evidence.at - self._evidence.held_since) / 1e6
        reason = "; ".join(self._doubts)
        if held_s >= self._config.hold_max_s:
            return CanaryAction.ABORT, Cause.DATA, f"the data have been in doubt for {held_s / 60:.0f} min: {reason}"
        return CanaryAction.HOLD, Cause.DATA, reason

    @property
    def _changed(self) -> str | None:
        """The metric without a direction that changed for sure."""
        return None if self._harm is None else self._harm.changed

    @property
    def _asks(self) -> str:
        """What people are asked to look at before they say yes."""
        return f"; {self._changed} changed, for better or worse: two people have to look" if self._changed else ""

    @property
    def _is_last(self) -> bool:
        return self._evidence.stage >= len(self._config.stages) - 1

    @property
    def _stage_units(self) -> int:
        """Units of this stage that were counted in the fastest lane: not those assigned, about which nothing is known yet."""
        lane = min(self._evidence.lanes, key=lambda lane: lane.window_s, default=None)
        return 0 if lane is None else int(np.sum(np.frombuffer(lane.stratum, dtype="<i8") == self._evidence.stage))

    @property
    def _stage_done(self) -> bool:
        stage = self._config.stages[self._evidence.stage]
        minutes = (self._evidence.at - self._evidence.stage_since) / 60e6
        return self._stage_units >= stage.units or (minutes >= stage.minutes and self._stage_units >= stage.least_units)

    @property
    def _all_non_inferior(self) -> bool:
        wanted = {metric.name for metric in self._config.required}
        return bool(wanted) and wanted == {r.metric for r in self._required if r.rejected}

    def numbers(self) -> dict[str, Any]:
        """Everything that was compared with something, JSON-serialisable."""
        evidence = self._evidence
        return {
            "stage": evidence.stage,
            "units": evidence.units,
            "stage_units": self._stage_units,
            "stage_done": self._stage_done,
            "harm": None if self._harm is None else self._harm.numbers(),
            "required": [r.numbers() for r in self._required],
            "doubts": self._doubts,
            "burnt": burnt(self._config, evidence),
            "incident": self._incident,
            "alarms": [
                *(["proxy_gold_gap"] if self._gap else []),
                *([f"behaviour: {self._changed}"] if self._changed else []),
                *hacking.alerts(self._monitored),
            ],
            "monitors": hacking.numbers(self._monitored),
            "left_out": {"duplicates": evidence.duplicates, "swapped": evidence.swapped, "late": evidence.late},
            "missing": {name: count for lane in evidence.lanes for name, count in lane.missing.items() if count},
        }
