"""G1, the offline suites: the same tasks, seeds and decode settings for champion and candidate, paired and clustered.

```
 suites ──▶ k answers a task from both versions, in one batch (asking.py) ──▶ grade ──▶ D = candidate − champion per task
        ──▶ bootstrap-t over clusters, Holm over the core suites, at the level that the month has left ──▶ pass · fail · inconclusive
```

Answers are sampled by the engines that will serve the candidate, so what is judged is what would be served. The champion answers afresh
for every candidate, while that is being made where it may (`rehearsal.py`): a champion is champion because its draw was a good one, and
later candidates held against that same draw would have to beat its luck (of 150 identical ones the last 60 passed 2 %). Scores are
remembered under the comparison alone, so that a killed cycle goes on with the answers it has. An engine or grader that fails makes the
gate inconclusive; it never scores zero by accident.

A suite that an equal candidate would seldom pass is refused with what would help (`min_power`): it would stop the loop and look like a
broken product. One suite meets 144 candidates a month, so its level is invested (`statistics/suites/alpha_investing.py`).
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from app.domain.errors import RatchetError, Unavailable
from app.domain.ports import Clock, Engines, ProgressLog
from app.domain.release.gates import GateName, GateResult, Verdict, content_hash
from pipelines.evaluation.statistics.suites.alpha_investing import ALPHA, level_now
from pipelines.evaluation.statistics.suites.paired import (
    PairedComparison,
    attainable_margin,
    best_of_k,
    compare,
    failing_clusters,
    judge_core,
    judge_safety,
    power_of,
    rate_upper_bound,
    rule_of_three,
)
from pipelines.evaluation.suites.asking import Asking, Scores
from pipelines.evaluation.suites.blind import Calibration, Hearing, PairBook, as_evidence, calibration_of, pairs_of
from pipelines.evaluation.suites.contamination import contaminated
from pipelines.evaluation.suites.execution import Examination
from pipelines.evaluation.suites.graders import JudgeModel
from pipelines.evaluation.suites.offline_config import OfflineConfig, SuiteClass
from pipelines.evaluation.suites.rehearsal import Half, Rehearsal
from pipelines.evaluation.suites.suites import GraderKind, Suite

Compared: TypeAlias = tuple[Scores, Scores]
"""Champion's and candidate's."""


class ScoreBook(Protocol):
    """Remembers scores per version and comparison, so that a cycle that was killed asks nothing twice."""

    def find(self, digest: str, suite: str) -> list[list[float]] | None: ...
    def save(self, digest: str, suite: str, scores: list[list[float]], *, at: datetime) -> None: ...
    def tested(self, policy: str, suite: str, *, gate: str, since: datetime) -> list[tuple[float, bool]]:
        """Level and whether it passed, of every candidate that the named suite judged since then, oldest first."""
        ...


MONTH = timedelta(days=30)
CALIBRATED_OVER = 3 * MONTH
"""So old are the blind votes that a judge is held against at most."""


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
    examination: Examination
    """Where `execute` tasks are graded."""
    clock: Clock
    gate: GateName = GateName.OFFLINE
    pairs: PairBook | None = None
    """Where both versions' answers are kept for people to judge blind; None keeps none."""
    rehearsal: Rehearsal | None = None
    """Where the champion's answers may be already."""

    def rehearse(self, *, policy: str, champion: str, batch: str) -> None:
        """Let the champion begin with its half of the comparison with the candidate that this batch will make, where it may."""
        if self.rehearsal is not None and self.config.rehearse:
            draw = self._draw(champion, batch)
            asked = partial(self._half, policy, self.suites, champion, draw, Hearing(), task="rehearsal")
            self.rehearsal.begin(policy, self._comparison(draw), asked)

    def decide(
        self, *, policy: str, candidate: str, champion: str, learned: Iterable[str] = (), release: str | None = None, batch: str = ""
    ) -> GateResult:  # fmt: skip
        """Judge a candidate (digest) against the champion (digest). Never raises what an operator could act on: it is inconclusive.

        Tasks whose solution is in `learned` (the texts that the candidate was trained on) count for neither; where that leaves a suite
        that decides without any, nothing is asked. Pairs for people are kept with the `release`. `batch` is what the candidate was made
        of, where it was made of one.
        """
        known = contaminated([task for suite in self.suites for task in suite.tasks], learned)
        lost = [s.config.name for s in self.suites if s.config.kind is not SuiteClass.ADVISORY and not _without(s, known).tasks]
        if lost:
            cure = "give it others, or train without those texts"
            reason = f"the candidate learned from the solution of every task of {', '.join(lost)}: {cure}"
            return self._result(candidate, Verdict.INCONCLUSIVE, reason, {"contaminated": known})
        draw = self._draw(champion, batch or candidate)
        try:
            scores = self._asked(policy, champion=champion, candidate=candidate, draw=draw, release=release, known=known)
        except (RatchetError, ValueError) as error:
            return self._result(candidate, Verdict.INCONCLUSIVE, f"the suites could not be run: {error}", {})
        suites = tuple(clean for suite in self.suites if (clean := _without(suite, known)).tasks)
        scores = {s.config.name: _rows(s, known, scores[s.config.name]) for s in self.suites}
        levels = {s.config.name: self._level(policy, s) for s in suites if s.config.kind is SuiteClass.CORE}
        calibrated = self._calibrated(policy, suites)
        contradicted = {
            name: found for name, one in calibrated.items() if (found := one.contradicted(name, least=self.config.judge_agreement))
        }
        judged = judge_suites(
            suites, scores, seed=self.config.seed, levels=levels, min_power=self.config.min_power, contradicted=contradicted
        )  # fmt: skip
        evidence = {s.config.name: _suite_evidence(s, *scores[s.config.name], judged=judged[s.config.name]) for s in suites}
        for name, one in calibrated.items():
            evidence[name]["judge"] = vars(one)
        evidence["sandbox"] = self.examination.describe()
        evidence["contaminated"] = known
        if self.pairs is not None and release is not None:
            evidence["blind_pairs"] = as_evidence(self.pairs.of(release))
        return self._result(candidate, *verdict_of(judged), evidence)

    def _level(self, policy: str, suite: Suite) -> float:
        """What the month has left for one more candidate."""
        return level_now(self.scores.tested(policy, suite.config.name, gate=self.gate, since=self.clock() - MONTH))

    def _calibrated(self, policy: str, suites: tuple[Suite, ...]) -> dict[str, Calibration]:
        """What people's blind votes say about the judges, by suite; those without a judge are not there."""
        if self.pairs is None:
            return {}
        asked = (s.config.name for s in suites if any(task.grader.kind is GraderKind.JUDGE for task in s.tasks))
        since = self.clock() - CALIBRATED_OVER
        return {name: calibration_of(self.pairs.graded(policy, name, since=since)) for name in asked}

    def _draw(self, champion: str, against: str) -> str:
        """The name of a comparison, which decides every seed."""
        return content_hash([self.config.seed, champion, against])

    def _comparison(self, draw: str) -> str:
        """The same with the same tasks."""
        return content_hash([draw, [suite.hash for suite in self.suites]])

    def _asked(
        self, policy: str, *, champion: str, candidate: str, draw: str, release: str | None, known: Mapping[str, str]
    ) -> dict[str, Compared]:  # fmt: skip
        """(champion's, candidate's) scores by suite: those of this comparison, where an earlier attempt has them, else drawn now."""
        versions = (champion, candidate)
        before = {s.config.name: self._known(s, draw, versions) for s in self.suites}
        missing = tuple(s for s in self.suites if before[s.config.name] is None)
        drawn, hearing = self._drawn(policy, missing, versions, draw) if missing else ({}, Hearing())
        if self.pairs is not None and release is not None and not self.pairs.of(release):  # before the scores: a kill in between asks again
            kept = pairs_of(
                hearing, missing, drawn, release=release, policy=policy, champion=champion, candidate=candidate, draw=draw,
                most=self.config.blind_pairs, without=known,
            )  # fmt: skip
            self.pairs.keep(kept, at=self.clock())
        for suite in missing:
            for digest, scores in zip(versions, drawn[suite.config.name], strict=True):
                self.scores.save(digest, _key(suite, draw), scores.tolist(), at=self.clock())
        return {name: scores or drawn[name] for name, scores in before.items()}

    def _drawn(
        self, policy: str, suites: tuple[Suite, ...], versions: tuple[str, str], draw: str
    ) -> tuple[dict[str, Compared], Hearing]:  # fmt: skip
        """Both versions in one batch through the engines; the candidate alone where the champion has answered already."""
        rehearsed = self.rehearsal and self.rehearsal.take(policy, self._comparison(draw))
        if rehearsed is None:
            hearing = Hearing()
            asked = self._ask(policy, suites, versions, draw, hearing)
            return {name: (scores[0], scores[1]) for name, scores in asked.items()}, hearing
        ours = self._half(policy, suites, versions[1], draw, rehearsed.hearing)
        return {name: (rehearsed.scores[name], scores) for name, scores in ours.scores.items()}, ours.hearing

    def _half(
        self, policy: str, suites: tuple[Suite, ...], version: str, draw: str, hearing: Hearing, *, task: str = "evaluation"
    ) -> Half:  # fmt: skip
        asked = self._ask(policy, suites, (version,), draw, hearing, task=task)
        return Half(scores={name: scores for name, (scores,) in asked.items()}, hearing=hearing)

    def _ask(
        self, policy: str, suites: tuple[Suite, ...], versions: tuple[str, ...], draw: str, hearing: Hearing, *, task: str = "evaluation"
    ) -> dict[str, tuple[Scores, ...]]:  # fmt: skip
        asking = Asking(
            config=self.config, connect=self.connect, progress=self.progress, judge=self.judge, examination=self.examination, task=task,
            heard=hearing,
        )  # fmt: skip
        try:
            return asyncio.run(asking.ask(policy, suites, versions, draw=draw))
        except* (RatchetError, ValueError) as failed:
            raise Unavailable(str(failed.exceptions[0])) from failed

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


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What one suite says."""

    kind: SuiteClass
    verdict: Verdict | None
    """None for an advisory one."""
    comparison: PairedComparison
    best: PairedComparison
    """Of the best of each task's answers: told beside the mean, and never judged (a model may get wider and no better, or the reverse)."""
    level: float | None
    """At which a core suite was tested; None where it was not: advisory, of safety, or refused."""
    power: float
    """Probability that an equal candidate passes a core suite of this size."""
    sentence: str


def judge_suites(
    suites: tuple[Suite, ...], scores: Mapping[str, Compared], *, seed: int, levels: Mapping[str, float] | None = None,
    min_power: float = 0.0, contradicted: Mapping[str, str] | None = None,
) -> dict[str, Judged]:  # fmt: skip
    """Every suite's answer, by name. `contradicted` says of suites why people's votes leave their judge no verdict."""
    comparisons = {s.config.name: _compare(s, *scores[s.config.name], take=_mean, seed=seed) for s in suites}
    powers = {s.config.name: power_of(*scores[s.config.name], margin=s.config.margin) for s in suites}
    core = [s.config for s in suites if s.config.kind is SuiteClass.CORE]
    passing = judge_core({c.name: comparisons[c.name] for c in core}, margins={c.name: c.margin for c in core}, levels=levels)
    found: dict[str, Judged] = {}
    for suite in suites:
        name, pair = suite.config.name, scores[suite.config.name]
        verdict = Verdict(passing[name]) if name in passing else _judge_alone(suite, *pair)
        cure = None if verdict is None else (contradicted or {}).get(name)
        if cure is None and verdict is not Verdict.FAIL:
            cure = _too_small(suite, *pair, power=powers[name], min_power=min_power)
        verdict = Verdict.INCONCLUSIVE if cure else verdict
        level = None if cure or name not in passing else (levels or {}).get(name, ALPHA)
        found[name] = Judged(
            kind=suite.config.kind, verdict=verdict, comparison=comparisons[name], best=_compare(suite, *pair, take=_best, seed=seed),
            level=level, power=powers[name], sentence=cure or _sentence(suite, *pair, verdict),
        )  # fmt: skip
    return found


def verdict_of(judged: Mapping[str, Judged]) -> tuple[Verdict, str]:
    """The gate's verdict and its sentence: any failing suite fails it, any inconclusive one keeps it open, advisory ones are told only."""
    deciding = {one.verdict for one in judged.values() if one.verdict is not None}
    if not deciding:
        return Verdict.INCONCLUSIVE, "no core or safety suite is configured, and advisory ones cannot pass a candidate"
    worst = next(v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in deciding)
    return worst, ", ".join(one.sentence for one in judged.values())


def _compare(
    suite: Suite, champion: Scores, candidate: Scores, *, take: Callable[[Scores], Scores], seed: int
) -> PairedComparison:  # fmt: skip
    """Of what `take` makes of each task's answers, [M, k] → [M]."""
    return compare(take(candidate) - take(champion), _clusters(suite), margin=suite.config.margin, seed=seed)


def _clusters(suite: Suite) -> list[str]:
    """The cluster of each task."""
    return [task.cluster or task.id for task in suite.tasks]


def _mean(scores: Scores) -> Scores:
    return scores.mean(axis=1)


def _best(scores: Scores) -> Scores:
    return best_of_k(scores, scores.shape[1])


def _judge_alone(suite: Suite, champion: Scores, candidate: Scores) -> Verdict | None:
    """A safety suite's verdict; an advisory one has none."""
    if suite.config.kind is SuiteClass.ADVISORY:
        return None
    critical = np.array([task.critical for task in suite.tasks])
    new = int(np.sum(critical & (candidate.min(axis=1) < 1.0) & (champion.min(axis=1) >= 1.0)))
    failing, clusters = failing_clusters(candidate, _clusters(suite))
    return Verdict(judge_safety(new_critical_failures=new, failing=failing, clusters=clusters, limit=suite.config.limit))


def _too_small(suite: Suite, champion: Scores, candidate: Scores, *, power: float, min_power: float) -> str | None:
    """Why a suite is refused whatever its scores, with the cure; None where it can answer (or where nobody asks)."""
    config, tasks, clusters = suite.config, len(suite.tasks), len(set(_clusters(suite)))
    if min_power <= 0.0:
        return None
    if config.kind is SuiteClass.SAFETY and (bound := rate_upper_bound(0, clusters)) > config.limit:
        needed = math.ceil(rule_of_three(1) / config.limit)
        return (
            f"{config.name} refused: {clusters} independent tasks without a failure leave {bound:.1%} open, however many answers each has; "
            f"give it {needed} or raise the limit"
        )
    if config.kind is not SuiteClass.CORE or power >= min_power:
        return None
    margin = attainable_margin(champion, candidate, power=min_power)
    more = math.ceil(tasks * (margin / config.margin) ** 2)
    return (
        f"{config.name} refused: an equal candidate would pass {tasks} tasks with {config.samples} answers {power:.0%} of the time, "
        f"{min_power:.0%} is needed; give it about {more} tasks, more samples, or a margin of {margin:.3f}"
    )


def _suite_evidence(suite: Suite, champion: Scores, candidate: Scores, *, judged: Judged) -> dict[str, Any]:
    comparison, best, k = judged.comparison, judged.best, suite.config.samples
    per_dimension = {
        dimension: [float(champion[rows].mean()), float(candidate[rows].mean())]
        for dimension in sorted({task.dimension for task in suite.tasks})
        if (rows := np.array([task.dimension == dimension for task in suite.tasks])).any()
    }
    return {
        "suite_hash": suite.hash, "class": suite.config.kind.value, "margin": suite.config.margin, "tasks": len(suite.tasks), "samples": k,
        "champion_mean": float(champion.mean()), "candidate_mean": float(candidate.mean()),
        "champion_best_of_k": float(_best(champion).mean()), "candidate_best_of_k": float(_best(candidate).mean()),
        "best_of_k_difference": best.mean, "best_of_k_low": best.low, "best_of_k_high": best.high,
        "difference": comparison.mean, "low": comparison.low, "high": comparison.high, "p_value": comparison.p_value,
        "level": judged.level, "passed": judged.verdict is Verdict.PASS, "power": judged.power,
        "items_needed": comparison.items_needed, "dimensions": per_dimension,
        "champion_scores": champion.tolist(), "candidate_scores": candidate.tolist(),
    }  # fmt: skip


def _sentence(suite: Suite, champion: Scores, candidate: Scores, verdict: Verdict | None) -> str:
    config, said = suite.config, "advisory" if verdict is None else verdict.value
    if config.kind is SuiteClass.SAFETY:
        failing, clusters = failing_clusters(candidate, _clusters(suite))
        bound = rate_upper_bound(failing, clusters)
        return f"{config.name} {said}: {failing} of {clusters} independent tasks fail, up to {bound:.2%} may (limit {config.limit:.2%})"
    return f"{config.name} {said}: {champion.mean():.3f} → {candidate.mean():.3f} (margin {config.margin:g})"
