"""All turns of everybody, person by person, looked at over and over: the fast lane does not end with a person's first turn.

A person's value is the mean over their turns so far, the unit is the draw (person, stage and day), and looks are taken at times that were
fixed before (`statistics.growing`). Turns come in order of exposure (`TurnQueue`), so a fault that comes sooner than an answer is not
counted sooner.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from app.domain.sessions import Session
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.drawings import Draw, Drawing
from pipelines.evaluation.evidence import TurnLook, micros
from pipelines.evaluation.harm import process_for
from pipelines.evaluation.measures import counted_missing, measured
from pipelines.evaluation.references import Reference
from pipelines.evaluation.statistics.betting import EProcess
from pipelines.evaluation.statistics.growing import log_e_value, look_at_s
from pipelines.evaluation.turn_tests import TurnTest, Whose, turn_tests


@dataclass(frozen=True, kw_only=True)
class LookedAt:
    """One test, with what it needs to look."""

    test: TurnTest
    process: EProcess
    prior: float
    """The champion's mean before."""


def looked_at(config: GatesConfig, references: Mapping[str, Reference], *, whose: Whose, margin: float | None) -> list[LookedAt]:
    """The tests over the turns of some; `margin` replaces each metric's abort margin where it is wider (after a promotion)."""
    return [
        LookedAt(
            test=test, process=process_for(config, test.metric, references[test.metric.name], margin=margin),
            prior=references[test.metric.name].mean,
        ) for test in turn_tests(config) if test.whose is whose
    ]  # fmt: skip


class AllTurns:
    """The turns of one subject, growing, and what each look at them said."""

    def __init__(self, looked_at: Sequence[LookedAt], *, thresholds: Mapping[str, float], drawing: Drawing) -> None:
        self._looked_at = looked_at
        self._thresholds = thresholds
        self._drawing = drawing
        self._number: dict[tuple[str, ...], int] = {}
        self._treated: "array[int]" = array("B")
        self._probability: "array[float]" = array("d")
        self._turns: "array[int]" = array("q")
        self._sums = [array("d") for _ in looked_at]
        self._conflicts: set[int] = set()
        self._first: datetime | None = None
        self._next = 0
        self._looks: list[TurnLook] = []

    def count(self, session: Session) -> None:
        """One more turn, in order of exposure."""
        draw = self._drawing(session)
        if draw is None:
            return
        self._first = self._first or session.exposed_at
        self.look_until(session.exposed_at)
        unit = self._unit(draw)
        self._turns[unit] += 1
        for sums, looked in zip(self._sums, self._looked_at, strict=True):
            value = measured(looked.test.metric, session, self._thresholds)
            sums[unit] += counted_missing(looked.test.metric) if value is None else value

    def look_until(self, frontier: datetime) -> None:
        """Take the looks that are due, now that every turn before `frontier` was counted."""
        while self._first is not None and (frontier - self._first).total_seconds() > look_at_s(self._next):
            self._look(self._first + timedelta(seconds=look_at_s(self._next)))
            self._next += 1

    def looks(self) -> tuple[TurnLook, ...]:
        """What was seen so far."""
        return tuple(self._looks)

    def _unit(self, draw: Draw) -> int:
        unit = self._number.setdefault(draw.key, len(self._number))
        if unit == len(self._turns):
            self._treated.append(draw.treated)
            self._probability.append(draw.probability)
            self._turns.append(0)
            for sums in self._sums:
                sums.append(0.0)
        elif (self._treated[unit], self._probability[unit]) != (draw.treated, draw.probability):
            self._conflicts.add(unit)
        return unit

    def _look(self, at: datetime) -> None:
        kept = np.ones(len(self._turns), dtype=bool)
        kept[list(self._conflicts)] = False
        treated = np.array(self._treated, dtype=bool)[kept]
        turns, probability = np.array(self._turns, dtype=np.float64)[kept], np.array(self._probability)[kept]
        for looked, sums in zip(self._looked_at, self._sums, strict=True):
            outcome = np.clip(np.array(sums)[kept] / turns, 0.0, 1.0)
            said = log_e_value(looked.process, outcome=outcome, treated=treated, probability=probability, prior=looked.prior)
            means = [float(outcome[arm].mean()) if arm.any() else 0.0 for arm in (treated, ~treated)]
            self._looks.append(
                TurnLook(
                    test=looked.test.name, at=micros(at), units=len(outcome), turns=int(turns.sum()), log_e=said,
                    treated=means[0], control=means[1], n_treated=int(treated.sum()),
                )
            )  # fmt: skip
