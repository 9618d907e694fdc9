"""b_i = the expected reward of a segment, where the same channels decided it, from past batches and the other turns of this one, shrunk to
the mean over all.

SPO's KL-adaptive tracker (arXiv 2509.13232; facts/rl.md 4.3) carried over to production, where prompts never repeat: the key is the
segment instead of the prompt, rewards are real numbers instead of 0/1, so (α, β) become a weight w and a weighted mean m:

    forget   w ← ρ w          ρ = 2^(−D / 0.06) clipped to [0.875, 0.96],  D = mean |Δ log π| of the update just made
    add      w ← w + n        m ← (w m + Σ r) / (w + n)
    shrink   b = (w m + k g) / (w + k)       g = the same over all segments, k = prior_weight

What is not observed is paid 0, and what a thumb says is nowhere near 0 on average where one answer in ten is liked: with one mean for
all, a turn would be praised for not having been rated. Whether somebody speaks is taken as not the answer's doing; where it is, a term
prices it (`pipelines.labelling`), and a term that only ever says one thing is no channel (`pipelines.batching`).

In b_i the batch's own turns enter without i's unit (leave-one-out), so that E[b_i · ∇log π] = 0: the gradient is unbiased, also in the
first batch, where there is no past.
"""

from collections.abc import Sequence
from typing import Any

from pipelines.training.config import TrackerConfig
from pipelines.training.estimators import RewardedTurn, leave_one_out


class SegmentTracker:
    """The default baseline. `state` is what `remember` returned for the version that is being updated.

    Rewards of two rule sets do not compare: a memory made under another one than `rule_set` is not used. The baseline then comes from the
    batch alone, as in the first update, where it is unbiased as well.
    """

    def __init__(self, config: TrackerConfig, state: dict[str, Any] | None, *, rule_set: str = "") -> None:
        self.config, self.rule_set = config, rule_set
        known = state if state is not None and state.get("rule_set", "") == rule_set else {}
        segments: dict[str, list[float]] = known.get("segments", {})
        self.past = {name: (weight, mean) for name, (weight, mean) in segments.items()}

    def baselines(self, turns: Sequence[RewardedTurn]) -> list[float]:
        """One baseline per turn; its own reward where nothing else is known, so that it teaches nothing."""
        past_weight = sum(weight for weight, _ in self.past.values())
        past_total = sum(weight * mean for weight, mean in self.past.values())
        overall = leave_one_out(turns)
        own = self._within_segments(turns)
        baselines: list[float] = []
        for turn, (count, total), (own_weight, own_total) in zip(turns, overall, own, strict=True):
            weight = past_weight + count
            everywhere = (past_total + total) / weight if weight else turn.reward
            prior = self.config.prior_weight
            baselines.append((own_total + prior * everywhere) / (own_weight + prior) if own_weight + prior else turn.reward)
        return baselines

    def _within_segments(self, turns: Sequence[RewardedTurn]) -> list[tuple[float, float]]:
        """Weight and weighted sum of rewards in each turn's segment: the past, and the batch without the turn's unit."""
        places: dict[str, list[int]] = {}
        for place, turn in enumerate(turns):
            places.setdefault(_key(turn), []).append(place)
        found: list[tuple[float, float]] = [(0.0, 0.0)] * len(turns)
        for segment, members in places.items():
            weight, mean = self.past.get(segment, (0.0, 0.0))
            for place, (count, total) in zip(members, leave_one_out([turns[m] for m in members]), strict=True):
                found[place] = (weight + count, weight * mean + total)
        return found

    def remember(self, turns: Sequence[RewardedTurn], *, drift: float) -> dict[str, Any]:
        """The state after this batch: everything older is forgotten by how far the policy moved, then the batch is added."""
        config = self.config
        memory = min(max(2 ** (-drift / config.kl_half_life), config.memory_low), config.memory_high)
        sums = {name: (memory * weight, memory * weight * mean) for name, (weight, mean) in self.past.items()}
        for turn in turns:
            weight, total = sums.get(_key(turn), (0.0, 0.0))
            sums[_key(turn)] = (weight + 1, total + turn.reward)
        segments = {name: [weight, total / weight] for name, (weight, total) in sorted(sums.items()) if weight > 0}
        return {"segments": segments} | ({"rule_set": self.rule_set} if self.rule_set else {})


def _key(turn: RewardedTurn) -> str:
    return f"{turn.segment}|{turn.channels}" if turn.channels else turn.segment
