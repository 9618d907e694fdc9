"""Where whoever signs in waits: beside everything else that the service does, and in a short queue.

Anybody who reaches the service may ask to be let in, and a password takes a tenth of a second to look at, a provider's answer seconds.
On the threads that read keys, tokens and pages for everybody, a hundred strangers at the door would stop all of them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.domain.errors import Overloaded

T = TypeVar("T")
WAITING = 16
"""Who waits behind these is sent away at once: at a tenth of a second each the last one waits two seconds."""


class Porch:
    """Looks at those who want to come in one after the other, on a thread of its own."""

    def __init__(self, *, waiting: int = WAITING) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="porch")
        self._most = waiting
        self._there = 0

    async def take(self, look: Callable[[], T]) -> T:
        """What `look` finds. Raises `Overloaded` where too many wait, before anything is looked at."""
        if self._there >= self._most:
            raise Overloaded("too many people are signing in just now: try again in a few seconds", retry_after_s=2.0)
        self._there += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, look)
        finally:
            self._there -= 1
