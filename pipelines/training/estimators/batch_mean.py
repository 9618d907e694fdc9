"""b_i = mean of the rewards of all other units in the batch.

Leave-one-out (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"): because r_i is not in b_i, E[b_i · ∇log π] = 0
and the gradient is unbiased; r_i − b_i = n/(n−1) · (r_i − mean) when every unit is one turn.
"""

from collections.abc import Sequence
from typing import Any

from pipelines.training.estimators import RewardedTurn, leave_one_out


class BatchMean:
    """The mean of the others; a batch of one unit has baseline equal to its reward, so it teaches nothing."""

    def baselines(self, turns: Sequence[RewardedTurn]) -> list[float]:
        """One baseline per turn."""
        others = leave_one_out(turns)
        return [total / count if count else turn.reward for turn, (count, total) in zip(turns, others, strict=True)]

    def remember(self, turns: Sequence[RewardedTurn], *, drift: float) -> dict[str, Any]:
        """Nothing outlives the batch."""
        return {}
