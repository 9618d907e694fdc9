"""Where long work on one request is done so that the others are answered meanwhile: one thread beside the event loop, in fair turns.

One, because Python's threads share one interpreter: several of them would take the loop's time, one takes at most half of it. Work must
be bounded by what is let in (`Limits`), for a thread cannot be stopped.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

from app.domain.errors import Overloaded

T = TypeVar("T")
SMALL_CHARS = 512
"""Work on less text than this is done at once: at most 10 ms (redaction, 20 µs a character), and nearly always well below one."""
SWITCH_S = 0.0001
"""How long the thread may keep the interpreter when the loop wants it, which it does after every read and write of an answer,
ten times: Python's own 5 ms would show in everybody's latency, and half a millisecond did."""
MANY, FEW = 16, 4
"""Work that may wait or be done: of a key, behind which are many people, and of one session or the feedback about one answer."""
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


@dataclass(frozen=True, kw_only=True)
class Share:
    """Whose work it is: those in one line share its turn among each other, as the answers of one key's tokens do."""

    line: str
    member: str = ""
    most: int = MANY
    """Of the member's work that waits or is being done."""


@dataclass
class _Line:
    """Work of one caller that waits."""

    spent_s: float
    """Of the thread's time, as if it had been there from the beginning and taken its part."""
    members: "OrderedDict[str, deque[tuple[Callable[[], object], Future[object]]]]" = field(default_factory=OrderedDict)

    def pop(self) -> "tuple[Callable[[], object], Future[object]]":
        """The next member's first."""
        name, waiting = self.members.popitem(last=False)
        work = waiting.popleft()
        if waiting:
            self.members[name] = waiting
        return work


class Workshop:
    """Does work for requests, one after the other: next is whoever has had the least of the thread's time among those who wait.

    So one who sends the worst there is makes others wait for one work of his at a time, and only himself be refused.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workshop")
        self._lines: dict[str, _Line] = {}
        self._asked = Counter[Share]()
        """Work that waits or is being done."""
        self._lock = threading.Lock()
        self._had_s = 0.0
        """What the line that was served last had had: who comes new begins there."""
        self._rested_at = 0.0
        """When the thread will have rested from its last work."""

    async def do(self, work: Callable[[], T], *, chars: int, share: Share, patient: bool = False) -> T:
        """The result of `work`, done at once where there is little text to work on. Raises `Overloaded` where too much of theirs waits.

        Patient work waits behind any amount: what was sampled is not given up because large bodies were sent.
        """
        if chars <= SMALL_CHARS:
            return work()
        if self._asked[share] >= share.most and not patient:
            raise Overloaded("too many large bodies of yours are being worked on: come back in a second", retry_after_s=1.0)
        self._asked[share] += 1
        try:
            return await asyncio.wrap_future(self._queued(work, share))
        finally:
            self._asked[share] -= 1
            if not self._asked[share]:
                del self._asked[share]

    def _queued(self, work: Callable[[], T], share: Share) -> "Future[T]":
        done: Future[T] = Future()
        with self._lock:
            line = self._lines.setdefault(share.line, _Line(self._had_s))
            line.members.setdefault(share.member, deque()).append((work, cast("Future[object]", done)))
        self._thread.submit(self._next)
        return done

    def _next(self) -> None:
        """In the thread: the work whose turn it is, after a rest from the one before."""
        time.sleep(max(0.0, self._rested_at - time.monotonic()))
        with self._lock:
            name = min(self._lines, key=lambda name: self._lines[name].spent_s)
            line = self._lines[name]
            work, done = line.pop()
            self._had_s = max(self._had_s, line.spent_s)
            if not line.members:
                del self._lines[name]
        if not done.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            with _beside():
                result = work()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            done.set_exception(error)
        else:
            done.set_result(result)
        now = time.monotonic()
        self._rested_at = now + min(now - _pace.began, REST_S)
        with self._lock:
            line.spent_s += now - began
