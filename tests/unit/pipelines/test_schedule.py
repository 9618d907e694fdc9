"""The clock as it runs: at once, again and again, for every policy, until it is told to stop."""

import threading
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from app.domain.ids import utc_now
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
