"""Practice is measured against its group, everything else by the estimator that is configured.

Tries at one task are comparable with each other and with nothing else; what people asked for is never tried twice. One batch may hold both.
"""

from collections.abc import Sequence
from typing import Any

from pipelines.training.estimators import Estimator, RewardedTurn
from pipelines.training.estimators.group_mean import GroupMean


class Grouped:
    """`GroupMean` for turns that have a group, `others` for those that have none."""

    def __init__(self, others: Estimator) -> None:
        self.others = others

    def baselines(self, turns: Sequence[RewardedTurn]) -> list[float]:
        """One baseline per turn."""
        grouped = iter(GroupMean().baselines([turn for turn in turns if turn.group]))
        others = iter(self.others.baselines([turn for turn in turns if not turn.group]))
        return [next(grouped if turn.group else others) for turn in turns]

    def remember(self, turns: Sequence[RewardedTurn], *, drift: float) -> dict[str, Any]:
        """Practice leaves nothing in the memory of what people's segments bring."""
        return self.others.remember([turn for turn in turns if not turn.group], drift=drift)
