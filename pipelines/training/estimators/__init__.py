"""Baselines: what reward was to be expected, so that only the rest is learned from. One file each.

Fed by rewards and the tracker's memory / feeds the advantage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class RewardedTurn:
    """What a baseline may look at."""

    unit: str
    """Turns of one unit (an episode) share its outcome, so none of them may serve as another's baseline."""
    reward: float
    segment: str
    prompt: str
    """Equal for turns whose episodes began with the same prompt: tries at one task."""
    channels: str = ""
    """Who decided the reward: an edit, a thumb, a next message, several of them, or nobody."""
    group: str = ""
    """Of a rollout: the id that the tries at one task have in common, from the first turn to the last."""


class Estimator(Protocol):
    """A baseline per turn, and the memory that the next update starts from."""

    def baselines(self, turns: Sequence[RewardedTurn]) -> list[float]:
        """One baseline per turn, in reward units, in the order given."""
        ...

    def remember(self, turns: Sequence[RewardedTurn], *, drift: float) -> dict[str, Any]:
        """State for the next update; `drift` is the update's mean |Δ log π| per token."""
        ...


def leave_one_out(turns: Sequence[RewardedTurn]) -> list[tuple[float, float]]:
    """For each turn the count and sum of the rewards of all turns outside its own unit."""
    total = sum(turn.reward for turn in turns)
    count: dict[str, int] = {}
    sums: dict[str, float] = {}
    for turn in turns:
        count[turn.unit] = count.get(turn.unit, 0) + 1
        sums[turn.unit] = sums.get(turn.unit, 0.0) + turn.reward
    return [(len(turns) - count[turn.unit], total - sums[turn.unit]) for turn in turns]
