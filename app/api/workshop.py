"""Where long work on one request is done so that the others are answered meanwhile: one thread beside the event loop, with a short queue.

One, because Python's threads share one interpreter: several of them would take the loop's time, one takes at most half of it. Work must
be bounded by what is let in (`Limits`), for a thread cannot be stopped.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from app.domain.errors import Overloaded

T = TypeVar("T")
SMALL_CHARS = 512
"""Work on less text than this is done at once: at most 10 ms (redaction, 20 µs a character), and nearly always well below one."""
SWITCH_S = 0.0001
"""How long the thread may keep the interpreter when the loop wants it, which it does after every read and write of an answer,
ten times: Python's own 5 ms would show in everybody's latency, and half a millisecond did."""
LONG_S, REST_S = 0.001, 0.05
"""Worked beside the loop at a stretch, and the longest rest after it."""


class _Pace(threading.local):
    """Of one thread."""

    beside = False
    """Whether it is at work beside the loop."""
    began = 0.0
    """When it last began, or rested."""


_pace = _Pace()


def breathe() -> None:
    """Beside the loop: rest after a while of work, as long as it took. To be called between steps; does nothing on the loop.

    Whoever waits for the interpreter gets it, but an answer on the loop asks for it again at every read and write: work without rests would
    take more than half of the time.
    """
    if _pace.beside:
        took = time.monotonic() - _pace.began
        if took > LONG_S:
            time.sleep(min(took, REST_S))
            _pace.began = time.monotonic()


def unhurried(steps: Iterable[T], *, chars: int) -> list[T]:
    """The steps' results. Beside the loop it breathes between them: what decodes and encodes keeps the interpreter to its end."""
    if chars <= SMALL_CHARS or _on_a_loop():
        return list(steps)
    found = list[T]()
    with _beside():
        for result in steps:
            found.append(result)
            breathe()
    return found


@contextmanager
def _beside() -> Iterator[None]:
    """This thread works beside the loop, from now on or already."""
    if _pace.beside:
        yield
        return
    _pace.beside, _pace.began = True, time.monotonic()
    try:
        yield
    finally:
        _pace.beside = False


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Workshop:
    """Does work for requests, one after the other."""

    def __init__(self, *, waiting: int = 16) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workshop")
        self._most = waiting
        self._busy = 0
        self._rested_at = 0.0
        """When the thread will have rested from its last work."""

    async def do(self, work: Callable[[], T], *, chars: int, patient: bool = False) -> T:
        """The result of `work`, done at once where there is little text to work on. Raises `Overloaded` when too many wait.

        Patient work waits behind any number: what was sampled is not given up because others sent large bodies.
        """
        if chars <= SMALL_CHARS:
            return work()
        if self._busy >= self._most and not patient:
            raise Overloaded("too many large bodies are being worked on: come back in a second", retry_after_s=1.0)
        self._busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._paced, work)
        finally:
            self._busy -= 1

    def _paced(self, work: Callable[[], T]) -> T:
        """In the thread: the work, after a rest from the one before."""
        time.sleep(max(0.0, self._rested_at - time.monotonic()))
        try:
            with _beside():
                return work()
        finally:
            now = time.monotonic()
            self._rested_at = now + min(now - _pace.began, REST_S)
