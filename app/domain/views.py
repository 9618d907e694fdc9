"""What people look at: rows of the console's pages and of the demo's terminal, read from the state and from nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import NormalDist
from typing import Any, Protocol

from app.domain.learning.cycles import Cycle
from app.domain.release.alarms import Alarm
from app.domain.release.releases import Pointer, Release


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A mean with its 95 % interval (normal approximation: for looking at, not for deciding)."""

    n: int
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """`0.43 [0.38, 0.48]`."""
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def measure(values: Sequence[float], *, low: float = -math.inf, high: float = math.inf) -> Measure | None:
    """Mean and interval of a sample within [low, high]; None below two values. Equal values get the rule of three's width."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = 1.96 * deviation / math.sqrt(n) if deviation > 0 else 3 / n
    return Measure(n=n, mean=mean, low=max(low, mean - half), high=min(high, mean + half))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Second mean minus first, with its interval (Welch)."""

    first: Measure
    second: Measure
    difference: float
    low: float
    high: float
    level: float = 0.95
    """Of the interval."""


def difference(first: Sequence[float], second: Sequence[float], *, error: float = 0.05) -> Difference | None:
    """What changed from the first sample to the second, with an interval of that error; None where either sample is too small."""
    before, after = measure(first), measure(second)
    if before is None or after is None:
        return None
    wider = NormalDist().inv_cdf(1 - error / 2) / NormalDist().inv_cdf(0.975)
    half = wider * math.hypot(before.high - before.mean, after.high - after.mean)
    delta = after.mean - before.mean
    return Difference(first=before, second=after, difference=delta, low=delta - half, high=delta + half, level=1 - error)


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
class GateRow:
    """A gate's newest answer about a release."""

    gate: str
    verdict: str
    action: str | None
    reason: str
    decided_at: datetime
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One move of a release."""

    from_state: str | None
    to_state: str
    stage: int | None
    reason: str | None
    actor: str
    occurred_at: datetime


@dataclass(frozen=True, kw_only=True)
class ProgressRow:
    """How far a long task is."""

    task: str
    done: float
    total: float
    detail: dict[str, Any]
    updated_at: datetime


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
    """Read-only sight of a deployment."""

    def policies(self) -> list[str]:
        """Names of the policies that were deployed."""
        ...

    def pointer(self, policy: str) -> Pointer | None: ...

    def releases(self, policy: str, *, limit: int = 50) -> list[Release]:
        """Newest first."""
        ...

    def release(self, release_id: str) -> Release | None:
        """One release, however long ago it was."""
        ...

    def gates(self, release_id: str) -> list[GateRow]:
        """The newest answer of each gate."""
        ...

    def steps(self, release_id: str) -> list[StepRow]:
        """The release's way so far, oldest move first."""
        ...

    def alarms(self, policy: str, release_id: str) -> list[Alarm]:
        """Alarms about the release, newest first."""
        ...

    def versions(self, policy: str, labels: Sequence[LabelRow] | None = None) -> list[VersionRow]:
        """Oldest first, with the measures of what they served: over `labels` where the caller has read them already."""
        ...

    def labels(self, policy: str, *, limit: int = 20_000) -> list[LabelRow]:
        """Current labels, newest first."""
        ...

    def labels_used_share(self, policy: str) -> float | None:
        """Of the labels of the day before the newest batch that could teach something, the share that is in a batch; None without any."""
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
