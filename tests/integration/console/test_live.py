"""Streams: one poller however many watch, a change told at once, an end when whoever watches may no longer look."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from fastapi import Request

from app.console.live import Live
from app.domain.errors import Unavailable
from app.domain.views.pages import Sight

PULSE_S = 0.01


class Heart:
    """A database that beats: counts how often it is asked."""

    def __init__(self) -> None:
        self.now, self.access, self.asked, self.away = 1, 1, 0, False
        self.pointers = 0
        self.crowded = False

    def pulse(self) -> tuple[str, str]:
        self.asked += 1
        if self.crowded:
            raise TimeoutError("QueuePool limit of size 5 overflow 10 reached")
        if self.away:
            raise Unavailable("the database does not answer")
        return str(self.now), str(self.access)

    def pointer(self, policy: str) -> str:
        self.pointers += 1
        return f"pointer of {policy}"


def live(heart: Heart, **more: Any) -> Live:
    return Live(cast(Sight, heart), pulse_s=PULSE_S, **more)


def request(last: str | None = None) -> Request:
    return Request({"type": "http", "headers": [] if last is None else [(b"last-event-id", last.encode())]})


async def opened(over: Live, last: str | None = None) -> tuple[AsyncIterator[str], str]:
    """A stream after its first words."""
    body = cast(AsyncIterator[str], cast(Any, over.stream(request(last))).body_iterator)
    return body, await asyncio.wait_for(anext(body), 5)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(PULSE_S)


def test_fifty_streams_are_told_of_a_change_by_one_poller() -> None:
    async def scene() -> None:
        heart = Heart()
        over = live(heart)
        streams = [(await opened(over))[0] for _ in range(50)]
        asked = heart.asked
        heart.now = 2
        told = await asyncio.wait_for(asyncio.gather(*(anext(stream) for stream in streams)), 5)
        assert set(told) == {"id: 2\nevent: changed\ndata: 2\n\n"}
        assert heart.asked - asked < 50, "everybody asked for themselves"
        for stream in streams:
            await cast(Any, stream).aclose()
        await until(lambda: over._poller is not None and over._poller.done())

    asyncio.run(scene())


def test_a_stream_is_neither_kept_nor_held_up_on_its_way() -> None:
    answer = live(Heart()).stream(request())
    assert answer.media_type == "text/event-stream"
    assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-store")


def test_what_changed_while_the_connection_was_lost_is_told_at_once() -> None:
    async def scene() -> None:
        heart = Heart()
        heart.now = 7
        stream, _ = await opened(live(heart), last="6")
        assert "id: 7\nevent: changed" in await asyncio.wait_for(anext(stream), 5)

    asyncio.run(scene())


def test_a_stream_ends_when_its_viewer_may_no_longer_look() -> None:
    async def scene() -> None:
        heart, may = Heart(), True

        async def still_may(_request: Request) -> bool:
            return may

        stream, _ = await opened(live(heart, still_may=still_may))
        may, heart.access = False, 2
        assert "event: ended" in await asyncio.wait_for(anext(stream), 5)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(scene())


def test_a_database_that_is_away_for_a_while_ends_no_stream() -> None:
    async def scene() -> None:
        heart = Heart()
        stream, _ = await opened(live(heart))
        heart.away = True
        asked = heart.asked
        await until(lambda: heart.asked > asked + 2)
        heart.away, heart.now = False, 2
        assert "id: 2" in await asyncio.wait_for(anext(stream), 5)

    asyncio.run(scene())


def test_a_failure_that_nobody_expected_ends_no_stream_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        heart = Heart()
        stream, _ = await opened(live(heart))
        heart.crowded, asked = True, heart.asked
        await until(lambda: heart.asked > asked)
        heart.crowded, heart.now = False, 2
        assert "id: 2" in await asyncio.wait_for(anext(stream), 1)

    asyncio.run(scene())
    assert "event=pulse_lost" in caplog.text
    assert "QueuePool limit" in caplog.text


def test_what_several_pages_ask_within_one_pulse_is_read_once_and_anew_after_it() -> None:
    async def scene() -> None:
        heart = Heart()
        over = live(heart)
        stream, _ = await opened(over)
        answers = [over.steady(cast(Sight, heart)).pointer(policy) for policy in ("a", "a", "b")]
        assert (answers, heart.pointers) == (["pointer of a", "pointer of a", "pointer of b"], 2)
        heart.now = 2
        await anext(stream)
        over.steady(cast(Sight, heart)).pointer("a")
        assert heart.pointers == 3

    asyncio.run(scene())


def test_without_anybody_watching_every_page_reads_for_itself() -> None:
    heart = Heart()
    over = live(heart)
    for _ in range(2):
        over.steady(cast(Sight, heart)).pointer("a")
    assert (heart.pointers, heart.asked) == (2, 0)
