"""G0, training health: is the update itself sound? Deterministic, from the run's own record (`facts/gates.md`, section 4.1).

A hard limit fails, half of it warns, and a figure that was not measured or is no number never passes (invariant I1).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from app.domain.learning.rewards import Exclusion
from app.domain.release.gates import GateName, GateResult, Verdict, content_hash
from app.domain.release.versions import PastRun, RunStatus, TrainingRun
from pipelines.evaluation.config import GatesConfig, HealthConfig, MetricClass
from pipelines.evaluation.statistics import monitors
from pipelines.evaluation.statistics.monitors import Finding, Level

BUDGET_SHARE = 0.8
"""How far to the fitted peak of the gold metric the anchor's budget reaches."""
LEAST_VERSIONS = 6
"""Versions with a known gold metric that the peak is fitted on."""
TOKEN_KL, ANCHOR_TOKEN_KL = 0.2, 1.0
"""Budgets in nat per token of a run that recorded none."""
ANCHORED = frozenset({"token_kl_anchor", "response_kl_anchor"})
DECIDING = frozenset({"variance_collapse", "length_drift"})
"""Monitors whose alert fails; exclusion rates and the on-policy share are told to people, the live gate acts on them."""
FAULTY = frozenset({Exclusion.TOO_LONG, Exclusion.EMPTY_COMPLETION, Exclusion.TOKENS_OUT_OF_RANGE, Exclusion.ENVIRONMENT_FAULT})
"""Exclusions that a policy could cause by how it answers, unlike those of consent, age or sampling."""
SILENT = frozenset({Exclusion.NO_SIGNAL})
"""Nobody reacted, or could."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One figure and what it may be."""

    name: str
    value: float | None
    """None where it was not measured."""
    limit: float
    above: bool
    """Whether larger is worse."""
    binding: bool = True
    """False where being beyond it warns only."""

    @property
    def is_known(self) -> bool:
        return self.value is not None and math.isfinite(self.value)

    @property
    def fails(self) -> bool:
        return self.binding and self.value is not None and (self.value > self.limit if self.above else self.value < self.limit)

    @property
    def warns(self) -> bool:
        """Half-way to the limit."""
        return self.value is not None and (self.value > self.limit / 2.0 if self.above else self.value < self.limit * 2.0)

    def __str__(self) -> str:
        shown = "not measured" if self.value is None else f"{self.value:.3g}"
        return f"{self.name} is {shown}, the limit is {self.limit:.3g}"


def judge_health(run: TrainingRun, *, config: GatesConfig, now: datetime, history: Sequence[PastRun] = ()) -> GateResult:
    """Judge the run behind a candidate; `history` is the champion's line of runs, oldest first, its own last."""
    limits = _limits(run, config.health, _overoptimisation(config, run, history))
    monitored = _monitored(run, config.health, history)
    verdict, reason = _verdict(run, limits, [finding for finding in monitored if finding.monitor in DECIDING])
    warnings = [str(x) for x in limits if x.warns and not x.fails]
    warnings += [f"monitor {f.monitor} is at {f.value:.3g}, the limit is {f.limit:.3g}" for f in monitored if f.level is not Level.OK]
    warnings += _alarms(run)
    evidence = {
        "run": run.id, "status": run.status, "figures": {limit.name: _plain(limit.value) for limit in limits},
        "limits": {limit.name: limit.limit for limit in limits}, "warnings": warnings,
        "monitors": [{"monitor": f.monitor, "level": f.level.value, "value": _plain(f.value), "limit": f.limit} for f in monitored],
        "anchor_budget_used": _budget_used(limits), "left_out": run.metrics.get("left_out", {}),
    }  # fmt: skip
    return GateResult(
        gate=GateName.TRAINING_HEALTH, digest=run.candidate or "", verdict=verdict, reason=reason, evidence=evidence,
        config_hash=content_hash(msgspec.to_builtins(config.health)), evidence_hash=content_hash(evidence), decided_at=now,
    )  # fmt: skip


def anchor_budget(history: Sequence[tuple[float, float]]) -> float | None:
    """KL to the anchor at which to stop, fitted on R = d (a - b log d) with d = sqrt(KL); None where there is no peak to be seen.

    Gao et al. 2022 (2210.10760), the form for reinforcement learning; its peak is d* = exp(a/b - 1), and the budget (0.8 d*)^2.
    """
    points = [(math.sqrt(kl), gold) for kl, gold in history if kl > 0.0]
    if len(points) < LEAST_VERSIONS:
        return None
    d = np.array([point[0] for point in points])
    gold = np.array([point[1] for point in points])
    design = np.column_stack([d, d * np.log(d)])
    a, minus_b = (float(x) for x in np.linalg.solve(design.T @ design, design.T @ gold))
    if minus_b >= 0.0:
        return None
    return (BUDGET_SHARE * math.exp(min(a / -minus_b - 1.0, 50.0))) ** 2


def _limits(run: TrainingRun, config: HealthConfig, history: Sequence[tuple[float, float]]) -> list[Limit]:
    metrics = run.metrics
    shares: Mapping[str, float] = metrics.get("term_shares") or {}
    return [
        *_budgets(run, config, history),
        Limit(name="entropy_ratio", value=_ratio(metrics, "entropy_after", "entropy_before"), limit=config.entropy_ratio_min, above=False),
        Limit(name="reward_std", value=_figure(metrics, "reward_std"), limit=config.reward_std_ratio_min, above=False),
        Limit(
            name="component_share", value=monitors.dominance(shares)[1] if shares else None, limit=config.component_share_max, above=True
        ),
        Limit(name="ceiling_rate", value=_figure(metrics, "ceiling_rate"), limit=config.ceiling_rate_max, above=True),
        Limit(name="effective_share", value=_figure(metrics, "effective_share"), limit=config.ess_min, above=False),
    ]  # fmt: skip


def _budgets(run: TrainingRun, config: HealthConfig, history: Sequence[tuple[float, float]]) -> list[Limit]:
    """How far the candidate may be from champion and anchor: per token always, per response where the configuration says so or the line of
    versions shows where the gold metric turns. One that came nearer to the anchor than its parent is not stopped for being far from it."""
    metrics = run.metrics
    made_under: Mapping[str, Any] = run.config.get("guards") or {}
    length, champion, anchor = (_figure(metrics, name) for name in ("length_mean", "kl_champion", "kl_anchor"))
    per_token = {
        "token_kl_champion": (_upper(metrics, "kl_champion"), config.token_kl_max, made_under.get("max_kl_champion", TOKEN_KL)),
        "token_kl_anchor": (_upper(metrics, "kl_anchor"), config.anchor_token_kl_max, made_under.get("max_kl_anchor", ANCHOR_TOKEN_KL)),
    }  # fmt: skip
    fitted = [budget for budget in (anchor_budget(history), config.anchor_kl_max) if budget is not None]
    per_response = {
        "response_kl_champion": (_times(champion, length), config.response_kl_max),
        "response_kl_anchor": (_times(anchor, length), min(fitted, default=None)),
    }
    found = [Limit(name=name, value=value, limit=own or made, above=True) for name, (value, own, made) in per_token.items()]
    found += [Limit(name=n, value=value, limit=limit, above=True) for n, (value, limit) in per_response.items() if limit is not None]
    before = _figure(metrics, "kl_anchor_before")
    nearer = anchor is not None and before is not None and anchor < before
    return [replace(x, binding=False) if nearer and x.name in ANCHORED else x for x in found]


def _upper(metrics: Mapping[str, Any], name: str) -> float | None:
    """Upper end of the interval of a divergence; the estimate itself in the record of an older run."""
    return _figure(metrics, f"{name}_upper") if f"{name}_upper" in metrics else _figure(metrics, name)


def _overoptimisation(config: GatesConfig, run: TrainingRun, history: Sequence[PastRun]) -> list[tuple[float, float]]:
    """(KL per response to the anchor, gold metric in its canary) of the versions since the anchor that this run is measured to."""
    gold = next(metric.name for metric in config.required if metric.kind is MetricClass.GOLD)
    points: list[tuple[float, float]] = []
    for past in history:
        kl = _times(_figure(past.metrics, "kl_anchor"), _figure(past.metrics, "length_mean"))
        harm: Mapping[str, Any] = (past.canary or {}).get("harm") or {}
        effects: Mapping[str, Mapping[str, float]] = harm.get("effects") or {}
        if past.anchor == run.metrics.get("anchor") and kl is not None and gold in effects:
            points.append((kl, effects[gold]["treated"]))
    return points


def _monitored(run: TrainingRun, config: HealthConfig, history: Sequence[PastRun]) -> list[Finding]:
    """The reward-hack monitors over the batch, against the batch that the champion was made from; none for the first one."""
    found: list[Finding] = []
    share = _figure(run.metrics, "on_policy_share")
    if share is not None:
        level = Level.OK if share >= config.on_policy_min else Level.WARN
        found.append(Finding(monitor="on_policy_share", level=level, value=share, limit=config.on_policy_min))
    if not history or history[-1].candidate != run.parent:
        return found
    ours, theirs = run.metrics, history[-1].metrics
    spread, before = _figure(ours, "reward_std"), _figure(theirs, "reward_std")
    if spread is not None and before is not None and before > 0.0:
        found.append(monitors.variance_collapse(spread, before, limit=config.reward_std_ratio_min))
    length, mean, std = _figure(ours, "length_mean"), _figure(theirs, "length_mean"), _figure(theirs, "length_std")
    if length is not None and mean is not None and std is not None:
        drift = monitors.length_drift(length, reference_mean=mean, reference_std=max(std, 1.0), limit=config.length_z_max)
        found.append(drift)
    rates = (_rate("exclusion_rate", FAULTY, ours, theirs), _rate("coverage", SILENT, ours, theirs))
    return [*found, *(rate for rate in rates if rate is not None)]


def _rate(name: str, reasons: frozenset[Exclusion], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Finding | None:
    """Shift of the share of labelled turns that were left out for these reasons; dropping what one would fail is the oldest hack."""
    (count, total), (reference_count, reference_total) = _left_out(ours, reasons), _left_out(theirs, reasons)
    if min(total, reference_total) == 0:
        return None
    return monitors.rate_shift(name, count=count, total=total, reference_count=reference_count, reference_total=reference_total)


def _left_out(metrics: Mapping[str, Any], reasons: frozenset[Exclusion]) -> tuple[int, int]:
    """(turns left out for these reasons, those and the turns learned from)."""
    left_out: Mapping[str, int] = metrics.get("batch_left_out") or {}
    count = sum(int(n) for reason, n in left_out.items() if reason in reasons)
    return count, count + int(_figure(metrics, "turns") or 0)


def _verdict(run: TrainingRun, limits: Sequence[Limit], monitored: Sequence[Finding]) -> tuple[Verdict, str]:
    if run.status is not RunStatus.SUCCEEDED or run.candidate is None:
        return Verdict.FAIL, f"run {run.id} is {run.status}: it made no candidate"
    infinite = [limit for limit in limits if limit.value is not None and not limit.is_known]
    failed = [limit for limit in limits if limit.is_known and limit.fails]
    unknown = [limit for limit in limits if limit.value is None]
    if infinite:
        return Verdict.FAIL, f"{', '.join(limit.name for limit in infinite)}: not a finite number"
    alerts = [f"monitor {f.monitor} is at {f.value:.3g}, the limit is {f.limit:.3g}" for f in monitored if f.level is Level.ALERT]
    if failed or alerts:
        return Verdict.FAIL, "; ".join([*(str(limit) for limit in failed), *alerts])
    if unknown:
        return Verdict.INCONCLUSIVE, f"{', '.join(limit.name for limit in unknown)}: not measured by the run"
    warned = [*_alarms(run), *(str(limit) for limit in limits if limit.warns)]
    return Verdict.PASS, f"sound, with warnings: {'; '.join(warned)}" if warned else "sound"


def _alarms(run: TrainingRun) -> list[str]:
    """What the run itself asks people to look at."""
    alarms: Sequence[object] = run.metrics.get("alarms") or []
    return [str(alarm) for alarm in alarms]


def _figure(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _ratio(metrics: Mapping[str, Any], after: str, before: str) -> float | None:
    a, b = _figure(metrics, after), _figure(metrics, before)
    return None if a is None or b is None or b == 0.0 else a / b


def _plain(value: float | None) -> float | str | None:
    """JSON has no NaN: say it in words."""
    return value if value is None or math.isfinite(value) else str(value)


def _budget_used(limits: Sequence[Limit]) -> float:
    """Share of the KL budget to the anchor that the candidate uses."""
    anchored = [limit for limit in limits if limit.name in ANCHORED]
    return max(x.value / x.limit if x.value is not None and x.is_known and x.limit > 0.0 else 1.0 for x in anchored)
