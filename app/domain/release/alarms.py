"""Alarms: what the watch raised, until when it stands, and who ended it. Each has an end; what was found once is not found again."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from operator import itemgetter


class AlarmKind(StrEnum):
    """What was found."""

    INCIDENT = "incident"
    """Limits are burnt and no version is shown to be healthier: nothing moves forward until they are kept again."""
    ANCHOR = "anchor"
    """The champions since the last renewal are worse than the anchor."""
    GAP = "gap"
    """Two champions running earned more reward than the anchor and were not better at what it stands for."""
    MONITORS = "monitors"
    """A monitor holds the champion for gaming its reward."""
    BREAKER = "breaker"
    """Several rollbacks within a day."""
    ROLLBACK_CAP = "rollback_cap"
    """Another automatic rollback would be more than a day may have: people decide."""


FREEZING = frozenset(set(AlarmKind) - {AlarmKind.INCIDENT})
"""Alarms that stop promotions until two people free them."""
FOUND_ONCE = frozenset({AlarmKind.MONITORS, AlarmKind.GAP})
"""What stays as it is and is seen again at every look: people who freed a release of it are not asked again."""
UNTIL = dict.fromkeys(FREEZING, "two people free promotions (`ratchet release unfreeze`)") | {
    AlarmKind.INCIDENT: "the champion keeps its limits again and engines hold it, or two people end it (`ratchet release unfreeze`)"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One alarm of a policy."""

    id: str
    policy: str
    kind: AlarmKind
    release_id: str | None
    """The champion's release when it was raised, or the one it is about."""
    generation: int
    """Of the pointer when it was raised: detectors begin again after it."""
    reason: str
    raised_at: datetime
    raised_by: str
    until: str
    """What ends it, in words."""
    ended_at: datetime | None = None
    ended_by: str | None = None
    end_reason: str | None = None


def open_of(alarms: Iterable[Alarm], kind: AlarmKind) -> Alarm | None:
    """The one of this kind that stands, if any: at most one of a kind does."""
    return next((alarm for alarm in alarms if alarm.kind is kind and alarm.ended_at is None), None)


def finding_of(reason: str) -> str:
    """What was found, without its numbers, which change from look to look: the words before the colon."""
    return reason.partition(":")[0]


def calm_again(incident: Alarm, *, season_s: float) -> datetime | None:
    """When the time of the season in which an incident began comes again after its end.

    None while it is open, without a season, and where people ended it: they need not wait for what they know.
    """
    if incident.ended_at is None or season_s <= 0.0 or (incident.ended_by or "").startswith("user:"):
        return None
    seasons = math.floor((incident.ended_at - incident.raised_at).total_seconds() / season_s) + 1
    return incident.raised_at + timedelta(seconds=seasons * season_s)


def why_still(alarms: Sequence[Alarm], *, policy: str, season_s: float, now: datetime) -> str | None:
    """Why nothing may move forward, in a sentence: an incident is open, or the time of the season in which it began has not come again.

    What broke under the traffic of the morning keeps its limits at night: that it ended says nothing about the next morning.
    """
    open_ = open_of(alarms, AlarmKind.INCIDENT)
    if open_ is not None:
        return f"an incident of {policy} is open ({open_.reason}): it ends when {open_.until}"
    seasons = ((alarm, calm_again(alarm, season_s=season_s)) for alarm in alarms if alarm.kind is AlarmKind.INCIDENT)
    waiting = max(((until, alarm) for alarm, until in seasons if until is not None and now < until), key=itemgetter(0), default=None)
    if waiting is None:
        return None
    until, incident = waiting
    return (
        f"an incident of {policy} began at {incident.raised_at:%Y-%m-%d %H:%M} UTC ({incident.reason}): nothing moves forward until that "
        f"hour has come again, at {until:%Y-%m-%d %H:%M} UTC (`reentry_season_s` under [gates])"
    )


def stood_still(incidents: Sequence[Alarm], *, season_s: float, since: datetime, now: datetime) -> timedelta:
    """For how long of the time from `since` to `now` nothing could move forward."""
    total, reached = timedelta(), since
    for incident in sorted(incidents, key=lambda alarm: alarm.raised_at):
        end = min(now, calm_again(incident, season_s=season_s) or incident.ended_at or now)
        start = max(incident.raised_at, reached)
        if end > start:
            total, reached = total + (end - start), end
    return total
