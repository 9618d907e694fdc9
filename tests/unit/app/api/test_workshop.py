"""Long work beside the event loop: where it is done, how much of it waits, and how much of the time it takes."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app.api.workshop import Workshop, breathe
from app.domain.errors import Overloaded


def test_long_work_is_done_beside_the_event_loop_and_short_work_on_it() -> None:
    async def story() -> tuple[str, str]:
        workshop = Workshop()

        def name() -> str:
            return threading.current_thread().name

        return await workshop.do(name, chars=10), await workshop.do(name, chars=10_000)

    at_once, beside = asyncio.run(story())
    assert at_once == "MainThread"
    assert beside.startswith("workshop")


def test_the_loop_answers_while_the_workshop_works_and_a_full_one_says_so() -> None:
    async def story() -> int:
        workshop, go = Workshop(waiting=2), threading.Event()
        first, second = (asyncio.ensure_future(workshop.do(lambda: go.wait(20), chars=10_000)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await workshop.do(lambda: True, chars=10_000)
        assert await workshop.do(lambda: 7, chars=1) == 7, "the loop is free"
        go.set()
        assert await asyncio.gather(first, second) == [True, True]
        return await workshop.do(lambda: 9, chars=10_000)

    assert asyncio.run(story()) == 9


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_work_beside_the_loop_rests_as_long_as_it_took_between_its_steps_and_before_the_next() -> None:
    """Its thread and the loop's share one interpreter, and an answer asks for it ten times."""

    async def story() -> tuple[float, float, float]:
        workshop = Workshop()

        def steps() -> tuple[float, float]:
            began = time.monotonic(), time.thread_time()
            for _ in range(5):
                busy(0.004)
                breathe()
            return time.monotonic() - began[0], time.thread_time() - began[1]

        def end() -> float:
            busy(0.02)
            return time.monotonic()

        took, worked = await workshop.do(steps, chars=10_000)
        ended = await workshop.do(end, chars=10_000)
        return took, worked, await workshop.do(time.monotonic, chars=10_000) - ended

    took, worked, rested = asyncio.run(story())
    assert took >= 1.8 * worked >= 1.8 * 0.02
    assert rested >= 0.018


SETTLED = """
import gc, json
from app.api.telemetry.intake import Limits
from app.main import settle
settle()
seen = []
gc.callbacks.append(lambda phase, info: seen.append(phase))
body = json.dumps([[]] * Limits().nodes)
gc.collect()
seen.clear()
for _ in range(2):
    json.loads(body)
assert not seen, "the collector went through everything while one body was read"
for _ in range(10):
    kept = [[] for _ in range(10_000)]
    kept.append(kept)
    del kept
assert seen, "what refers to itself is freed, later"
"""


def test_what_one_body_may_hold_is_read_without_the_collector() -> None:
    subprocess.run([sys.executable, "-c", SETTLED], check=True, timeout=60, cwd=Path(__file__).resolve().parents[4])
