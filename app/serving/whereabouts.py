"""Who holds a version, by the ledger of engines; as it was last known while the ledger is away: an answer needs an engine and no database.

A ledger that refuses says so at once. One that is silent is waited for `PATIENCE_S`, by the first who ask; until it answers again nobody
waits for it, and each version has one question under way at most, in threads that nothing else needs.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from app.domain.errors import Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE_S = 1.0
THREADS = 4


class Whereabouts(Generic[T]):
    """Answers of the ledger by digest, asked for again when older than `forget_s`. Belongs to one event loop."""

    def __init__(self, ask: Callable[[str], T], *, nothing: T, forget_s: float) -> None:
        self._ask = ask
        self._nothing = nothing
        self._forget_s = forget_s
        self._known: dict[str, tuple[float, T]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._away = False
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="ledger")

    async def of(self, digest: str) -> T:
        """What the ledger says, or said last; `nothing` where it never said anything."""
        known_at, _ = self._known.get(digest, (float("-inf"), self._nothing))
        if time.monotonic() - known_at > self._forget_s:
            asking = self._asking.get(digest)
            if asking is None or asking.done():
                asking = self._asking[digest] = asyncio.create_task(self._refresh(digest))
            await asyncio.wait({asking}, timeout=0.0 if self._away else PATIENCE_S)
            self._away = self._away or not asking.done()
        return self._known.get(digest, (0.0, self._nothing))[1]

    def forget(self, digest: str) -> None:
        """Ask again before this version is looked for the next time."""
        if digest in self._known:
            self._known[digest] = (float("-inf"), self._known[digest][1])

    def close(self) -> None:
        """Wait for nobody any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _refresh(self, digest: str) -> None:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, digest)
        except Unavailable as error:
            if not self._away:
                log.warning("engines as last known, the ledger is away: %s", error)
            self._away = True
        else:
            self._away = False
            self._known[digest] = (time.monotonic(), found)
