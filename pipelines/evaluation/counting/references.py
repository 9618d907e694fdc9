"""What the champion was like before a canary: mean, variance and thresholds per metric, fixed before the first exposure."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, Good, MetricConfig
from pipelines.evaluation.counting.measures import counted_missing, is_referred, measured, of_unit, raw_value

LEAST_UNITS = 30
"""Below this many people the configured prior is the better guess."""
VARIANCE_FLOOR = 0.0025
LEAST_MARGIN = 1e-4
"""Where the champion never succeeds: no version can be shown to be no worse, so nothing is promoted on that."""
LENGTH_QUANTILE = 0.95
TURNS_QUANTILE = 0.99


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of the champion. A wrong reference costs power, never validity (`facts/gates.md`, section 3.1)."""

    mean: float
    """Oriented: good is up."""
    variance: float
    threshold: float | None = None
    """For a metric that refers to the champion's values: their quantile, or median.
    For a metric counted by turns: how many of one person's count at most."""
    units: int = 0
    """People it was measured on; 0 for the configured prior."""
    known: float = 1.0
    """Share of the labelled turns that had any signal of it."""
    explained: float = 0.0
    """Share of the variance between people that their own habits explain, seen by what they did before and after."""

    @property
    def residual(self) -> float:
        """The variance that is left."""
        return self.variance * (1.0 - self.explained)


def references_of(config: GatesConfig, history: Sequence[Session]) -> dict[str, Reference]:
    """References from the champion's sessions; the configured priors where there are too few people."""
    return {metric.name: _reference(metric, history, window_s=config.window_of(metric)) for metric in config.metrics}


def bounded(config: GatesConfig, metric: MetricConfig, margin: float, reference: Reference) -> float:
    """The margin of a metric whose good is up, at most `margin_share_max` of the champion's measured mean (a prior bounds nothing)."""
    if metric.good is not Good.UP or reference.units == 0 or config.margin_share_max == 0.0:
        return margin
    return min(margin, max(LEAST_MARGIN, config.margin_share_max * reference.mean))


def _reference(metric: MetricConfig, history: Sequence[Session], *, window_s: float) -> Reference:
    threshold = _threshold(metric, history)
    thresholds = {} if threshold is None else {metric.name: threshold}
    people: dict[str, list[float]] = {}  # by person; counted by turns, by person and window, as the canary's units are
    turns = known = 0
    for session in history:
        if session.labelled:
            value = measured(metric, session, thresholds)
            turns, known = turns + 1, known + (value is not None)
            part = f" {session.exposed_at.timestamp() // max(window_s, 1.0)}" if metric.by_turns else ""
            people.setdefault(session.actor + part, []).append(counted_missing(metric) if value is None else value)
    if metric.by_turns and metric.turns_cap is None and len(people) >= LEAST_UNITS:
        threshold = max(1.0, float(np.quantile([len(values) for values in people.values()], TURNS_QUANTILE, method="higher")))
        thresholds = {metric.name: threshold}
    means = np.array([of_unit(metric, values, thresholds) for values in people.values()])
    if len(means) < LEAST_UNITS:
        mean = _prior(metric)
        return Reference(mean=mean, variance=max(mean * (1.0 - mean), VARIANCE_FLOOR), threshold=threshold)
    variance = max(float(means.var()), VARIANCE_FLOOR if not metric.by_turns else VARIANCE_FLOOR / 25.0)
    return Reference(mean=float(means.mean()), variance=variance, threshold=threshold, units=len(means), known=known / turns)


def thresholds_of(references: Mapping[str, Reference]) -> dict[str, float]:
    """By metric, those that have one."""
    return {name: r.threshold for name, r in references.items() if r.threshold is not None}


def _threshold(metric: MetricConfig, history: Sequence[Session]) -> float | None:
    """The champion's quantile that the metric refers to; for a relative one the median, none where that is nothing."""
    if not is_referred(metric):
        return None
    values = [value for value in (raw_value(metric, session) for session in history) if value is not None]
    if len(values) < LEAST_UNITS:
        return None
    found = float(np.quantile(values, 0.5 if metric.relative else metric.quantile or LENGTH_QUANTILE))
    return found if found > 0.0 or not metric.relative else None


def _prior(metric: MetricConfig) -> float:
    if metric.prior is None:
        return 0.5
    return 1.0 - metric.prior if metric.good is Good.DOWN else metric.prior
