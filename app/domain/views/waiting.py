"""What a release waits for at this moment, in a sentence: for whoever asks why nothing happens.

The conditions are those that `app.release` and the watch ask again before they move it; this only tells them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from app.domain.release.alarms import Alarm, why_still
from app.domain.release.releases import IN_FLIGHT, Release, ReleaseState
from app.domain.release.terms import Terms

S = ReleaseState
BY_ITSELF = "the next look of the watch: nothing stands in its way"
AN_ENGINE = "an engine that holds its weights: none that was heard of lately says `ready` (`GET /v1/engines` shows what each has)"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What decides it, beside the release itself."""

    others: Sequence[Release]
    """Releases of the same policy that are in flight, newest first."""
    alarms: Sequence[Alarm]
    """Of the policy, also those that ended."""
    frozen: str | None
    """Why promotions are frozen, where they are."""
    yes: int
    """People who approved its evidence."""
    held: bool
    """Whether an engine that is alive holds it, verified."""
    now: datetime


def waits_for(release: Release, scene: Scene) -> str | None:
    """None for a release that is over, or serves."""
    if release.state not in IN_FLIGHT:
        return None  # whatever terms it was opened under
    terms = msgspec.convert(release.config, Terms)
    match release.state:
        case S.TRAINED | S.OFFLINE:
            return "the answers of the offline gates, which the loop asks"
        case S.QUEUED:
            return _calm(scene, terms, release) or _turn(release, scene) or (BY_ITSELF if scene.held else AN_ENGINE)
        case S.CANARY:
            stage = release.stage or 0
            people = f"people: {terms.stages[stage]:.0%} of them are asked, in stage {stage + 1} of {len(terms.stages)}"
            return _calm(scene, terms, release) or people
        case S.JUDGING:
            until = release.changed_at + timedelta(seconds=terms.people.longest_s)
            return f"{terms.people.votes} blind votes that count, until {until:%Y-%m-%d %H:%M} UTC (/console/pairs)"
        case S.READY:
            return _calm(scene, terms, release) or _approvals(release, scene)
        case _:
            return _frozen(scene) or _calm(scene, terms, release) or (BY_ITSELF if scene.held or release.state is S.APPROVED else AN_ENGINE)


def _calm(scene: Scene, terms: Terms, release: Release) -> str | None:
    """The end of an incident, where there is one."""
    why = why_still(scene.alarms, policy=release.policy, season_s=terms.reentry_season_s, now=scene.now)
    return None if why is None else f"calm: {why}"


def _frozen(scene: Scene) -> str | None:
    return None if scene.frozen is None else f"people: promotions are frozen ({scene.frozen}); two of them run `ratchet release unfreeze`"


def _turn(release: Release, scene: Scene) -> str | None:
    """One candidate is judged at a time, and the newest goes first."""
    judged = next((other for other in scene.others if other.state in (S.CANARY, S.JUDGING)), None)
    if judged is not None:
        return f"the end of {judged.version_name}, which is {judged.state} since {judged.changed_at:%Y-%m-%d %H:%M} UTC: one at a time"
    newer = next((other for other in scene.others if other.state is S.QUEUED and other.created_at > release.created_at), None)
    return None if newer is None else f"{newer.version_name}, which is newer and goes first"


def _approvals(release: Release, scene: Scene) -> str:
    missing = max(0, (release.approvals_needed or 1) - scene.yes)
    until = "" if release.approval_expires_at is None else f", until {release.approval_expires_at:%Y-%m-%d %H:%M} UTC"
    asked = f"{missing} {'approval' if missing == 1 else 'approvals'} of {release.approvals_needed or 1}{until}"
    frozen = _frozen(scene)
    return asked if frozen is None else f"{asked}; then for {frozen}"
