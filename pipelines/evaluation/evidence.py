"""From sessions to evidence: one update per unit and metric, in an order that outcomes cannot change, each counted once and for good.

A unit is a person in one stage of the ramp (or one era of a holdback). It opens with its first session; in the lane of a metric with window
W it closes when W is over and everything its sessions could still bring has come: for W = 0 the first turn alone, else the labels. Units
close strictly in the order of their first session, and the first that is not complete holds back all after it: who is counted when never
depends on how it went. Whatever is left out is counted.

    sessions ─▶ UnitBook ─▶ Lane per window (arrays) ─▶ Evidence (hashed, stored) ─▶ decide()
"""

import hashlib
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec
import numpy as np
import numpy.typing as npt

from app.domain.sessions import Session
from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig
from pipelines.evaluation.drawings import Draw, Drawing
from pipelines.evaluation.measures import counted_missing, measured, of_unit
from pipelines.evaluation.profiles import ArmProfile, with_session
from pipelines.evaluation.references import Reference

SLO_UNITS = 500
"""Absolute limits are held against so many of the newest units, so that a long healthy past cannot hide a bad hour."""
MICROS = timedelta(microseconds=1)
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The closed units of all metrics with one window, as little-endian arrays of the same length N."""

    window_s: float
    treated: bytes
    """uint8: 1 for the canary (after a promotion: the champion)."""
    probability: bytes
    """float64: of being treated."""
    stratum: bytes
    """int64: stage of the ramp, or era and share."""
    closed_at: bytes
    """int64: microseconds since the epoch, never decreasing."""
    covered: bytes
    """uint8: whether anybody reacted to the unit."""
    outcomes: dict[str, bytes]
    """float64 per metric, in [0, 1], good is up."""
    missing: dict[str, int]
    """Units without any signal of the metric."""

    def array(self, name: str) -> npt.NDArray[np.float64]:
        """Outcomes of a metric. [N]"""
        return np.frombuffer(self.outcomes[name], dtype="<f8")

    def __len__(self) -> int:
        return len(self.treated)


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """How many units one stratum put in each arm, closed or not, and how many of the closed ones were reacted to."""

    stratum: int
    probability: float
    treated: int
    control: int
    covered_treated: int
    covered_control: int


class SloCount(msgspec.Struct, frozen=True, kw_only=True):
    """Bad turns of one arm against an absolute limit."""

    source: str
    arm: str
    limit: float
    bad: int
    total: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a live decision depends on besides the configuration."""

    release_id: str
    policy: str
    digest: str
    champion: str
    """The version it is compared with."""
    at: int
    """When this was taken, microseconds since the epoch."""
    state: str
    stage: int
    stage_since: int
    since: int
    """Start of the canary (of the era)."""
    lanes: tuple[Lane, ...]
    assigned: tuple[Assigned, ...]
    duplicates: int
    """Units seen in two arms; left out."""
    swapped: int
    """Sessions whose arm and version contradict each other; left out."""
    late: int
    """Units that arrived after later ones were counted; left out."""
    lag_s: float
    last_unit_at: int | None
    held_since: int | None
    """Since when the data have been held bad without a break."""
    found_earlier: tuple[str, ...]
    """Tests of the data that failed earlier (`ratio`, `coverage`): once found, found."""
    references: dict[str, Reference]
    n_max: dict[str, int]
    """Declared units per required metric."""
    declared_share: float
    slos: tuple[SloCount, ...]
    profiles: tuple[ArmProfile, ...] = ()
    """Treated and control, for the reward-hack monitors."""
    lasts_s: float | None = None
    """How long the canary may take, from its plan; unset, as the configuration says."""
    hard: tuple[str, ...]
    """Reasons to stop that need no statistics, such as weights that no engine can load."""

    @property
    def units(self) -> int:
        return sum(a.treated + a.control for a in self.assigned)

    def lane_of(self, window_s: float) -> Lane:
        """The lane of a window."""
        return next(lane for lane in self.lanes if lane.window_s == window_s)


_pack = msgspec.msgpack.Encoder(order="deterministic")
_unpack = msgspec.msgpack.Decoder(Evidence)


def hash_of(evidence: Evidence) -> str:
    """SHA-256 (hex) of the evidence."""
    return hashlib.sha256(_pack.encode(evidence)).hexdigest()


def packed(evidence: Evidence) -> bytes:
    """The bytes to store it as."""
    return zlib.compress(_pack.encode(evidence), 6)


def unpacked(payload: bytes) -> Evidence:
    """Stored evidence."""
    return _unpack.decode(zlib.decompress(payload))


def micros(at: datetime) -> int:
    """Microseconds since the epoch."""
    return (at - EPOCH) // MICROS


@dataclass(kw_only=True, slots=True)
class _Unit:
    first_at: datetime
    draw: Draw
    sessions: dict[str, Session] = field(default_factory=dict[str, Session])
    conflict: bool = False
    lanes_left: int = 0


@dataclass(kw_only=True, slots=True)
class _LaneBook:
    """The closed units of one lane, growing."""

    window: timedelta
    metrics: tuple[MetricConfig, ...]
    position: int = 0
    """How many units, in order of their first session, were counted or left out."""
    rows: list[tuple[bool, float, int, int, bool]] = field(default_factory=list[tuple[bool, float, int, int, bool]])
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    missing: dict[str, int] = field(default_factory=dict[str, int])


class UnitBook:
    """Collects sessions and closes units. Feed it the sessions from `resume_at` on as often as you like; what is closed stays as it is."""

    def __init__(self, config: GatesConfig, drawing: Drawing, references: dict[str, Reference]) -> None:
        self._config = config
        self._drawing = drawing
        self._thresholds = {name: r.threshold for name, r in references.items() if r.threshold is not None}
        windows = sorted({config.window_of(metric) for metric in config.metrics})
        self._lanes = [
            _LaneBook(window=timedelta(seconds=w), metrics=tuple(m for m in config.metrics if config.window_of(m) == w)) for w in windows
        ]
        self._units: dict[tuple[str, ...], _Unit] = {}
        self._order: list[_Unit] = []
        self._frontier: datetime | None = None
        """First session of the newest unit that some lane has passed."""
        self._done = 0
        self._slo_metrics = [
            MetricConfig(name=slo.source, source=slo.source, kind=MetricClass.HARD, good=Good.DOWN, threshold=slo.threshold)
            for slo in config.slos
        ]
        self._slos = {(i, treated): deque[bool](maxlen=SLO_UNITS) for i in range(len(config.slos)) for treated in (True, False)}
        self._profiles = {treated: ArmProfile(arm=arm) for treated, arm in ((True, "treated"), (False, "control"))}
        self._ceiling = next((m.high for m in config.metrics if m.source == "reward"), 1.0)
        self._swapped: set[str] = set()
        self._late: set[tuple[str, ...]] = set()

    @property
    def resume_at(self) -> datetime | None:
        """From when on sessions have to be read again; None from the beginning."""
        if self._done < len(self._order):
            return self._order[self._done].first_at
        return self._order[-1].first_at if self._order else None

    def update(self, sessions: Iterable[Session], *, now: datetime) -> None:
        """Take sessions in (again), in order of exposure, and close what is complete."""
        fresh: list[_Unit] = []
        for session in sessions:
            self._take(session, fresh)
        if fresh:
            self._order[self._done :] = sorted([*self._order[self._done :], *fresh], key=lambda unit: unit.first_at)
        for lane in self._lanes:
            self._close(lane, now)
        while self._done < len(self._order) and self._order[self._done].lanes_left == 0:
            self._order[self._done].sessions.clear()
            self._done += 1

    def _take(self, session: Session, fresh: list[_Unit]) -> None:
        draw = self._drawing(session)
        if draw is None:
            self._swapped.add(session.inference_id)
            return
        unit = self._units.get(draw.key)
        if unit is None:
            if self._frontier is not None and session.exposed_at < self._frontier:
                self._late.add(draw.key)
                return
            unit = _Unit(first_at=session.exposed_at, draw=draw, lanes_left=len(self._lanes))
            self._units[draw.key] = unit
            fresh.append(unit)
        if (unit.draw.treated, unit.draw.probability) != (draw.treated, draw.probability):
            unit.conflict = True
        elif unit.lanes_left:
            unit.sessions[session.inference_id] = session

    def _close(self, lane: _LaneBook, now: datetime) -> None:
        while lane.position < len(self._order):
            unit = self._order[lane.position]
            sessions = self._complete(unit, lane, now)
            if sessions is None:
                return
            lane.position += 1
            unit.lanes_left -= 1
            self._frontier = max(self._frontier or unit.first_at, unit.first_at)
            if not unit.conflict:
                self._count(lane, unit, sessions)
                if lane is self._lanes[0] and sessions:
                    self._count_slos(unit, sessions[0])
                if lane is self._lanes[-1]:
                    self._profile(unit.draw.treated, sessions)

    def _complete(self, unit: _Unit, lane: _LaneBook, now: datetime) -> list[Session] | None:
        """The unit's sessions in the lane's window, once nothing can be added to them; None before."""
        end = unit.first_at + lane.window
        if now < end + timedelta(seconds=self._config.settle_s):
            return None
        if unit.conflict:
            return []  # left out whatever comes: it must not hold the others back
        inside = sorted((s for s in unit.sessions.values() if s.exposed_at <= end), key=lambda s: s.exposed_at)
        if lane.window == timedelta(0):
            inside = inside[:1]
        patience = timedelta(seconds=self._config.turn_wait_s)
        for session in inside:
            known = session.labelled if lane.window else session.served
            if not known and (session.served or now < session.exposed_at + patience):
                return None
        return inside

    def _count(self, lane: _LaneBook, unit: _Unit, sessions: Sequence[Session]) -> None:
        draw, closed = unit.draw, unit.first_at + lane.window
        lane.rows.append((draw.treated, draw.probability, draw.stratum, micros(closed), any(s.signals for s in sessions)))
        for metric in lane.metrics:
            found = [measured(metric, session, self._thresholds) for session in sessions]
            if all(value is None for value in found):
                lane.missing[metric.name] = lane.missing.get(metric.name, 0) + 1
            values = [counted_missing(metric) if value is None else value for value in found]
            lane.values.setdefault(metric.name, []).append(of_unit(metric, values, self._thresholds))

    def _profile(self, treated: bool, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self._profiles[treated] = with_session(self._profiles[treated], session, ceiling=self._ceiling)

    def _count_slos(self, unit: _Unit, first: Session) -> None:
        for i, metric in enumerate(self._slo_metrics):
            value = measured(metric, first, {})
            if value is not None:
                self._slos[(i, unit.draw.treated)].append(value < 1.0)

    # --- what was counted

    def slos(self) -> tuple[SloCount, ...]:
        """First turns of the newest units against the absolute limits."""
        return tuple(
            SloCount(
                source=slo.source, limit=slo.limit, arm="treated" if treated else "control", bad=sum(self._slos[(i, treated)]),
                total=len(self._slos[(i, treated)]),
            )
            for i, slo in enumerate(self._config.slos) for treated in (True, False)
        )  # fmt: skip

    def profiles(self) -> tuple[ArmProfile, ...]:
        """Treated, then control."""
        return (self._profiles[True], self._profiles[False])

    def lanes(self) -> tuple[Lane, ...]:
        """The closed units per window."""
        return tuple(_lane(lane) for lane in self._lanes)

    def assigned(self) -> tuple[Assigned, ...]:
        """Units per stratum and arm, for the sample-ratio and the coverage test."""
        counts: dict[int, list[int]] = {}
        shares: dict[int, float] = {}
        for unit in self._order:
            if not unit.conflict:
                shares.setdefault(unit.draw.stratum, unit.draw.probability)
                counts.setdefault(unit.draw.stratum, [0, 0, 0, 0])[0 if unit.draw.treated else 1] += 1
        for treated, _, stratum, _, covered in self._lanes[-1].rows:
            if covered and stratum in counts:
                counts[stratum][2 if treated else 3] += 1
        return tuple(
            Assigned(stratum=s, probability=shares[s], treated=n[0], control=n[1], covered_treated=n[2], covered_control=n[3])
            for s, n in sorted(counts.items())
        )

    @property
    def duplicates(self) -> int:
        return sum(unit.conflict for unit in self._order)

    @property
    def swapped(self) -> int:
        return len(self._swapped)

    @property
    def late(self) -> int:
        return len(self._late)

    @property
    def last_unit_at(self) -> datetime | None:
        return self._order[-1].first_at if self._order else None


def _lane(lane: _LaneBook) -> Lane:
    rows = lane.rows
    return Lane(
        window_s=lane.window.total_seconds(),
        treated=np.array([row[0] for row in rows], dtype="u1").tobytes(),
        probability=np.array([row[1] for row in rows], dtype="<f8").tobytes(),
        stratum=np.array([row[2] for row in rows], dtype="<i8").tobytes(),
        closed_at=np.array([row[3] for row in rows], dtype="<i8").tobytes(),
        covered=np.array([row[4] for row in rows], dtype="u1").tobytes(),
        outcomes={m.name: np.array(lane.values.get(m.name, []), dtype="<f8").tobytes() for m in lane.metrics},
        missing={m.name: lane.missing.get(m.name, 0) for m in lane.metrics},
    )
