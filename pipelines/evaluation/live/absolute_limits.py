"""Turns against the absolute limits, arm by arm, as they become known: all turns, not only a person's first.

Turns are counted strictly in the order of their exposure, and the first of which nothing is known yet holds back those after it: a fault
that comes sooner than an answer is not counted sooner. Where one arm exceeds a limit, the other's turns since that began say whether it is
the version or the place: `SloCount.beside` is the evidence that the other one is healthier.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import takewhile

import msgspec

from app.domain.release.sessions import Session
from pipelines.evaluation.config import Good, MetricClass, MetricConfig, SloConfig
from pipelines.evaluation.counting.measures import measured
from pipelines.evaluation.statistics.limits import HealthierProcess, LimitProcess

RENEWED_EVERY = timedelta(minutes=10)
"""After this long a person's turns count in full again."""
REMEMBERED = 4000
"""So many of the newest turns are kept per limit, to say what either arm did since an incident began."""
COUNTED_KNOWN = 20_000
"""So many of the newest counted turns are known one by one, so that reading them again does not count them again."""
SUSPECT = 2.9
"""Evidence (log) from which on the other arm is looked at: below log(1/0.05) no limit is called burnt, whatever its alpha."""
RECOVERED = 3.0
"""Evidence (log) for at most half the limit from which on an arm keeps the limit again."""


class SloCount(msgspec.Struct, frozen=True, kw_only=True):
    """One arm against one absolute limit."""

    source: str
    arm: str
    """`treated` or `control`."""
    limit: float
    bad: int
    """Bad turns since what is seen now began, of `total`."""
    total: int
    people: int = 0
    """Distinct people among the bad turns."""
    log_e: float = -1e9
    """Evidence that the arm exceeds the limit (an e-process, `statistics.limits`)."""
    beside: float = -1e9
    """Evidence that the other arm is healthier: its rate over the same time is under the limit, or under half of this arm's."""
    calm: float = 0.0
    """Evidence that the arm keeps the limit now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    number: int
    """In its arm."""
    at: datetime
    treated: bool
    actor: str
    bad: bool


@dataclass(kw_only=True)
class LimitBook:
    """All turns of one subject against all absolute limits."""

    slos: Sequence[SloConfig]
    _processes: dict[tuple[int, bool], LimitProcess] = field(default_factory=dict[tuple[int, bool], LimitProcess])
    _turns: list[deque[_Turn]] = field(default_factory=list[deque[_Turn]])
    _metrics: list[MetricConfig] = field(default_factory=list[MetricConfig])
    _seen: dict[tuple[bool, str], int] = field(default_factory=dict[tuple[bool, str], int])
    _period: int = 0

    def __post_init__(self) -> None:
        self._processes = {(i, t): LimitProcess(limit=slo.limit) for i, slo in enumerate(self.slos) for t in (True, False)}
        self._turns = [deque[_Turn](maxlen=REMEMBERED) for _ in self.slos]
        self._metrics = [
            MetricConfig(name=slo.source, source=slo.source, kind=MetricClass.HARD, good=Good.DOWN, threshold=slo.threshold)
            for slo in self.slos
        ]

    def count(self, session: Session, *, treated: bool) -> None:
        """One more turn, in order of exposure."""
        stake = 1.0 / self._times_seen(session, treated) ** 2
        for i, metric in enumerate(self._metrics):
            value, process = measured(metric, session, {}), self._processes[(i, treated)]
            if value is None or not 0.0 < self.slos[i].limit < 1.0:
                continue
            self._turns[i].append(_Turn(number=process.turns, at=session.exposed_at, treated=treated, actor=session.actor, bad=value < 1.0))
            process.bet(bad=value < 1.0, stake=stake)
            if process.calm >= RECOVERED and process.log_e > 0.0:
                process.restart()

    def counts(self) -> tuple[SloCount, ...]:
        """Where every limit stands, in both arms."""
        return tuple(self._count(i, treated) for i in range(len(self.slos)) for treated in (True, False))

    def _times_seen(self, session: Session, treated: bool) -> int:
        period = int(session.exposed_at.timestamp() // RENEWED_EVERY.total_seconds())
        if period > self._period:
            self._period = period
            self._seen.clear()
        key = (treated, session.actor)
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key]

    def _count(self, i: int, treated: bool) -> SloCount:
        slo, process = self.slos[i], self._processes[(i, treated)]
        own = self._since(i, treated, process.onset)
        bad = [turn for turn in own if turn.bad]
        return SloCount(
            source=slo.source, arm="treated" if treated else "control", limit=slo.limit, bad=len(bad), total=len(own),
            people=len({turn.actor for turn in bad}), log_e=max(process.log_e, -1e9), beside=self._beside(i, treated, own, len(bad)),
            calm=process.calm,
        )  # fmt: skip

    def _since(self, i: int, treated: bool, onset: int) -> list[_Turn]:
        """One arm's turns from number `onset` on, read from the newest back: an arm that keeps its limit has an onset that is young."""
        own = (turn for turn in reversed(self._turns[i]) if turn.treated is treated)
        return list(takewhile(lambda turn: turn.number >= onset, own))[::-1]

    def _beside(self, i: int, treated: bool, own: Sequence[_Turn], bad: int) -> float:
        """The other arm's turns since the first of `own`, held against the limit or half of this arm's rate, whichever is more.

        A person's k-th turn since then stakes 1/k: few people are on the reference of a holdback, and what they met before does not count.
        """
        if self._processes[(i, treated)].log_e < SUSPECT or not own:
            return -1e9
        process, times = HealthierProcess(rate=max(self.slos[i].limit, 0.5 * bad / len(own))), Counter[str]()
        for turn in self._turns[i]:
            if turn.treated is not treated and turn.at >= own[0].at:
                times[turn.actor] += 1
                process.bet(bad=turn.bad, stake=1.0 / times[turn.actor])
        return process.log_e


class TurnQueue:
    """Turns on their way to being counted, in order of exposure. An exposure without a turn after `patience` is a fault."""

    def __init__(
        self, count: Callable[[Session, bool], None], *, patience: timedelta, settle: timedelta, labelled: bool = False
    ) -> None:  # fmt: skip
        self._count = count
        self._patience = patience
        self._settle = settle
        self._labelled = labelled
        """Whether a turn is known with its label only."""
        self._order: list[tuple[datetime, str]] = []
        """A heap."""
        self._open: dict[str, tuple[Session, bool]] = {}
        self._counted: deque[tuple[datetime, str]] = deque()
        self._counted_ids: set[str] = set()
        self._forgotten: datetime | None = None
        """Turns up to here were counted, one by one no longer known."""

    def add(self, session: Session, *, treated: bool) -> None:
        """A turn, or what is known of it by now."""
        key = session.inference_id
        if key in self._counted_ids or (self._forgotten is not None and session.exposed_at <= self._forgotten):
            return
        if key not in self._open:
            heapq.heappush(self._order, (session.exposed_at, key))
        self._open[key] = (session, treated)

    def drop(self, inference_id: str) -> None:
        """It is gone: its person was erased."""
        self._open.pop(inference_id, None)

    def count_known(self, now: datetime) -> None:
        """Count in order, up to the first of which nothing is known yet."""
        while self._order:
            at, key = self._order[0]
            found = self._open.get(key)
            if found is not None and not self._is_known(found[0], now):
                return
            heapq.heappop(self._order)
            if found is not None:
                self._count(*found)
                del self._open[key]
                self._remember(at, key)

    def unknown(self, now: datetime, *, most: int = 200) -> list[str]:
        """The oldest turns that nothing is known of yet, once they could be."""
        oldest = heapq.nsmallest(most, self._order) if self._order and not self._is_open_head_fresh(now) else []
        return [key for _, key in oldest if key in self._open and not self._has_come(self._open[key][0])]

    def frontier(self, now: datetime) -> datetime:
        """Every turn before this was counted."""
        return min(now - self._settle, self._order[0][0]) if self._order else now - self._settle

    def _is_open_head_fresh(self, now: datetime) -> bool:
        return now < self._order[0][0] + self._settle

    def _is_known(self, session: Session, now: datetime) -> bool:
        if now < session.exposed_at + self._settle:
            return False
        return self._has_come(session) or (not session.served and now >= session.exposed_at + self._patience)

    def _has_come(self, session: Session) -> bool:
        return session.labelled if self._labelled else session.served

    def _remember(self, at: datetime, key: str) -> None:
        self._counted.append((at, key))
        self._counted_ids.add(key)
        while len(self._counted) > COUNTED_KNOWN:
            at, key = self._counted.popleft()
            self._counted_ids.discard(key)
            self._forgotten = max(self._forgotten or at, at)
