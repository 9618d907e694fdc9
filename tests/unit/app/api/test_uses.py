"""When keys were used: written beside the requests, once a minute."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest

from app.api.entry.access import Access
from app.api.entry.sessions import Sessions
from app.domain.access import Scope
from app.domain.errors import Unavailable
from app.listening.errors import HttpError
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import MemoryKeys

SESSIONS = Sessions(lambda: ("a session secret",))


def headers(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def last_uses(keys: MemoryKeys) -> list[Any]:
    return [key.last_used_at for key in keys.keys]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


def test_when_a_key_was_used_is_written_once_a_minute_and_not_for_each_request() -> None:
    keys, clock = MemoryKeys(), FrozenClock()
    used, _ = keys.add(Scope.INGEST), keys.add(Scope.INGEST)
    access = Access(keys, clock=clock, sessions=SESSIONS)
    access.load()

    async def story() -> None:
        for _ in range(1000):
            await access.identify(headers(used))
        await until(lambda: keys.writes == 1)
        clock.advance(59)
        await access.identify(headers(used))
        clock.advance(1)
        await access.identify(headers(used))
        await until(lambda: keys.writes == 2)

    began = clock()
    asyncio.run(story())
    assert last_uses(keys) == [began + timedelta(seconds=60), None]


def test_no_request_waits_until_it_is_written_that_a_key_was_used() -> None:
    free = threading.Event()

    class Stuck(MemoryKeys):
        def note_used(self, used: Mapping[str, datetime]) -> None:
            assert free.wait(60)
            super().note_used(used)

    keys, clock = Stuck(), FrozenClock()
    one, other = keys.add(Scope.INGEST), keys.add(Scope.INGEST)
    access = Access(keys, clock=clock, sessions=SESSIONS)
    access.load()

    async def story() -> None:
        await access.identify(headers(one))
        await access.identify(headers(other))
        free.set()
        await until(lambda: None not in last_uses(keys))

    asyncio.run(story())
    assert last_uses(keys) == [clock()] * 2


def test_what_a_sessions_key_asks_for_is_a_use_of_the_key_that_started_it() -> None:
    keys, clock = MemoryKeys(), FrozenClock()
    parent, _ = keys.add(Scope.INGEST), keys.add(Scope.INGEST)
    access = Access(keys, clock=clock, sessions=SESSIONS)
    access.load()

    async def story() -> None:
        token, _ = access.session_token("an episode", await access.identify(headers(parent)))
        clock.advance(3600)
        await access.identify(headers(token))
        await until(lambda: keys.keys[0].last_used_at == clock())

    asyncio.run(story())
    assert last_uses(keys) == [clock(), None]


def test_who_is_turned_away_used_no_key() -> None:
    keys, clock = MemoryKeys(), FrozenClock()
    good, ended = keys.add(Scope.INGEST), keys.add(Scope.INGEST, expires_at=clock() - timedelta(seconds=1))
    access = Access(keys, clock=clock, sessions=SESSIONS)
    access.load()

    async def story() -> None:
        for key in (good[:-4] + "AAAA", ended):
            with pytest.raises(HttpError):
                await access.identify(headers(key))
        await access.reread()

    asyncio.run(story())
    assert (keys.writes, last_uses(keys)) == (0, [None, None])


def test_a_use_that_could_not_be_written_is_written_when_the_database_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryKeys):
        away = True

        def note_used(self, used: Mapping[str, datetime]) -> None:
            if self.away:
                raise Unavailable("the database does not answer")
            super().note_used(used)

    keys, clock = Away(), FrozenClock()
    key = keys.add(Scope.INGEST)
    access = Access(keys, clock=clock, sessions=SESSIONS)
    access.load()

    async def story() -> None:
        await access.identify(headers(key))
        await until(lambda: "uses_of_keys_not_written" in caplog.text)
        keys.away = False
        await access.reread()
        await until(lambda: keys.writes == 1)

    asyncio.run(story())
    assert last_uses(keys) == [clock()]


def test_one_use_is_written_after_the_other_and_none_of_them_twice() -> None:
    free, written = threading.Event(), list[int]()

    class Stuck(MemoryKeys):
        def note_used(self, used: Mapping[str, datetime]) -> None:
            assert free.wait(60)
            written.append(len(used))
            super().note_used(used)

    keys = Stuck()
    one, other = keys.add(Scope.INGEST), keys.add(Scope.INGEST)
    access = Access(keys, clock=FrozenClock(), sessions=SESSIONS)
    access.load()

    async def story() -> None:
        await access.identify(headers(one))
        await asyncio.sleep(0)  # its writing began
        await access.identify(headers(other))
        await asyncio.sleep(0)
        free.set()
        await until(lambda: None not in last_uses(keys))

    asyncio.run(story())
    assert written == [1, 1]
