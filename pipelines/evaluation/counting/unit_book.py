"""From sessions to closed units: one update per unit and metric, in an order that outcomes cannot change, each counted once and for good.

A unit is a person in one stage of the ramp (or one era of a holdback). It opens with its first session; in the lane of a metric with window
W it closes when W is over and everything its sessions could still bring has come: for W = 0 the first turn alone, else the labels. Units
close strictly in the order of their first session, and the first that is not complete holds back all after it: who is counted when never
depends on how it went. Whatever is left out is counted. The absolute limits see every turn (`absolute_limits`).
"""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice

from app.domain.release.assignment import is_lasting
from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, MetricConfig
from pipelines.evaluation.counting.drawings import Draw, Drawing, lasting_drawing
from pipelines.evaluation.counting.evidence import Assigned, Lane, TurnLook, micros
from pipelines.evaluation.counting.habits import Habits
from pipelines.evaluation.counting.measures import counted_missing, measured, of_unit
from pipelines.evaluation.counting.profiles import ArmProfile, with_session
from pipelines.evaluation.counting.references import Reference, thresholds_of
from pipelines.evaluation.live.absolute_limits import LimitBook, SloCount, TurnQueue
from pipelines.evaluation.live.all_turns import AllTurns, looked_at
from pipelines.evaluation.live.turn_tests import Whose

LATE_BY = timedelta(seconds=60)
"""So long before the newest exposure sessions are read again: one partition of the stream may be so much behind another."""
ASKED_AT_ONCE = 1000
"""So many sessions that hold the others back are read again at once: what a tick costs does not grow with those that are open."""


@dataclass(kw_only=True, slots=True)
class _Unit:
    first_at: datetime
    draw: Draw
    sessions: dict[str, Session] = field(default_factory=dict[str, Session])
    conflict: bool = False
    vanished: bool = False
    """Its person was erased before all lanes had counted it."""
    lanes_left: int = 0


@dataclass(kw_only=True, slots=True)
class _LaneBook:
    """The closed units of one lane, growing."""

    window: timedelta
    metrics: tuple[MetricConfig, ...]
    position: int = 0
    """How many units, in order of their first session, were counted or left out."""
    treated: "array[int]" = field(default_factory=lambda: array("B"))
    probability: "array[float]" = field(default_factory=lambda: array("d"))
    stratum: "array[int]" = field(default_factory=lambda: array("q"))
    closed_at: "array[int]" = field(default_factory=lambda: array("q"))
    covered: "array[int]" = field(default_factory=lambda: array("B"))
    values: dict[str, "array[float]"] = field(default_factory=dict[str, "array[float]"])
    usual: dict[str, "array[float]"] = field(default_factory=dict[str, "array[float]"])
    missing: dict[str, int] = field(default_factory=dict[str, int])


class UnitBook:
    """Collects sessions and closes units. Feed it the sessions from `resume_at` on as often as you like; what is closed stays as it is.

    Reading is incremental: sessions since `resume_at`, and those that `waiting` names, which hold the others back. A session that is named
    and no longer there (its person was erased) goes with its unit, whichever arm it was in.
    """

    def __init__(
        self, config: GatesConfig, drawing: Drawing, references: dict[str, Reference], *, habits: Habits | None = None,
        lasting: float = 0.0, margin: float | None = None,
    ) -> None:  # fmt: skip
        """`lasting`: share of the people in the lasting cohort of a canary. `margin`: of harm, where it is wider than a metric's own."""
        self._config = config
        self._drawing = drawing
        self._references = references
        self._thresholds = thresholds_of(references)
        windows = sorted({config.window_of(metric) for metric in config.metrics})
        self._lanes = [
            _LaneBook(window=timedelta(seconds=w), metrics=tuple(m for m in config.metrics if config.window_of(m) == w)) for w in windows
        ]
        self._units: dict[tuple[str, ...], _Unit] = {}
        self._unit_of: dict[str, _Unit] = {}
        """The unit of every session that some lane still waits for."""
        self._order: list[_Unit] = []
        self._frontier: datetime | None = None
        """First session of the newest unit that some lane has passed."""
        self._done = 0
        self._newest: datetime | None = None
        """Newest exposure of any person, also of those whose unit was counted long ago: is there traffic?"""
        self._limits = LimitBook(slos=config.slos)
        self._lasting = lasting
        self._habits = habits or Habits()
        self._fast, self._labelled, self._cohort = self._looking(self._habits, margin)
        settle, longest = timedelta(seconds=config.settle_s), timedelta(seconds=max(windows))
        self._turns = TurnQueue(self._count_turn, patience=self._patience, settle=settle)
        self._labels = TurnQueue(self._count_labelled, patience=self._patience, settle=max(settle, longest), labelled=True)
        """Labels are asked for once the longest window is over, as for the lanes."""
        self._profiles = {treated: ArmProfile(arm=arm) for treated, arm in ((True, "treated"), (False, "control"))}
        self._ceiling = next((m.high for m in config.metrics if m.source == "reward"), 1.0)
        self._assigned: dict[int, list[int]] = {}
        """Treated, control, and covered ones of either, by stratum."""
        self._shares: dict[int, float] = {}
        self._conflicts = 0
        self._swapped: set[str] = set()
        self._late: set[tuple[str, ...]] = set()

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self._config.turn_wait_s)

    @property
    def resume_at(self) -> datetime | None:
        """From when on sessions have to be read again: those of the last moments; None from the beginning."""
        return None if self._newest is None else self._newest - LATE_BY

    def update(self, sessions: Iterable[Session], *, now: datetime, gone: Collection[str] = ()) -> None:
        """Take sessions in (again), in order of exposure, drop those that are gone, and close what is complete."""
        fresh: list[_Unit] = []
        for session in sessions:
            self._take(session, fresh)
        for inference_id in gone:
            self._drop(inference_id)
        if fresh:
            first = min(unit.first_at for unit in fresh)
            start = max(self._done, bisect_left(self._order, first, key=lambda unit: unit.first_at))
            self._order[start:] = sorted([*self._order[start:], *fresh], key=lambda unit: unit.first_at)
        self._turns.count_known(now)
        self._labels.count_known(now)
        for looking, queue in ((self._fast, self._turns), (self._labelled, self._labels), (self._cohort, self._labels)):
            for turns in looking:
                turns.look_until(queue.frontier(now))
        for lane in self._lanes:
            self._close(lane, now)
        while self._done < len(self._order) and self._order[self._done].lanes_left == 0:
            self._forget(self._order[self._done])
            self._done += 1

    def waiting(self, now: datetime) -> list[str]:
        """The sessions that hold the lanes and the limits back, the oldest first, at most `ASKED_AT_ONCE`: ask for these again."""
        found = dict.fromkeys([*self._turns.unknown(now), *self._labels.unknown(now)])
        for lane in self._lanes:
            for unit in islice(self._order, lane.position, lane.position + ASKED_AT_ONCE):
                if len(found) >= ASKED_AT_ONCE or now < self._due(unit, lane):
                    break
                if not unit.conflict:
                    found |= dict.fromkeys(s.inference_id for s in self._inside(unit, lane) if not self._known(s, lane))
        return list(found)[:ASKED_AT_ONCE]

    def _take(self, session: Session, fresh: list[_Unit]) -> None:
        if self._is_lasting(session):
            self._labels.add(session, treated=False)
            return
        draw = self._drawing(session)
        if draw is None:
            self._swapped.add(session.inference_id)
            return
        self._newest = max(self._newest or session.exposed_at, session.exposed_at)
        self._turns.add(session, treated=draw.treated)
        self._labels.add(session, treated=draw.treated)
        unit = self._units.get(draw.key)
        if unit is None:
            if self._frontier is not None and session.exposed_at < self._frontier:
                self._late.add(draw.key)
                return
            unit = _Unit(first_at=session.exposed_at, draw=draw, lanes_left=len(self._lanes))
            self._units[draw.key] = unit
            self._tally(unit, +1)
            fresh.append(unit)
        if (unit.draw.treated, unit.draw.probability) != (draw.treated, draw.probability):
            if not unit.conflict:
                self._tally(unit, -1)
                self._conflicts += 1
            unit.conflict = True
        elif unit.lanes_left:
            unit.sessions[session.inference_id] = session
            self._unit_of[session.inference_id] = unit

    def _count_turn(self, session: Session, treated: bool) -> None:
        self._limits.count(session, treated=treated)
        for turns in self._fast:
            turns.count(session)

    def _count_labelled(self, session: Session, _treated: bool) -> None:
        for turns in (*self._cohort, *(() if self._is_lasting(session) else self._labelled)):
            turns.count(session)

    def _is_lasting(self, session: Session) -> bool:
        """Whether it is of somebody in the lasting cohort of this canary."""
        return self._lasting > 0.0 and is_lasting(session.stage)

    def _looking(self, habits: Habits, margin: float | None) -> tuple[list[AllTurns], list[AllTurns], list[AllTurns]]:
        """All turns as looked at when they are served, when they are labelled, and across the lasting cohort."""

        def turns(whose: Whose, drawing: Drawing, *, fast: bool = False, only: frozenset[str] | None = None) -> AllTurns:
            asked = looked_at(self._config, self._references, habits, whose=whose, fast=fast, margin=margin)
            return AllTurns(asked, thresholds=self._thresholds, drawing=drawing, only=only)

        everybody, heaviest = turns(Whose.EVERYBODYS, self._drawing), turns(Whose.HEAVIEST, self._drawing, only=habits.heaviest)
        cohort = [turns(Whose.LASTING, lasting_drawing(share=self._lasting))] if self._lasting > 0.0 else []
        return [turns(Whose.EVERYBODYS, self._drawing, fast=True)], [everybody, heaviest], cohort

    def _tally(self, unit: _Unit, by: int) -> None:
        draw = unit.draw
        self._shares.setdefault(draw.stratum, draw.probability)
        self._assigned.setdefault(draw.stratum, [0, 0, 0, 0])[0 if draw.treated else 1] += by

    def _drop(self, inference_id: str) -> None:
        self._turns.drop(inference_id)
        self._labels.drop(inference_id)
        unit = self._unit_of.pop(inference_id, None)
        if unit is None or unit.sessions.pop(inference_id, None) is None or unit.sessions:
            return
        unit.vanished = True
        if not unit.conflict:
            self._tally(unit, -1)

    def _forget(self, unit: _Unit) -> None:
        for inference_id in unit.sessions:
            self._unit_of.pop(inference_id, None)
        unit.sessions.clear()

    def _close(self, lane: _LaneBook, now: datetime) -> None:
        while lane.position < len(self._order):
            unit = self._order[lane.position]
            sessions = self._complete(unit, lane, now)
            if sessions is None:
                return
            lane.position += 1
            unit.lanes_left -= 1
            self._frontier = max(self._frontier or unit.first_at, unit.first_at)
            if not unit.conflict and not unit.vanished:
                self._count(lane, unit, sessions)
                if lane is self._lanes[-1]:
                    self._profile(unit.draw.treated, sessions)

    def _due(self, unit: _Unit, lane: _LaneBook) -> datetime:
        return unit.first_at + lane.window + timedelta(seconds=self._config.settle_s)

    def _inside(self, unit: _Unit, lane: _LaneBook) -> list[Session]:
        """The unit's sessions that count in the lane: those within its window, for W = 0 the first."""
        end = unit.first_at + lane.window
        inside = sorted((s for s in unit.sessions.values() if s.exposed_at <= end), key=lambda s: s.exposed_at)
        return inside if lane.window else inside[:1]

    def _known(self, session: Session, lane: _LaneBook) -> bool:
        return session.labelled if lane.window else session.served

    def _complete(self, unit: _Unit, lane: _LaneBook, now: datetime) -> list[Session] | None:
        """The unit's sessions in the lane's window, once nothing can be added to them; None before."""
        if now < self._due(unit, lane):
            return None
        if unit.conflict or unit.vanished:
            return []  # left out whatever comes: it must not hold the others back
        inside = self._inside(unit, lane)
        for session in inside:
            if not self._known(session, lane) and (session.served or now < session.exposed_at + self._patience):
                return None
        return inside

    def _count(self, lane: _LaneBook, unit: _Unit, sessions: Sequence[Session]) -> None:
        draw, covered = unit.draw, any(s.signals for s in sessions)
        lane.treated.append(draw.treated)
        lane.probability.append(draw.probability)
        lane.stratum.append(draw.stratum)
        lane.closed_at.append(micros(unit.first_at + lane.window))
        lane.covered.append(covered)
        if covered and lane is self._lanes[-1]:
            self._assigned[draw.stratum][2 if draw.treated else 3] += 1
        for metric in lane.metrics:
            found = [measured(metric, session, self._thresholds) for session in sessions]
            if all(value is None for value in found):
                lane.missing[metric.name] = lane.missing.get(metric.name, 0) + 1
            values = [counted_missing(metric) if value is None else value for value in found]
            lane.values.setdefault(metric.name, array("d")).append(of_unit(metric, values, self._thresholds))
            if metric.name in self._habits.usual:
                lane.usual.setdefault(metric.name, array("d")).append(self._habits.usual[metric.name].of(draw.key[0]))

    def _profile(self, treated: bool, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self._profiles[treated] = with_session(self._profiles[treated], session, ceiling=self._ceiling)

    # --- what was counted

    def slos(self) -> tuple[SloCount, ...]:
        """All turns against the absolute limits."""
        return self._limits.counts()

    def turn_looks(self) -> tuple[TurnLook, ...]:
        """What all turns said, look by look."""
        return tuple(look for turns in (*self._fast, *self._labelled, *self._cohort) for look in turns.looks())

    def profiles(self) -> tuple[ArmProfile, ...]:
        """Treated, then control."""
        return (self._profiles[True], self._profiles[False])

    def lanes(self) -> tuple[Lane, ...]:
        """The closed units per window."""
        return tuple(_lane(lane) for lane in self._lanes)

    def assigned(self) -> tuple[Assigned, ...]:
        """Units per stratum and arm, for the sample-ratio and the coverage test."""
        return tuple(
            Assigned(stratum=s, probability=self._shares[s], treated=n[0], control=n[1], covered_treated=n[2], covered_control=n[3])
            for s, n in sorted(self._assigned.items()) if any(n)
        )  # fmt: skip

    @property
    def duplicates(self) -> int:
        return self._conflicts

    @property
    def swapped(self) -> int:
        return len(self._swapped)

    @property
    def late(self) -> int:
        return len(self._late)

    @property
    def last_session_at(self) -> datetime | None:
        return self._newest


def _lane(lane: _LaneBook) -> Lane:
    return Lane(
        window_s=lane.window.total_seconds(), treated=lane.treated.tobytes(), probability=lane.probability.tobytes(),
        stratum=lane.stratum.tobytes(), closed_at=lane.closed_at.tobytes(), covered=lane.covered.tobytes(),
        outcomes={m.name: lane.values.get(m.name, array("d")).tobytes() for m in lane.metrics},
        missing={m.name: lane.missing.get(m.name, 0) for m in lane.metrics},
        usual={name: values.tobytes() for name, values in lane.usual.items()},
    )  # fmt: skip
