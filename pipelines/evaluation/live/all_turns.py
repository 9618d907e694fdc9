"""All turns of everybody, person by person, looked at over and over: the fast lane does not end with a person's first turn.

A person's value is the mean over their turns so far, the unit is the draw (person, stage and day), and looks are taken at times that were
fixed before (`statistics.growing`). Turns come in order of exposure (`TurnQueue`), so a fault that comes sooner than an answer is not
counted sooner.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
import numpy as np

from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.drawings import Draw, Drawing
from pipelines.evaluation.counting.evidence import TurnLook, micros
from pipelines.evaluation.counting.habits import Habits, Usual
from pipelines.evaluation.counting.measures import counted_missing, measured
from pipelines.evaluation.counting.references import Reference
from pipelines.evaluation.live.harm import process_for
from pipelines.evaluation.live.turn_tests import COVERAGE, TurnTest, Whose, turn_tests
from pipelines.evaluation.statistics import betting
from pipelines.evaluation.statistics.betting import EProcess
from pipelines.evaluation.statistics.growing import log_e_value, look_at_s


@dataclass(frozen=True, kw_only=True)
class LookedAt:
    """One test, with what it needs to look."""

    test: TurnTest
    process: EProcess
    mean: float
    """The champion's before."""
    usual: Usual | None = None

    def of(self, actor: str) -> float:
        """What is to be expected of this person."""
        return self.mean if self.usual is None else self.usual.of(actor)


def looked_at(
    config: GatesConfig, references: Mapping[str, Reference], habits: Habits, *, whose: Whose, fast: bool, margin: float | None = None
) -> list[LookedAt]:
    """The tests over these turns, of what is known with the turn (`fast`) or with its label.

    `margin` replaces each metric's abort margin where it is wider (after a promotion).
    """
    tests = [test for test in turn_tests(config) if test.whose is whose and (test.metric.window_s == 0.0) is fast]
    found = [
        LookedAt(
            test=test, process=process_for(config, test.metric, _reference(references, habits, test), margin=margin),
            mean=references[test.metric.name].mean, usual=habits.usual.get(test.metric.name),
        ) for test in tests
    ]  # fmt: skip
    if whose is Whose.EVERYBODYS and not fast:
        process = betting.two_sided(margin=COVERAGE.metric.abort_margin, variance=0.24, targets=config.e_targets)
        found.append(LookedAt(test=COVERAGE, process=process, mean=0.5))
    return found


def _reference(references: Mapping[str, Reference], habits: Habits, test: TurnTest) -> Reference:
    """The metric's, with the variance that is left once what is usual for each person is taken off."""
    reference, usual = references[test.metric.name], habits.usual.get(test.metric.name)
    if usual is None:
        return reference
    left = usual.residual(habits.heavy) if test.whose is Whose.HEAVIEST else reference.residual
    return msgspec.structs.replace(reference, variance=left)


class AllTurns:
    """The turns of one subject, growing, and what each look at them said."""

    def __init__(
        self, looked_at: Sequence[LookedAt], *, thresholds: Mapping[str, float], drawing: Drawing, only: frozenset[str] | None = None
    ) -> None:  # fmt: skip
        """`only`: the people whose turns count; unset, everybody."""
        self._looked_at = looked_at
        self._only = only
        self._thresholds = thresholds
        self._drawing = drawing
        self._number: dict[tuple[str, ...], int] = {}
        self._treated: array[int] = array("B")
        self._probability: array[float] = array("d")
        self._turns: array[int] = array("q")
        self._sums = [array("d") for _ in looked_at]
        self._usual = [array("d") for _ in looked_at]
        self._conflicts: set[int] = set()
        self._first: datetime | None = None
        self._next = 0
        self._looks: list[TurnLook] = []

    def count(self, session: Session) -> None:
        """One more turn, in order of exposure."""
        draw = self._drawing(session) if self._only is None or session.actor in self._only else None
        if draw is None or not 0.0 < draw.probability < 1.0:  # without another arm there is nothing to compare
            return
        self._first = self._first or session.exposed_at
        self.look_until(session.exposed_at)
        unit = self._unit(draw, session.actor)
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

    def _unit(self, draw: Draw, actor: str) -> int:
        unit = self._number.setdefault(draw.key, len(self._number))
        if unit == len(self._turns):
            self._treated.append(draw.treated)
            self._probability.append(draw.probability)
            self._turns.append(0)
            for sums, usual, looked in zip(self._sums, self._usual, self._looked_at, strict=True):
                sums.append(0.0)
                usual.append(looked.of(actor))
        elif (self._treated[unit], self._probability[unit]) != (draw.treated, draw.probability):
            self._conflicts.add(unit)
        return unit

    def _look(self, at: datetime) -> None:
        kept = np.ones(len(self._turns), dtype=bool)
        kept[list(self._conflicts)] = False
        treated = np.array(self._treated, dtype=bool)[kept]
        turns, probability = np.array(self._turns, dtype=np.float64)[kept], np.array(self._probability)[kept]
        for looked, sums, usual in zip(self._looked_at, self._sums, self._usual, strict=True):
            outcome = np.clip(np.array(sums)[kept] / turns, 0.0, 1.0)
            expected = np.array(usual)[kept]
            said = log_e_value(looked.process, outcome=outcome, treated=treated, probability=probability, usual=expected)
            means = [float(outcome[arm].mean()) if arm.any() else 0.0 for arm in (treated, ~treated)]
            self._looks.append(
                TurnLook(
                    test=looked.test.name, at=micros(at), units=len(outcome), turns=int(turns.sum()), log_e=said,
                    treated=means[0], control=means[1], n_treated=int(treated.sum()),
                )
            )  # fmt: skip
