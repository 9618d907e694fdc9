"""An engine that is asked beside before it is given up, and a ledger that nobody waits for twice."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from app.domain.errors import Unavailable
from app.serving.silence import Listening, Patience
from app.serving.whereabouts import Whereabouts

SHORT = Patience(silent_s=0.01, probe_s=0.02, probes=2)


def listened(health: Callable[[int], httpx.Response], said: Callable[[], Coroutine[Any, Any, str]]) -> tuple[str, list[httpx.Request]]:
    """What is heard, and who was asked beside."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return health(len(asked))

    async def inside() -> str:
        async with (
            httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client, Listening(client, "http://one", SHORT) as listening,
        ):  # fmt: skip
            return await listening.hear(said())

    return asyncio.run(asyncio.wait_for(inside(), 20)), asked


async def never() -> str:
    await asyncio.sleep(15)
    return "late"


def gone(_: int) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_how_long_an_engine_may_be_silent_unless_it_is_said_otherwise() -> None:
    found = Patience()
    assert found.probes * (found.silent_s + found.probe_s) == 10.0, "until it is given up"
    assert (found.silent_s, found.probe_s) == (2.0, 3.0)


def test_an_engine_that_answers_nobody_twice_is_given_up() -> None:
    asked: list[int] = []

    def counted(number: int) -> httpx.Response:
        asked.append(number)
        raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ReadTimeout, match="it says nothing and does not answer /health"):
        listened(counted, never)
    assert asked == [1, 2]


def test_an_engine_that_answers_once_in_between_is_waited_for_anew() -> None:
    asked: list[int] = []

    def once(number: int) -> httpx.Response:
        asked.append(number)
        if number in (2, 3):
            return httpx.Response(503 if number == 2 else 200)
        raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ReadTimeout):
        listened(once, never)
    assert asked == [1, 2, 3, 4, 5], "whatever it answers, it lives"


def test_an_engine_is_asked_for_its_health_while_it_says_nothing_and_heard_when_it_does() -> None:
    async def slow() -> str:
        await asyncio.sleep(0.1)
        return "said"

    said, asked = listened(lambda _: httpx.Response(200), slow)
    assert said == "said"
    assert {str(request.url) for request in asked} == {"http://one/health"}
    assert 2 <= len(asked) <= 12


def test_nobody_is_asked_beside_while_nothing_is_waited_for_or_words_keep_coming() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        raise httpx.ConnectError("refused")

    async def soon() -> str:
        await asyncio.sleep(0.03)
        return "said"

    async def inside() -> None:
        patience = Patience(silent_s=0.05, probe_s=0.02, probes=1)
        async with (
            httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client, Listening(client, "http://one", patience) as listening,
        ):  # fmt: skip
            for _ in range(5):
                assert await listening.hear(soon()) == "said"
            await asyncio.sleep(0.12)
            assert listening._watching is not None
            assert not listening._watching.done()
        await asyncio.sleep(0)
        assert listening._watching.cancelled(), "whoever left listens no more"

    asyncio.run(inside())
    assert asked == []


# --- who holds a version -------------------------------------------------------------------------------------------------------


def run(act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(act(), 20))


def test_the_ledger_is_asked_again_when_its_answer_is_old_or_was_forgotten() -> None:
    asked: list[str] = []

    def ledger(digest: str) -> str:
        asked.append(digest)
        return f"{digest}{len(asked)}"

    async def act() -> None:
        known = Whereabouts(ledger, nothing="", forget_s=1000.0)
        assert [await known.of("a"), await known.of("a"), await known.of("b")] == ["a1", "a1", "b2"]
        known.forget("a")
        known.forget("never heard of")
        assert [await known.of("a"), await known.of("b")] == ["a3", "b2"]
        known.close()
        fleeting = Whereabouts(ledger, nothing="", forget_s=-1.0)
        assert [await fleeting.of("a"), await fleeting.of("a")] == ["a4", "a5"]
        fleeting.close()

    run(act)


def test_a_ledger_that_refuses_is_logged_once_until_it_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    refuses = [False, True, True, False, True]

    def ledger(_: str) -> str:
        if refuses.pop(0):
            raise Unavailable("the database does not answer")
        return f"held {len(refuses)}"

    async def settled(known: "Whereabouts[str]") -> str:
        said = await known.of("a")
        await asyncio.gather(*known._asking.values())
        return said

    async def act() -> None:
        known = Whereabouts(ledger, nothing="nothing", forget_s=-1.0)
        said = [await settled(known) for _ in range(5)]
        assert said[:3] == ["held 4"] * 3, "as it was last known"
        assert await asyncio.to_thread(lambda: caplog.text.count("the ledger is away")) == 2
        known.close()

    run(act)
    assert refuses == []


def test_a_silent_ledger_is_waited_for_once_and_asked_one_question_at_a_time() -> None:
    speak, asked = threading.Event(), list[str]()

    def ledger(digest: str) -> str:
        asked.append(digest)
        speak.wait(10)
        return "held"

    async def act() -> None:
        loop = asyncio.get_running_loop()
        known = Whereabouts(ledger, nothing="nothing", forget_s=-1.0)
        began = loop.time()
        assert await known.of("a") == "nothing"
        assert 0.9 < loop.time() - began < 5.0
        began = loop.time()
        assert [await known.of("a"), await known.of("b"), await known.of("a")] == ["nothing"] * 3
        assert loop.time() - began < 0.5, "nobody waits for it any more"
        await asyncio.sleep(0.05)
        assert asked == ["a", "b"]
        speak.set()
        await asyncio.gather(*known._asking.values())
        assert await known.of("b") == "held"
        known.close()

    run(act)


def test_whoever_closes_waits_for_no_ledger_and_asks_none_any_more() -> None:
    speak = threading.Event()

    def ledger(_: str) -> str:
        speak.wait(10)
        return "held"

    async def act() -> None:
        loop = asyncio.get_running_loop()
        known = Whereabouts(ledger, nothing="nothing", forget_s=-1.0)
        known._away = True
        assert await known.of("a") == "nothing"
        await asyncio.sleep(0.02)
        began = loop.time()
        known.close()
        assert loop.time() - began < 5.0
        speak.set()
        await asyncio.gather(*known._asking.values())
        assert await known.of("b") == "nothing"
        with pytest.raises(RuntimeError, match="shutdown"):
            await known._asking["b"]

    run(act)
