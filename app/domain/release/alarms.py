"""Alarms: what the watch raised, until when it stands, and who ended it. Each has an end; what was found once is not found again."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


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
    AlarmKind.INCIDENT: "the champion keeps its limits again"
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


def finding_of(reason: str) -> str:
    """What was found, without its numbers, which change from look to look: the words before the colon."""
    return reason.partition(":")[0]
