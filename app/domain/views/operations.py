"""What the demo's terminal looks at: read from the state and from nothing else, every label of the line in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from app.domain.learning.cycles import Cycle
from app.domain.release.releases import Pointer, Release
from app.domain.views.measures import Measure
from app.domain.views.rows import GateRow, ProgressRow


@dataclass(frozen=True, kw_only=True)
class LabelRow:
    """One label, as far as pages show it."""

    version: str
    segment: str
    tier: str
    reward: float
    exclusion: str | None
    persistence: float | None
    """0 … 1; None where the term abstained."""
    follow_up: float | None
    """Satisfaction of the user's next message, -1 … 1; None where there was none or it was unclear."""
    success: float | None
    """The gold signal `task_success`, 0 … 1."""
    tokens: int | None
    """Length of the answer; None where the engine did not count."""
    finished_at: datetime
    arm: str


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    """A version with what people did with its answers."""

    digest: str
    name: str
    kind: str
    parent: str | None
    step: int
    created_at: datetime
    turns: int
    """Labelled turns."""
    persistence: Measure | None = None
    dissatisfied: Measure | None = None
    """Share of dissatisfied ones among the follow-ups that could be read."""
    success: Measure | None = None
    reward: Measure | None = None


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Requests served by one version, and when."""

    requests: int
    people: int
    first_at: datetime | None
    last_at: datetime | None
    units: int = 0
    """People times stages of the canaries it was in, both arms, from its first exposure to its last: what the gate had to decide on."""
    people_meanwhile: int = 0
    """Everybody whom the policy served between its first exposure and its last."""

    @property
    def share(self) -> float:
        """Of the people served meanwhile, those who got it."""
        return self.people / self.people_meanwhile if self.people_meanwhile else 0.0


class Operations(Protocol):
    """Reads a deployment for the demo."""

    def pointer(self, policy: str) -> Pointer | None: ...

    def releases(self, policy: str, *, limit: int = 50) -> list[Release]:
        """Newest first."""
        ...

    def gates(self, release_id: str) -> list[GateRow]:
        """The newest answer of each gate."""
        ...

    def versions(self, policy: str, labels: Sequence[LabelRow] | None = None) -> list[VersionRow]:
        """Oldest first, with the measures of what they served: over `labels` where the caller has read them already."""
        ...

    def labels(self, policy: str, *, limit: int = 20_000) -> list[LabelRow]:
        """Current labels, newest first."""
        ...

    def cycles(self, policy: str, *, limit: int = 50) -> list[Cycle]:
        """Newest slot first."""
        ...

    def progress(self, policy: str) -> list[ProgressRow]: ...

    def exposed(self, digest: str) -> Exposed:
        """Who was served by the version."""
        ...

    def accepted_events(self) -> int:
        """Events the door has accepted since the beginning."""
        ...

    def waiting_turns(self, policy: str) -> int:
        """Turns whose wait is not over yet."""
        ...
