"""The release desk: every act on a release, whoever asks for it, as one transaction.

    the cycle    open · start_offline · record · queue · stop
    the watch    start_canary · ramp · mark_ready · void · expire · begin_promotion · promote · abort · roll_back
    people       approve · reject · abort · roll_back · plant
    either       what `PolicyDesk` does with a policy, and `PeopleDesk` where people judge

Acts of the watch name the release as it was seen (`seen`): where another replica moved it meanwhile, `StaleGeneration` says so and nothing
happens. The judge never acts, the actor never judges (invariant I5): anybody may abort at any time, nobody can promote without a recorded
pass and the approvals bound to exactly this evidence.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec

from app.domain.errors import Quarantined, Refused
from app.domain.ids import utc_now, uuid7
from app.domain.release.alarms import AlarmKind
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.releases import IN_FLIGHT, Approval, Pointer, Release, ReleaseState, approvers
from app.domain.release.terms import Terms
from app.domain.release.versions import Version
from app.release import promotion
from app.release.alarms import freeze, require_calm
from app.release.ledger import ReleaseLedger, ReleaseTransaction
from app.release.people import evidence_digest, people_needed, require_independent, require_person
from app.release.people_desk import PeopleDesk
from app.release.promotion import terms_of
from app.release.readiness import make_ready, require_offline

S = ReleaseState
T = TypeVar("T")


class ReleaseDesk(PeopleDesk):
    """Acts on releases. `terms` are those that releases opened from now on are frozen with."""

    def __init__(
        self, ledger: ReleaseLedger, *, terms: Terms | None = None, clock: Callable[[], datetime] = utc_now,
        new_id: Callable[[], str] = uuid7, moved: Callable[[Release, Release], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(ledger)
        self.moved = moved or self.moved
        self._new_id = new_id
        self._terms = terms or Terms()
        self._clock = clock

    # --- reading

    def find(self, release_id: str) -> Release:
        """A release by id. Raises `NotFound`."""
        return self._ledger.find(release_id)

    def recorded(self, release_id: str) -> dict[GateName, GateResult]:
        """The newest answer of each gate."""
        return self._ledger.recorded(release_id)

    # --- before the canary

    def bootstrap(self, version: Version, *, actor: str) -> Pointer:
        """Deploy the first version of a policy; where something is deployed already, change nothing."""
        with self._ledger.transaction(version.policy) as tx:
            pointer = tx.pointer()
            if pointer is not None:
                return pointer
            opened = self._new(tx, version, initiator=actor, terms=self._terms, generation=1, champion=version.digest)
            release = tx.insert(replace(opened, state=S.CHAMPION, reason="the first version"))
            first = Pointer(
                policy=version.policy, digest=version.digest, generation=1, previous=None, anchor=version.digest, holdback=0.0,
                release_id=release.id, changed_at=tx.now,
            )  # fmt: skip
            tx.swap(first, expected=None, action="bootstrap", actor=actor, reason="the first version")
            return first

    def open(self, version: Version, *, initiator: str) -> Release:
        """A release for a candidate; the one that exists already where an earlier attempt opened it. Raises `Quarantined`, `Refused`."""
        with self._ledger.transaction(version.policy) as tx:
            return self._open(tx, version, initiator=initiator, terms=self._terms)

    def plant(self, version: Version, *, actor: str, reason: str) -> Release:
        """Put a version into the canary's queue past the offline gates: marked as forced for ever, and two people to approve it."""
        with self._ledger.transaction(version.policy) as tx:
            release = self._open(tx, version, initiator=actor, terms=msgspec.structs.replace(self._terms, forced=reason))
            if release.state is S.TRAINED:
                release = tx.move(release, S.OFFLINE, actor=actor, reason=f"offline gates skipped by hand: {reason}")
                tx.note(actor=actor, action="release.forced", subject=release.id, detail={"digest": release.digest, "reason": reason})
            return self._queue(tx, release, actor=actor) if release.state is S.OFFLINE else release

    def start_offline(self, release_id: str) -> Release:
        """TRAINED → OFFLINE."""
        return self._act(release_id, lambda tx, r: tx.move(r, S.OFFLINE, actor="system:loop", reason="the offline gates are asked"))

    def record(self, release_id: str, result: GateResult) -> None:
        """Keep a gate's answer. Raises `Refused` where it is about other weights."""

        def act(tx: ReleaseTransaction, release: Release) -> None:
            if result.digest != release.digest:
                raise Refused(f"the result is about {result.digest}, release {release.id} about {release.digest}: judge the right version")
            tx.add_result(release_id, result)

        self._act(release_id, act)

    def queue(self, release_id: str) -> Release:
        """OFFLINE → QUEUED, on explicit passes only; an older one in the queue gives way."""
        return self._act(release_id, lambda tx, r: self._queue(tx, r, actor="system:loop"))

    def stop(
        self, release_id: str, *, to: ReleaseState, reason: str, actor: str = "system:loop", seen: Release | None = None,
        because: GateResult | None = None,
    ) -> Release:  # fmt: skip
        """End a release in REJECTED, INCONCLUSIVE, ABORTED or EXPIRED; the champion stays. `because`: the live decision to record."""
        if to not in (S.REJECTED, S.INCONCLUSIVE, S.ABORTED, S.EXPIRED):
            raise Refused(f"{to} is not an end that a release can be stopped in")

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            self._keep(tx, release, because, action="inconclusive")
            tx.void_approvals(release.id, actor=actor, reason=reason)
            return tx.move(release, to, actor=actor, reason=reason, changes={"stage": None})

        return self._act(release_id, act, seen=seen)

    # --- canary

    def start_canary(self, release_id: str, *, plan: dict[str, Any] | None = None, stage: int = 0) -> Release:
        """QUEUED → CANARY against whoever is champion now; one at a time. `plan` is what was declared before it."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            pointer = tx.pointer()
            require_calm(tx, season_s=terms_of(release).reentry_season_s)
            if tx.releases(states={S.CANARY, S.JUDGING}):
                raise Refused(f"a candidate of {release.policy} is being judged: one at a time")
            if tx.is_quarantined(release.digest):
                raise Quarantined(f"version {release.digest} was rolled back and may never serve again: train a new one")
            if pointer is None or pointer.digest == release.digest:
                raise Refused(f"{release.version_name} is what is deployed: there is nothing to compare it with")
            changes = {
                "stage": stage, "stage_since": tx.now, "champion_digest": pointer.digest, "champion_generation": pointer.generation,
                "config": {**release.config, "plan": plan or {}},
            }  # fmt: skip
            share = terms_of(release).stages[stage]
            return tx.move(release, S.CANARY, actor="system:watch", reason=f"canary starts at {share:.0%}", changes=changes)

        return self._act(release_id, act)

    def ramp(self, release_id: str, *, reason: str, seen: Release | None = None, because: GateResult | None = None) -> Release:
        """The next stage of the canary, after the one it was seen in."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            shares = terms_of(release).stages
            if release.state is not S.CANARY or release.stage is None or release.stage + 1 >= len(shares):
                raise Refused(f"release {release.id} is {release.state} at stage {release.stage}: there is no further stage")
            require_calm(tx, season_s=terms_of(release).reentry_season_s)
            self._keep(tx, release, because, action="ramp")
            changes = {"stage": release.stage + 1, "stage_since": tx.now}
            return tx.amend(release, "release.ramped", actor="system:watch", reason=reason, changes=changes)

        return self._act(release_id, act, seen=seen)

    def mark_ready(
        self, release_id: str, result: GateResult, *, next_ready_at: datetime | None = None, seen: Release | None = None
    ) -> Release:
        """CANARY → READY with the passing live result: bind the evidence and ask for approval until it expires."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            if release.state is not S.CANARY:
                raise Refused(f"release {release.id} is {release.state}: a canary's pass says nothing about it")
            if result.gate is not GateName.CANARY or result.verdict is not Verdict.PASS or result.digest != release.digest:
                raise Refused(f"release {release.id} needs a passing canary result about {release.digest}: only an explicit pass promotes")
            require_calm(tx, season_s=terms_of(release).reentry_season_s)
            tx.add_result(release_id, result, action="ready")
            return make_ready(tx, release, next_ready_at=next_ready_at)

        return self._act(release_id, act, seen=seen)

    def record_live(self, release_id: str, result: GateResult, *, action: str, seen: Release | None = None) -> None:
        """Keep a live decision that changes nothing by itself."""
        self._act(release_id, lambda tx, _: tx.add_result(release_id, result, action=action), seen=seen)

    def rebind(self, release_id: str, result: GateResult, *, seen: Release | None = None) -> Release:
        """READY again after its data were in doubt or an incident: approvals are void, the next ones bind to the evidence as it is now.

        People have their whole time again, and it takes as many as that evidence asks for, never fewer than before: it is another question.
        """

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            if release.state not in (S.READY, S.APPROVED) or result.verdict is not Verdict.PASS:
                raise Refused(f"release {release.id} is {release.state} and the result {result.verdict}: only a pass makes it ready again")
            terms = terms_of(release)
            require_calm(tx, season_s=terms.reentry_season_s)
            tx.add_result(release_id, result, action="ready")
            tx.void_approvals(release.id, actor="system:watch", reason="the evidence was taken again")
            expires_at = tx.now + timedelta(seconds=terms.approval_ttl_s)
            needed, doubt = people_needed(tx, release, terms)
            if needed < (release.approvals_needed or 1):
                needed, doubt = release.approvals_needed or 1, "as before"
            changes = {
                "evidence_digest": evidence_digest(release, terms, tx.results(release_id)), "approvals_needed": needed,
                "approval_expires_at": expires_at,
            }  # fmt: skip
            why = f"ready again: the evidence was taken again, {needed} approvals needed ({doubt})"
            if release.state is S.APPROVED:
                return tx.move(release, S.READY, actor="system:watch", reason=why, changes=changes)
            return tx.amend(release, "release.rebound", actor="system:watch", reason=why, changes=changes)

        return self._act(release_id, act, seen=seen)

    # --- people

    def approve(self, release_id: str, *, approver: str, evidence: str, reason: str | None = None) -> Release:
        """One person's yes to exactly this evidence; with the last one needed the release is APPROVED. Raises `Refused` with the rule."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            require_person(approver, "approve a release")
            require_independent(tx, release, terms_of(release), approver)
            self._require_open(tx, release, evidence)
            if approver in approvers(release, tx.approvals(release.id)):
                raise Refused(f"{approver} approved release {release.id} already: the second approval has to be somebody else's")
            tx.add_approval(self._word(tx, release, approver, approved=True, reason=reason))
            count, needed = len(approvers(release, tx.approvals(release.id))), release.approvals_needed or 1
            if count < needed:
                return tx.amend(release, "release.approved_in_part", actor=approver, reason=f"{count} of {needed} approvals")
            return tx.move(release, S.APPROVED, actor=approver, reason=f"approved by {count} of {needed}")

        return self._act(release_id, act)

    def reject(self, release_id: str, *, approver: str, reason: str) -> Release:
        """One person's no ends the release."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            require_person(approver, "reject a release")
            if not reason.strip():
                raise Refused("a rejection needs a reason: say what was wrong, the next person will ask")
            if release.state not in IN_FLIGHT:
                raise Refused(f"release {release.id} is {release.state}: there is nothing to reject (a champion is rolled back)")
            tx.void_approvals(release.id, actor=approver, reason=f"rejected: {reason}")
            if release.evidence_digest is not None:
                tx.add_approval(self._word(tx, release, approver, approved=False, reason=reason))
            promotion.end_descendants(tx, release, actor=approver, because=f"{release.version_name} was rejected: {reason}")
            return tx.move(release, S.REJECTED, actor=approver, reason=reason, changes={"stage": None})

        return self._act(release_id, act)

    def void(self, release_id: str, *, reason: str, because: GateResult | None = None, seen: Release | None = None) -> Release:
        """Take approvals back because something happened after them; the release waits for people again."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            self._keep(tx, release, because, action="hold")
            tx.void_approvals(release.id, actor="system:watch", reason=reason)
            return tx.move(release, S.READY, actor="system:watch", reason=reason) if release.state is S.APPROVED else release

        return self._act(release_id, act, seen=seen)

    def expire(self, release_id: str) -> Release:
        """End a release whose approval did not come in time; one that still has time, or is over, stays as it is.

        Raises `Refused` while an incident lets nothing move: nobody was slow then.
        """

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            late = release.approval_expires_at is not None and tx.now >= release.approval_expires_at
            if not late or release.state not in promotion.LATE:
                return release
            require_calm(tx, season_s=terms_of(release).reentry_season_s)
            tx.void_approvals(release.id, actor="system:watch", reason="expired")
            why = "nobody approved it in time" if release.state is S.READY else "it was approved, and could not be promoted in time"
            return tx.move(release, S.EXPIRED, actor="system:watch", reason=why, changes={"stage": None})

        return self._act(release_id, act)

    # --- what is live

    def begin_promotion(self, release_id: str, *, actor: str = "system:watch", seen: Release | None = None) -> Release:
        """APPROVED → PROMOTING, on the conditions that the promotion itself asks again."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            promotion.require_promotable(tx, release)
            return tx.move(release, S.PROMOTING, actor=actor, reason="the pointer is about to move")

        return self._act(release_id, act, seen=seen)

    def promote(self, release_id: str, *, actor: str = "system:watch") -> Release:
        """PROMOTING → CHAMPION: swap the pointer. Raises `Refused` and `StaleGeneration`; nothing changed then."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            if release.state is S.CHAMPION:
                return release
            if release.state is not S.PROMOTING:
                raise Refused(f"release {release.id} is {release.state}: only an approved release that is being promoted becomes champion")
            return promotion.finish(tx, release, actor=actor)

        return self._act(release_id, act)

    def abort(
        self, release_id: str, *, actor: str, reason: str, quarantine: bool = False, because: GateResult | None = None,
        seen: Release | None = None,
    ) -> Release:  # fmt: skip
        """End a release that is not live yet; one that is over stays as it is, a champion is rolled back."""

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            if release.state in (S.CHAMPION, S.SUPERSEDED):
                return promotion.roll_back(tx, release, actor=actor, reason=reason)
            if release.state not in IN_FLIGHT:
                return release
            self._keep(tx, release, because, action="abort")
            if quarantine:
                return promotion.roll_back(tx, release, actor=actor, reason=reason)
            return promotion.end(tx, release, actor=actor, reason=reason)

        return self._act(release_id, act, seen=seen)

    def roll_back(
        self, release_id: str, *, actor: str, reason: str, to: str | None = None, alarm: AlarmKind | None = None,
        because: GateResult | None = None, seen: Release | None = None,
    ) -> Release:  # fmt: skip
        """Take a version back, whatever state it is in, and quarantine it; `alarm` also stops promotions.

        A champion stays where programs rolled back as often as a day may have it: an alarm calls people then, and `because` says why.
        """

        def act(tx: ReleaseTransaction, release: Release) -> Release:
            if release.state in promotion.TAKEN_BACK:
                return promotion.roll_back(tx, release, actor=actor, reason=reason)
            open_before = {one.id for one in tx.alarms(open_only=True)}
            gone = promotion.roll_back(tx, release, actor=actor, reason=reason, to=to)
            if alarm is not None:
                freeze(tx, alarm, release_id=release.id, reason=reason, actor=actor)
            if gone.state is not S.CHAMPION or {one.id for one in tx.alarms(open_only=True)} - open_before:
                self._keep(tx, release, because, action="abort")
            return gone

        return self._act(release_id, act, seen=seen)

    # --- inside a transaction

    def _keep(self, tx: ReleaseTransaction, release: Release, result: GateResult | None, *, action: str) -> None:
        """Record the live decision that an act follows from, in the act's transaction: who loses a race records nothing."""
        if result is not None:
            tx.add_result(release.id, result, action=action)

    def _open(self, tx: ReleaseTransaction, version: Version, *, initiator: str, terms: Terms) -> Release:
        pointer = tx.pointer()
        if pointer is None:
            raise Refused(f"nothing is deployed for {version.policy}: bootstrap it first")
        if tx.is_quarantined(version.digest):
            raise Quarantined(f"version {version.name} was rolled back and may never be released again: train a new one")
        for earlier in tx.releases(digest=version.digest):
            if earlier.state in IN_FLIGHT or (earlier.initiator == initiator and not tx.champion_moved_since(earlier.champion_generation)):
                return earlier
        if pointer.digest == version.digest:
            raise Refused(f"version {version.name} is the champion already")
        opened = self._new(tx, version, initiator=initiator, terms=terms, generation=pointer.generation, champion=pointer.digest)
        return tx.insert(opened)

    def _new(self, tx: ReleaseTransaction, version: Version, *, initiator: str, terms: Terms, generation: int, champion: str) -> Release:
        return Release(
            id=self._new_id(), policy=version.policy, digest=version.digest, version_name=version.name, state=S.TRAINED, generation=1,
            stage=None,
            champion_digest=champion, champion_generation=generation, evidence_digest=None, reason="a candidate was trained",
            created_at=tx.now, changed_at=tx.now, initiator=initiator,
            config=msgspec.to_builtins(msgspec.structs.replace(terms, parent=version.parent)),
        )  # fmt: skip

    def _queue(self, tx: ReleaseTransaction, release: Release, *, actor: str) -> Release:
        require_offline(release, terms_of(release), tx.results(release.id))
        for older in tx.releases(states={S.QUEUED}):
            tx.move(older, S.SUPERSEDED_BY_NEWER, actor=actor, reason=f"{release.version_name} is newer")
        return tx.move(release, S.QUEUED, actor=actor, reason="waits for its canary")

    def _require_open(self, tx: ReleaseTransaction, release: Release, evidence: str) -> None:
        if release.state is not S.READY:
            raise Refused(f"release {release.id} is {release.state}: only a release that is READY can be approved")
        if evidence != release.evidence_digest:
            raise Refused(
                f"the evidence of release {release.id} is {release.evidence_digest}, not {evidence}: look at it again, then approve"
            )
        if release.approval_expires_at is None or tx.now >= release.approval_expires_at:
            raise Refused(f"the time to approve release {release.id} is over: wait for the next one")
        if tx.champion_moved_since(release.champion_generation):
            raise Refused(f"the champion changed since release {release.id} was compared with it: its evidence no longer holds")
        require_calm(tx, season_s=terms_of(release).reentry_season_s)

    def _word(self, tx: ReleaseTransaction, release: Release, approver: str, *, approved: bool, reason: str | None) -> Approval:
        assert release.evidence_digest is not None
        return Approval(
            release_id=release.id, approver=approver, approved=approved, evidence_digest=release.evidence_digest, reason=reason,
            decided_at=tx.now,
        )  # fmt: skip
