"""G2, off-policy: what the candidate would have earned on turns the champion answered (`facts/gates.md`, section 4.3).

It may veto, or hint that the ramp can start faster; it never lets anything pass, so without a veto its verdict is INCONCLUSIVE, which stops
nobody. Weights are per response and in log space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from app.domain.gates import GateName, GateResult, Verdict, content_hash
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.statistics.off_policy import LoggedResponses, OffPolicyEstimate, OffPolicyHint, estimate


@dataclass(frozen=True, kw_only=True)
class LoggedTurns:
    """Turns of the champion, in order of time, scored again by the candidate."""

    candidate_logprobs: Sequence[npt.NDArray[np.float64]]
    """Per turn [T]: the candidate's log-probability of each sampled token, under the same temperature and truncation."""
    logged_logprobs: Sequence[npt.NDArray[np.float64]]
    """Per turn [T]: as logged when it was sampled."""
    rewards: npt.NDArray[np.float64]
    """[N], in reward units."""
    truncated: bool
    """Whether sampling cut the support (top-p below 1): then no weight means anything."""
    replayed_logprobs: Sequence[npt.NDArray[np.float64]] = ()
    """Per turn [T]: the champion scored again by the engine that scores the candidate; the check that both agree."""


def judge_off_policy(turns: LoggedTurns, *, candidate: str, config: GatesConfig, now: datetime) -> GateResult:
    """Veto, hint or nothing."""
    rules = config.off_policy
    rewards = np.clip((turns.rewards - rules.low) / (rules.high - rules.low), 0.0, 1.0)
    responses = LoggedResponses(
        log_candidate=_sums(turns.candidate_logprobs), log_logged=_sums(turns.logged_logprobs), reward=rewards,
        is_fully_supported=not turns.truncated, engine_gap=_gap(turns),
    )  # fmt: skip
    found = estimate(responses, margin=rules.margin, alpha=rules.alpha)
    evidence = {"turns": len(rewards), **_numbers(found), "diagnostics": _diagnostics(turns)}
    veto = found.hint is OffPolicyHint.VETO
    return GateResult(
        gate=GateName.OFF_POLICY, digest=candidate, verdict=Verdict.FAIL if veto else Verdict.INCONCLUSIVE,
        reason=f"{found.status}: {found.reason}", evidence=evidence, config_hash=content_hash(msgspec.to_builtins(rules)),
        evidence_hash=content_hash(evidence), decided_at=now,
    )  # fmt: skip


def _sums(logprobs: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    return np.array([float(np.sum(values)) for values in logprobs], dtype=np.float64)


def _gap(turns: LoggedTurns) -> float:
    """Absolute mean token difference of the champion's log-probabilities, logged and scored again; NaN where it was not checked."""
    if not turns.replayed_logprobs:
        return float("nan")
    differences = [np.abs(a - b) for a, b in zip(turns.replayed_logprobs, turns.logged_logprobs, strict=True)]
    return float(np.mean(np.concatenate(differences)))


def _numbers(found: OffPolicyEstimate) -> dict[str, Any]:
    health = None if found.health is None else {k: float(v) for k, v in vars(found.health).items()}
    return {
        "status": found.status, "hint": found.hint, "health": health, "effect": found.effect, "low": found.low, "high": found.high,
    }  # fmt: skip


def _diagnostics(turns: LoggedTurns) -> dict[str, float]:
    """Means that look like estimates and are none: token-wise weights give back the logger's value (sheet S12)."""
    if not turns.logged_logprobs:
        return {}
    differences = np.concatenate([new - old for new, old in zip(turns.candidate_logprobs, turns.logged_logprobs, strict=True)])
    finite = differences[np.isfinite(differences)]
    return {"mean_token_difference": float(finite.mean()) if len(finite) else 0.0}
