"""Shiryaev-Roberts e-detector for the time after promotion: good early evidence cannot mask a later fall (sheet 4.7).

Shin, Ramdas & Rinaldo 2022 ("E-detectors"): the sum of e-processes restarted at every look. With the threshold at the
wanted average run length, measured in looks, the expected time to a false alarm is at least that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipelines.evaluation.statistics.betting import EProcess, log_factors, log_mixture
from pipelines.evaluation.statistics.resumed import Resumed
from pipelines.evaluation.statistics.units import Units

UNITS_PER_LOOK = 200
RUN_LENGTH_UNITS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Detector:
    """What is watched: an e-process for harm, restarted every `units_per_look` units."""

    process: EProcess
    run_length_units: int = RUN_LENGTH_UNITS
    """Average number of healthy units until a false alarm, at least."""
    units_per_look: int = UNITS_PER_LOOK

    @property
    def log_threshold(self) -> float:
        return math.log(self.run_length_units / self.units_per_look)


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Where the detector stands."""

    log_statistic: tuple[float, ...]
    """log SR of every target at the last full look; -inf before the first."""
    log_open: tuple[float, ...]
    """log of the factors of the look being filled."""
    open_units: int
    units: int
    alarmed_at: int | None
    """Number of units at the first alarm; an alarm stays."""


def start(detector: Detector) -> Detection:
    """Nothing seen yet."""
    targets = sum(len(leg.targets) for leg in detector.process.legs)
    return Detection(log_statistic=(-math.inf,) * targets, log_open=(0.0,) * targets, open_units=0, units=0, alarmed_at=None)


_DETECTIONS: Resumed[Detection] = Resumed()


def detect(detector: Detector, units: Units) -> Detection:
    """Where the detector stands after a whole stream; of one that goes on, only what is new is computed."""
    return _DETECTIONS.ask(detector, units, start(detector), lambda detection, new: advance(detector, detection, new))


def advance(detector: Detector, detection: Detection, units: Units) -> Detection:
    """SR <- (SR + 1) x product of the look's factors; alarm when the mean over targets passes the threshold.

    Any split of a stream gives the same state as the whole batch.
    """
    factors = log_factors(detector.process, units)
    statistic, open_ = np.array(detection.log_statistic), np.array(detection.log_open)
    filled, seen, alarmed_at = detection.open_units, detection.units, detection.alarmed_at
    taken = 0
    while taken < len(units):
        step = min(detector.units_per_look - filled, len(units) - taken)
        open_ = np.cumsum(np.vstack([open_, factors[taken : taken + step]]), axis=0)[-1]
        taken, filled, seen = taken + step, filled + step, seen + step
        if filled == detector.units_per_look:
            statistic, open_, filled = np.logaddexp(statistic, 0.0) + open_, np.zeros_like(open_), 0
            if alarmed_at is None and float(log_mixture(detector.process, statistic)) > detector.log_threshold:
                alarmed_at = seen
    return Detection(
        log_statistic=tuple(statistic.tolist()),
        log_open=tuple(open_.tolist()),
        open_units=filled,
        units=seen,
        alarmed_at=alarmed_at,
    )
