"""One e-process for a whole family of metrics: the weighted mixture, with the cause (sheet 3.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.evaluation.statistics.betting import EProcess, evidence_needed, log_e_path_so_far
from pipelines.evaluation.statistics.units import FloatArray, IntArray, Units


@dataclass(frozen=True, kw_only=True)
class Member:
    """One abort metric of the family."""

    name: str
    weight: float
    """Share of the family; all weights together are at most 1. Divide a class weight among its metrics."""
    process: EProcess
    units: Units


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Evidence of the family that comes in looks and only grows (`growing.log_sums`): nothing before the first one."""

    name: str
    weight: float
    at: IntArray
    """Microseconds since the epoch, increasing. [K]"""
    log_sums: FloatArray
    """[K]"""


NOTHING = -1e9
"""log of no evidence at all, as a number that can be stored."""


@dataclass(frozen=True, kw_only=True)
class FamilyEvidence:
    """What the family says about harm."""

    log_e: float
    """log E now, over everything closed so far."""
    peak_log_e: float
    """The largest log E ever reached; this is what is compared with log(1/alpha)."""
    rejected_at: int | None
    """closed_at of the unit with which E first reached 1/alpha; None if it never did."""
    cause: str | None
    """Metric with the largest weight x E at the rejection, else at the end; None without any unit."""
    log_weighted: Mapping[str, float]
    """log(weight x E) of each metric now."""

    @property
    def rejected(self) -> bool:
        return self.rejected_at is not None


def family_evidence(members: Sequence[Member], *, alpha: float, steps: Sequence[Steps] = ()) -> FamilyEvidence:
    """E = sum of weight_k E_k over calendar time; rejects when it ever reaches 1/alpha.

    Valid under arbitrary dependence between the metrics, never worse than weighted Bonferroni. A metric without units
    yet contributes its starting capital, one of `steps` nothing. Raises ValueError if the weights sum to more than 1 or names repeat.
    """
    _check(members, steps)
    lanes, lane_of = _distinct([m.units.closed_at for m in members])
    times = _merged([*lanes, *(s.at for s in steps)])
    closed = [np.searchsorted(lane, times, side="right") for lane in lanes]
    rows = [_log_weighted_at(member, closed[lane]) for member, lane in zip(members, lane_of, strict=True)]
    logs = np.vstack([*rows, *(_log_steps_at(s, times) for s in steps)])
    named = [*members, *steps]
    total = _log_sum(logs)
    crossed = np.flatnonzero(total >= evidence_needed(alpha))
    at = int(crossed[0]) if len(crossed) else len(times)
    return FamilyEvidence(
        log_e=float(total[-1]),
        peak_log_e=float(total.max()),
        rejected_at=int(times[at - 1]) if len(crossed) else None,
        cause=named[int(np.argmax(logs[:, at]))].name if len(times) else None,
        log_weighted={m.name: float(row[-1]) for m, row in zip(named, logs, strict=True)},
    )


def _check(members: Sequence[Member], steps: Sequence[Steps]) -> None:
    named = [*members, *steps]
    if not members:
        raise ValueError("a family needs at least one abort metric")
    if any(not m.weight > 0.0 for m in named) or math.fsum(m.weight for m in named) > 1.0 + 1e-9:
        raise ValueError("family weights must be positive and sum to at most 1; divide class weights among metrics")
    if len({m.name for m in named}) != len(named):
        raise ValueError("a metric appears twice in the family; name each once")


def _distinct(columns: Sequence[IntArray]) -> tuple[list[IntArray], list[int]]:
    """The different ones, and which of them each is: metrics with the same window close together."""
    found: list[IntArray] = []
    which: list[int] = []
    for column in columns:
        same = next((k for k, other in enumerate(found) if np.array_equal(column, other)), len(found))
        found += [column] if same == len(found) else []
        which.append(same)
    return found, which


def _merged(columns: Sequence[IntArray]) -> IntArray:
    """Each time once, in order. A stable sort merges what is in order already."""
    times = np.sort(np.concatenate(columns), kind="stable")
    return times[np.diff(times, prepend=times[:1] - 1) > 0]


def _log_weighted_at(member: Member, closed: IntArray) -> FloatArray:
    """log(weight x E) before anything closed and after each time, by which so many units had `closed`. [T], ints -> [T + 1]"""
    path = np.concatenate([[0.0], log_e_path_so_far(member.process, member.units)])
    return math.log(member.weight) + np.concatenate([[0.0], path[closed]])


def _log_steps_at(steps: Steps, times: IntArray) -> FloatArray:
    """log(weight x sum) before anything closed and after each time. [T + 1]"""
    path = np.concatenate([[NOTHING], math.log(steps.weight) + steps.log_sums])
    return np.concatenate([[NOTHING], path[np.searchsorted(steps.at, times, side="right")]])


def _log_sum(logs: FloatArray) -> FloatArray:
    top = logs.max(axis=0)
    return top + np.log(np.exp(logs - top).sum(axis=0))
