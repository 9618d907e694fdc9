"""b_i = mean of the rewards of the turns that answer the same prompt, i included.

Dr. GRPO as the Composer 2 report uses it (arXiv 2603.24477, 4.1): no division by the standard deviation, no length normalisation.
Because r_i is in its own mean, the expected gradient is (n−1)/n of the exact one in a group of n; a group of one has advantage zero.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pipelines.training.estimators import RewardedTurn


class GroupMean:
    """For simulator tasks and prompts that repeat; production prompts do not, and then nothing is learned (and the run is held)."""

    def baselines(self, turns: Sequence[RewardedTurn]) -> list[float]:
        """One baseline per turn."""
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for turn in turns:
            rewards[turn.prompt].append(turn.reward)
        return [sum(rewards[turn.prompt]) / len(rewards[turn.prompt]) for turn in turns]

    def remember(self, turns: Sequence[RewardedTurn], *, drift: float) -> dict[str, Any]:
        """Nothing outlives the batch."""
        return {}
