"""Long work beside the event loop: where it is done, how much of it waits, and how much of the time it takes."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.api.workshop import Share, Workshop, breathe
from app.domain.errors import Overloaded

ONE = Share(line="one")


def test_long_work_is_done_beside_the_event_loop_and_short_work_on_it() -> None:
    async def story() -> tuple[str, str]:
        workshop = Workshop()

        def name() -> str:
            return threading.current_thread().name

        return await workshop.do(name, chars=10, share=ONE), await workshop.do(name, chars=10_000, share=ONE)

    at_once, beside = asyncio.run(story())
    assert at_once == "MainThread"
    assert beside.startswith("workshop")


def test_the_loop_answers_while_the_workshop_works_and_who_asks_for_too_much_is_told() -> None:
    async def story() -> int:
        workshop, go, two = Workshop(), threading.Event(), Share(line="one", most=2)
        first, second = (asyncio.ensure_future(workshop.do(lambda: go.wait(20), chars=10_000, share=two)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await workshop.do(lambda: True, chars=10_000, share=two)
        patient = asyncio.ensure_future(workshop.do(lambda: 8, chars=10_000, share=two, patient=True))
        other = asyncio.ensure_future(workshop.do(lambda: 9, chars=10_000, share=Share(line="other", most=1)))
        assert await workshop.do(lambda: 7, chars=1, share=two) == 7, "the loop is free"
        go.set()
        assert await asyncio.gather(first, second, patient) == [True, True, 8]
        return await other

    assert asyncio.run(story()) == 9


def test_nobody_waits_for_more_than_one_piece_of_each_other_s_work() -> None:
    """Sixteen of one key wait when two others come, one of them with two pieces: next are theirs, in turns, and not the sixteen."""
    done = list[str]()

    async def story() -> None:
        workshop, go = Workshop(), threading.Event()

        def piece(name: str) -> Callable[[], None]:
            def work() -> None:
                busy(0.01)
                done.append(name)

            return work

        hold = asyncio.ensure_future(workshop.do(lambda: go.wait(20), chars=10_000, share=Share(line="hold")))
        await asyncio.sleep(0.05)
        asked = [(f"key {n}", Share(line="key")) for n in range(16)]
        asked += [("b 0", Share(line="b")), ("b 1", Share(line="b")), ("c 0", Share(line="c"))]
        waiting = [asyncio.ensure_future(workshop.do(piece(name), chars=10_000, share=share)) for name, share in asked]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(hold, *waiting)

    asyncio.run(story())
    assert max(done.index(name) for name in ("b 0", "c 0")) <= 2
    assert done.index("b 1") <= 5
    assert [name for name in done if name.startswith("key")] == [f"key {n}" for n in range(16)]


def test_who_had_the_thread_for_long_waits_longer_and_who_was_away_saves_nothing_up() -> None:
    done = list[str]()

    async def story() -> None:
        workshop = Workshop()

        def piece(name: str, seconds: float) -> Callable[[], None]:
            def work() -> None:
                busy(seconds)
                done.append(name)

            return work

        async def ask(name: str, seconds: float) -> None:
            await workshop.do(piece(name, seconds), chars=10_000, share=Share(line=name))

        # five long pieces of one, and then twenty short ones of another, who comes when the first long one is done
        long = [asyncio.ensure_future(ask("long", 0.04)) for _ in range(5)]
        while not done:
            await asyncio.sleep(0.001)
        short = [asyncio.ensure_future(ask("short", 0.002)) for _ in range(16)]
        await asyncio.gather(*long, *short)

    asyncio.run(story())
    assert done.index("short") <= 2
    assert done[-1] == "long", "sixteen pieces of 2 ms are less than one of 40"
    assert done[:-2].count("short") == 16


def test_those_who_share_a_line_take_turns_in_it() -> None:
    done = list[str]()

    async def story() -> None:
        workshop, go = Workshop(), threading.Event()
        hold = asyncio.ensure_future(workshop.do(lambda: go.wait(20), chars=10_000, share=Share(line="hold")))
        await asyncio.sleep(0.05)
        asked = [Share(line="answers", member=member, most=4) for member in ("a", "a", "a", "a", "b")]
        waiting = [
            asyncio.ensure_future(workshop.do(lambda name=share.member: done.append(name), chars=10_000, share=share)) for share in asked
        ]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await workshop.do(lambda: None, chars=10_000, share=asked[0])
        go.set()
        await asyncio.gather(hold, *waiting)

    asyncio.run(story())
    assert done == ["a", "b", "a", "a", "a"]


def test_who_goes_away_while_waiting_leaves_his_place() -> None:
    async def story() -> list[int]:
        workshop, go, one = Workshop(), threading.Event(), Share(line="one", most=2)
        ran = list[int]()
        hold = asyncio.ensure_future(workshop.do(lambda: go.wait(20), chars=10_000, share=one))
        await asyncio.sleep(0.05)
        gone = asyncio.ensure_future(workshop.do(lambda: ran.append(1), chars=10_000, share=one))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        stays = asyncio.ensure_future(workshop.do(lambda: ran.append(2), chars=10_000, share=one))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(hold, stays)
        return ran

    assert asyncio.run(story()) == [2]


def test_what_breaks_breaks_for_its_sender_alone() -> None:
    async def story() -> list[object]:
        workshop = Workshop()

        def broken() -> int:
            raise ValueError("broken")

        found = await asyncio.gather(
            *(workshop.do(work, chars=10_000, share=Share(line="one")) for work in (broken, lambda: 3)), return_exceptions=True
        )
        return [type(found[0]), found[1]]

    assert asyncio.run(story()) == [ValueError, 3]


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

        took, worked = await workshop.do(steps, chars=10_000, share=ONE)
        ended = await workshop.do(end, chars=10_000, share=ONE)
        return took, worked, await workshop.do(time.monotonic, chars=10_000, share=ONE) - ended

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
