"""What is asked of all turns, besides what each person's first half hour says: which tests, and their share of the metric's evidence."""

from dataclasses import dataclass
from enum import StrEnum

from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig
from pipelines.evaluation.statistics.growing import LOOKS


class Whose(StrEnum):
    """Whose turns a test is about."""

    EVERYBODYS = "all turns"
    HEAVIEST = "heaviest users"
    """Of those who used it most before the canary."""
    LASTING = "lasting cohort"
    """Of people who could get the candidate, against those who never can: harm that lasts from stage to stage is in both of its arms."""


FAST = {Whose.EVERYBODYS: 0.5}
GOLD = {Whose.EVERYBODYS: 0.15, Whose.HEAVIEST: 0.25, Whose.LASTING: 0.2}
"""Of a metric's weight in the harm family; its first turns, or its window, keep what is left."""


COVERAGE_TOLERANCE = 0.02
"""Silence counts as failure. Feedback on 2 % more of the turns may hide a loss of 2 points at most, and of 1.2 where 60 % succeed."""


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


COVERAGE = TurnTest(
    metric=MetricConfig(
        name="feedback coverage per turn", source="abandoned", kind=MetricClass.BEHAVIOUR, good=Good.SAME, abort_margin=COVERAGE_TOLERANCE
    ),
    whose=Whose.EVERYBODYS,
    share=0.0,
)
"""Whether anybody reacts, turn by turn: it is no harm, it is a doubt, and it has no share of any metric's."""


def turn_tests(config: GatesConfig) -> list[TurnTest]:
    """Every test over all turns, in the metrics' order."""
    return [TurnTest(metric=m, whose=whose, share=share) for m in config.metrics for whose, share in _shares(m).items()]


def lane_share(metric: MetricConfig) -> float:
    """What is left of the metric's weight for its window."""
    return 1.0 - sum(_shares(metric).values())


def alpha_of_a_look(config: GatesConfig, metric: MetricConfig, whose: Whose) -> float:
    """The level at which one look of this test rejects by itself, with nothing from the rest of the family or from other looks.

    Raises ValueError where the metric has no such test.
    """
    share = _shares(metric).get(whose)
    if share is None:
        raise ValueError(f"{metric.name} is not asked of {whose}")
    return config.alpha_abort_e * config.weight_of(metric) * share / LOOKS


def _shares(metric: MetricConfig) -> dict[Whose, float]:
    if metric.good is Good.SAME:
        return {}
    if metric.window_s == 0.0:
        return FAST
    return GOLD if metric.kind is MetricClass.GOLD and not metric.by_turns else {}
