"""How an engine's process ends: when it is told to, when one of its threads died, and what it finishes before."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn

from app.domain.errors import Unavailable
from app.listening.connections import Connection
from app.serving.process import _leave, _Server
from app.serving.residency import Residency
from app.serving.worker import Worker


class Quiet(_Server):
    """Serves nobody until it is to exit."""

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.005)


class Working:
    """A worker whose load falls by one each time that it is looked at."""

    def __init__(self, load: int = 0, *, alive: bool = True, falls: bool = True) -> None:
        self._load, self.alive, self.falls = load, alive, falls
        self.draining = False
        self.seen_draining: list[bool] = []

    @property
    def load(self) -> int:
        self.seen_draining.append(self.draining)
        self._load -= self.falls and self._load > 0
        return self._load


def served(worker: Working, *, alive: bool = True, drain_s: float = 20.0, leave: Callable[[], None] = lambda: None) -> float:
    """Serve until the end that is set already; how long that took."""
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    residency = cast("Residency", SimpleNamespace(alive=alive))
    ends = Quiet(uvicorn.Config("no:app", http=Connection)).serve_until(
        stop, cast("Any", None), cast("Worker", worker), residency, leave=leave, drain_s=drain_s
    )
    asyncio.run(asyncio.wait_for(ends, 30))
    return time.monotonic() - began


def test_an_engine_that_is_idle_ends_at_once_and_leaves_the_ledger_later() -> None:
    left: list[int] = []
    worker = Working()
    assert served(worker, leave=lambda: left.append(1)) < 10
    assert (left, worker.draining) == ([], True)


def test_an_engine_leaves_the_ledger_first_and_finishes_what_was_begun(caplog: pytest.LogCaptureFixture) -> None:
    order: list[int] = []
    worker = Working(4)
    with caplog.at_level(logging.INFO):
        served(worker, leave=lambda: order.append(worker._load))
    assert (order, worker._load) == ([3], 0)
    assert all(worker.seen_draining), "nothing new is taken from the beginning"
    assert "engine drained left=0" in caplog.text


@pytest.mark.parametrize(("drain_s", "longer"), [(0.0, False), (0.3, True)])
def test_an_engine_that_is_not_done_in_its_time_ends_all_the_same(drain_s: float, longer: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        took_s = served(Working(3, falls=False), drain_s=drain_s)
    assert took_s < 10
    assert took_s >= 0.3 or not longer
    assert "engine drained left=3" in caplog.text


@pytest.mark.parametrize(
    ("worker", "alive", "said"),
    [(Working(3, alive=False), True, "the thread that samples died"), (Working(), False, "the thread that takes up versions died")],
)
def test_an_engine_whose_thread_died_ends_with_an_error_so_that_it_is_started_again(worker: Working, alive: bool, said: str) -> None:
    left: list[int] = []
    with pytest.raises(RuntimeError, match=said):
        served(worker, alive=alive, leave=lambda: left.append(1))
    assert left == [], "what nobody samples is not waited for"


@pytest.mark.parametrize("fault", [None, Unavailable("the database is away")])
def test_a_ledger_that_is_away_keeps_no_engine_from_ending(fault: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    acts: list[str] = []

    def forget() -> None:
        acts.append("forget")
        if fault is not None:
            raise fault

    residency = cast("Residency", SimpleNamespace(close=lambda: acts.append("close")))
    _leave(residency, cast("Any", SimpleNamespace(forget=forget)))
    assert acts == ["close", "forget"], "nothing is reported after it"
    assert ("still in the ledger error=the database is away" in caplog.text) is (fault is not None)
