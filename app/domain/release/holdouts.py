"""The long-term holdout: some people stay for months on the version that was champion when it began (`docs/long-term-holdout.md`).

Every release is compared with the champion before it, on people who are drawn anew each day. What builds up in one person over many
releases is in both arms of all of these comparisons. So a few people are drawn once, for months, and no release reaches them; beside each
of them four others are followed who get everything. Their difference is what all releases since have brought.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

STAGE = "holdout"
HELD = "held"
"""Arm of a turn whose person the holdout keeps on its version."""
BESIDE = 4
"""People followed beside each one who is held: with all the others instead, the variance would be a fifth less."""
WEEK = timedelta(days=7)


class Member(StrEnum):
    """What somebody is to a holdout; most people are nothing."""

    HELD = "held"
    BESIDE = "beside"


class ArmMean(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over the turns of one arm's people."""

    people: int = 0
    turns: int = 0
    mean: float | None = None
    """Per turn, in [0, 1], good is up; None without turns."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the releases since its beginning have brought, by one metric."""

    metric: str
    week: int | None
    """Since it began, from 0; None for all of them together."""
    held: ArmMean
    beside: ArmMean
    difference: float | None = None
    """Beside minus held: above 0 the releases were good."""
    low: float | None = None
    high: float | None = None
    """Of its 95 % interval, people as clusters; None where there are too few of them."""


def told_difference(reading: Reading) -> tuple[str, str]:
    """(difference, interval) in points; what is missing where there are too few people."""
    if reading.difference is None or reading.low is None or reading.high is None:
        return "-", "too few people yet"
    return f"{100 * reading.difference:+.2f} pp", f"[{100 * reading.low:+.2f}, {100 * reading.high:+.2f}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Somebody who can be recognised was served."""

    inference_id: str
    person: str
    arm: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Exposures in order, up to and with the moment `edge`."""

    edge: datetime
    seen: tuple[Seen, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one person had in a piece, by one metric."""

    week: int
    person: str
    metric: str
    held: bool
    turns: int
    total: float
    since: datetime
    """Their first turn in it."""


@dataclass(frozen=True, kw_only=True)
class PersonSums:
    """Sums over an arm's people, each with n turns that add up to x."""

    people: int = 0
    n: float = 0.0
    x: float = 0.0
    nn: float = 0.0
    xx: float = 0.0
    nx: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Holdout:
    """One holdout of a policy. One is open at a time; whoever it holds is drawn by its id, so that the next one holds others."""

    id: str
    policy: str
    digest: str
    """The version that it keeps people on."""
    share: float
    """Of the people who can be recognised."""
    began_at: datetime
    ends_at: datetime
    """Nobody is held from then on."""
    counted_until: datetime
    """Exposures up to then are in the sums."""
    thresholds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of metrics that refer to the champion's values, as they were at its beginning."""
    readings: tuple[Reading, ...] = ()
    """As of the end of the last day that was counted whole."""
    read_until: datetime | None = None
    """The end of that day."""
    ended_at: datetime | None = None
    ended_because: str | None = None

    @property
    def last_moment(self) -> datetime:
        """At which somebody is held."""
        return self.ends_at - timedelta(microseconds=1)

    @property
    def told(self) -> list[Reading]:
        """Readings of the newest week and of all weeks together: what a table shows."""
        newest = max((one.week for one in self.readings if one.week is not None), default=0)
        return [one for one in self.readings if one.week in (None, newest)]

    def week_of(self, moment: datetime) -> int:
        """Since it began, from 0."""
        return (moment - self.began_at) // WEEK
