"""What is done every so often goes on whatever comes."""

import logging
import threading

import pytest
from sqlalchemy.exc import OperationalError

from app.domain.errors import Unavailable
from pipelines.commands.running.repeating import repeat

ERRORS = [
    Unavailable("MLflow does not answer"), OSError("no space"), OperationalError("SELECT 1", None, ConnectionError("the server closed it")),
    ZeroDivisionError(),
]  # fmt: skip


def test_a_round_that_failed_is_said_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    stop, left, done = threading.Event(), list(ERRORS), list[int]()

    def work() -> None:
        if left:
            raise left.pop(0)
        done.append(1)
        if len(done) == 3:
            stop.set()

    with caplog.at_level(logging.WARNING):
        thread = repeat("prune", work, stop, every_s=0.001)
        thread.join(30.0)
    assert done == [1, 1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR", "ERROR"]
    assert all("what=prune" in record.message for record in caplog.records)


def test_the_first_round_waits_or_does_not() -> None:
    begun = {True: threading.Event(), False: threading.Event()}
    stop = threading.Event()
    threads = [repeat("x", event.set, stop, every_s=60.0, at_once=at_once) for at_once, event in begun.items()]
    assert begun[True].wait(30.0)
    stop.set()
    for thread in threads:
        thread.join(30.0)
    assert not begun[False].is_set()
