"""Rule sets as people ask for them: proposed by somebody, and put in force or refused by the labeller that has to score by them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

MOST_CHARS = 40_000
"""Of a rule set that somebody sends."""


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A rule set put in force."""

    digest: str
    name: str
    activated_by: str
    activated_at: datetime


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A rule set that somebody wants in force."""

    id: str
    policy: str
    toml: str
    proposed_by: str
    proposed_at: datetime
    settled_at: datetime | None = None
    digest: str | None = None
    """Of the rule set, once it is in force."""
    refused: str | None = None
    """What is wrong with it."""

    @property
    def state(self) -> str:
        """`waiting`, `in force` (since `settled_at`; another may be by now) or `refused`."""
        if self.settled_at is None:
            return "waiting"
        return "refused" if self.digest is None else "in force"


@dataclass(frozen=True, kw_only=True)
class Mover:
    """One turn under both rule sets."""

    inference_id: str
    segment: str
    before: float
    """The reward that its label has."""
    after: float
    paid_before: Mapping[str, float]
    """Weight times value, by the terms that spoke when it was labelled."""
    paid_after: Mapping[str, float]

    @property
    def change(self) -> float:
        """Reward gained."""
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class Shift:
    """What a term pays, weight times value, on average over the labels in which it speaks."""

    spoke_before: int
    mean_before: float
    spoke_after: int
    mean_after: float


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Stored labels scored anew by another rule set."""

    turns: int
    changed: int
    before: tuple[float, ...]
    """Quantiles of the rewards at 0, 25, 50, 75 and 100 % under the labels as they are; empty without turns."""
    after: tuple[float, ...]
    segments: Mapping[str, tuple[int, float, float]]
    """Per segment: turns, mean reward as labelled, mean reward replayed."""
    terms: Mapping[str, Shift]
    movers: tuple[Mover, ...]
    """Turns whose reward changes most, the largest change first."""
    excluded: Mapping[str, int]
    """Turns that the replayed rule set would exclude, by reason."""
    name: str = ""
    digest: str = ""
    """Of the rule set."""


@dataclass(frozen=True, kw_only=True)
class AskedReplay:
    """A rule set that somebody wants to see over stored labels, before anything is paid by it."""

    id: str
    policy: str
    toml: str
    asked_by: str
    asked_at: datetime
    settled_at: datetime | None = None
    refused: str | None = None
    """What is wrong with it."""
    outcome: Replay | None = None

    @property
    def state(self) -> str:
        """`waiting`, `replayed` or `refused`."""
        if self.settled_at is None:
            return "waiting"
        return "replayed" if self.refused is None else "refused"
