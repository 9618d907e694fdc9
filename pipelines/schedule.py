"""The clock: every replica ticks, the database decides who runs the slot.

```
 APScheduler tick (30 s, every replica)          database
 ─────────────────────────────────────          ───────────────────────────────────────────────
 an expired lease?            ── take over ──▶  token + 1, attempt + 1, resume at the last durable step
 no cycle runs?               ── close ──────▶  releases that a cycle opened and died on: ABORTED
 this slot already decided?   ◀─ yes: rest ───  one row per (policy, slot)
 slots nobody decided?        ── record ─────▶  SKIPPED "missed: …"
 blocked or thin, patience left? rest           (a cycle or a release under way; too few labels yet)
 blocked?                     ── record ─────▶  SKIPPED with that reason
 otherwise                    ── elect ──────▶  INSERT … ON CONFLICT DO NOTHING: exactly one winner;
                                                too few labels then end in a HELD run
```

APScheduler is only the tick: memory store, no misfire grace, one instance. Its own intervals are never the schedule, because
a restart would re-arm them in full (`facts/gates.md`, section 7). Slots come from the epoch: restarting postpones nothing.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler  # pyright: ignore[reportMissingTypeStubs]

from app.domain.errors import LeaseLost
from app.domain.learning.cycles import Cycle, slot_of
from app.domain.ports import Clock, CycleBook
from pipelines.config import ScheduleConfig

log = logging.getLogger(__name__)
MOST_MISSED = 48
"""Missed slots recorded one by one; after a longer outage only the newest ones are, which is ten days of five-hour slots."""


@dataclass(frozen=True, kw_only=True)
class Ticker:
    """One replica's side of the election for one policy."""

    policy: str
    owner: str
    """Unique per process."""
    book: CycleBook
    config: ScheduleConfig
    clock: Clock
    close_orphans: Callable[[str], None]
    """Ends releases whose cycle is over and that no offline gate will be asked about any more: they would block every slot to come."""
    blocked: Callable[[str], str | None]
    """Why no cycle may start now (a release is in flight), as a sentence, or None."""
    thin: Callable[[str], str | None]
    """Why a cycle would be held if it started now (too few labels), as a sentence, or None."""
    run: Callable[[Cycle], None]
    """Runs the cycle to its end; raises only what is a bug."""

    def tick(self) -> Cycle | None:
        """Do what is due; returns the cycle that was run, if this replica ran one."""
        now = self.clock()
        lease = timedelta(seconds=self.config.lease_s)
        cycle = self.book.take_over(self.policy, owner=self.owner, now=now, lease=lease)
        if cycle is not None:
            log.warning("cycle taken over policy=%s slot=%d attempt=%d step=%s", self.policy, cycle.slot, cycle.attempt, cycle.step)
        else:
            if self.book.running(self.policy) is None:
                self.close_orphans(self.policy)
            cycle = self._elect(now, lease)
        if cycle is not None:
            self._run_under_lease(cycle)
        return cycle

    def _elect(self, now: datetime, lease: timedelta) -> Cycle | None:
        slot = slot_of(now, self.config.slot_s)
        newest = self.book.newest_slot(self.policy)
        if newest is not None and newest >= slot:
            return None
        self._record_missed(newest, slot, now)
        blocked = self._still_running() or self.blocked(self.policy)
        waited_s = now.timestamp() - slot
        if waited_s < self.config.patience_s and (blocked or self.thin(self.policy)):
            return None
        if blocked:
            self._skip(slot, blocked, now)
            return None
        return self.book.elect(self.policy, slot, owner=self.owner, now=now, lease=lease)

    def _still_running(self) -> str | None:
        running = self.book.running(self.policy)
        return running and f"the cycle of slot {running.slot} still runs (step {running.step})"

    def _record_missed(self, newest: int | None, slot: int, now: datetime) -> None:
        if newest is None:
            return
        length = self.config.slot_s
        first = max(newest // length * length + length, slot - MOST_MISSED * length)
        for missed in range(first, slot, length):
            self._skip(missed, "missed: no replica decided on it in time", now)

    def _skip(self, slot: int, reason: str, now: datetime) -> None:
        if self.book.skip(self.policy, slot, reason=reason, now=now):
            log.info("slot skipped policy=%s slot=%d reason=%s", self.policy, slot, reason)

    def _run_under_lease(self, cycle: Cycle) -> None:
        done = threading.Event()
        heart = threading.Thread(target=self._beat, args=(cycle, done), name="cycle-heartbeat", daemon=True)
        heart.start()
        try:
            self.run(cycle)
        finally:
            done.set()
            heart.join()

    def _beat(self, cycle: Cycle, done: threading.Event) -> None:
        while not done.wait(self.config.heartbeat_s):
            try:
                self.book.renew(cycle, now=self.clock(), lease=timedelta(seconds=self.config.lease_s))
            except LeaseLost:
                log.warning("lease lost policy=%s slot=%d token=%d", cycle.policy, cycle.slot, cycle.fencing_token)
                return
            except Exception as error:  # noqa: BLE001 - a database that is away may be back at the next beat; the token decides
                log.warning("lease not renewed policy=%s slot=%d error=%r", cycle.policy, cycle.slot, error)


def run_forever(tickers: list[Ticker], stop: threading.Event) -> None:
    """Tick until `stop` is set. Policies take turns in one thread: one machine trains one policy at a time."""
    scheduler: Any = BackgroundScheduler(  # Any: APScheduler 3 has no types
        timezone="UTC",
        # The defaults would drop a tick that is one second late without a word, and run several after a pause.
        job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
    )
    seconds = min(ticker.config.tick_s for ticker in tickers)
    scheduler.add_job(_tick_all, "interval", args=[tickers], seconds=seconds, next_run_time=tickers[0].clock())
    scheduler.start()
    stop.wait()
    scheduler.shutdown(wait=False)


def _tick_all(tickers: list[Ticker]) -> None:
    """One after the other; what breaks for one policy is logged, and costs the others no slot."""
    for ticker in tickers:
        try:
            ticker.tick()
        except Exception:
            log.exception("tick failed policy=%s", ticker.policy)
