"""Whoever signs in waits in a short queue, one after the other, beside everything else."""

import asyncio
import threading

import pytest

from app.access.porch import Porch
from app.domain.errors import Overloaded


def test_a_queue_of_sixteen_sends_people_away_and_takes_them_again_once_one_was_looked_at() -> None:
    async def come() -> list[str]:
        porch, door, said = Porch(), threading.Event(), list[str]()

        def look() -> str:
            door.wait(10)
            return threading.current_thread().name

        there = [asyncio.create_task(porch.take(look)) for _ in range(16)]
        await asyncio.sleep(0)
        try:
            with pytest.raises(Overloaded, match="too many people are signing in just now") as refused:
                await asyncio.wait_for(porch.take(lambda: said.append("looked at")), 1)
        finally:
            door.set()
        assert refused.value.retry_after_s == 2.0
        names = [await one for one in there]
        for _ in range(3):  # one after the other: nobody is in front of them
            names.append(await porch.take(look))
        assert said == []
        return names

    assert asyncio.run(come()) == ["porch_0"] * 19


def test_who_was_looked_at_in_vain_makes_room_as_well() -> None:
    async def come() -> None:
        porch = Porch(waiting=1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await porch.take(lambda: 1 // 0)

    asyncio.run(come())


def test_who_was_looked_at_makes_room_for_one_and_no_more() -> None:
    async def come() -> None:
        porch, door = Porch(waiting=1), threading.Event()
        await porch.take(lambda: None)
        first = asyncio.create_task(porch.take(lambda: door.wait(10)))
        await asyncio.sleep(0)
        try:
            with pytest.raises(Overloaded):
                await asyncio.wait_for(porch.take(lambda: None), 1)
        finally:
            door.set()
        assert await first

    asyncio.run(come())
