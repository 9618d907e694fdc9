"""The ratchet guard: champions since the last renewal of the anchor, held against the anchor; and the proxy-gold gap between them.

Every version may be non-inferior to the one before it by a little, and all of them together worse by a lot. So a few percent of people stay
on the anchor, and one detector runs over every era in which they did.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import takewhile

from app.domain.release.alarms import Alarm, AlarmKind
from app.domain.release.releases import Pointer
from app.domain.release.sessions import Era
from pipelines.evaluation.config import GatesConfig, MetricClass, MetricConfig
from pipelines.evaluation.counting.drawings import era_drawing
from pipelines.evaluation.counting.references import Reference, references_of
from pipelines.evaluation.counting.subjects import EvidenceBook, read_on
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.champion import anchor_guard
from pipelines.evaluation.live.harm import units_of
from pipelines.evaluation.statistics.confidence import Interval, betting_interval
from pipelines.evaluation.statistics.proxy_gold import VERSIONS_RUNNING, Lift, gap_alarm
from pipelines.evaluation.statistics.units import Units

ASK_EVERY = timedelta(seconds=30)
"""The guard is about days, and reads more than the other questions."""
LATE = timedelta(hours=1)
"""An era that ended longer ago than this, and its windows, brings no more sessions."""


class AnchorWatch:
    """Watches one policy against its anchor."""

    def __init__(self, policy: str, config: GatesConfig, book: EvidenceBook) -> None:
        self._policy = policy
        self._config = config
        self._book = book
        self._gold = next(m for m in config.required if m.kind is MetricClass.GOLD)
        self._proxy = next((m for m in config.required if m.kind is MetricClass.PROXY), None)
        self._references = references_of(config, [])
        self._books: dict[int, UnitBook] = {}
        self._champions: dict[int, str] = {}
        self._complete: set[int] = set()
        self._asked_at: datetime | None = None
        self._anchor: str | None = None
        self._gap = False

    def ask(self, pointer: Pointer, alarms: Sequence[Alarm] = (), *, now: datetime) -> str | None:
        """Why to go back to the anchor, in a sentence; None where there is no reason (or it was asked a moment ago).

        `alarms`: those that were raised already. What they found is used up: the detectors begin again with the eras after them.
        """
        if self._asked_at is not None and now - self._asked_at < ASK_EVERY:
            return None
        self._asked_at = now
        eras = self._eras(pointer)
        self._champions = {era.generation: era.champion for era in eras}
        for era in eras:
            if era.generation in self._complete:
                continue
            if era.until is not None and now - era.until > LATE + timedelta(seconds=self._config.window_s):
                self._complete.add(era.generation)  # read once more, and then never again
            book = self._books.setdefault(era.generation, UnitBook(self._config, era_drawing(era), self._references))
            read_on(book, lambda since, era=era: self._book.era_sessions(self._policy, era, since=since), self._book, now=now)
        self._gap = self._gap_found(_begins_after(AlarmKind.GAP, alarms))
        return self._judge([era for era in eras if era.generation > _begins_after(AlarmKind.ANCHOR, alarms)], now)

    def gap(self) -> bool:
        """Whether the newest two champions running earned more reward than the anchor without being better at what it stands for."""
        return self._gap

    def _gap_found(self, begins_after: int) -> bool:
        """The newest era of each champion counts: two eras of one champion are not two versions running."""
        newest = {self._champions[g]: book for g, book in sorted(self._books.items()) if g > begins_after}
        if self._proxy is None:
            return False
        return gap_alarm([self._lift(champion, book, self._proxy) for champion, book in list(newest.items())[-VERSIONS_RUNNING:]])

    def _eras(self, pointer: Pointer) -> list[Era]:
        """Eras since the anchor was last renewed in which the holdback was on it, oldest first, however long ago that was: the guard is
        about steps that are each too small to be seen."""
        if self._anchor != pointer.anchor:
            self._anchor, self._books, self._complete = pointer.anchor, {}, set()
        since_renewal = list(takewhile(lambda era: era.anchor == pointer.anchor, reversed(self._book.eras(self._policy))))
        return [e for e in reversed(since_renewal) if e.holdback > 0.0 and e.reference == e.anchor != e.champion]

    def _judge(self, eras: list[Era], now: datetime) -> str | None:
        if not eras:
            return None
        reference = self._references[self._gold.name]
        slot = timedelta(seconds=self._config.holdback_s)
        traffic = timedelta(days=self._config.traffic_days)
        per_slot = self._book.units_in(self._policy, window=slot, since=now - traffic, now=now)
        units = [self._units(self._books[era.generation], self._gold, reference) for era in eras]
        fall = anchor_guard(self._config, units, units_per_slot=per_slot, variance=reference.variance)
        if not fall.found:
            return None
        return f"champions since the last renewal are worse than the anchor on {self._gold.name}, found after {fall.detection.units} units"

    def _units(self, book: UnitBook, metric: MetricConfig, reference: Reference) -> Units:
        window = self._config.window_of(metric)
        lane = next(lane for lane in book.lanes() if lane.window_s == window)
        return units_of(lane, metric.name, prior=reference.mean)

    def _lift(self, version: str, book: UnitBook, proxy: MetricConfig) -> Lift:
        return Lift(version=version, proxy=self._interval(book, proxy), gold=self._interval(book, self._gold))

    def _interval(self, book: UnitBook, metric: MetricConfig) -> Interval:
        reference = self._references[metric.name]
        return betting_interval(self._units(book, metric, reference), variance=reference.variance, alpha=0.05)


def _begins_after(kind: AlarmKind, alarms: Sequence[Alarm]) -> int:
    """The newest generation of the pointer that an alarm of this kind was about."""
    return max((alarm.generation for alarm in alarms if alarm.kind is kind), default=0)
