"""What goes on record of a live decision: the numbers, the champion against itself beside them, and the evidence to decide it again."""

from dataclasses import dataclass

import msgspec

from app.domain.ports import Clock
from app.domain.release.alarms import finding_of
from app.domain.release.gates import CanaryAction, GateName, GateResult
from app.domain.release.releases import Release
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Evidence, packed
from pipelines.evaluation.counting.subjects import EvidenceBook, frozen_config
from pipelines.evaluation.live.decide import Cause, Decision
from pipelines.evaluation.live.live_aa import live_aa, live_aa_after, told
from pipelines.evaluation.live.required import intervals


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Writes down live decisions about one policy."""

    policy: str
    config: GatesConfig
    """For releases from before configurations were frozen with them."""
    book: EvidenceBook
    clock: Clock

    def result(self, release: Release, decision: Decision, evidence: Evidence, gate: GateName) -> GateResult:
        """The decision for the record, its evidence stored so that anybody can decide again."""
        now, numbers = self.clock(), {"cause": decision.cause, **decision.numbers}
        if decision.numbers["harm"] is not None:
            config = frozen_config(release) if release.config.get("gates") else self.config
            if gate is GateName.CANARY:
                numbers["intervals"] = intervals(config, evidence)
            found = (live_aa if gate is GateName.CANARY else live_aa_after)(config, evidence)
            before = self.book.false_alarms(self.policy, besides=release.id, gate=gate)
            numbers["live_aa"] = {**msgspec.to_builtins(found), "told": told(found, before=before)}
        self.book.keep(release.id, decision.evidence_hash, packed(evidence), now=now)
        return GateResult(
            gate=gate, digest=release.digest, verdict=decision.verdict, reason=decision.reason, evidence=numbers,
            config_hash=decision.config_hash, evidence_hash=decision.evidence_hash, decided_at=now,
        )  # fmt: skip

    def said(self, release: Release) -> tuple[str, ...]:
        """What the newest decision about a canary on record says (`said_by`); nothing before the first."""
        live = [row for row in self.book.decisions(release.id) if row["gate"] == GateName.CANARY]
        return _says(live[-1]["action"], live[-1]["evidence"].get("cause"), live[-1]["reason"]) if live else ()


def said_by(decision: Decision) -> tuple[str, ...]:
    """What a decision says, without what changes from tick to tick: of a hold its cause, and of an incident which one."""
    return _says(decision.action, decision.cause, decision.reason)


def _says(action: str, cause: str | None, reason: str) -> tuple[str, ...]:
    if action != CanaryAction.HOLD:
        return (action,)
    return (action, cause or Cause.DATA, finding_of(reason) if cause == Cause.INCIDENT else "")
