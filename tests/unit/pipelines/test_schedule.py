"""The clock as it runs: at once, again and again, for every policy, until it is told to stop."""

import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from app.domain.ids import utc_now
from app.domain.learning.cycles import Cycle, CycleStatus
from pipelines.config import ScheduleConfig
from pipelines.schedule import Ticker, run_forever

FAR_SLOT = int(datetime(2100, 1, 1, tzinfo=UTC).timestamp())


class Book:
    """Slots that are all decided; looking at those of a broken policy raises what nobody expected."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def take_over(self, policy: str, **_: Any) -> None:
        self.asked[policy] += 1
        if policy == "broken":
            raise ZeroDivisionError("a bug")

    def running(self, policy: str) -> None:
        return None

    def newest_slot(self, policy: str) -> int:
        return FAR_SLOT


def ticker(policy: str, book: Any) -> Ticker:
    def never(_: object) -> None:
        return None

    config = msgspec.structs.replace(ScheduleConfig(), tick_s=0.02)
    return Ticker(
        policy=policy, owner="me", book=book, config=config, clock=utc_now, close_orphans=never, blocked=never, thin=never, run=never
    )


def test_every_policy_is_looked_at_again_and_again_and_one_that_breaks_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    book, stop = Book(), threading.Event()
    clock = threading.Thread(target=run_forever, args=[[ticker("broken", book), ticker("composer", book)], stop])
    clock.start()
    give_up = time.monotonic() + 60
    while min(book.asked["broken"], book.asked["composer"]) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    stop.set()
    clock.join(60)
    assert not clock.is_alive()
    assert min(book.asked["broken"], book.asked["composer"]) >= 3
    assert "tick failed policy=broken" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    looked = book.asked.total()
    time.sleep(0.1)
    assert book.asked.total() <= looked + 2, "one look may have been under way"


# --- one tick --------------------------------------------------------------------------------------------------------------------------

SLOT_S = 100
SLOT = 5_000_000
"""A multiple of the length."""


class Kept:
    """A book that keeps what it was told."""

    def __init__(self, *, newest: int | None = None, running: Cycle | None = None, left: Cycle | None = None) -> None:
        self.newest, self.current, self.left = newest, running, left
        self.skipped: list[tuple[int, str]] = []
        self.elected: list[int] = []
        self.leases: list[timedelta] = []

    def take_over(self, policy: str, *, owner: str, now: datetime, lease: timedelta) -> Cycle | None:
        self.leases.append(lease)
        return self.left

    def running(self, policy: str) -> Cycle | None:
        return self.current

    def newest_slot(self, policy: str) -> int | None:
        return self.newest

    def skip(self, policy: str, slot: int, *, reason: str, now: datetime) -> bool:
        self.skipped.append((slot, reason))
        return True

    def elect(self, policy: str, slot: int, *, owner: str, now: datetime, lease: timedelta) -> Cycle:
        self.elected.append(slot)
        self.leases.append(lease)
        return cycle(slot)


def cycle(slot: int) -> Cycle:
    now = datetime.fromtimestamp(slot, UTC)
    return Cycle(
        policy="p", slot=slot, status=CycleStatus.RUNNING, step="train", reason=None, owner="o", fencing_token=1, attempt=1,
        lease_expires_at=None, batch_id=None, run_id=None, release_id=None, started_at=now, finished_at=None,
    )  # fmt: skip


class Acts:
    """A replica, and what it did."""

    def __init__(
        self, book: Kept, *, after_s: float = 0.0, blocked: str | None = None, thin: str | None = None, patience_s: float = 30.0
    ) -> None:
        self.orphans, self.ran = 0, list[int]()
        config = msgspec.structs.replace(ScheduleConfig(), slot_s=SLOT_S, patience_s=patience_s, lease_s=7.0)
        self.ticker = Ticker(
            policy="p", owner="o", book=cast("Any", book), config=config, clock=lambda: datetime.fromtimestamp(SLOT + after_s, UTC),
            close_orphans=self._close, blocked=lambda _: blocked, thin=lambda _: thin, run=lambda run: self.ran.append(run.slot),
        )  # fmt: skip

    def _close(self, policy: str) -> None:
        self.orphans += 1


def test_a_slot_that_nobody_decided_is_elected_and_run() -> None:
    book = Kept()
    acts = Acts(book)
    found = acts.ticker.tick()
    assert found is not None
    assert (found.slot, book.elected, acts.ran, book.skipped, acts.orphans) == (SLOT, [SLOT], [SLOT], [], 1)
    assert book.leases == [timedelta(seconds=7)] * 2


@pytest.mark.parametrize("newest", [SLOT, SLOT + SLOT_S])
def test_a_slot_that_was_decided_is_left_alone(newest: int) -> None:
    book = Kept(newest=newest)
    acts = Acts(book)
    assert acts.ticker.tick() is None
    assert (book.elected, acts.ran, book.skipped, acts.orphans) == ([], [], [], 1)


@pytest.mark.parametrize(
    ("slots_ago", "first", "count"),
    [(1, SLOT, 0), (2, SLOT - 100, 1), (49, SLOT - 4800, 48), (50, SLOT - 4800, 48), (500, SLOT - 4800, 48)],
)
def test_missed_slots_are_recorded_one_by_one_up_to_forty_eight(slots_ago: int, first: int, count: int) -> None:
    book = Kept(newest=SLOT - slots_ago * SLOT_S + 7)
    Acts(book).ticker.tick()
    assert [slot for slot, _ in book.skipped] == list(range(first, SLOT, SLOT_S))
    assert len(book.skipped) == count
    assert {reason for _, reason in book.skipped} <= {"missed: no replica decided on it in time"}
    assert book.elected == [SLOT]


@pytest.mark.parametrize(
    ("after_s", "blocked", "thin", "elected", "skipped"),
    [
        (29.9, None, None, [SLOT], []),
        (29.9, "a canary", None, [], []),
        (29.9, None, "too few", [], []),
        (30.0, "a canary", None, [], [(SLOT, "a canary")]),
        (30.0, "a canary", "too few", [], [(SLOT, "a canary")]),
        (30.0, None, "too few", [SLOT], []),
    ],
)
def test_patience_lasts_for_so_long_and_then_a_block_skips_and_thin_labels_do_not(
    after_s: float, blocked: str | None, thin: str | None, elected: list[int], skipped: list[tuple[int, str]]
) -> None:
    book = Kept()
    Acts(book, after_s=after_s, blocked=blocked, thin=thin).ticker.tick()
    assert (book.elected, book.skipped) == (elected, skipped)


def test_a_cycle_that_still_runs_blocks_the_slot_and_keeps_its_releases() -> None:
    book = Kept(running=cycle(SLOT - SLOT_S))
    acts = Acts(book, patience_s=0.0)
    assert acts.ticker.tick() is None
    assert book.skipped == [(SLOT, f"the cycle of slot {SLOT - SLOT_S} still runs (step train)")]
    assert acts.orphans == 0


def test_a_cycle_whose_owner_is_gone_is_run_before_anything_is_elected() -> None:
    book = Kept(left=cycle(SLOT - SLOT_S))
    acts = Acts(book)
    found = acts.ticker.tick()
    assert found is not None
    assert (acts.ran, book.elected, acts.orphans) == ([SLOT - SLOT_S], [], 0)
