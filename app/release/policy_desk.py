"""Acts on a policy rather than on one release: holdback, anchor, alarms, freezes, quarantines. Each is one transaction.

the watch    hold_back · begin_holdout · end_holdout · freeze · raise_incident · end_incident · remind
people       renew_anchor · unfreeze · lift · pin · unpin
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from datetime import timedelta
from typing import Self, TypeVar

from app.domain.errors import DoneAlready, NotFound, Refused, StaleGeneration
from app.domain.ids import uuid7
from app.domain.release.alarms import Alarm, AlarmKind
from app.domain.release.holdouts import Holdout
from app.domain.release.releases import Pointer, Release, ReleaseState
from app.release import alarms, promotion
from app.release.basis import BasedLedger, Basis
from app.release.ledger import ReleaseLedger, ReleaseTransaction

T = TypeVar("T")
WATCH = "system:watch"


class PolicyDesk:
    """Acts on policies."""

    def __init__(self, ledger: ReleaseLedger) -> None:
        self._ledger = ledger
        self.moved: Callable[[Release, Release], None] = lambda before, after: None
        """Hears of a release as it was and as it is, after the transaction that moved it."""

    def on(self, basis: Basis) -> Self:
        """The same desk for one act of a person, which is checked against what it rests on."""
        desk = copy(self)
        desk._ledger = BasedLedger(self._ledger, basis)
        return desk

    def _act(self, release_id: str, act: Callable[[ReleaseTransaction, Release], T], *, seen: Release | None = None) -> T:
        """One transaction about one release. Raises `StaleGeneration` where it is no longer in the state and stage it was `seen` in."""
        with self._ledger.transaction(self._ledger.find(release_id).policy) as tx:
            release = tx.release(release_id)
            if seen is not None and (release.state, release.stage) != (seen.state, seen.stage):
                now, then = f"{release.state} at stage {release.stage}", f"{seen.state} at stage {seen.stage}"
                raise StaleGeneration(f"release {release_id} is {now}, not {then}: read it again and decide afresh")
            done = act(tx, release)
        if isinstance(done, Release) and done.state is not release.state:
            self.moved(release, done)
        return done

    def pointer(self, policy: str) -> Pointer:
        """What is live. Raises `Unavailable` when nothing was deployed yet."""
        return self._ledger.pointer(policy)

    def alarms(self, policy: str) -> list[Alarm]:
        """What was raised, newest first, and what became of it."""
        return self._ledger.alarms(policy)

    def hold_back(
        self, policy: str, *, share: float, digest: str | None, reason: str, actor: str = WATCH, seen: Pointer | None = None
    ) -> Pointer:
        """Move the holdback to another reference (the anchor) or end it (share 0). Raises `StaleGeneration` where the pointer moved on."""
        with self._ledger.transaction(policy) as tx:
            pointer = tx.pointer()
            if pointer is None:
                raise Refused(f"nothing is deployed for {policy}: bootstrap it first")
            if seen is not None and seen.generation != pointer.generation:
                raise StaleGeneration(
                    f"the pointer of {policy} is at generation {pointer.generation}, not {seen.generation}: decide afresh"
                )
            if digest is not None and tx.is_quarantined(digest):
                raise Refused(f"version {digest} is quarantined: nobody is held back on it")
            after = replace(pointer, generation=pointer.generation + 1, holdback=share, holdback_digest=digest, changed_at=tx.now)
            tx.swap(after, expected=pointer.generation, action="holdback", actor=actor, reason=reason)
            return after

    def begin_holdout(
        self, policy: str, *, share: float, lasts: timedelta, thresholds: Mapping[str, float], actor: str = WATCH
    ) -> Holdout:  # fmt: skip
        """Keep a share of the people on the champion of this moment. Raises `Refused` where some are kept already."""
        with self._ledger.transaction(policy) as tx:
            pointer, runs = tx.pointer(), tx.holdout()
            if pointer is None:
                raise Refused(f"nothing is deployed for {policy}: bootstrap it first")
            if runs is not None:
                raise Refused(f"a long-term holdout of {policy} runs since {runs.began_at:%Y-%m-%d}: it ends first")
            if tx.is_quarantined(pointer.digest):
                raise Refused(f"version {pointer.digest} is quarantined: nobody is held on it")
            holdout = Holdout(
                id=uuid7(), policy=policy, digest=pointer.digest, share=share, began_at=tx.now, ends_at=tx.now + lasts,
                counted_until=tx.now, thresholds=thresholds,
            )  # fmt: skip
            why = f"{share:.1%} of the people stay on the champion until {holdout.ends_at:%Y-%m-%d}"
            tx.begin_holdout(holdout, actor=actor, reason=why)
            return holdout

    def end_holdout(self, holdout: Holdout, *, reason: str, actor: str = WATCH) -> bool:
        """From now on it holds nobody; False where it had ended."""
        with self._ledger.transaction(holdout.policy) as tx:
            runs = tx.holdout()
            if runs is None or runs.id != holdout.id:
                return False
            tx.end_holdout(runs, actor=actor, reason=reason)
            return True

    def remind(self, release_id: str) -> bool:
        """At half of the time that people have for a release that is READY, say so once for its evidence; whether it was said."""
        found = self._ledger.find(release_id)
        with self._ledger.transaction(found.policy) as tx:
            release = tx.release(release_id)
            if release.state is not ReleaseState.READY or release.approval_expires_at is None:
                return False
            since = tx.results(release_id)[promotion.live_gate(promotion.terms_of(release))].decided_at
            if tx.now < since + (release.approval_expires_at - since) / 2:
                return False
            try:
                tx.once(f"half-time {release.id} {release.evidence_digest}", actor=WATCH, act="remind", subject=release.id)
            except DoneAlready:
                return False
            count = f"{release.approvals_needed} approvals" if (release.approvals_needed or 1) > 1 else "one approval"
            detail = {
                "policy": release.policy, "digest": release.digest, "version_name": release.version_name,
                "evidence_digest": release.evidence_digest, "expires_at": release.approval_expires_at.isoformat(),
                "reason": f"it needs {count} until {release.approval_expires_at:%Y-%m-%d %H:%M} UTC, and expires then",
            }  # fmt: skip
            tx.note(actor=WATCH, action="release.waiting", subject=release.id, detail=detail)
            return True

    def renew_anchor(self, policy: str, *, actor: str, reason: str = "renewed by a person") -> Pointer:
        """Make the champion the anchor; only a person may."""
        with self._ledger.transaction(policy) as tx:
            return promotion.renew_anchor(tx, actor=actor, reason=reason)

    def freeze(self, policy: str, kind: AlarmKind, *, actor: str, reason: str, release_id: str | None = None) -> bool:
        """Stop promotions with an alarm; training goes on. False where the alarm is open, or people ended it already."""
        with self._ledger.transaction(policy) as tx:
            return alarms.freeze(tx, kind, release_id=release_id, reason=reason, actor=actor)

    def raise_incident(self, policy: str, *, release_id: str | None, reason: str, actor: str = WATCH) -> bool:
        """Nothing moves forward until it ends; False where one is open."""
        with self._ledger.transaction(policy) as tx:
            return tx.raise_alarm(AlarmKind.INCIDENT, release_id=release_id, reason=reason, actor=actor)

    def end_incident(self, policy: str, *, reason: str, actor: str = WATCH) -> bool:
        """What was held goes on, with the time that it stood still where people judged it; False where none is open."""
        with self._ledger.transaction(policy) as tx:
            return bool(alarms.end(tx, {AlarmKind.INCIDENT}, actor=actor, reason=reason))

    def unfreeze(self, policy: str, *, actor: str) -> bool:
        """One of two votes; True when promotions are free again."""
        with self._ledger.transaction(policy) as tx:
            return alarms.unfreeze(tx, actor=actor)

    def lift(self, policy: str, digest: str, *, actor: str, reason: str) -> bool:
        """One of two votes that lift a version's quarantine; True when it may serve again."""
        with self._ledger.transaction(policy) as tx:
            return alarms.lift(tx, digest, actor=actor, reason=reason)

    def pin(self, policy: str, digest: str, *, actor: str, reason: str) -> None:
        """Keep a version's weights until it is unpinned (`Pin`). Raises `NotFound`; `Refused` where somebody pinned it already."""
        with self._ledger.transaction(policy) as tx:
            if not tx.knows(digest):
                raise NotFound(f"{policy} has no version {digest[:12]}: /console/versions lists those there are")
            pinned = tx.pins().get(digest)
            if pinned is not None:
                raise Refused(f"{pinned.pinned_by} pinned it at {pinned.pinned_at:%Y-%m-%d %H:%M:%S} UTC already: {pinned.reason}")
            tx.pin(digest, actor=actor, reason=reason)

    def unpin(self, policy: str, digest: str, *, actor: str, reason: str) -> None:
        """From now on its weights stay only while something else needs them. Raises `Refused` where nobody pins it."""
        with self._ledger.transaction(policy) as tx:
            if digest not in tx.pins():
                raise Refused(f"{digest[:12]} of {policy} is not pinned (any more)")
            tx.unpin(digest, actor=actor, reason=reason)
