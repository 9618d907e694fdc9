"""Alarms and what they stop: freezing and freeing promotions, incidents, and quarantines that two people lift.

What people looked at and freed is used up, and what comes after it counts: the detectors begin again with the next era
(`pipelines.evaluation.live.guards`), which begins when they free a champion that programs may not take back.
"""

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from functools import partial

import msgspec

from app.domain.errors import NotFound, Refused
from app.domain.release.alarms import FOUND_ONCE, Alarm, AlarmKind, finding_of, open_of, stood_still, why_still
from app.domain.release.by_people import BY_PEOPLE
from app.domain.release.releases import ReleaseState
from app.domain.release.terms import Terms
from app.release.ledger import ReleaseTransaction
from app.release.people import require_person, require_strangers

VOTES = 2
BEGUN_ANEW = frozenset({AlarmKind.ROLLBACK_CAP, AlarmKind.INCIDENT})
"""What people end of these is used up with the evidence for it, of which the champion's next era begins to gather its own."""


def freeze(tx: ReleaseTransaction, kind: AlarmKind, *, release_id: str | None, reason: str, actor: str) -> bool:
    """Raise an alarm that stops promotions; False where it is open, or people freed this release of the same finding already."""
    if kind in FOUND_ONCE and any(_is_used_up(alarm, kind, release_id, reason) for alarm in tx.alarms()):
        return False
    raised = tx.raise_alarm(kind, release_id=release_id, reason=reason, actor=actor)
    if raised and tx.frozen() is None:
        tx.freeze(actor=actor, reason=reason)
    return raised


def call_people(tx: ReleaseTransaction, *, release_id: str, reason: str, actor: str) -> bool:
    """A champion that programs may not take back any more today; False where people were called about it already."""
    open_ = open_of(tx.alarms(open_only=True), AlarmKind.ROLLBACK_CAP)
    if open_ is not None and open_.release_id != release_id:
        tx.end_alarms({AlarmKind.ROLLBACK_CAP}, actor=actor, reason="people are called about another champion now")
    return freeze(tx, AlarmKind.ROLLBACK_CAP, release_id=release_id, reason=reason, actor=actor)


def _is_used_up(alarm: Alarm, kind: AlarmKind, release_id: str | None, reason: str) -> bool:
    same = alarm.kind is kind and alarm.release_id == release_id and finding_of(alarm.reason) == finding_of(reason)
    return same and alarm.ended_at is not None


def require_free(tx: ReleaseTransaction, *, season_s: float) -> None:
    """Refuse to move anything forward while promotions are frozen or an incident is open, or its hour has not come again."""
    frozen = tx.frozen()
    if frozen is not None:
        raise Refused(f"promotions of {tx.policy} are frozen ({frozen}): two people have to run `ratchet release unfreeze`")
    require_calm(tx, season_s=season_s)


def require_calm(tx: ReleaseTransaction, *, season_s: float) -> None:
    """Refuse to move anything forward while an incident is open, and until the time of the season in which it began has come again."""
    why = why_still(tx.alarms(), policy=tx.policy, season_s=season_s, now=tx.now)
    if why is not None:
        raise Refused(why)


def end(tx: ReleaseTransaction, kinds: Collection[AlarmKind], *, actor: str, reason: str) -> list[AlarmKind]:
    """End open alarms of these kinds, and with an incident the standstill of those who have to approve; returns the kinds that ended."""
    incident = open_of(tx.alarms(open_only=True), AlarmKind.INCIDENT)
    ended = tx.end_alarms(kinds, actor=actor, reason=reason)
    if incident is not None and incident.kind in ended:
        _give_time(tx, incident, actor=actor)
    return ended


def _give_time(tx: ReleaseTransaction, incident: Alarm, *, actor: str) -> None:
    """Nobody could decide in an incident: what people judged has that time on top. What traffic judged is bound anew instead."""
    incidents = [alarm for alarm in tx.alarms() if alarm.kind is AlarmKind.INCIDENT]
    others = [alarm for alarm in incidents if alarm.id != incident.id]
    for release in tx.releases(states={ReleaseState.READY, ReleaseState.APPROVED, ReleaseState.PROMOTING}):
        terms, until = msgspec.convert(release.config, Terms), release.approval_expires_at
        if terms.by_people is None or until is None or until <= incident.raised_at:
            continue
        season_s = terms.reentry_season_s
        stood = partial(stood_still, season_s=season_s, since=release.changed_at, now=tx.now + timedelta(seconds=season_s))
        lost = stood(incidents) - stood(others)
        until += lost
        why = f"nothing could be decided for {lost / timedelta(hours=1):.1f} h: people have until {until:%Y-%m-%d %H:%M} UTC"
        tx.amend(release, "release.extended", actor=actor, reason=f"{BY_PEOPLE}: {why}", changes={"approval_expires_at": until})


def unfreeze(tx: ReleaseTransaction, *, actor: str) -> bool:
    """One of two votes; True when promotions are free again: the alarms that froze them ended, and an incident."""
    require_person(actor, "unfreeze promotions")
    frozen = tx.frozen() is not None
    incident = open_of(tx.alarms(open_only=True), AlarmKind.INCIDENT)
    if frozen:
        voters = tx.vote_to_unfreeze(actor)
    elif incident is not None:
        voters = tx.vote_to_end(incident, actor)
    else:
        return True
    require_strangers(tx, actor, voters)
    if len(voters) < VOTES:
        return False
    if frozen:
        tx.unfreeze(actor=actor)
    ended = end(tx, set(AlarmKind), actor=", ".join(voters), reason="two people freed the promotions")
    if BEGUN_ANEW.intersection(ended):
        _begin_anew(tx, actor=actor, reason="two people freed the promotions: what the champion does from now on counts")
    return True


def _begin_anew(tx: ReleaseTransaction, *, actor: str, reason: str) -> None:
    """A new era of the same champion and holdback: what was found in the one before is used up."""
    pointer = tx.pointer()
    if pointer is not None:
        after = replace(pointer, generation=pointer.generation + 1, changed_at=tx.now)
        tx.swap(after, expected=pointer.generation, action="holdback", actor=actor, reason=reason)


def lift(tx: ReleaseTransaction, digest: str, *, actor: str, reason: str) -> bool:
    """One of two votes against a version's quarantine; True when it may serve again, and rollbacks may go to it."""
    require_person(actor, "lift a quarantine")
    if not reason.strip():
        raise Refused("lifting a quarantine needs a reason: say why the version was not to blame")
    if not tx.is_quarantined(digest):
        raise NotFound(f"version {digest} of {tx.policy} is not quarantined: GET /v1/policies/{tx.policy}/deployment names those that are")
    voters = tx.vote_to_lift(digest, actor, reason=reason)
    require_strangers(tx, actor, voters)
    if len(voters) < VOTES:
        return False
    tx.lift(digest, actor=actor, reason=reason)
    for release in tx.releases(states={ReleaseState.ROLLED_BACK}, digest=digest):
        tx.move(release, ReleaseState.SUPERSEDED, actor=actor, reason=f"its quarantine was lifted by two people: {reason}")
    return True
