"""How an update learns from corrections. The defaults are the vetted setting."""

from typing import Literal

import msgspec

from app.domain.errors import BadConfig


class HindsightConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The second objective, and how far one person can move it."""

    objective: Literal["none", "self_distillation", "sft", "dpo"] = "none"
    """See `pipelines.training.hindsight`; `none` learns from the reward alone, the default until `make bench-corrections` says better
    over all its seeds."""
    weight: float = 0.3
    """What a wanted answer weighs beside an advantage of one; of `self_distillation` reward units per nat between teacher and policy, where
    .1 was best."""
    scalar_weight: float = 1.0
    """What the reward above its baseline weighs beside; 0 learns from corrections alone."""
    clip: float = 5.0
    """Nats by which one token counts at the most, either way."""
    dpo_beta: float = 0.1
    max_person_share: float = 0.1
    """Of the weight of all corrections in an update, what one person may have; where there are too few people for that, none is used."""
    newcomer_weight: float = 0.5
    """Of corrections by newcomers and by nobody who is named, beside others'."""

    def __post_init__(self) -> None:
        if not 0.0 < self.max_person_share <= 1.0:
            raise BadConfig(f"training.hindsight.max_person_share is {self.max_person_share}: give a share above 0 and up to 1")
        if min(self.weight, self.scalar_weight) < 0.0 or not 0.0 < self.newcomer_weight <= 1.0:
            raise BadConfig("training.hindsight: weight and scalar_weight are at least 0, newcomer_weight is above 0 and at most 1")
        if self.clip <= 0.0 or self.dpo_beta <= 0.0:
            raise BadConfig("training.hindsight: clip and dpo_beta are above 0")
