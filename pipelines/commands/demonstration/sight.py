"""One look at the deployment: everything the screen shows and the story decides on, read at one moment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from app.domain.learning.cycles import Cycle
from app.domain.release.releases import Pointer, Release, ReleaseState
from app.domain.release.versions import VersionKind
from app.domain.views.operations import LabelRow, Operations, VersionRow
from app.domain.views.rows import ProgressRow

PANEL = "panel"
LABELS_GOOD_FOR_S = 3.0
COUNTS = frozenset({"holdback"})
"""Progress that only counts and is no work with an end."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The deployment as it is now."""

    seen_at: datetime
    pointer: Pointer | None
    releases: Sequence[Release]
    """Newest first."""
    versions: Sequence[VersionRow]
    """Oldest first."""
    labels: Sequence[LabelRow]
    labels_read_at: datetime
    cycles: Sequence[Cycle]
    progress: Sequence[ProgressRow]
    accepted_events: int
    waiting_turns: int
    names: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def champions(self) -> list[VersionRow]:
        """The versions that were made by training and became champion, oldest first."""
        promoted = {release.digest for release in self.releases if release.state in (ReleaseState.CHAMPION, ReleaseState.SUPERSEDED)}
        return [version for version in self.versions if version.digest in promoted and version.kind == VersionKind.RL]

    def panel(self, digest: str) -> list[float]:
        """Edit persistence of each answer that a version gave to held-out people."""
        return [r.persistence for r in self.labels if r.version == digest and r.tier == PANEL and r.persistence is not None]

    def panel_lengths(self, digest: str) -> list[float]:
        """Tokens of each answer that a version gave to held-out people."""
        return [float(r.tokens) for r in self.labels if r.version == digest and r.tier == PANEL and r.tokens is not None]

    def panel_dissatisfied(self, digest: str) -> list[float]:
        """Per readable follow-up of held-out people: 1 for a dissatisfied one."""
        return [float(r.follow_up < 0) for r in self.labels if r.version == digest and r.tier == PANEL and r.follow_up is not None]


def look(operations: Operations, policy: str, now: datetime, before: Sight | None = None) -> Sight:
    """Read everything; the labels, thousands of rows, only when those of the look before are too old."""
    fresh = before is not None and (now - before.labels_read_at).total_seconds() < LABELS_GOOD_FOR_S
    labels = before.labels if fresh and before is not None else operations.labels(policy)
    versions = operations.versions(policy, labels)
    return Sight(
        seen_at=now, pointer=operations.pointer(policy), releases=operations.releases(policy), versions=versions,
        labels=labels, labels_read_at=before.labels_read_at if fresh and before is not None else now,
        cycles=operations.cycles(policy), progress=operations.progress(policy),
        accepted_events=operations.accepted_events(), waiting_turns=operations.waiting_turns(policy),
        names={version.digest: version.name for version in versions},
    )  # fmt: skip
