"""The long-term holdout: begins, counts what its people have had, and ends. A report, never a gate (`docs/long-term-holdout.md`).

tick ─▶ open and to be ended (its version is quarantined or lost, the configuration asks for another)  ──▶ ended, and why
        open                 the next piece of exposures whose labels are in ─▶ sums ─▶ a day is whole ─▶ readings
        over and counted     ──▶ ended
        ended                people's sums are deleted, piece by piece
        none                 the configuration asks for one ──▶ begins on the champion
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from app.domain.ports import Clock
from app.domain.release.assignment import member_of
from app.domain.release.holdouts import HELD, ArmMean, Counted, Holdout, Member, PersonSums, Piece, Reading
from app.domain.release.releases import ENGINE_ALIVE
from app.domain.release.sessions import Session
from app.release.desk import ReleaseDesk
from pipelines.evaluation.config import GatesConfig, Good, MetricConfig
from pipelines.evaluation.counting.measures import counted_missing, is_referred, measured
from pipelines.evaluation.counting.references import references_of, thresholds_of
from pipelines.evaluation.counting.subjects import HABITS_FROM, EvidenceBook
from pipelines.evaluation.statistics.clusters import difference, mean

log = logging.getLogger("ratchet.watch")
PIECE = 5_000
"""Exposures looked at in one tick: those of the people it follows are read, a tenth of them where a fiftieth is held."""
COUNTED_EVERY = timedelta(minutes=1)
"""Where it has caught up."""
FORGOTTEN = 2_000
DAY = timedelta(days=1)
EXPOSED = frozenset({"champion", "candidate", "previous", HELD})
"""Arms of turns that a draw decided: neither practice nor a version that the caller named."""


class HoldoutBook(Protocol):
    """What the keeper reads and counts; `app.db.release.holdouts` implements it."""

    def open(self, policy: str) -> Holdout | None: ...
    def is_barred(self, holdout: Holdout) -> bool:
        """Whether its version is quarantined."""
        ...

    def piece(self, holdout: Holdout, *, until: datetime, limit: int) -> Piece | None: ...
    def count(self, holdout: Holdout, piece: Piece, counted: Sequence[Counted]) -> bool: ...
    def sums(self, holdout: Holdout, *, week: int | None) -> Mapping[tuple[str, bool], PersonSums]: ...
    def keep(self, holdout: Holdout, readings: Collection[Reading], *, until: datetime) -> Holdout: ...
    def forget(self, policy: str, *, limit: int) -> int: ...


class HoldoutKeeper:
    """Keeps one policy's long-term holdout."""

    def __init__(
        self, policy: str, config: GatesConfig, book: HoldoutBook, evidence: EvidenceBook, desk: ReleaseDesk, clock: Clock, *,
        piece: int = PIECE,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._config = config
        self._book = book
        self._evidence = evidence
        self._desk = desk
        self._clock = clock
        self._piece = piece
        self._absent_since: datetime | None = None

    def tick(self) -> None:
        """One round of the picture."""
        holdout, now = self._book.open(self._policy), self._clock()
        if holdout is None:
            self._book.forget(self._policy, limit=FORGOTTEN)
            if self._config.holdout.share > 0.0:
                self._begin(now)
        elif (why := self._to_end(holdout, now)) is not None:
            self._end(holdout, why)
        elif not self._count(holdout, now) and holdout.counted_until >= holdout.last_moment:
            self._end(holdout, "its time is over")

    # --- beginning and end

    def _begin(self, now: datetime) -> None:
        pointer = self._desk.pointer(self._policy)
        if not self._evidence.engines_ready(self._policy, pointer.digest, seen_since=now - ENGINE_ALIVE):
            return
        since = now - timedelta(days=self._config.traffic_days)
        history = self._evidence.history(self._policy, pointer.digest, since=since, newest=HABITS_FROM)
        thresholds = thresholds_of(references_of(self._config, history))
        asked = self._config.holdout
        holdout = self._desk.begin_holdout(self._policy, share=asked.share, lasts=timedelta(days=asked.days), thresholds=thresholds)
        log.info("holdout_began policy=%s holdout=%s share=%g version=%s", self._policy, holdout.id, holdout.share, holdout.digest)

    def _to_end(self, holdout: Holdout, now: datetime) -> str | None:
        """Why it may not go on, in a sentence."""
        asked = self._config.holdout.share
        if asked != holdout.share:
            return "the configuration asks for none" if asked == 0.0 else f"the configuration asks for a share of {asked:g} now"
        if self._book.is_barred(holdout):
            return f"version {holdout.digest[:12]} is quarantined: nobody stays on it"
        return self._lost(holdout, now)

    def _lost(self, holdout: Holdout, now: datetime) -> str | None:
        """No engine has held its version for half a minute, while one holds the champion: who is held is not answered."""
        alive = now - ENGINE_ALIVE
        there = self._evidence.engines_ready(self._policy, holdout.digest, seen_since=alive)
        if there or not self._evidence.engines_ready(self._policy, self._desk.pointer(self._policy).digest, seen_since=alive):
            self._absent_since = None
            return None
        self._absent_since = self._absent_since or now
        if now - self._absent_since < ENGINE_ALIVE:
            return None
        return f"no engine holds version {holdout.digest[:12]} any more: give engines room for one more version"

    def _end(self, holdout: Holdout, why: str) -> None:
        """With a last reading of whatever was counted."""
        self._read(holdout, until=holdout.counted_until)
        if self._desk.end_holdout(holdout, reason=why):
            log.info("holdout_ended policy=%s holdout=%s reason=%s", self._policy, holdout.id, why)

    # --- counting

    def _count(self, holdout: Holdout, now: datetime) -> bool:
        """Whether there was anything to count."""
        until = min(holdout.last_moment, self._complete_until(now))
        if until < holdout.last_moment and until - holdout.counted_until < COUNTED_EVERY:
            return False
        piece = self._book.piece(holdout, until=until, limit=self._piece)
        if piece is None:
            return False
        followed = [one.inference_id for one in piece.seen if one.arm in EXPOSED and member_of(holdout, one.person) is not None]
        sessions = self._evidence.sessions_of(followed)
        if self._book.count(holdout, piece, list(self._counted(holdout, sessions))):
            whole = holdout.began_at + (piece.edge - holdout.began_at) // DAY * DAY
            if whole > (holdout.read_until or holdout.began_at):
                self._read(holdout, until=whole)
        return True

    def _complete_until(self, now: datetime) -> datetime:
        """Whoever was served before has said what counts, and it was labelled."""
        longest = max(self._config.window_of(metric) for metric in self._config.metrics)
        waits = longest + self._config.turn_wait_s + self._config.settle_s + self._evidence.label_wait_s(self._policy)
        return now - timedelta(seconds=waits + self._evidence.lag_s(self._policy, now=now))

    def _counted(self, holdout: Holdout, sessions: Sequence[Session]) -> Iterator[Counted]:
        """A row per week, person and metric. A turn without the signal counts as the metric says, as in a canary."""
        mine: dict[tuple[int, str], list[Session]] = {}
        for session in sessions:
            mine.setdefault((holdout.week_of(session.exposed_at), session.actor), []).append(session)
        for (week, person), turns in mine.items():
            held = member_of(holdout, person) is Member.HELD
            since = min(turn.exposed_at for turn in turns)
            for metric in read_metrics(self._config, holdout):
                values = [measured(metric, turn, holdout.thresholds) for turn in turns]
                total = sum(counted_missing(metric) if value is None else value for value in values)
                yield Counted(week=week, person=person, metric=metric.name, held=held, turns=len(turns), total=total, since=since)

    # --- reading

    def _read(self, holdout: Holdout, *, until: datetime) -> None:
        """Readings of the weeks that may have changed since the last ones, and of all together."""
        newest = holdout.week_of(max(until, holdout.began_at))
        first = 0 if holdout.read_until is None else holdout.week_of(holdout.read_until)
        settled = [one for one in holdout.readings if one.week is not None and one.week < first]
        fresh = [one for week in (*range(first, newest + 1), None) for one in readings(self._book.sums(holdout, week=week), week=week)]
        self._book.keep(holdout, [*settled, *fresh], until=until)


def read_metrics(config: GatesConfig, holdout: Holdout) -> list[MetricConfig]:
    """Metrics with a direction, counted by turns anyway; without those that refer to what was not known of the champion."""
    directed = [metric for metric in config.metrics if metric.good is not Good.SAME and not metric.by_turns]
    return [metric for metric in directed if not is_referred(metric) or metric.name in holdout.thresholds]


def readings(sums: Mapping[tuple[str, bool], PersonSums], *, week: int | None) -> list[Reading]:
    """By metric, in order of their names."""
    found: list[Reading] = []
    for name in sorted({metric for metric, _ in sums}):
        held, beside = (sums.get((name, is_held), PersonSums()) for is_held in (True, False))
        interval = difference(beside, held)
        change, low, high = (None, None, None) if interval is None else interval
        found.append(Reading(metric=name, week=week, held=_arm(held), beside=_arm(beside), difference=change, low=low, high=high))
    return found


def _arm(sums: PersonSums) -> ArmMean:
    return ArmMean(people=sums.people, turns=round(sums.n), mean=mean(sums))
