"""Streams on a clock that is moved by hand: how often the database is asked, a quiet stream speaks, and rights are asked again."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from fastapi import Request

from app.console.live import Live, Shared
from app.domain.views.pages import Sight


class ByHand(asyncio.SelectorEventLoop):
    """A loop whose clock stands still."""

    at_s = 1_000.0

    def time(self) -> float:
        return self.at_s


class Heart:
    """A database that beats, and counts how often it is asked."""

    def __init__(self) -> None:
        self.now, self.asked = "1", 0

    def pulse(self) -> tuple[str, str]:
        self.asked += 1
        return self.now, "a"

    def audit_entries(self) -> list[int]:
        self.asked += 1
        return [self.asked]

    def names(self, policy: str, digests: Any) -> int:
        self.asked += 1
        return self.asked


class Scene:
    """A stream over a heart, and the clock."""

    def __init__(self, **more: Any) -> None:
        self.loop = cast("ByHand", asyncio.get_running_loop())
        self.heart, self.may, self.asked_rights = Heart(), True, 0
        self.live = Live(cast("Sight", self.heart), still_may=self._still_may, **more)

    async def _still_may(self, _request: Request) -> bool:
        self.asked_rights += 1
        return self.may

    async def opened(self) -> AsyncIterator[str]:
        stream: Any = self.live.stream(Request({"type": "http", "headers": []}))
        body: AsyncIterator[str] = stream.body_iterator
        first = asyncio.ensure_future(cast("Any", anext(body)))
        await eventually(lambda: self.heart.asked == 1)
        self.loop.at_s += 1.0  # whoever opened the stream looks again a pulse later
        await eventually(first.done)
        assert first.result() == "retry: 1000\nid: 1\n: watching\n\n"
        return body

    def next_of(self, stream: AsyncIterator[str]) -> "asyncio.Future[str]":
        return asyncio.ensure_future(cast("Awaitable[str]", anext(stream)))


async def eventually(holds: Callable[[], bool]) -> None:
    patient_until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < patient_until, "it never came"
        await asyncio.to_thread(time.sleep, 0.001)


def played(scene: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=ByHand) as runner:
        runner.run(cast("Any", scene()))


async def left(stream: AsyncIterator[str], *waiting: "asyncio.Future[str]") -> None:
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await cast("Any", stream).aclose()


def test_the_database_is_asked_every_six_tenths_of_a_second_however_long_it_takes_to_change() -> None:
    async def scene() -> None:
        room = Scene()
        stream = await room.opened()
        for _ in range(3):
            await _settled(room)
            asked = room.heart.asked
            room.loop.at_s += 0.6
            await eventually(lambda asked=asked: room.heart.asked > asked)
        await left(stream)

    played(scene)


async def _settled(room: Scene) -> None:
    """Until the poller sleeps."""
    asked = -1
    while asked != room.heart.asked:
        asked = room.heart.asked
        await asyncio.to_thread(time.sleep, 0.02)


def test_a_quiet_stream_speaks_every_fifteen_seconds_and_asks_for_rights_once_a_minute() -> None:
    async def scene() -> None:
        room = Scene()
        stream = await room.opened()
        for _ in range(3):
            waiting = room.next_of(stream)
            await _settled(room)
            room.loop.at_s += 15.5
            await eventually(waiting.done)
            assert waiting.result() == ": still here\n\n"
        assert room.asked_rights == 0, "46 seconds"
        room.may, waiting = False, room.next_of(stream)
        await _settled(room)
        room.loop.at_s += 15.5
        await eventually(waiting.done)
        assert (room.asked_rights, waiting.result()) == (1, "event: ended\ndata: you may no longer look\n\n")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    played(scene)


def test_who_may_still_look_goes_on_and_is_asked_about_again_a_minute_later() -> None:
    async def scene() -> None:
        room = Scene()
        stream = await room.opened()
        for minute in (1, 2):
            waiting = room.next_of(stream)
            await _settled(room)
            room.loop.at_s += 61.0
            await eventually(waiting.done)
            assert (room.asked_rights, waiting.result()) == (minute, ": still here\n\n")
        await left(stream)

    played(scene)


def test_a_change_is_told_once_and_a_stream_that_spoke_of_it_is_quiet_for_its_whole_time() -> None:
    async def scene() -> None:
        room = Scene()
        stream = await room.opened()
        waiting = room.next_of(stream)
        await _settled(room)
        room.loop.at_s += 14.0
        await _settled(room)
        room.heart.now = "2"
        room.loop.at_s += 0.7
        await eventually(waiting.done)
        assert waiting.result() == "id: 2\nevent: changed\ndata: 2\n\n"
        waiting = room.next_of(stream)
        await _settled(room)
        room.loop.at_s += 14.0
        await _settled(room)
        assert not waiting.done(), "it spoke 14 seconds ago"
        await left(stream, waiting)

    played(scene)


def test_what_streams_is_not_shared_and_what_is_asked_in_another_order_is() -> None:
    async def scene() -> None:
        room = Scene()
        sight = cast("Sight", room.heart)
        assert room.live.steady(sight) is sight, "nobody watches"
        stream = await room.opened()
        steady = room.live.steady(sight)
        await _settled(room)
        first: Any = steady.names("tab", {"a", "b"})
        assert [steady.names("tab", {"b", "a"}), steady.names("tab", frozenset({"a", "b"}))] == [first, first]
        assert [steady.names("tab", ["a"]), steady.names("composer", {"a", "b"})] == [first + 1, first + 2]
        assert steady.audit_entries() != steady.audit_entries()
        await left(stream)
        assert room.live.steady(sight) is sight

    played(scene)


def test_a_read_that_takes_long_holds_up_neither_a_change_nor_other_reads_and_is_asked_once() -> None:
    shared, begun, may_end, asked = Shared(), threading.Event(), threading.Event(), list[str]()

    def slow() -> str:
        asked.append("sums")
        begun.set()
        may_end.wait(20)
        return "the sums"

    with ThreadPoolExecutor(4) as threads:
        pages = [threads.submit(shared.get, "sums", slow)]
        assert begun.wait(10)
        pages.append(threads.submit(shared.get, "sums", slow))
        other = threads.submit(shared.get, "names", lambda: "the names")
        try:
            assert other.result(1) == "the names"
            threads.submit(shared.forget).result(1)
            assert shared.get("sums", lambda: "newer sums") == "newer sums", "what was asked before the change is not what is told after it"
        finally:
            may_end.set()
        assert [page.result(10) for page in pages] == ["the sums"] * 2
    assert (asked, shared.get("sums", slow)) == (["sums"], "newer sums")


def test_a_read_that_failed_is_asked_again() -> None:
    shared = Shared()
    with pytest.raises(ZeroDivisionError):
        shared.get("sums", lambda: 1 / 0)
    assert shared.get("sums", lambda: 1) == 1
