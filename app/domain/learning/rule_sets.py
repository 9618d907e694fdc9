"""Rule sets as people ask for them: proposed by somebody, and put in force or refused by the labeller that has to score by them."""

from dataclasses import dataclass
from datetime import datetime


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
