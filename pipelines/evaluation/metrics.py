"""What one canary metric is: its source, its direction, its class, and what a missing value counts as."""

from enum import StrEnum

import msgspec


class MetricClass(StrEnum):
    """Classes of canary metrics, with their share of the harm family's alpha (sheet 4.4)."""

    HARD = "hard"
    GOLD = "gold"
    PROXY = "proxy"
    BEHAVIOUR = "behaviour"
    USER_HARM = "user_harm"
    COST = "cost"
    """Seconds and tokens."""


CLASS_WEIGHTS = {
    MetricClass.HARD: 0.30, MetricClass.GOLD: 0.30, MetricClass.PROXY: 0.10, MetricClass.BEHAVIOUR: 0.10, MetricClass.USER_HARM: 0.10,
    MetricClass.COST: 0.10,
}  # fmt: skip
"""Behaviour is a family of its own, whose shares are brought to one there (`harm.behaviour_of`)."""


class Good(StrEnum):
    """Which way is good."""

    UP = "up"
    DOWN = "down"
    SAME = "same"
    """Neither: a change of behaviour is what is looked for, in both directions. It asks people; it never says "worse" by itself."""


class Missing(StrEnum):
    """What a unit without the signal counts as."""

    WORST = "worst"
    """Intention to treat: silence is never better than an answer."""
    BEST = "best"
    """For complaints, whose absence is the good case."""


PLAIN_SOURCES = frozenset(
    {
        "fault", "invalid_tool_call", "time_to_first_token", "total_time", "price", "reward", "acts", "asks", "refuses", "length", "tools",
        "abandoned", "excluded",
    }
)  # fmt: skip
NAMED_SOURCES = frozenset({"term", "observation", "has"})


class MetricConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One metric: what is measured on each turn, brought to [0, 1], and what the family does with it."""

    name: str
    source: str
    """`fault`, `reward`, …, or `term:NAME` (a term of the label), `observation:NAME` (its value), `has:NAME` (whether there is one)."""
    kind: MetricClass
    good: Good = Good.UP
    low: float = 0.0
    high: float = 1.0
    """The source's range; values are brought to [0, 1] and cut off there, fixed before the canary."""
    threshold: float | None = None
    """Count turns at or above it instead of averaging values; for `length`, unset means the champion's p95."""
    quantile: float | None = None
    """With neither `threshold` nor `relative`: count turns above this quantile of the champion's, fixed before the canary."""
    relative: bool = False
    """A value x counts as x/(x + the champion's median): bounded, .5 where it is as before, .55 at a fifth more, whatever its unit."""
    prompt_price: float = 0.25
    """For `price`: what a token of the prompt costs, in tokens of the answer."""
    abort_margin: float = 0.0
    """Harm is an effect worse than this; two-sided metrics: a change larger than this."""
    margin: float | None = None
    """Non-inferiority margin; set, the metric is required for promotion."""
    window_s: float | None = None
    """Sessions of a unit count this long after its first; 0 is the fast lane (the first turn alone); unset, `GatesConfig.window_s`."""
    missing: Missing = Missing.WORST
    by_turns: bool = False
    """Every turn counts, not every person: a unit's value is how few of its turns went badly, `turns_cap` of them at most. The same loss
    weighs as much as the turns that it spoils, so a version that is worse for the few who use it most cannot hide behind the many."""
    turns_cap: int | None = None
    """With `by_turns`: turns of one person that count at most; unset, as many as one in a hundred of the champion's people has."""
    weight: float | None = None
    """Share of the harm family; unset, its class's share divided among the class."""
    prior: float | None = None
    """Champion's mean (before orientation) where the canary starts without any history of it."""

    @property
    def required(self) -> bool:
        return self.margin is not None
