"""What moves: one poller per process asks the database whether anything changed, and tells every open page; the pages come and look.

    poller ──(one small read every PULSE_S while somebody watches)──▶ every stream: `event: changed`
    page   ──(fetches itself again, with its viewer's rights)──▶ reads shared by everybody who asks within one pulse

A stream carries no data, so it can tell nobody what they may not see. It ends when its viewer may no longer look: rights are asked again
whenever who may do what has changed, and once a minute.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, cast

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from app.console.rendering import HEADERS
from app.domain.errors import RatchetError
from app.domain.views.pages import Sight

log = logging.getLogger("ratchet.console")
PULSE_S = 0.6
"""With the page's own fetch, a change is on the screen within a second; a process asks 1.7 times a second however many watch."""
BEAT_S = 15.0
"""A comment so often keeps proxies from closing a quiet stream."""
RIGHTS_S = 60.0
MOST_REMEMBERED = 2_000
STREAM = HEADERS | {"x-accel-buffering": "no"}
StillMay = Callable[[Request], Awaitable[bool]]


class Live:
    """Streams of one process. `still_may` says whether whoever opened a stream may still look."""

    def __init__(self, sight: Sight, *, still_may: StillMay | None = None, pulse_s: float = PULSE_S) -> None:
        self._sight = sight
        self._still_may = still_may
        self._pulse_s = pulse_s
        self._poller: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._watching = 0
        self._shared = Shared()
        self.pulse = ""
        self.access = ""

    def stream(self, request: Request) -> Response:
        """A stream of changes; `Last-Event-ID` from before a lost connection is compared with how it is now."""
        seen = request.headers.get("last-event-id")
        return StreamingResponse(self._events(request, seen), media_type="text/event-stream", headers=STREAM)

    def steady(self, sight: Sight) -> Sight:
        """The same sight, asked once per pulse for what several pages ask; without a poller it is asked every time."""
        return cast(Sight, _Steady(sight, self._shared, self.pulse)) if self._watching and self.pulse else sight

    async def _events(self, request: Request, seen: str | None) -> AsyncIterator[str]:
        self._watching += 1
        loop = asyncio.get_running_loop()
        try:
            self._start()
            while not self.pulse:
                await self._next(self._pulse_s)
            known, access, asked_at, spoke_at = seen or self.pulse, self.access, loop.time(), loop.time()
            yield f"retry: 1000\nid: {self.pulse}\n: watching\n\n"
            while True:
                if self.access != access or loop.time() - asked_at > RIGHTS_S:
                    access, asked_at = self.access, loop.time()
                    if self._still_may is not None and not await self._still_may(request):
                        yield "event: ended\ndata: you may no longer look\n\n"
                        return
                if self.pulse != known:
                    known, spoke_at = self.pulse, loop.time()
                    yield f"id: {known}\nevent: changed\ndata: {known}\n\n"
                elif loop.time() - spoke_at > BEAT_S:
                    spoke_at = loop.time()
                    yield ": still here\n\n"
                await self._next(BEAT_S)
        finally:
            self._watching -= 1

    def _start(self) -> None:
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())

    async def _next(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), at_most_s)

    async def _poll(self) -> None:
        """Until nobody watches any more."""
        while self._watching:
            try:
                pulse, access = await asyncio.to_thread(self._sight.pulse)
            except RatchetError as error:
                log.warning("event=pulse_lost error=%s", error)
            except Exception:  # without the poller every open page would stand still, and say nothing
                log.exception("event=pulse_lost")
            else:
                if (pulse, access) != (self.pulse, self.access):
                    self.pulse, self.access = pulse, access
                    self._shared.forget()
                    self._changed.set()
                    self._changed = asyncio.Event()
            await asyncio.sleep(self._pulse_s)
        self.pulse = ""


class Shared:
    """Answers of one pulse, for everybody who asks the same."""

    def __init__(self) -> None:
        self._answers: dict[Any, Future[Any]] = {}
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Something changed. Waits for no read: the event loop calls it."""
        with self._lock:
            self._answers = {}

    def get(self, key: Any, ask: Callable[[], Any]) -> Any:  # noqa: ANN401 - any answer of Sight
        """The answer, asked for once; a question that failed is asked again, but not by those who waited for it."""
        with self._lock:
            if key not in self._answers and len(self._answers) >= MOST_REMEMBERED:
                self._answers = {}
            answers, mine = self._answers, Future[Any]()
            answer = answers.setdefault(key, mine)
        if answer is mine:
            try:
                mine.set_result(ask())
            except Exception as error:  # noqa: BLE001 - whoever waits for it hears of it
                with self._lock:
                    del answers[key]
                mine.set_exception(error)
        return answer.result()


class _Steady:
    """A `Sight` whose answers are shared within one pulse. What streams (iterators) is not kept."""

    KEPT = frozenset(
        ("policies", "pointer", "needs", "names", "totals", "decisions", "approvals", "sums", "course", "segments", "gates", "people")
    )

    def __init__(self, sight: Sight, shared: Shared, pulse: str) -> None:
        self._sight = sight
        self._shared = shared
        self._pulse = pulse

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the methods of Sight
        ask = getattr(self._sight, name)
        if name not in self.KEPT:
            return ask

        def asked(*words: Any, **named: Any) -> Any:  # noqa: ANN401 - as the method takes and gives them
            key = (self._pulse, name, _key(words), _key(sorted(named.items())))
            return self._shared.get(key, lambda: ask(*words, **named))

        return asked


def _key(words: Any) -> str:  # noqa: ANN401 - arguments
    return repr([sorted(word) if isinstance(word, set | frozenset) else word for word in words])
