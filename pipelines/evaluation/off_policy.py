"""G2, off-policy: what the candidate would have earned on turns the champion answered (`facts/gates.md`, section 4.3).

It may veto, or hint that the ramp can start faster; it never lets anything pass, so without a veto its verdict is INCONCLUSIVE, which stops
nobody. Weights are per response and in log space. `pipelines.evaluation.off_policy_gate` has the turns scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from app.domain.release.gates import GateName, GateResult, Verdict, content_hash
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.statistics.off_policy import LoggedResponses, OffPolicyEstimate, OffPolicyHint, OffPolicyStatus, estimate

Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LoggedTurns:
    """Turns of the champion, in order of time, scored again by the candidate."""

    candidate_logprobs: Sequence[Logprobs]
    """Per turn [T]: the candidate's log-probability of each sampled token, under the same temperature and truncation."""
    logged_logprobs: Sequence[Logprobs]
    """Per turn [T]: as logged when it was sampled."""
    rewards: Logprobs
    """[N], in reward units."""
    truncated: bool
    """Whether sampling cut the support (top-p below 1): then no weight means anything."""
    replayed_logprobs: Sequence[Logprobs] = ()
    """Of the first turns, [T] each: the champion scored again by the engine that scores the candidate; the check that both agree."""
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    """Turns that could not be scored, by reason."""


def judge_off_policy(turns: LoggedTurns, *, candidate: str, config: GatesConfig, now: datetime) -> GateResult:
    """Veto, hint or nothing."""
    rules = config.off_policy
    rewards = np.clip((turns.rewards - rules.low) / (rules.high - rules.low), 0.0, 1.0)
    responses = LoggedResponses(
        log_candidate=_sums(turns.candidate_logprobs), log_logged=_sums(turns.logged_logprobs), reward=rewards,
        is_fully_supported=not turns.truncated, engine_gap=engine_gap(turns.replayed_logprobs, turns.logged_logprobs),
    )  # fmt: skip
    found = estimate(responses, margin=rules.margin, alpha=rules.alpha)
    evidence = {"turns": len(rewards), "left_out": turns.left_out, **_numbers(found), "diagnostics": _diagnostics(turns)}
    veto = found.hint is OffPolicyHint.VETO
    verdict = Verdict.FAIL if veto else Verdict.INCONCLUSIVE
    return _result(candidate, verdict, f"{found.status}: {found.reason}", evidence, config=config, now=now)


def _sums(logprobs: Sequence[Logprobs]) -> Logprobs:
    return np.array([float(np.sum(values)) for values in logprobs], dtype=np.float64)


def engine_gap(replayed: Sequence[Logprobs], logged: Sequence[Logprobs]) -> float:
    """abs(mean over tokens of replayed − logged log-probability), nat a token, over the turns that were replayed; NaN where none was.

    Its expectation is the Kullback-Leibler divergence between what the engine samples from and what it scores with, so rounding that
    averages out does not count (SmolLM2 in bfloat16: 0.04 a token either way, 0.001 on average).
    """
    if not replayed:
        return float("nan")
    return abs(float(np.mean(np.concatenate([new - old for new, old in zip(replayed, logged, strict=False)]))))


def unsupported(candidate: str, reason: str, *, config: GatesConfig, now: datetime) -> GateResult:
    """The verdict where nothing could be scored at all."""
    evidence = {"turns": 0, "status": OffPolicyStatus.UNSUPPORTED, "hint": OffPolicyHint.NONE}
    return _result(candidate, Verdict.INCONCLUSIVE, f"{OffPolicyStatus.UNSUPPORTED}: {reason}", evidence, config=config, now=now)


def _result(candidate: str, verdict: Verdict, reason: str, evidence: dict[str, Any], *, config: GatesConfig, now: datetime) -> GateResult:
    return GateResult(
        gate=GateName.OFF_POLICY, digest=candidate, verdict=verdict, reason=reason, evidence=evidence,
        config_hash=content_hash(msgspec.to_builtins(config.off_policy)), evidence_hash=content_hash(evidence), decided_at=now,
    )  # fmt: skip


def _numbers(found: OffPolicyEstimate) -> dict[str, Any]:
    health = None if found.health is None else {k: float(v) for k, v in vars(found.health).items()}
    return {
        "status": found.status, "hint": found.hint, "health": health, "effect": found.effect, "low": found.low, "high": found.high,
    }  # fmt: skip


def _diagnostics(turns: LoggedTurns) -> dict[str, float]:
    """Means that look like estimates and are none: token-wise weights give back the logger's value (sheet S12)."""
    differences = [new - old for new, old in zip(turns.candidate_logprobs, turns.logged_logprobs, strict=True)]
    replayed = {"replayed": float(len(turns.replayed_logprobs))}
    gap = engine_gap(turns.replayed_logprobs, turns.logged_logprobs)
    if np.isfinite(gap):
        replayed["engine_gap"] = gap
    if not differences:
        return replayed
    per_response = np.array([float(np.sum(d)) for d in differences])
    return {"mean_token_difference": _mean(np.concatenate(differences)), "response_kl": -_mean(per_response), **replayed}


def _mean(values: Logprobs) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else 0.0
