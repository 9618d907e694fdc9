"""The clock over a real database, SQLite and PostgreSQL: one cycle per slot, whoever ticks, dies or restarts.

The conformance cases name the bug of another project that they prevent (facts/gates.md, sections 6.2 and 7).
"""

import threading
import time
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from app.db.learning.cycles import SqlCycles
from app.db.leases import PER_TIMELINE
from app.domain.errors import LeaseLost
from app.domain.learning.cycles import Cycle, CycleStatus
from pipelines.config import ScheduleConfig
from pipelines.schedule import Ticker
from tests.fakes.clock import FrozenClock

FIVE_HOURS = 18_000
CONFIG = ScheduleConfig(slot_s=FIVE_HOURS, lease_s=60, heartbeat_s=15)


@pytest.fixture
def book(engine: Engine) -> SqlCycles:
    return SqlCycles(engine)


class Runs:
    """Counts the cycles that were run, and finishes them."""

    def __init__(self, book: SqlCycles, clock: FrozenClock) -> None:
        self.book, self.clock, self.slots = book, clock, []

    def __call__(self, cycle: Cycle) -> None:
        self.slots.append(cycle.slot)
        self.book.finish(cycle, status=CycleStatus.DONE, reason="a test ran it", now=self.clock())


class Dies:
    """Dies in the middle of a step, as after kill -9: nothing is recorded."""

    def __init__(self, book: SqlCycles, step: str) -> None:
        self.book, self.step = book, step

    def __call__(self, cycle: Cycle) -> None:
        self.book.advance(cycle, step=self.step, changes={})


def nothing(_policy: str) -> None:
    return None


def ticker(book: SqlCycles, clock: FrozenClock, run: object, *, owner: str = "a", config: ScheduleConfig = CONFIG, **why: object) -> Ticker:
    asked = {"close_orphans": nothing, "blocked": nothing, "thin": nothing, **why}
    return Ticker(policy="composer", owner=owner, book=book, config=config, clock=clock, run=run, **asked)  # type: ignore[arg-type]


def test_three_replicas_run_one_cycle_per_slot(book: SqlCycles) -> None:
    """agronholm/apscheduler#160: three schedulers on one shared store ran every job two or three times."""
    clock = FrozenClock()
    runs = Runs(book, clock)
    replicas = [ticker(book, clock, runs, owner=name) for name in "abc"]
    for _ in range(4):
        together = [threading.Thread(target=replica.tick) for replica in replicas]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        clock.advance(FIVE_HOURS)
    assert len(runs.slots) == len(set(runs.slots)) == 4


def test_restarting_every_ten_minutes_for_twelve_hours_still_trains_in_every_slot(book: SqlCycles) -> None:
    """agronholm/apscheduler#696: a restart re-arms the full interval, so frequent deployments stop training altogether."""
    clock = FrozenClock()
    runs = Runs(book, clock)
    for restart in range(72):
        ticker(book, clock, runs, owner=f"boot-{restart}").tick()
        clock.advance(600)
    assert len(runs.slots) == 4  # noon to midnight touches the slots that begin at 8, 13, 18 and 23 o'clock


@pytest.mark.parametrize("step", ["elected", "batch", "train", "register", "open", "judge"])
def test_a_cycle_killed_in_any_step_is_resumed_once_by_another_replica(book: SqlCycles, step: str) -> None:
    """agronholm/apscheduler#429: next_run_time moves on at hand-over, so a crash in mid-run loses the run."""
    clock = FrozenClock()
    ticker(book, clock, Dies(book, step), owner="dies").tick()
    runs = Runs(book, clock)
    survivor = ticker(book, clock, runs, owner="survives")
    assert survivor.tick() is None  # the lease still holds
    clock.advance(CONFIG.lease_s + 1)
    taken = survivor.tick()
    assert taken is not None
    assert (taken.attempt, taken.fencing_token % PER_TIMELINE, taken.step) == (2, 2, step)
    assert survivor.tick() is None
    assert len(runs.slots) == 1


def test_a_slot_that_dies_twice_is_recorded_as_failed(book: SqlCycles) -> None:
    clock = FrozenClock()
    dying = ticker(book, clock, Dies(book, "train"))
    for _ in range(2):
        dying.tick()
        clock.advance(CONFIG.lease_s + 1)
    assert dying.tick() is None
    failed = book.recent("composer")[0]
    assert failed.status is CycleStatus.FAILED
    assert "step train on attempt 2" in (failed.reason or "")


def test_releases_of_a_dead_cycle_are_closed_once_no_cycle_runs(book: SqlCycles) -> None:
    clock = FrozenClock()
    asked: list[str] = []
    dying = ticker(book, clock, Dies(book, "judge"), close_orphans=asked.append)
    dying.tick()
    dying.tick()  # the lease holds: the cycle may still be judging
    assert asked == ["composer"]  # only before it began
    clock.advance(CONFIG.lease_s + 1)
    dying.tick()
    assert asked == ["composer"]  # taken over: the second attempt judges
    clock.advance(CONFIG.lease_s + 1)
    dying.tick()  # failed for good
    assert asked == ["composer", "composer"]


def test_a_replica_that_wakes_up_after_its_lease_changes_nothing(book: SqlCycles) -> None:
    clock = FrozenClock()
    kept: list[Cycle] = []
    ticker(book, clock, kept.append, owner="zombie").tick()
    clock.advance(CONFIG.lease_s + 1)
    runs = Runs(book, clock)
    ticker(book, clock, runs, owner="heir").tick()
    with pytest.raises(LeaseLost, match="taken over"):
        book.advance(kept[0], step="train", changes={"run_id": "from-the-grave"})
    assert book.find("composer", kept[0].slot).run_id is None


def test_slots_nobody_decided_are_recorded_with_the_reason_and_only_the_newest_runs(book: SqlCycles) -> None:
    """agronholm/apscheduler#292: the default misfire grace of one second skips silently."""
    clock = FrozenClock()
    runs = Runs(book, clock)
    replica = ticker(book, clock, runs)
    replica.tick()
    clock.advance(3 * FIVE_HOURS)
    replica.tick()
    recent = book.recent("composer")
    assert [c.status for c in recent] == [CycleStatus.DONE, CycleStatus.SKIPPED, CycleStatus.SKIPPED, CycleStatus.DONE]
    assert all("missed" in (c.reason or "") for c in recent if c.status is CycleStatus.SKIPPED)
    assert len(runs.slots) == 2


def test_a_slot_whose_predecessor_still_runs_is_skipped_with_that_reason(book: SqlCycles) -> None:
    clock = FrozenClock()
    kept: list[Cycle] = []
    first = ticker(book, clock, kept.append)
    first.tick()
    clock.advance(FIVE_HOURS - 30)
    book.renew(kept[0], now=clock(), lease=timedelta(seconds=60))
    clock.advance(30)
    ticker(book, clock, Runs(book, clock), owner="b").tick()
    newest = book.recent("composer")[0]
    assert newest.status is CycleStatus.SKIPPED
    assert "still runs" in (newest.reason or "")


def test_a_release_in_flight_blocks_the_slot_and_says_so(book: SqlCycles) -> None:
    clock = FrozenClock()
    runs = Runs(book, clock)
    ticker(book, clock, runs, blocked=lambda _: "release r1 is in CANARY").tick()
    assert runs.slots == []
    assert book.recent("composer")[0].reason == "release r1 is in CANARY"


def test_with_patience_a_slot_waits_for_labels_and_then_is_decided_anyway(book: SqlCycles) -> None:
    clock = FrozenClock()
    runs = Runs(book, clock)
    patient = ScheduleConfig(slot_s=60, patience_s=50, lease_s=60)
    replica = ticker(book, clock, runs, config=patient, thin=lambda _: "12 of 96 labels")
    replica.tick()
    assert runs.slots == []
    assert book.newest_slot("composer") is None
    clock.advance(51)
    replica.tick()
    assert len(runs.slots) == 1  # the update itself then records HELD: too few labels


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_jumps_never_runs_a_slot_twice(book: SqlCycles, jump_s: int) -> None:
    clock = FrozenClock()
    runs = Runs(book, clock)
    replica = ticker(book, clock, runs)
    for step in (0, jump_s, -jump_s, 60):
        clock.advance(step)
        replica.tick()
    assert len(runs.slots) == len(set(runs.slots))


def test_a_zombie_writes_nothing_while_its_heir_is_at_work(book: SqlCycles) -> None:
    """The row is still running when the zombie wakes up: only the fencing token tells the two apart."""
    clock = FrozenClock()
    kept: list[Cycle] = []
    ticker(book, clock, kept.append, owner="zombie").tick()
    clock.advance(CONFIG.lease_s + 1)
    ticker(book, clock, kept.append, owner="heir").tick()
    zombie, heir = kept
    before = book.find("composer", heir.slot)
    assert (before.status, before.owner, before.fencing_token % PER_TIMELINE) == (CycleStatus.RUNNING, "heir", 2)
    for write in (
        lambda: book.advance(zombie, step="train", changes={"run_id": "from-the-grave"}),
        lambda: book.renew(zombie, now=clock(), lease=timedelta(hours=9)),
        lambda: book.finish(zombie, status=CycleStatus.DONE, reason="from the grave", now=clock()),
    ):
        with pytest.raises(LeaseLost, match="taken over"):
            write()
    assert book.find("composer", heir.slot) == before
    book.advance(heir, step="train", changes={"run_id": "alive"})
    assert book.find("composer", heir.slot).run_id == "alive"


class Beats(FrozenClock):
    """Counts how often the heart asks for the time: once a beat, before it renews."""

    count = 0

    def __call__(self) -> datetime:
        """The time."""
        self.count += threading.current_thread().name == "cycle-heartbeat"
        return super().__call__()

    def wait(self) -> None:
        """Until two beats that began after now are over."""
        wanted, give_up = self.count + 4, time.monotonic() + 300
        while self.count < wanted:
            assert time.monotonic() < give_up, "there is no heart"
            time.sleep(0.005)


class Failing(SqlCycles):
    """Loses its connection at every second beat, as in a failover."""

    beats = 0

    def renew(self, cycle: Cycle, *, now: datetime, lease: timedelta) -> None:
        self.beats += 1
        if self.beats % 2:
            raise OperationalError("UPDATE cycles", None, ConnectionError("server closed the connection unexpectedly"))
        super().renew(cycle, now=now, lease=lease)


@pytest.mark.parametrize("kind", [SqlCycles, Failing])
def test_the_lease_of_a_long_step_is_renewed_by_its_heartbeat(engine: Engine, kind: type[SqlCycles]) -> None:
    """Nothing else renews it: without the heartbeat every update longer than the lease would be taken over in the middle."""
    clock, book = Beats(), kind(engine)
    rival = ticker(book, clock, Runs(book, clock), owner="rival")
    seen: list[bool] = []

    def long_step(cycle: Cycle) -> None:
        for _ in range(3):
            clock.advance(CONFIG.lease_s - 1)
            clock.wait()
            seen.append(book.find(cycle.policy, cycle.slot).lease_expires_at == clock.now + timedelta(seconds=CONFIG.lease_s))
            assert rival.tick() is None
        book.finish(cycle, status=CycleStatus.DONE, reason=None, now=clock())

    beating = ScheduleConfig(slot_s=FIVE_HOURS, lease_s=CONFIG.lease_s, heartbeat_s=0.01)
    ticker(book, clock, long_step, owner="works", config=beating).tick()
    assert seen == [True] * 3
    assert book.recent("composer")[0].attempt == 1
