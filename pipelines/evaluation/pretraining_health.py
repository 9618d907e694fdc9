"""G0 for a version that continued pretraining made: did it learn, and did it forget nothing that was looked at?

Asks the run's own held-out perplexities per domain; there is no reward, no ratio and no batch to ask about.
"""

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from app.domain.release.gates import GateName, GateResult, Verdict, content_hash
from app.domain.release.versions import RunStatus, TrainingRun
from pipelines.evaluation.config import GatesConfig


def judge_pretraining(run: TrainingRun, *, config: GatesConfig, now: datetime) -> GateResult:
    """Fail where a domain got worse than allowed or is no number; inconclusive where none was held out (invariant I1)."""
    before: Mapping[str, float] = run.metrics.get("perplexity_before") or {}
    after: Mapping[str, float] = run.metrics.get("perplexity_after") or {}
    verdict, reason = _verdict(run, before, after, config.health.perplexity_rise_max)
    evidence: dict[str, Any] = {
        "run": run.id, "status": run.status, "corpus": run.batch_id, "limit": config.health.perplexity_rise_max,
        "perplexity_before": {domain: str(value) for domain, value in before.items()},
        "perplexity_after": {domain: str(value) for domain, value in after.items()},
    }  # fmt: skip
    return GateResult(
        gate=GateName.TRAINING_HEALTH, digest=run.candidate or "", verdict=verdict, reason=reason, evidence=evidence,
        config_hash=content_hash(msgspec.to_builtins(config.health)), evidence_hash=content_hash(evidence), decided_at=now,
    )  # fmt: skip


def _verdict(run: TrainingRun, before: Mapping[str, float], after: Mapping[str, float], limit: float) -> tuple[Verdict, str]:
    if run.status is not RunStatus.SUCCEEDED or run.candidate is None:
        return Verdict.FAIL, f"run {run.id} is {run.status}: it made no candidate"
    if not before or set(before) != set(after):
        return Verdict.INCONCLUSIVE, "no held-out perplexity was measured: give a corpus of more documents"
    worse = [domain for domain in before if not after[domain] <= (1.0 + limit) * before[domain] or not math.isfinite(before[domain])]
    if worse:
        shown = ", ".join(f"{domain} {before[domain]:.3g} → {after[domain]:.3g}" for domain in worse)
        return Verdict.FAIL, f"held-out perplexity rose by more than {limit:.0%}: {shown}"
    shown = ", ".join(f"{domain} {before[domain]:.3g} → {after[domain]:.3g}" for domain in before)
    return Verdict.PASS, f"held-out perplexity: {shown}"
