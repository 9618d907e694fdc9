"""One process at a time keeps house, under a lease: every class of `[retention]` in its turn, step by step, until nothing is old any more.

    inbox ──▶ identities ──▶ outbox ──▶ dead letters ──▶ segments ──▶ turns ──▶ blind pairs ──▶ labels ──▶ exposures
    ──▶ stray observations ──▶ retractions of none; segments are merged

Every step is one short transaction, fenced by the lease where the state database is written. Inbox rows need no fence: only what was
applied long ago is deleted, and that is true whoever looks.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, select

from app.db import leases, locks
from app.db.clock import ConnectionClock
from app.db.counters import add_counts
from app.db.engine import expected_to_answer, reading, writing
from app.db.tables import turn_counts
from app.db.upkeep import eras, identities, old_segments, past
from app.db.upkeep.compaction import MergingFiles, compact
from app.db.upkeep.needs import needs
from app.db.verdicts import judged
from app.domain.errors import Unavailable
from app.domain.ids import utc_now
from app.domain.ports import Clock, Lease
from app.domain.retention import Retention, days

LEASE = "upkeep"
TERM = timedelta(minutes=2)
"""How long a keeper that was killed blocks the next one; it renews with every step."""
SKEW = timedelta(hours=1)
ROWS = 2_000
"""Rows of one step: milliseconds on a warm table, so that nobody waits."""
SEGMENTS = 20
LATER = timedelta(days=1)
"""Deduplication rows outlive the inbox's identities: what the inbox takes for new once more is still known behind it."""


class SqlUpkeep:
    """Keeps house in the state and the inbox databases."""

    def __init__(
        self, state: Engine, inbox: Engine, *, files: MergingFiles, retention: Retention, owner: str, clock: Clock = utc_now,
        database_clock: ConnectionClock | None = None, own: Clock | None = None, rows: int = ROWS,
    ) -> None:  # fmt: skip
        self._state = state
        self._inbox = inbox
        self._files = files
        self._retention = retention
        self._owner = owner
        self._clock = clock
        self._database_clock = database_clock
        self._own = own
        """This machine's clock, where it is to agree with the database's: a year ahead, either would make everything old."""
        self._rows = rows

    @contextmanager
    def office(self) -> Iterator[Lease | None]:
        """The lease, or None while another process keeps house. Raises `Unavailable`."""
        with ExitStack() as held:
            with expected_to_answer("what is old stays for now"):
                lease = held.enter_context(leases.term(self._state, LEASE, self._owner, ttl=TERM, clock=self._now))
            yield lease

    def retire(self, lease: Lease, *, stopping: Callable[[], bool] = lambda: False) -> dict[str, int]:
        """Drop everything that is old and that nothing needs; returns how much of each class. Raises `LeaseLost`, `Unavailable`."""
        self._agree_on_time()
        gone: Counter[str] = Counter()
        with judged():
            for name, step in self._steps(lease):
                while not stopping() and (count := step()) is not None:
                    gone[name] += count
            told = {name: count for name, count in gone.items() if count}
            with writing(self._state) as connection:
                add_counts(connection, {("", f"retired_{name}"): count for name, count in told.items()})
        return told

    def merge(self, lease: Lease, *, stopping: Callable[[], bool] = lambda: False) -> dict[str, int]:
        """Merge the small segments of days that are over; returns how many there were, of how many files, with how many bytes."""
        told: Counter[str] = Counter()
        lost: set[str] = set()
        over_for, size = timedelta(hours=self._retention.compact_after_h), self._retention.compact_bytes
        with judged():
            while not stopping():
                made = compact(
                    self._state, self._files, now=self._clock(), over_for=over_for, at_most_bytes=size, fence=self.fence(lease), lost=lost
                )
                if made is None:
                    break
                told.update(made._asdict())
            with writing(self._state) as connection:
                add_counts(connection, {("", "segments_merged"): told["sources"]})
        return dict(told)

    def fence(self, lease: Lease) -> Callable[[Connection], None]:
        """To be asked in every transaction: renews, and raises `LeaseLost` once another process keeps house."""

        def check(connection: Connection) -> None:
            leases.renew(connection, lease, ttl=TERM, now=self._now(connection))

        return check

    def oldest(self) -> dict[str, datetime | None]:
        """When the oldest of each class came. Raises `Unavailable`."""
        with expected_to_answer(), reading(self._inbox) as connection:
            door = identities.oldest(connection)
        with expected_to_answer(), reading(self._state) as connection:
            state = identities.oldest(connection) | past.oldest(connection) | old_segments.oldest(connection)
        return state | {"inbox": door["inbox"]}

    def _agree_on_time(self) -> None:
        if self._own is not None and abs(self._own() - self._clock()) > SKEW:
            raise Unavailable(
                f"this machine's clock ({self._own():%Y-%m-%d %H:%M}) and the database's ({self._clock():%Y-%m-%d %H:%M}) are more than "
                f"{SKEW} apart: nothing is dropped by a clock that may be wrong; set both by NTP"
            )

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _now(self, connection: Connection) -> datetime:
        return self._database_clock(connection) if self._database_clock else self._clock()

    def _before(self, number: float | None) -> datetime | None:
        age = days(number)
        return None if age is None else self._clock() - age

    def _steps(self, lease: Lease) -> Iterator[tuple[str, Callable[[], int | None]]]:
        """Each class with its step, which says None when nothing is left to look at."""
        fence = self.fence(lease)
        kept = self._retention
        if (keep := days(kept.inbox_days)) is not None:
            yield "inbox", self._eras(keep)
        if (before := self._before(kept.dedupe_days)) is not None:
            yield "identities", self._along(self._inbox, self._door(identities.forget_inbox, before))
            yield "applied", self._emptying(self._at_most(identities.forget_applied, before - LATER), fence)
        if (before := self._before(kept.inbox_days)) is not None:
            yield "outbox", self._along(self._state, self._door(identities.forget_outbox, before))
        if (before := self._before(kept.dead_letters_days)) is not None:
            yield "dead_letters", self._emptying(self._at_most(identities.forget_letters, before), fence)
        if (before := self._before(kept.segments_days)) is not None:
            yield "segments", self._segments(before, fence)
        if (before := self._before(kept.turns_days)) is not None:
            yield "turns", self._moving(self._turns(before), fence)
            yield "blind_pairs", self._emptying(self._at_most(past.retire_pairs, before), fence)
        for policy in self._policies():
            if (before := self._before(kept.labels_days)) is not None:
                yield "labels", self._moving(self._labels(policy, before), fence)
            if (before := self._before(kept.exposures_days)) is not None:
                yield "exposures", self._emptying(self._exposures(policy, before), fence)
        if (before := self._before(kept.observations_days)) is not None:
            yield "observations", self._emptying(self._at_most(past.retire_strays, before), fence)
            yield "retractions", self._emptying(self._at_most(past.retire_waiting, before), fence)

    def _eras(self, keep: timedelta) -> Callable[[], int | None]:
        """PostgreSQL: the next era of the inbox opens when its time has come, and old ones go."""
        eras.turn(self._inbox, now=self._clock(), after=eras.span(keep))
        return lambda: eras.drop_oldest(self._inbox, before=self._clock() - keep)

    def _door(self, act: Callable[..., tuple[int, int]], before: datetime) -> Callable[[Connection, int], tuple[int, int]]:
        return lambda c, after: act(c, before=before, limit=self._rows, after=after)

    def _at_most(self, act: Callable[..., int], before: datetime) -> Callable[[Connection], int]:
        return lambda c: act(c, before=before, limit=self._rows)

    def _turns(self, before: datetime) -> Callable[[Connection, Any], tuple[int, Any]]:
        return lambda c, after: past.retire_turns(c, needs(c), before=before, limit=self._rows // 4, after=after)

    def _labels(self, policy: str, before: datetime) -> Callable[[Connection, Any], tuple[int, Any]]:
        return lambda c, after: past.retire_labels(c, policy, needs(c), before=before, limit=self._rows, after=after)

    def _exposures(self, policy: str, before: datetime) -> Callable[[Connection], int]:
        return lambda c: past.retire_exposures(c, policy, needs(c), before=before, limit=self._rows)

    def _policies(self) -> list[str]:
        with reading(self._state) as connection:
            return sorted(connection.execute(select(turn_counts.c.policy).distinct()).scalars())

    def _emptying(self, act: Callable[[Connection], int], fence: Callable[[Connection], None]) -> Callable[[], int | None]:
        def fenced(connection: Connection) -> int:
            fence(connection)
            return act(connection)

        return lambda: locks.settled(self._state, fenced) or None

    def _along(self, engine: Engine, act: Callable[[Connection, int], tuple[int, int]]) -> Callable[[], int | None]:
        at = 0

        def step() -> int | None:
            nonlocal at
            was, (count, at) = at, locks.settled(engine, lambda connection: act(connection, at))
            return count if at > was else None

        return step

    def _moving(self, act: Callable[[Connection, Any], tuple[int, Any]], fence: Callable[[Connection], None]) -> Callable[[], int | None]:
        after: Any = None

        def fenced(connection: Connection) -> tuple[int, Any]:
            fence(connection)
            return act(connection, after)

        def step() -> int | None:
            nonlocal after
            count, until = locks.settled(self._state, fenced)
            after = until
            return None if until is None else count

        return step

    def _segments(self, before: datetime, fence: Callable[[Connection], None]) -> Callable[[], int | None]:
        after: Any = None

        def step() -> int | None:
            nonlocal after
            looked = old_segments.drop_old(
                self._state, self._files, now=self._clock(), before=before, limit=SEGMENTS, after=after, fence=fence
            )
            after = looked.until
            return None if looked.until is None else looked.dropped

        return step
