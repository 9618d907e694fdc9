"""How a batch is cut. The defaults are the vetted setting."""

from typing import Literal

import msgspec

from app.domain.errors import BadConfig


class BatchingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one slot's update may learn from."""

    min_turns: int = 32
    """Fewer eligible turns than this hold the cycle; nothing is used up."""
    max_turns: int = 1024
    """The rest stays eligible for the next slot while its version does."""
    max_turns_per_actor: int = 16
    """How much one person can weigh in one update."""
    max_turns_per_rater: int = 16
    """How much one person's word on other people's answers can weigh in one update."""
    quarantine: bool = True
    """Whether labels wait that rest on raters who seem to act together (`raters.py`); false lets those through that waited."""
    newcomer_days: float = 1.0
    """How long somebody counts as new after they were first heard of."""
    newcomer_weight: float = 0.5
    """How far an outcome that none but newcomers or nameless raters decided may be from the mean, beside others'. 1 trusts everybody."""
    staleness: int = 2
    """How many versions behind the champion a turn may be (S). What people said while the last update, canary and approval ran is about the
    version before, and what they said late about the one before that. `tis` at a lag of 1 or 2 versions costs .001 of the final reward and
    keeps 40 % of the sample effective; at 4 it keeps 23 %, where the update refuses (docs/EVIDENCE.md, `make bench-learning`)."""
    max_tries: int = 3
    """In how many batches a label may be that are held or fail, and give their labels back, before it is left out as `held_again`: a turn
    whose logged probabilities are wrong would hold every batch to come."""
    rollout_share: float = 0.0
    """How much of a batch may be practice (`ratchet env run`). 0: none, and its turns are labelled as left out; 1: all of it, where there
    is nothing else. In between production comes first: without it there is no practice in the batch either."""
    rollout_staleness: int = 1
    """The same as `staleness`, for rollouts: they can be had again, and a long one may have begun a version earlier."""
    episode_reward: Literal["final", "mean", "own"] = "final"
    """Whose outcome every turn of a chain is paid: the last one of the chain, the mean of them, or each its own. What a turn itself did
    (its process terms: tool calls, a question, how it ended, length, latency) it keeps in every case."""
    wait_for_episodes: bool = True
    """Leave a chain for the next slot while one of its turns has no label yet."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_turns <= self.max_turns:
            raise BadConfig(f"batching.min_turns is {self.min_turns}: give 1 to batching.max_turns ({self.max_turns})")
        if self.max_turns_per_rater < 1 or not 0.0 < self.newcomer_weight <= 1.0 or self.newcomer_days < 0.0:
            raise BadConfig("batching.max_turns_per_rater is at least 1, newcomer_weight above 0 and at most 1, newcomer_days at least 0")
        if self.max_tries < 1:
            raise BadConfig(f"batching.max_tries is {self.max_tries}: give at least 1, which gives nothing back")
        if not 0.0 <= self.rollout_share <= 1.0 or self.rollout_staleness < 0:
            raise BadConfig("batching.rollout_share is from 0 to 1, and batching.rollout_staleness at least 0")
        if self.max_turns_per_actor < 1 or self.staleness < 0:
            raise BadConfig("batching.max_turns_per_actor must be at least 1 and batching.staleness at least 0")
