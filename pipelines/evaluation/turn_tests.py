"""What is asked of all turns, besides what each person's first half hour says: which tests, and their share of the metric's evidence."""

from dataclasses import dataclass
from enum import StrEnum

from pipelines.evaluation.config import GatesConfig, Good, MetricConfig


class Whose(StrEnum):
    """Whose turns a test is about."""

    EVERYBODYS = "all turns"


SHARES: dict[str, dict[Whose, float]] = {
    "fast": {Whose.EVERYBODYS: 0.5},
}
"""Of a metric's weight in the harm family; its first turns, or its window, keep what is left."""


@dataclass(frozen=True, kw_only=True)
class TurnTest:
    """One test over all turns."""

    metric: MetricConfig
    whose: Whose
    share: float
    """Of the metric's weight."""

    @property
    def name(self) -> str:
        return f"{self.metric.name}, {self.whose}"


def turn_tests(config: GatesConfig) -> list[TurnTest]:
    """Every test over all turns, in the metrics' order."""
    return [TurnTest(metric=m, whose=whose, share=share) for m in config.metrics for whose, share in _shares(m).items()]


def lane_share(metric: MetricConfig) -> float:
    """What is left of the metric's weight for its window."""
    return 1.0 - sum(_shares(metric).values())


def _shares(metric: MetricConfig) -> dict[Whose, float]:
    if metric.good is Good.SAME:
        return {}
    return SHARES["fast"] if metric.window_s == 0.0 else {}
