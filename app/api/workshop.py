"""Where long work on one request is done so that the others are answered meanwhile: one thread beside the event loop, with a short queue.

One, because Python's threads share one interpreter: several of them would take the loop's time, one takes at most half of it. Work must
be bounded by what is let in (`Limits`), for a thread cannot be stopped.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.domain.errors import Overloaded

T = TypeVar("T")
SMALL_CHARS = 512
"""Work on less text than this is done at once: at most 10 ms (redaction, 20 µs a character), and nearly always well below one."""
SWITCH_S = 0.0005
"""How long the thread may keep the interpreter when the loop wants it; Python's own 5 ms would show in everybody's latency."""


LONG_S = 0.001


def unhurried(steps: Iterable[T], *, chars: int) -> list[T]:
    """The steps' results. Beside the loop it rests, after some long ones or many short, as long as they took.

    Decoding and encoding hold the interpreter to their end, and an answer on the loop asks for it again at every read and write: steps
    one behind the other would each time keep it waiting.
    """
    if chars <= SMALL_CHARS or _on_a_loop():
        return list(steps)
    found, began = list[T](), time.monotonic()
    for result in steps:
        found.append(result)
        took = time.monotonic() - began
        if took > LONG_S:
            time.sleep(min(took, 0.05))
            began = time.monotonic()
    return found


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
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._busy -= 1
