"""Releases: a candidate's way through the states, and the one table of moves between them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from app.domain.release.holdouts import Holdout


class ReleaseState(StrEnum):
    """States of `facts/gates.md`, section 5.2."""

    TRAINED = "TRAINED"
    OFFLINE = "OFFLINE"
    QUEUED = "QUEUED"
    CANARY = "CANARY"
    JUDGING = "JUDGING"
    """People judge it, nobody is served by it (`app.domain.release.by_people`)."""
    READY = "READY"
    APPROVED = "APPROVED"
    PROMOTING = "PROMOTING"
    CHAMPION = "CHAMPION"
    SUPERSEDED = "SUPERSEDED"
    REJECTED = "REJECTED"
    ABORTED = "ABORTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    EXPIRED = "EXPIRED"
    SUPERSEDED_BY_NEWER = "SUPERSEDED_BY_NEWER"
    ROLLED_BACK = "ROLLED_BACK"


S = ReleaseState
MOVES: dict[ReleaseState, frozenset[ReleaseState]] = {
    S.TRAINED: frozenset({S.OFFLINE, S.REJECTED, S.ABORTED}),
    S.OFFLINE: frozenset({S.QUEUED, S.REJECTED, S.ABORTED, S.INCONCLUSIVE}),
    S.QUEUED: frozenset({S.CANARY, S.JUDGING, S.REJECTED, S.ABORTED, S.INCONCLUSIVE, S.EXPIRED, S.SUPERSEDED_BY_NEWER}),
    S.CANARY: frozenset({S.READY, S.REJECTED, S.ABORTED, S.INCONCLUSIVE}),
    S.JUDGING: frozenset({S.READY, S.REJECTED, S.ABORTED, S.INCONCLUSIVE}),
    S.READY: frozenset({S.APPROVED, S.REJECTED, S.ABORTED, S.EXPIRED, S.SUPERSEDED_BY_NEWER}),
    S.APPROVED: frozenset({S.PROMOTING, S.REJECTED, S.ABORTED, S.EXPIRED, S.READY}),
    S.PROMOTING: frozenset({S.CHAMPION, S.REJECTED, S.ABORTED, S.EXPIRED}),
    S.CHAMPION: frozenset({S.SUPERSEDED, S.ROLLED_BACK}),
    S.SUPERSEDED: frozenset({S.ROLLED_BACK, S.CHAMPION}),
    S.REJECTED: frozenset(),
    S.ABORTED: frozenset(),
    S.INCONCLUSIVE: frozenset(),
    S.EXPIRED: frozenset(),
    S.SUPERSEDED_BY_NEWER: frozenset(),
    S.ROLLED_BACK: frozenset({S.SUPERSEDED}),
}
"""Allowed moves. SUPERSEDED → CHAMPION is the previous champion coming back by a rollback; APPROVED → READY is a voided approval;
ROLLED_BACK → SUPERSEDED is a quarantine that two people lifted."""

ENGINE_ALIVE = timedelta(seconds=30)
"""An engine that has not reported for this long is not counted on."""
IN_FLIGHT = frozenset({S.TRAINED, S.OFFLINE, S.QUEUED, S.CANARY, S.JUDGING, S.READY, S.APPROVED, S.PROMOTING})
WATCHED = frozenset({S.CANARY, S.READY, S.APPROVED, S.PROMOTING, S.CHAMPION, S.SUPERSEDED})
"""States in which harm is evaluated, before holds, dwell times and approvals (invariant I2)."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One candidate on its way."""

    id: str
    policy: str
    digest: str
    version_name: str
    state: ReleaseState
    generation: int
    """Raised by every transition; writers compare and swap on it."""
    stage: int | None
    """Index into the canary stages from CANARY to PROMOTING (a waiting release keeps its last share); None otherwise."""
    champion_digest: str
    """Champion it is compared with."""
    champion_generation: int
    evidence_digest: str | None
    """Set in READY; approvals bind to it."""
    reason: str | None
    """Why it is where it is, in one sentence."""
    created_at: datetime
    changed_at: datetime
    stage_since: datetime | None = None
    initiator: str | None = None
    """Who asked for it, like `AuditEntry.actor`; may not approve it."""
    approvals_needed: int | None = None
    """How many people have to say yes; set in READY."""
    approval_expires_at: datetime | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """The terms it was opened under (`app.release.terms.Terms` as JSON), frozen with it."""


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """What is live for a policy; changed by compare-and-swap only."""

    policy: str
    digest: str
    generation: int
    previous: str | None
    """Champion before this one, kept warm for the holdback and for rollback."""
    anchor: str
    holdback: float
    """Share of units that stay on the reference version (0 where there is none)."""
    release_id: str | None
    changed_at: datetime
    holdback_digest: str | None = None
    """Reference of the holdback: the previous champion for the first slot, the anchor afterwards; None means `previous`."""

    @property
    def reference(self) -> str | None:
        """The version that the holdback serves."""
        return self.holdback_digest or self.previous


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A version that somebody pinned: its weights and its optimizer state stay, however old it becomes, until it is unpinned.

    So requests may go on naming it and a rollback may go to it, where it was champion once and is not quarantined. Nothing else follows:
    it serves nobody for that, no engine holds it for that, and weights that were removed before do not come back.
    """

    policy: str
    digest: str
    reason: str
    pinned_by: str
    pinned_at: datetime


@dataclass(frozen=True, kw_only=True)
class Route:
    """What the gateway needs to assign an arm, read afresh at most every second."""

    policy: str
    pointer: Pointer
    canary_digest: str | None = None
    canary_release: str | None = None
    canary_stage: int = 0
    canary_share: float = 0.0
    """Probability with which a unit gets the candidate in this stage."""
    canary_lasting: float = 0.0
    """Probability with which a unit never gets it, in no stage."""
    coming: str | None = None
    """The candidate that engines hold, whether or not anybody is served by it yet."""
    holdout: Holdout | None = None
    """The long-term holdout that is open."""
    quarantined: frozenset[str] = frozenset()
    """Digests that may not serve any more: a running episode on one of them is assigned afresh."""


@dataclass(frozen=True, kw_only=True)
class Approval:
    """One person's yes or no, bound to a digest of all evidence."""

    release_id: str
    approver: str
    approved: bool
    evidence_digest: str
    reason: str | None
    decided_at: datetime


def approvers(release: Release, approvals: Iterable[Approval]) -> set[str]:
    """Everybody whose yes is bound to the evidence as it is now."""
    return {a.approver for a in approvals if a.approved and a.evidence_digest == release.evidence_digest}


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One link of the hash chain: what was done, by whom, to what."""

    seq: int
    occurred_at: datetime
    actor: str
    """`user:<name>`, `key:<prefix>` or `system:<process>`."""
    action: str
    subject: str
    detail: dict[str, Any] = field(default_factory=dict[str, Any])
    previous_hash: str
    hash: str
