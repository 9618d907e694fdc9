"""Promotion, rollback, the circuit breaker and the anchor: the acts that move the pointer. Each runs inside one transaction.

promote     APPROVED → PROMOTING → CHAMPION; the champion before becomes SUPERSEDED and keeps the holdback
roll back   the newest good version comes back; the bad one is quarantined, whatever was compared with it and every release of it ends
freeze      two rollbacks within a day, or an anchor alarm: nobody promotes until two people say so (`app.release.alarms`)
cap         after three automatic rollbacks within a day an alarm calls people, and nothing moves by itself
"""

from dataclasses import replace
from datetime import timedelta

import msgspec

from app.domain.errors import Quarantined, Refused
from app.domain.release.alarms import AlarmKind
from app.domain.release.by_people import BY_PEOPLE
from app.domain.release.gates import GateName, Verdict
from app.domain.release.releases import IN_FLIGHT, Pointer, Release, ReleaseState, approvers
from app.domain.release.terms import Terms
from app.release.alarms import call_people, freeze, require_free
from app.release.ledger import ReleaseTransaction
from app.release.people import evidence_digest, is_person, require_person

S = ReleaseState
LATE = frozenset({S.READY, S.APPROVED, S.PROMOTING})
TAKEN_BACK = frozenset({S.ROLLED_BACK, S.ABORTED})


def terms_of(release: Release) -> Terms:
    """The terms a release is frozen with."""
    return msgspec.convert(release.config, Terms)


def live_gate(terms: Terms) -> GateName:
    """What judged a release last: its canary, or people where no traffic could."""
    return GateName.CANARY if terms.by_people is None else GateName.PEOPLE


def require_promotable(tx: ReleaseTransaction, release: Release) -> Pointer:
    """Everything that has to hold at the moment of promotion, asked again inside its transaction; returns the pointer to swap.

    Raises `Refused` with what does not hold (invariants I1, I5).
    """
    pointer, terms = tx.pointer(), terms_of(release)
    if pointer is None:
        raise Refused(f"nothing is deployed for {release.policy}: bootstrap it first")
    if tx.is_quarantined(release.digest):
        raise Quarantined(f"version {release.digest} was rolled back and may never serve again: train a new one")
    require_free(tx, season_s=terms.reentry_season_s)
    if pointer.digest != release.champion_digest or tx.champion_moved_since(release.champion_generation):
        raise Refused(f"release {release.id} was compared with {release.champion_digest}, which is no longer the champion: judge it again")
    results = tx.results(release.id)
    live = results.get(live_gate(terms))
    if live is None or live.verdict is not Verdict.PASS or live.digest != release.digest:
        raise Refused(f"release {release.id} has no passing {live_gate(terms)} on record: only an explicit pass promotes")
    if release.evidence_digest is None or evidence_digest(release, terms, results) != release.evidence_digest:
        raise Refused(f"the evidence of release {release.id} changed after it was approved: approve it again")
    said_yes = approvers(release, tx.approvals(release.id))
    if len(said_yes) < (release.approvals_needed or 1):
        raise Refused(f"release {release.id} has {len(said_yes)} of {release.approvals_needed} approvals for its evidence")
    if release.approval_expires_at is None or tx.now >= release.approval_expires_at:
        raise Refused(f"the approval of release {release.id} has expired: wait for the next release")
    return pointer


def finish(tx: ReleaseTransaction, release: Release, *, actor: str) -> Release:
    """Swap the pointer to a release in PROMOTING, keep the holdback on the champion before it, and end what it makes moot."""
    pointer = require_promotable(tx, release)
    reason, terms = f"promoted over {pointer.digest[:12]} at generation {pointer.generation}", terms_of(release)
    reason = reason if terms.by_people is None else f"{reason}, {BY_PEOPLE}"
    for champion in tx.releases(states={S.CHAMPION}):
        tx.move(champion, S.SUPERSEDED, actor=actor, reason=f"superseded by {release.version_name}")
    _end_comparisons(tx, pointer.digest, actor=actor, besides=release.id, because=f"{release.version_name} became champion")
    promoted = tx.move(release, S.CHAMPION, actor=actor, reason=reason, changes={"stage": None})
    after = replace(
        pointer, digest=release.digest, generation=pointer.generation + 1, previous=pointer.digest,
        holdback=terms.holdback if terms.by_people is None else terms.people.holdback, holdback_digest=None,
        release_id=release.id, changed_at=tx.now,
    )  # fmt: skip
    tx.swap(after, expected=pointer.generation, action="promote", actor=actor, reason=reason)
    return promoted


def roll_back(tx: ReleaseTransaction, release: Release, *, actor: str, reason: str, to: str | None = None) -> Release:
    """Take a version back, from whatever state, at once, and end what continues from it.

    Asking again for the same reason changes nothing (`to` names a version instead of the newest good).
    """
    match release.state:
        case S.CHAMPION:
            return _dethrone(tx, release, actor=actor, reason=reason, to=to)
        case S.SUPERSEDED:
            return _bar(tx, release, actor=actor, reason=reason)
        case state if state in IN_FLIGHT:
            _quarantine(tx, release, actor=actor, reason=reason)
            return end(tx, release, actor=actor, reason=reason)
        case _:
            _quarantine(tx, release, actor=actor, reason=reason)
            return release


def _dethrone(tx: ReleaseTransaction, release: Release, *, actor: str, reason: str, to: str | None) -> Release:
    pointer, terms = tx.pointer(), terms_of(release)
    assert pointer is not None
    window = timedelta(seconds=terms.breaker_window_s)
    if not is_person(actor) and tx.rollbacks_within(window, automatic=True) >= terms.rollbacks_max:
        day = f"{terms.rollbacks_max} automatic rollbacks within {terms.breaker_window_s / 3600:.0f} h"
        call = f"{day}, and now {release.version_name}: {reason}"
        call_people(tx, release_id=release.id, reason=call, actor=actor)
        return release
    good = tx.good_versions(besides=frozenset({release.digest}))
    if is_person(actor) and to is not None and to not in good:
        raise Refused(f"{to[:12]} is no version that {release.policy} may go back to: it never served, or is quarantined; nothing was done")
    target = to if to is not None and to in good else next(iter(good), None)
    if target is None:
        raise Refused(f"there is no earlier good version of {release.policy} to go back to: deploy one with `ratchet release plant`")
    tx.quarantine(release, actor=actor, reason=reason)
    gone = tx.move(release, S.ROLLED_BACK, actor=actor, reason=reason)
    _end_others_of_it(tx, release, actor=actor, reason=reason)
    end_descendants(tx, release, actor=actor, because=f"champion {release.version_name} was rolled back")
    _end_comparisons(tx, release.digest, actor=actor, besides=release.id, because=f"champion {release.version_name} was rolled back")
    back = next(iter(tx.releases(states={S.SUPERSEDED}, digest=target)), None)
    if back is not None:
        tx.move(back, S.CHAMPION, actor=actor, reason=f"came back when {release.version_name} was rolled back")
    after = replace(
        pointer, digest=target, generation=pointer.generation + 1, previous=next((d for d in good if d != target), None), holdback=0.0,
        holdback_digest=None, release_id=back.id if back else None, changed_at=tx.now, anchor=pointer.anchor,
    )  # fmt: skip
    if pointer.anchor == release.digest:
        after = replace(after, anchor=target)  # nothing is held against a version that was rolled back
    tx.swap(after, expected=pointer.generation, action="rollback", actor=actor, reason=reason)
    _break_circuit(tx, release, actor=actor)
    return gone


def _bar(tx: ReleaseTransaction, release: Release, *, actor: str, reason: str) -> Release:
    """Quarantine a former champion."""
    _quarantine(tx, release, actor=actor, reason=reason)
    return tx.move(release, S.ROLLED_BACK, actor=actor, reason=reason)


def _quarantine(tx: ReleaseTransaction, release: Release, *, actor: str, reason: str) -> None:
    """Bar a version that is not the champion, and end every other release of it and what continues from it.

    It leaves the holdback, is no target of rollbacks, and nothing is held against it.
    """
    pointer = tx.pointer()
    if pointer is not None and pointer.digest == release.digest:
        return  # another release of these weights is the champion: that one is rolled back, or nothing is
    tx.quarantine(release, actor=actor, reason=reason)
    _end_others_of_it(tx, release, actor=actor, reason=reason)
    end_descendants(tx, release, actor=actor, because=f"{release.version_name} was taken back")
    if pointer is not None and release.digest in (pointer.previous, pointer.reference, pointer.anchor):
        good = tx.good_versions(besides=frozenset({release.digest, pointer.digest}))
        after = replace(
            pointer, generation=pointer.generation + 1, previous=next(iter(good), None), holdback=0.0, holdback_digest=None,
            changed_at=tx.now, anchor=pointer.digest if pointer.anchor == release.digest else pointer.anchor,
        )  # fmt: skip
        tx.swap(after, expected=pointer.generation, action="holdback", actor=actor, reason=reason)


def _break_circuit(tx: ReleaseTransaction, release: Release, *, actor: str) -> None:
    terms = terms_of(release)
    count = tx.rollbacks_within(timedelta(seconds=terms.breaker_window_s))
    if count >= terms.breaker_rollbacks:
        why = f"{count} rollbacks within {terms.breaker_window_s / 3600:.0f} h"
        freeze(tx, AlarmKind.BREAKER, release_id=release.id, reason=why, actor=actor)


def end(tx: ReleaseTransaction, release: Release, *, actor: str, reason: str) -> Release:
    """End a release in flight; nobody's approval of it counts any more."""
    tx.void_approvals(release.id, actor=actor, reason=reason)
    return tx.move(release, S.ABORTED, actor=actor, reason=reason, changes={"stage": None})


def _end_others_of_it(tx: ReleaseTransaction, release: Release, *, actor: str, reason: str) -> None:
    """End what else is in flight of the same weights: a canary of a version that is barred would be served, and could never be promoted."""
    for other in tx.releases(states=IN_FLIGHT, digest=release.digest):
        if other.id != release.id:
            end(tx, other, actor=actor, reason=f"{release.version_name} was taken back: {reason}")


def _end_comparisons(tx: ReleaseTransaction, champion: str, *, actor: str, besides: str, because: str) -> None:
    """End releases that were compared with a champion that is no more. A queued one starts its comparison later, and may stay."""
    for other in tx.releases(states={S.CANARY, S.JUDGING} | LATE):
        if other.id != besides and other.champion_digest == champion:
            tx.void_approvals(other.id, actor=actor, reason=because)
            to = S.ABORTED if other.state in (S.CANARY, S.JUDGING) else S.EXPIRED
            tx.move(other, to, actor=actor, reason=f"{because}: its comparison no longer holds", changes={"stage": None})
    if tx.is_quarantined(champion):
        for other in tx.releases(states=IN_FLIGHT):
            if other.id != besides and other.champion_digest == champion:
                end(tx, other, actor=actor, reason=f"{because}: it was trained from it")


def end_descendants(tx: ReleaseTransaction, release: Release, *, actor: str, because: str) -> None:
    """End what continues from weights that are no good, over however many candidates; not what was judged good itself meanwhile."""
    tainted, good = {release.digest}, {S.CHAMPION, S.SUPERSEDED}
    for other in reversed(tx.releases()):
        if other.id == release.id or terms_of(other).parent not in tainted or other.state in good:
            continue
        tainted.add(other.digest)
        if other.state in IN_FLIGHT:
            end(tx, other, actor=actor, reason=f"{because}, and it continues from it")


def renew_anchor(tx: ReleaseTransaction, *, actor: str, reason: str) -> Pointer:
    """The champion becomes the anchor: what later versions are held against. Only a person moves it."""
    require_person(actor, "renew the anchor")
    pointer = tx.pointer()
    if pointer is None:
        raise Refused(f"nothing is deployed for {tx.policy}: bootstrap it first")
    if pointer.anchor == pointer.digest:
        return pointer
    _require_sealed(tx, pointer)
    after = replace(pointer, generation=pointer.generation + 1, anchor=pointer.digest, changed_at=tx.now)
    if after.reference == after.digest:
        after = replace(after, holdback=0.0, holdback_digest=None)
    tx.swap(after, expected=pointer.generation, action="anchor", actor=actor, reason=reason)
    return after


def _require_sealed(tx: ReleaseTransaction, pointer: Pointer) -> None:
    """Where the terms ask for it, an explicit pass of the sealed split by exactly these weights (invariant I1)."""
    if pointer.release_id is None or not terms_of(tx.release(pointer.release_id)).sealed:
        return
    result = tx.results(pointer.release_id).get(GateName.SEALED)
    if result is None or result.digest != pointer.digest or result.verdict is not Verdict.PASS:
        said = "was not read for it" if result is None else f"says {result.verdict}: {result.reason}"
        raise Refused(f"the anchor stays: the suites' sealed split {said}; run `ratchet suite sealed {tx.policy}`")
