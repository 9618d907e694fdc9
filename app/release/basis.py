"""What an act of a person rests on: what they saw when they decided, and the name of their request.

Two tabs, a browser and a terminal, a lost answer that is asked for again: each act is checked against what it rests on inside its own
transaction, and the name of a request is good for one act. So what moved on meanwhile is refused with what happened since, and what was
carried out already says so and happens once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.domain.errors import Refused, StaleGeneration
from app.domain.release.alarms import Alarm
from app.domain.release.gates import GateName, GateResult
from app.domain.release.releases import Pointer, Release
from app.release.ledger import ReleaseLedger, ReleaseTransaction

UNPROVEN = (
    "on an open deployment anybody can say any name, so one person could be two: add people (`ratchet people first`, then `ratchet people "
    "add`), and let each sign in as themselves"
)
BY_TWO = frozenset({"unfreeze", "lift"})
"""Acts that two people decide, always."""
MOST_MOVES = 5
"""Sentences of what happened since, in a refusal."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What somebody saw, and how their request is called."""

    actor: str
    proven: bool = True
    """Whether they are who they say: nobody has to be on an open deployment, so nothing there is decided by two."""
    act: str
    """As the audit chain calls it: `approve`, `roll_back`, …"""
    subject: str
    """The release or policy it is done to."""
    generation: int | None = None
    """Of the pointer of the policy, as it was shown."""
    release_generation: int | None = None
    """Of the release, as it was shown."""
    evidence: str | None = None
    """Digest of the evidence, as it was shown."""
    request_id: str | None = None


class BasedLedger:
    """A ledger whose transactions begin with a look at what the act rests on."""

    def __init__(self, ledger: ReleaseLedger, basis: Basis) -> None:
        self._ledger = ledger
        self._basis = basis

    def find(self, release_id: str) -> Release:
        """Raises `NotFound`."""
        return self._ledger.find(release_id)

    def pointer(self, policy: str) -> Pointer:
        """Raises `Unavailable` when nothing was deployed yet."""
        return self._ledger.pointer(policy)

    def alarms(self, policy: str) -> list[Alarm]:
        """Newest first."""
        return self._ledger.alarms(policy)

    def recorded(self, release_id: str) -> dict[GateName, GateResult]:
        """The newest answer of each gate."""
        return self._ledger.recorded(release_id)

    @contextmanager
    def transaction(self, policy: str) -> Iterator[ReleaseTransaction]:
        """One act. Raises `DoneAlready`, `StaleGeneration`, `Refused`."""
        with self._ledger.transaction(policy) as tx:
            self._require_proven(tx)
            if self._basis.request_id is not None:
                tx.once(self._basis.request_id, actor=self._basis.actor, act=self._basis.act, subject=self._basis.subject)
            self._require_fresh(tx)
            yield tx

    def _require_proven(self, tx: ReleaseTransaction) -> None:
        """Refuse one of two people whom nothing proves to be somebody."""
        basis = self._basis
        if basis.proven:
            return
        if basis.act in BY_TWO:
            raise Refused(f"two people decide this, and {UNPROVEN}")
        if basis.act == "approve" and (needed := tx.release(basis.subject).approvals_needed or 1) > 1:
            raise Refused(f"release {basis.subject} needs {needed} people, and {UNPROVEN}")

    def _require_fresh(self, tx: ReleaseTransaction) -> None:
        basis, pointer = self._basis, tx.pointer()
        if basis.generation is not None and pointer is not None and pointer.generation != basis.generation:
            since = "; ".join(tx.moves_since(basis.generation)[-MOST_MOVES:])
            raise StaleGeneration(
                f"{tx.policy} moved on since you looked (generation {basis.generation}, now {pointer.generation}): {since}. "
                "Nothing was done: look again, then decide"
            )
        if basis.release_generation is None and basis.evidence is None:
            return
        release = tx.release(basis.subject)
        if basis.evidence not in (None, release.evidence_digest):
            raise StaleGeneration(
                f"the evidence of {release.version_name} is {release.evidence_digest or 'not there'}, not {basis.evidence} that you looked "
                f"at; it is {release.state}: {release.reason}. Nothing was done: look at it again, then decide"
            )
        if basis.release_generation not in (None, release.generation):
            raise StaleGeneration(
                f"{release.version_name} is {release.state} since you looked ({release.reason}). Nothing was done: look again, then decide"
            )
