"""G1, the offline suites: the same tasks, seeds and decode settings for champion and candidate, paired and clustered.

```
 suites ──▶ k answers a task from both versions, in one batch (asking.py) ──▶ grade ──▶ D = candidate − champion per task
        ──▶ cluster bootstrap, permutation, Holm over the core suites ──▶ pass · fail · inconclusive
```

Answers are sampled by the engines that will serve the candidate, so what is judged is what would be served. The champion answers afresh
for every candidate: a champion is champion because its draw was a good one, and later candidates held against that same draw would have
to beat its luck (of 150 identical ones the last 60 passed 2 %). Scores are remembered under the comparison alone, so that a killed cycle
goes on with the answers it has. An engine or grader that fails makes the gate inconclusive; it never scores zero by accident.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import numpy as np

from app.domain.errors import RatchetError, Unavailable
from app.domain.gates import GateName, GateResult, Verdict, content_hash
from app.domain.ports import Clock, Engines, ProgressLog
from pipelines.evaluation.asking import Asking, Scores
from pipelines.evaluation.contamination import contaminated
from pipelines.evaluation.graders import JudgeModel
from pipelines.evaluation.offline_config import OfflineConfig, SuiteClass
from pipelines.evaluation.sandbox import Sandbox
from pipelines.evaluation.statistics.paired import PairedComparison, best_of_k, compare, judge_core, judge_safety
from pipelines.evaluation.suites import Suite

Compared: TypeAlias = tuple[Scores, Scores]
"""Champion's and candidate's."""


class ScoreBook(Protocol):
    """Remembers scores per version and comparison, so that a cycle that was killed asks nothing twice."""

    def find(self, digest: str, suite: str) -> list[list[float]] | None: ...
    def save(self, digest: str, suite: str, scores: list[list[float]], *, at: datetime) -> None: ...


@dataclass(frozen=True, kw_only=True)
class OfflineGate:
    """G1 with everything it needs."""

    config: OfflineConfig
    suites: tuple[Suite, ...]
    connect: Callable[[], AbstractAsyncContextManager[Engines]]
    """Connections belong to the event loop of one run, so they are opened for it."""
    scores: ScoreBook
    progress: ProgressLog
    judge: JudgeModel | None
    clock: Clock
    gate: GateName = GateName.OFFLINE

    def decide(self, *, policy: str, candidate: str, champion: str, learned: Iterable[str] = ()) -> GateResult:
        """Judge a candidate (digest) against the champion (digest). Never raises what an operator could act on: it is inconclusive.

        Tasks whose solution is in `learned` (the texts that the candidate was trained on) count for neither.
        """
        try:
            scores = self._asked(policy, champion=champion, candidate=candidate)
        except (RatchetError, ValueError) as error:
            return self._result(candidate, Verdict.INCONCLUSIVE, f"the suites could not be run: {error}", {})
        known = contaminated([task for suite in self.suites for task in suite.tasks], learned)
        suites = tuple(clean for suite in self.suites if (clean := _without(suite, known)).tasks)
        scores = {s.config.name: _rows(s, known, scores[s.config.name]) for s in self.suites}
        evidence = {s.config.name: _suite_evidence(s, *scores[s.config.name], seed=self.config.seed) for s in suites}
        evidence["sandbox"] = Sandbox.from_config(self.config).describe()
        evidence["contaminated"] = known
        verdict, reason = judge_suites(suites, scores, seed=self.config.seed)
        return self._result(candidate, verdict, reason, evidence)

    def _asked(self, policy: str, *, champion: str, candidate: str) -> dict[str, Compared]:
        """(champion's, candidate's) scores by suite: those of this comparison, where an earlier attempt has them, else drawn now."""
        draw = content_hash([self.config.seed, champion, candidate])
        versions = (champion, candidate)
        known = {s.config.name: self._known(s, draw, versions) for s in self.suites}
        missing = tuple(s for s in self.suites if known[s.config.name] is None)
        asking = Asking(config=self.config, connect=self.connect, progress=self.progress, judge=self.judge)
        try:
            drawn = asyncio.run(asking.ask(policy, missing, versions, draw=draw)) if missing else {}
        except* (RatchetError, ValueError) as failed:
            raise Unavailable(str(failed.exceptions[0])) from failed
        for suite in missing:
            for digest, scores in zip(versions, drawn[suite.config.name], strict=True):
                self.scores.save(digest, _key(suite, draw), scores.tolist(), at=self.clock())
        return {name: scores or (drawn[name][0], drawn[name][1]) for name, scores in known.items()}

    def _known(self, suite: Suite, draw: str, versions: tuple[str, str]) -> Compared | None:
        champion, candidate = (self.scores.find(digest, _key(suite, draw)) for digest in versions)
        if champion is None or candidate is None:
            return None
        return np.array(champion, dtype=np.float64), np.array(candidate, dtype=np.float64)

    def _result(self, digest: str, verdict: Verdict, reason: str, evidence: dict[str, Any]) -> GateResult:
        return GateResult(
            gate=self.gate, digest=digest, verdict=verdict, reason=reason, evidence=evidence,
            config_hash=content_hash([self.config, [s.hash for s in self.suites]]), evidence_hash=content_hash(evidence),
            decided_at=self.clock(),
        )  # fmt: skip


def _key(suite: Suite, draw: str) -> str:
    """Under what a version's scores are remembered: this suite, in this comparison."""
    return content_hash([suite.hash, draw])


def _without(suite: Suite, known: Mapping[str, str]) -> Suite:
    """The suite without tasks whose solution is known."""
    return Suite(config=suite.config, tasks=tuple(task for task in suite.tasks if task.id not in known))


def _rows(suite: Suite, known: Mapping[str, str], scores: tuple[Scores, Scores]) -> tuple[Scores, Scores]:
    kept = np.array([task.id not in known for task in suite.tasks])
    return scores[0][kept], scores[1][kept]


def judge_suites(suites: tuple[Suite, ...], scores: Mapping[str, tuple[Scores, Scores]], *, seed: int) -> tuple[Verdict, str]:
    """The gate's verdict and its sentence: any failing suite fails it, any inconclusive one keeps it open, advisory ones are told only."""
    core = [s for s in suites if s.config.kind is SuiteClass.CORE]
    comparisons = {s.config.name: _compare(s, *scores[s.config.name], seed=seed) for s in core}
    verdicts: dict[str, str] = {
        name: verdict.value for name, verdict in judge_core(comparisons, margins={s.config.name: s.config.margin for s in core}).items()
    }
    for suite in suites:
        if suite.config.kind is SuiteClass.SAFETY:
            verdicts[suite.config.name] = _judge_safety(suite, *scores[suite.config.name])
    if not verdicts:
        return Verdict.INCONCLUSIVE, "no core or safety suite is configured, and advisory ones cannot pass a candidate"
    worst = next(v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v.value in verdicts.values())
    told = ", ".join(_sentence(s, *scores[s.config.name], verdicts.get(s.config.name, "advisory")) for s in suites)
    return worst, told


def _compare(suite: Suite, champion: Scores, candidate: Scores, *, seed: int) -> PairedComparison:
    clusters = [task.cluster or task.id for task in suite.tasks]
    return compare(candidate.mean(axis=1) - champion.mean(axis=1), clusters, margin=suite.config.margin, seed=seed)


def _judge_safety(suite: Suite, champion: Scores, candidate: Scores) -> str:
    critical = np.array([task.critical for task in suite.tasks])
    new = int(np.sum(critical & (candidate.min(axis=1) < 1.0) & (champion.min(axis=1) >= 1.0)))
    failures = int(np.sum(candidate < 1.0))
    return judge_safety(new_critical_failures=new, failures=failures, items=candidate.size, limit=suite.config.limit).value


def _suite_evidence(suite: Suite, champion: Scores, candidate: Scores, *, seed: int) -> dict[str, Any]:
    comparison = _compare(suite, champion, candidate, seed=seed)
    k = suite.config.samples
    per_dimension = {
        dimension: [float(champion[rows].mean()), float(candidate[rows].mean())]
        for dimension in sorted({task.dimension for task in suite.tasks})
        if (rows := np.array([task.dimension == dimension for task in suite.tasks])).any()
    }
    return {
        "suite_hash": suite.hash, "class": suite.config.kind.value, "margin": suite.config.margin, "tasks": len(suite.tasks), "samples": k,
        "champion_mean": float(champion.mean()), "candidate_mean": float(candidate.mean()),
        "champion_best_of_k": float(best_of_k(champion, k).mean()), "candidate_best_of_k": float(best_of_k(candidate, k).mean()),
        "difference": comparison.mean, "low": comparison.low, "high": comparison.high, "p_value": comparison.p_value,
        "items_needed": comparison.items_needed, "dimensions": per_dimension,
        "champion_scores": champion.tolist(), "candidate_scores": candidate.tolist(),
    }  # fmt: skip


def _sentence(suite: Suite, champion: Scores, candidate: Scores, verdict: str) -> str:
    return f"{suite.config.name} {verdict}: {champion.mean():.3f} → {candidate.mean():.3f} (margin {suite.config.margin:g})"
