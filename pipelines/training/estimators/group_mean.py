"""b_i = mean over the episodes that began with the same prompt, i's own included, of what each was paid.

Dr. GRPO as the Composer 2 report uses it (arXiv 2603.24477, 4.1): no division by the standard deviation, no length normalisation.
Because i's episode is in its own mean, the expected gradient is (n−1)/n of the exact one in a group of n; a group of one has advantage
zero. A rollout says which group it is of; without one, the group is known by the episode's first prompt, because from the second turn on
every episode has a prompt of its own. An episode counts once, by the mean
of its turns, however long it became.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pipelines.training.estimators import RewardedTurn


class GroupMean:
    """For simulator tasks and prompts that repeat; production prompts do not, and then nothing is learned (and the run is held)."""

    def baselines(self, turns: Sequence[RewardedTurn]) -> list[float]:
        """One baseline per turn."""
        rewards: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for turn in turns:
            rewards[_group(turn)][turn.unit].append(turn.reward)
        means = {group: fmean(fmean(paid) for paid in episodes.values()) for group, episodes in rewards.items()}
        return [means[_group(turn)] for turn in turns]

    def remember(self, turns: Sequence[RewardedTurn], *, drift: float) -> dict[str, Any]:
        """Nothing outlives the batch."""
        return {}


def _group(turn: RewardedTurn) -> str:
    return f"rollouts {turn.group}" if turn.group else turn.prompt
