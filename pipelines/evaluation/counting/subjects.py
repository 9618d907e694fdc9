"""What is being watched, and the evidence about it as it grows: one subject per canary, and one per era of a holdback.

A subject lives in the memory of the watch and can be lost at any time: everything is read again from the database, and the same units
close in the same order. What has to survive (when data became doubtful, whether a mismatch was ever found) is read from the decisions on
record.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec

from app.domain.release.alarms import Alarm, stood_still, why_still
from app.domain.release.gates import CanaryAction, GateName
from app.domain.release.releases import ENGINE_ALIVE, Release
from app.domain.release.sessions import Era, Session
from app.domain.release.terms import Terms
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.drawings import Drawing, canary_drawing, era_drawing
from pipelines.evaluation.counting.evidence import MICROS, Evidence, micros
from pipelines.evaluation.counting.habits import habits_of
from pipelines.evaluation.counting.references import Reference, references_of, thresholds_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.doubts import STICKY

NO_ENGINE = ", and no engine holds another version either: an incident, nothing moves"
NEVER = timedelta()
HABITS_FROM = 20_000
"""So many of the champion's newest sessions say what everybody was like before."""


class EvidenceBook(Protocol):
    """What subjects read; `app.db.release.evidence` implements it."""

    def canary_sessions(self, release_id: str, *, since: datetime | None = None) -> list[Session]: ...
    def sessions_of(self, inference_ids: Collection[str]) -> list[Session]:
        """As they are now, in order of exposure; those whose person was erased are not among them."""
        ...

    def era_sessions(self, policy: str, era: Era, *, since: datetime | None = None) -> list[Session]: ...
    def history(self, policy: str, digest: str, *, since: datetime, until: datetime | None = None, newest: int = 5000) -> list[Session]: ...
    def eras(self, policy: str) -> list[Era]: ...
    def incidents(self, policy: str) -> list[Alarm]:
        """Newest first."""
        ...

    def units_in(self, policy: str, *, window: timedelta, since: datetime, now: datetime) -> float: ...
    def label_wait_s(self, policy: str) -> float: ...
    def lag_s(self, policy: str, *, now: datetime) -> float: ...
    def engines_ready(self, policy: str, digest: str, *, seen_since: datetime) -> bool: ...
    def engine_failure(self, policy: str, digest: str, *, seen_since: datetime) -> str | None: ...
    def decisions(self, release_id: str, *, newest: int = 1000) -> list[dict[str, Any]]: ...
    def false_alarms(self, policy: str, *, besides: str, gate: GateName = GateName.CANARY, newest: int = 500) -> tuple[int, int]:
        """(alarms, comparisons) of the champion with itself beside this gate's newest verdicts (`live_aa`)."""
        ...

    def keep(self, release_id: str, digest: str, payload: bytes, *, now: datetime) -> None: ...
    def kept(self, digest: str) -> bytes: ...


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is declared before a canary, and frozen with its release."""

    references: dict[str, Reference] = {}
    n_max: dict[str, int] = {}
    share: float = 0.5
    units_expected: float = 0.0
    """People a whole canary is expected to see."""
    lasts_s: float | None = None
    """How long it may take: what this traffic needs, between `canary_max_s` and `canary_longest_s`; unset, `canary_max_s`."""
    powers: dict[str, float] = {}
    note: str = ""


def frozen_config(release: Release) -> GatesConfig:
    """The configuration that a release is judged by, whatever the file says meanwhile."""
    return msgspec.convert(release.config["gates"], GatesConfig)


def frozen_plan(release: Release) -> Plan:
    """What was declared before its canary."""
    return msgspec.convert(msgspec.convert(release.config, Terms).plan, Plan)


class CanarySubject:
    """A release from CANARY until it is decided: its units, and the evidence about it."""

    def __init__(self, release: Release, book: EvidenceBook) -> None:
        self._book = book
        self._plan = frozen_plan(release)
        self.config = frozen_config(release)
        self._units: UnitBook | None = None

    def evidence(self, release: Release, *, now: datetime) -> Evidence:
        """Everything known about the canary now."""
        live = [row for row in self._book.decisions(release.id) if row["gate"] == GateName.CANARY]
        started = release.stage_since or release.changed_at
        since, season_s = _canary_since(live, default=started), self.config.reentry_season_s
        self._units = units = self._units or self._opened(release, since=since)
        read_on(units, lambda since: self._book.canary_sessions(release.id, since=since), self._book, now=now)
        hard, trouble = _engine_trouble(self._book, release, beside=release.champion_digest, now=now)
        incidents = self._book.incidents(release.policy)
        still = why_still(incidents, policy=release.policy, season_s=season_s, now=now)
        stage = release.stage if release.stage is not None else len(self.config.stages) - 1
        return _evidence(
            units, release=release, plan=self._plan, now=now, stage=stage, stage_since=started,
            since=since, reference=release.champion_digest, lag_s=self._book.lag_s(release.policy, now=now),
            held_since=held_since(live), found_earlier=tuple(test for test in STICKY if any(test in row["reason"] for row in live)),
            hard=hard, incident=trouble if still is None else (still, *trouble),
            still=stood_still(incidents, season_s=season_s, since=since, now=now),
        )  # fmt: skip

    def _opened(self, release: Release, *, since: datetime) -> UnitBook:
        """A book that knows what everybody was like before the canary."""
        before = since - timedelta(days=self.config.traffic_days)
        history = self._book.history(release.policy, release.champion_digest, since=before, until=since, newest=HABITS_FROM)
        drawing = canary_drawing(digest=release.digest, champion=release.champion_digest)
        lasting = msgspec.convert(release.config, Terms).lasting
        habits = habits_of(self.config, history, thresholds_of(self._plan.references))
        return UnitBook(self.config, drawing, self._plan.references, habits=habits, lasting=lasting)


class EraSubject:
    """One champion with one holdback: its units, and the evidence about it."""

    def __init__(self, release: Release, era: Era, config: GatesConfig, book: EvidenceBook) -> None:
        self._book = book
        self._plan = frozen_plan(release)
        if not self._plan.references:
            self._plan = msgspec.structs.replace(self._plan, references=references_of(config, []))
        self.era = era
        self.config = config
        drawing: Drawing = era_drawing(era)
        self._units = UnitBook(config, drawing, self._plan.references, margin=config.post_margin)

    def evidence(self, release: Release, *, now: datetime) -> Evidence:
        """Everything known about champion and holdback now."""
        read_on(self._units, lambda since: self._book.era_sessions(release.policy, self.era, since=since), self._book, now=now)
        hard, incident = _engine_trouble(self._book, release, beside=self.era.reference, now=now)
        reference = self.era.reference if self.era.holdback > 0.0 and self.era.reference else release.digest
        return _evidence(
            self._units, release=release, plan=self._plan, now=now, stage=0, stage_since=self.era.since, since=self.era.since,
            reference=reference, lag_s=self._book.lag_s(release.policy, now=now), held_since=None, found_earlier=(),
            hard=hard, incident=incident,
        )  # fmt: skip


def read_on(units: UnitBook, read: Callable[[datetime | None], list[Session]], book: EvidenceBook, *, now: datetime) -> None:
    """Take in what is new, and what became of the sessions that hold the others back. Costs what is new, however much is open."""
    units.update(read(units.resume_at), now=now)
    waiting = units.waiting(now)
    if waiting:
        found = book.sessions_of(waiting)
        units.update(found, now=now, gone=set(waiting) - {session.inference_id for session in found})


def is_about_engines(reason: str) -> bool:
    """Whether an incident began because no engine held any version, and not by a limit."""
    return reason.endswith(NO_ENGINE)


def _engine_trouble(book: EvidenceBook, release: Release, *, beside: str | None, now: datetime) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(reasons against this version, reasons why nothing may move): engines load the version beside it and not this one, or neither."""
    failure = book.engine_failure(release.policy, release.digest, seen_since=now - ENGINE_ALIVE)
    if failure is None:
        return (), ()
    if beside is not None and beside != release.digest and book.engines_ready(release.policy, beside, seen_since=now - ENGINE_ALIVE):
        return (failure,), ()
    return (), (f"{failure}{NO_ENGINE}",)


def held_since(decisions: Sequence[Mapping[str, Any]]) -> datetime | None:
    """Since when a release has been held for its data without a break; `decisions` oldest first. An incident is no doubt about the data."""
    since: datetime | None = None
    for row in reversed(decisions):
        if row["action"] != CanaryAction.HOLD or row["evidence"].get("cause", "data") != "data":
            return since
        since = row["decided_at"]
    return since


def _canary_since(decisions: Sequence[Mapping[str, Any]], *, default: datetime) -> datetime:
    """When the canary started: its first decision is recorded in the first moments."""
    return min((row["decided_at"] for row in decisions), default=default)


def _evidence(
    units: UnitBook, *, release: Release, plan: Plan, now: datetime, stage: int, stage_since: datetime, since: datetime, reference: str,
    lag_s: float, held_since: datetime | None, found_earlier: tuple[str, ...], hard: tuple[str, ...], incident: tuple[str, ...],
    still: timedelta = NEVER,
) -> Evidence:  # fmt: skip
    last = units.last_session_at
    return Evidence(
        release_id=release.id, policy=release.policy, digest=release.digest, champion=reference, at=micros(now), state=release.state.value,
        stage=stage, stage_since=micros(stage_since), since=micros(min(since, stage_since)), lanes=units.lanes(), assigned=units.assigned(),
        duplicates=units.duplicates, swapped=units.swapped, late=units.late, lag_s=lag_s,
        last_session_at=None if last is None else micros(last), held_since=None if held_since is None else micros(held_since),
        found_earlier=found_earlier, references=plan.references, n_max=plan.n_max, declared_share=plan.share, slos=units.slos(),
        turn_looks=units.turn_looks(),
        profiles=units.profiles(), hard=hard, lasts_s=plan.lasts_s, incident=incident, still_us=still // MICROS,
    )  # fmt: skip
