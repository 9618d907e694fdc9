"""Reward-hack monitors over a training batch or a version's traffic (sheet 4.1, 11).

Limits are rewardspy's where it has one. Each monitor answers with a Finding; NaN or nothing to look at is an ALERT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from app.domain.learning.rewards import PROCESS_TERMS

COMPONENT_SHARE_LIMIT = 0.90
STD_RATIO_ALERT = 0.05
STD_RATIO_WARN = 0.20
LENGTH_Z_LIMIT = 3.0
CEILING_RATE_LIMIT = 0.80
RATE_GAP_LIMIT = 0.03
RATE_Z_LIMIT = 3.0


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    ALERT = "alert"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one monitor saw."""

    monitor: str
    level: Level
    value: float
    limit: float
    detail: str = ""


def component_dominance(sizes: Mapping[str, float], *, limit: float = COMPONENT_SHARE_LIMIT) -> Finding:
    """Share of the absolute reward (`sizes`, per component) that comes from its largest one; one alone invites hacking. See `dominance`."""
    name, share = dominance(sizes)
    return _too_high("component_dominance", share, limit, name)


def dominance(sizes: Mapping[str, float]) -> tuple[str, float]:
    """The component that outweighs the others, and its share of them all; NaN of nothing, and of what is no number.

    Judged against the channels that exist: where people can answer in one way only (thumbs, say), all feedback comes through it, and its
    weight says nothing about hacking. Then only the terms about the turn itself (length, tool calls, …) can outweigh it.
    """
    total = math.fsum(sizes.values())
    if not (math.isfinite(total) and total > 0.0):
        return "", math.nan
    channels = {name for name, size in sizes.items() if size > 0.0 and name not in PROCESS_TERMS}
    judged = {name: size / total for name, size in sizes.items() if len(channels) > 1 or name not in channels}
    name = max(judged, key=lambda n: judged[n], default="")
    return name, judged.get(name, 0.0)


def variance_collapse(std: float, reference_std: float, *, limit: float = STD_RATIO_ALERT) -> Finding:
    """Spread of the reward against the reference's; without spread nothing is learned. Warns below four times the limit."""
    ratio = std / reference_std if reference_std > 0.0 else math.nan
    if ratio >= limit * STD_RATIO_WARN / STD_RATIO_ALERT:
        level = Level.OK
    else:
        level = Level.WARN if ratio >= limit else Level.ALERT
    return Finding(monitor="variance_collapse", level=level, value=ratio, limit=limit)


def length_drift(mean: float, *, reference_mean: float, reference_std: float, limit: float = LENGTH_Z_LIMIT) -> Finding:
    """Shift of the mean response length in standard deviations of the reference's single responses."""
    z = (mean - reference_mean) / reference_std if reference_std > 0.0 else math.nan
    return _too_high("length_drift", abs(z), limit, "longer" if z > 0 else "shorter")


def saturation(at_ceiling: int, total: int, *, limit: float = CEILING_RATE_LIMIT) -> Finding:
    """Share of rewards at the maximum: a saturated reward no longer separates good from better."""
    return _too_high("saturation", at_ceiling / total if total > 0 else math.nan, limit)


def rate_shift(
    monitor: str, *, count: int, total: int, reference_count: int, reference_total: int, limit: float = RATE_GAP_LIMIT
) -> Finding:
    """Difference of a version's exclusion or coverage rate from the champion's; ALERT if large and not chance.

    Score z with the pooled rate. Excluding the episodes one would fail is the oldest hack (broken tool calls).
    """
    if min(total, reference_total) <= 0:
        return Finding(monitor=monitor, level=Level.ALERT, value=math.nan, limit=limit, detail="no turns to compare")
    gap = count / total - reference_count / reference_total
    pooled = (count + reference_count) / (total + reference_total)
    error = math.sqrt(pooled * (1.0 - pooled) * (1.0 / total + 1.0 / reference_total))
    z = gap / error if error > 0.0 else 0.0
    if abs(z) < RATE_Z_LIMIT:
        level = Level.OK
    else:
        level = Level.ALERT if abs(gap) >= limit else Level.WARN
    return Finding(monitor=monitor, level=level, value=gap, limit=limit, detail=f"z {z:+.1f}")


def _too_high(monitor: str, value: float, limit: float, detail: str = "") -> Finding:
    """OK up to half the limit, WARN up to the limit, ALERT above it or if there is no value."""
    if value <= limit / 2.0:
        level = Level.OK
    else:
        level = Level.WARN if value <= limit else Level.ALERT
    return Finding(monitor=monitor, level=level, value=value, limit=limit, detail=detail)
