"""What everybody was like before the canary: how much they use the product, and how it usually goes for them.

Both are known before anybody is drawn, so a stratum of the heaviest users is a fair one, and what is usual for a person may be taken off
what happens to them (CUPED, Deng et al. 2013): the variance that people bring along goes, the effect stays. A person's usual value is their
mean, drawn towards everybody's by as much as people's own turns differ (empirical Bayes): its slope is one by construction, nothing has to
be learned while a canary runs.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, MetricConfig
from pipelines.evaluation.counting.measures import counted_missing, measured
from pipelines.evaluation.counting.references import Reference, references_of, thresholds_of
from pipelines.evaluation.live.harm import PRIMARY
from pipelines.evaluation.statistics.units import FloatArray

HEAVIEST = 0.05
"""Share of the people who count as the heaviest users."""
LEAST_PEOPLE = 30
LEAST_EXPLAINED = 100
"""People of the later half, before any of their variance is called explained."""
MOST_EXPLAINED = 0.9
LEAST_VARIANCE = 0.0025
MOST_ALIKE = 1000.0
"""Turns that everybody's mean is worth at most against a person's own, where people hardly differ."""


@dataclass(frozen=True, kw_only=True)
class Usual:
    """How one metric usually goes."""

    mean: float
    """Of the people."""
    worth: float
    """Turns of their own that it takes to count as much as everybody's mean."""
    within: float
    """Variance of a person's turns about their own mean."""
    own: Mapping[str, tuple[float, int]]
    """Sum and number of turns, by person."""

    def of(self, actor: str) -> float:
        """What is to be expected of this person's turns, in [0, 1]."""
        total, turns = self.own.get(actor, (0.0, 0))
        return (self.worth * self.mean + total) / (self.worth + turns)

    def residual(self, turns: int) -> float:
        """Variance of the mean of so many turns about what is usual for somebody of whom as many are known."""
        return max(LEAST_VARIANCE, self.within * (1.0 / turns + 1.0 / (self.worth + turns)))


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Of everybody who used the champion lately; nothing is known of anybody else."""

    heaviest: frozenset[str] = frozenset()
    heavy: int = 1
    """Turns that each of them had, at least."""
    usual: Mapping[str, Usual] = field(default_factory=dict[str, Usual])
    """By metric, those that are judged on their means; none of which people hardly differ in."""


def habits_of(config: GatesConfig, history: Sequence[Session], thresholds: Mapping[str, float]) -> Habits:
    """From the champion's sessions before the canary; none where there are too few people."""
    turns = Counter(session.actor for session in history)
    if len(turns) < LEAST_PEOPLE:
        return Habits()
    counts = np.array(sorted(turns.values()))
    least = max(float(np.quantile(counts, 1.0 - HEAVIEST, method="higher")), float(np.median(counts)) + 1.0)
    labelled = [session for session in history if session.labelled]
    usual = {m.name: _usual(m, labelled, thresholds) for m in config.metrics if m.kind in PRIMARY and not m.by_turns}
    return Habits(
        heavy=int(least), heaviest=frozenset(actor for actor, count in turns.items() if count >= least),
        usual={name: found for name, found in usual.items() if found is not None},
    )  # fmt: skip


def with_explained(config: GatesConfig, history: Sequence[Session]) -> dict[str, Reference]:
    """References, with what the habits of the earlier half of this history explain of what people did in the later one.

    People who are new in the later half are among those it is about, as they will be in a canary.
    """
    references = references_of(config, history)
    thresholds = thresholds_of(references)
    half = len(history) // 2
    habits = habits_of(config, history[:half], thresholds)
    later = [session for session in history[half:] if session.labelled]
    return {
        m.name: msgspec.structs.replace(references[m.name], explained=_explained(m, habits.usual.get(m.name), later, thresholds))
        for m in config.metrics
    }


def _explained(metric: MetricConfig, usual: Usual | None, later: Sequence[Session], thresholds: Mapping[str, float]) -> float:
    after = None if usual is None else _usual(metric, later, thresholds)
    if usual is None or after is None or len(after.own) < LEAST_EXPLAINED:
        return 0.0
    means = np.array([total / turns for total, turns in after.own.values()])
    left = means - np.array([usual.of(actor) for actor in after.own])
    return float(np.clip(1.0 - left.var() / means.var(), 0.0, MOST_EXPLAINED)) if means.var() > 0.0 else 0.0


def _usual(metric: MetricConfig, labelled: Sequence[Session], thresholds: Mapping[str, float]) -> Usual | None:
    values: dict[str, list[float]] = defaultdict(list)
    for session in labelled:
        value = measured(metric, session, thresholds)
        values[session.actor].append(counted_missing(metric) if value is None else value)
    if len(values) < LEAST_PEOPLE:
        return None
    means = np.array([sum(mine) / len(mine) for mine in values.values()])
    own = {actor: (sum(mine), len(mine)) for actor, mine in values.items()}
    within, between = _variances([np.array(mine) for mine in values.values()])
    if between * MOST_ALIKE <= within:
        return None  # people hardly differ, or hardly anybody came twice
    worth = max(0.1, within / between)
    return Usual(mean=float(means.mean()), worth=worth, within=within, own=own)


def _variances(people: Sequence[FloatArray]) -> tuple[float, float]:
    """Of a person's turns, and between people, by analysis of variance (0 where they do not differ, or came once)."""
    turns = np.array([len(mine) for mine in people], dtype=np.float64)
    n, k = turns.sum(), len(people)
    if n <= k:
        return float(np.concatenate(people).var()), 0.0
    means, grand = np.array([mine.mean() for mine in people]), np.concatenate(people).mean()
    within = sum(float(((mine - mine.mean()) ** 2).sum()) for mine in people) / (n - k)
    typical = (n - (turns**2).sum() / n) / (k - 1)
    return within, max(0.0, (float((turns * (means - grand) ** 2).sum()) / (k - 1) - within) / typical)
