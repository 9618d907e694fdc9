"""What a canary can find out, before it starts: N_max, time to detect, attainable margin, refusal (sheet 3.7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from pipelines.evaluation.statistics import normal

SEQUENTIAL_PRICE = 1.3
"""Units a sequential hybrid test needs for each unit of a fixed-sample test of the same power (sheet 3.7)."""
NI_ALPHA = 0.05
TARGET_POWER = 0.80
MINIMUM_POWER = 0.60
"""A config below this is refused: an underpowered gate never promotes and looks like a broken product."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the ramp: canary share and how many units it will see."""

    share: float
    units: float

    @property
    def information(self) -> float:
        """Worth in units of 1/s^2: n pi (1 - pi)."""
        return self.units * self.share * (1.0 - self.share)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One required metric as the config states it."""

    metric: str
    margin: float
    variance: float
    explained: float = 0.0
    """R^2 of the pre-period regression; the variance shrinks by 1 - R^2."""
    coverage: float = 1.0
    """Share of units that enter this metric."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The config can be answered with this traffic."""

    power: dict[str, float]
    n_max: dict[str, int]
    """Declared units per metric, at `share`."""
    share: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The config cannot be answered with this traffic; every alternative would be accepted."""

    metric: str
    power: float
    attainable_margin: float
    """Smallest margin with 60 % power in the same window."""
    window_factor: float
    """How many times as many people the window must see to keep the margin."""
    explained_needed: float | None
    """R^2 that would be enough, None if none is."""
    cure: str | None = None
    """What to do where none of this helps, in a sentence that replaces the others."""

    @property
    def message(self) -> str:
        if self.cure is not None:
            return self.cure
        parts = [
            f"{self.metric}: non-inferiority would reach {self.power:.0%} power in its window, {MINIMUM_POWER:.0%} is needed;",
            f"set a margin of at least {100 * self.attainable_margin:.2f} pp,",
            f"or a window with {self.window_factor:.1f} times as many people (they come back, so it is longer than so many times),",
        ]
        if self.explained_needed is not None:
            parts.append(f"or variance reduction with R^2 >= {self.explained_needed:.2f},")
        return " ".join([*parts, "or require fewer metrics"])


def time_to_detect(
    *, effect: float, variance: float, share: float, alpha: float = 0.025, targets: int = 4, power: float = 0.5
) -> float:  # fmt: skip
    """Units until betting has found a harm of `effect` with this power: 2 g s^2 / (pi (1 - pi) d^2), g the growth of log E by then.

    After so many units log E is about normal with mean g and variance 2 g, and L = ln 1/alpha + ln targets is asked for: half of the
    harms are found at g = L (sheet 3.7), a share `power` of them where g - z sqrt(2 g) = L, with z the normal quantile of the power.
    """
    z = normal.quantile(power)
    growth = (z + math.sqrt(z**2 + 2.0 * (-math.log(alpha) + math.log(targets)))) ** 2 / 2.0
    return 2.0 * growth * variance / (share * (1.0 - share) * effect**2)


def detectable(*, units: float, variance: float, share: float, alpha: float = 0.025, targets: int = 4) -> float:
    """The harm that `time_to_detect` says is found within so many units; infinite without any."""
    if units <= 0.0:
        return math.inf
    return math.sqrt(2.0 * (-math.log(alpha) + math.log(targets)) * variance / (share * (1.0 - share) * units))


def sample_size(*, margin: float, variance: float, share: float, power: float = TARGET_POWER) -> int:
    """Declared N_max of a non-inferiority test at true effect zero: 1.3 (z_.95 + z_power)^2 s^2/(pi (1-pi) delta^2)."""
    return math.ceil(_information_needed(margin, variance, power) / (share * (1.0 - share)))


def power_of(*, margin: float, variance: float, information: float) -> float:
    """Probability that a harmless candidate is promoted, from the information its window collects."""
    return normal.below(margin * math.sqrt(information / (SEQUENTIAL_PRICE * variance)) - normal.quantile(1 - NI_ALPHA))


def attainable_margin(*, variance: float, information: float, power: float = MINIMUM_POWER) -> float:
    """Smallest margin that reaches `power` with this information; infinite without traffic."""
    if information <= 0.0:
        return math.inf
    return _z_sum(power) * math.sqrt(SEQUENTIAL_PRICE * variance / information)


def ramp(*, shares: Sequence[float], units_per_hour: float, window: timedelta, dwell: timedelta) -> tuple[Stage, ...]:
    """Stages that a window holds: each but the last lasts `dwell`, the last takes the rest."""
    hours, left = dwell.total_seconds() / 3600.0, window.total_seconds() / 3600.0
    stages: list[Stage] = []
    for share in shares[:-1]:
        stages.append(Stage(share=share, units=units_per_hour * min(hours, left)))
        left -= min(hours, left)
    return (*stages, Stage(share=shares[-1], units=units_per_hour * left))


def plan_canary(stages: Sequence[Stage], required: Sequence[Requirement], *, minimum: float = MINIMUM_POWER) -> Accepted | Refused:
    """Accept with N_max per metric, or refuse the metric with the least power, with what would help."""
    if not required:
        raise ValueError("a canary needs at least one required metric; name a gold metric with its margin")
    powers = {r.metric: _power(r, stages) for r in required}
    weakest = min(required, key=lambda r: powers[r.metric])
    if powers[weakest.metric] < minimum:
        return _refusal(weakest, stages, powers[weakest.metric])
    share = stages[-1].share
    return Accepted(power=powers, n_max={r.metric: _declared(r, stages, share) for r in required}, share=share)


def _power(requirement: Requirement, stages: Sequence[Stage]) -> float:
    return power_of(margin=requirement.margin, variance=_variance(requirement), information=_information(requirement, stages))


def _declared(requirement: Requirement, stages: Sequence[Stage], share: float) -> int:
    """N_max for 80 % power, or what the window holds if that is less."""
    held = _information(requirement, stages) / (share * (1.0 - share))
    wanted = sample_size(margin=requirement.margin, variance=_variance(requirement), share=share)
    return min(wanted, math.floor(held))


def _refusal(requirement: Requirement, stages: Sequence[Stage], power: float) -> Refused:
    information = _information(requirement, stages)
    needed = _information_needed(requirement.margin, requirement.variance, MINIMUM_POWER)
    factor = needed * (1.0 - requirement.explained) / information if information else math.inf
    explained = 1.0 - information / needed
    return Refused(
        metric=requirement.metric,
        power=power,
        attainable_margin=attainable_margin(variance=_variance(requirement), information=information),
        window_factor=factor,
        explained_needed=explained if explained < 0.9 else None,
    )


def _information(requirement: Requirement, stages: Sequence[Stage]) -> float:
    return requirement.coverage * math.fsum(stage.information for stage in stages)


def _variance(requirement: Requirement) -> float:
    return requirement.variance * (1.0 - requirement.explained)


def _information_needed(margin: float, variance: float, power: float) -> float:
    return SEQUENTIAL_PRICE * _z_sum(power) ** 2 * variance / margin**2


def _z_sum(power: float) -> float:
    return normal.quantile(1.0 - NI_ALPHA) + normal.quantile(power)
