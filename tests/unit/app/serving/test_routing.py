"""The gateway's client before several engines: before the first token another replica is asked, after it nobody is."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import msgspec
import pytest

from app.domain.errors import Overloaded, Unavailable
from app.domain.ports import Holder
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.serving.client import HttpEngines
from app.serving.refusals import DRAINING
from app.serving.replicas import EJECT_AFTER

Answer = Callable[[httpx.Request], httpx.Response]
ASKED = GenerateRequest(policy="composer", digest="d" * 64, messages=[], sampling=SamplingParams())
FIRST = GenerationChunk(text="a", tokens=[1], logprobs=[-0.5])
LAST = GenerationChunk(text="b", tokens=[2], logprobs=[-0.1], finish_reason=FinishReason.STOP, prompt_tokens=[7])


class Lines(httpx.AsyncByteStream):
    """A body that may break off."""

    def __init__(self, *chunks: GenerationChunk, broken: bool = False) -> None:
        self.chunks, self.broken = chunks, broken

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield msgspec.json.encode(chunk) + b"\n"
        if self.broken:
            raise httpx.ReadError("gone")


def whole(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, stream=Lines(FIRST, LAST))


def dead(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def dies_at_once(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, stream=Lines(broken=True))


def dies_later(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, stream=Lines(FIRST, broken=True))


def broken_step(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, stream=Lines(GenerationChunk(text="", tokens=[], logprobs=[], finish_reason=FinishReason.ERROR)))


def refusing(status: int) -> Answer:
    body = {"error": {"message": f"status {status}", "param": None, "code": None}}
    return lambda _: httpx.Response(status, content=msgspec.json.encode(body))


class Servers:
    """Engines by host name, as a transport; counts who was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def engines(self) -> HttpEngines:
        urls = [f"http://{name}" for name in self.answers]
        return HttpEngines(urls, client=httpx.AsyncClient(transport=httpx.MockTransport(self.answer)))

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, content=b'{"status": "ok", "load": 3}')
        self.asked.append(request.url.host)
        return self.answers[request.url.host](request)


def ask(servers: Servers, times: int = 1) -> list[list[GenerationChunk]]:
    async def inside() -> list[list[GenerationChunk]]:
        async with servers.engines() as engines:
            return [[chunk async for chunk in engines.generate(ASKED)] for _ in range(times)]

    return asyncio.run(inside())


def test_an_engine_that_does_not_know_top_k_is_not_taken_for_one_that_kept_to_it() -> None:
    async def inside(asked: GenerateRequest, answer: Answer) -> GenerationChunk:
        async with Servers(one=answer).engines() as engines:
            return [chunk async for chunk in engines.generate(asked)][-1]

    def knowing(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Lines(FIRST, msgspec.structs.replace(LAST, kept_log_mass=[-0.1, 0.0])))

    few = msgspec.structs.replace(ASKED, sampling=SamplingParams(top_k=3))
    assert "older than top_k" in str(asyncio.run(inside(few, whole)).unscorable)
    assert asyncio.run(inside(few, knowing)).unscorable is None
    assert asyncio.run(inside(ASKED, whole)).unscorable is None


@pytest.mark.parametrize("bad", [dead, dies_at_once, broken_step, refusing(503), refusing(429), refusing(404), refusing(DRAINING)])
def test_before_the_first_token_another_replica_answers(bad: Answer) -> None:
    servers = Servers(one=bad, two=whole)
    assert ask(servers, times=4) == [[FIRST, LAST]] * 4
    assert "one" in servers.asked


def test_after_the_first_token_nothing_is_asked_again() -> None:
    servers = Servers(one=dies_later, two=dies_later)
    (chunks,) = ask(servers)
    assert [chunk.finish_reason for chunk in chunks] == [None, FinishReason.ERROR]
    assert len(servers.asked) == 1


@pytest.mark.parametrize("bad", [dead, refusing(503), dies_at_once])
def test_an_engine_that_keeps_failing_is_asked_no_more_for_a_while(bad: Answer) -> None:
    servers = Servers(one=bad, two=whole)
    ask(servers, times=20)
    assert servers.asked.count("one") == EJECT_AFTER


def test_a_refusal_in_words_is_an_answer_and_begins_the_count_of_failures_anew() -> None:
    said = iter([dead, dead, refusing(429)] * 3)
    servers = Servers(one=lambda request: next(said)(request), two=whole)
    ask(servers, times=18)
    assert servers.asked.count("one") == 9, "never three failures in a row"


def test_one_that_drains_is_passed_over_at_its_first_word() -> None:
    servers = Servers(one=refusing(DRAINING), two=whole)
    ask(servers, times=20)
    assert servers.asked.count("one") == 1


def test_while_the_ledger_is_away_the_engines_it_named_last_answer(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers(one=dead, two=whole)
    said = [{"http://two": Holder()}]

    def ledger(_: str) -> dict[str, Holder]:
        if not said:
            raise Unavailable("the database does not answer")
        return said.pop()

    async def inside() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(servers.answer))
        async with HttpEngines(["http://one"], holders=ledger, client=client, forget_s=0.0) as engines:
            for _ in range(3):
                assert [chunk async for chunk in engines.generate(ASKED)] == [FIRST, LAST]

    asyncio.run(inside())
    assert servers.asked == ["two"] * 3
    assert "the ledger is away" in caplog.text


@pytest.mark.parametrize(
    ("eu", "asked"),
    [(whole, ["eu"] * 6), (refusing(429), ["eu", "us"] * 6), (dies_at_once, None), (dead, None)],
)
def test_another_region_s_engine_is_asked_where_none_of_ones_own_answers(eu: Answer, asked: list[str] | None) -> None:
    servers = Servers(eu=eu, us=whole)
    held = {"http://us": Holder(region="us"), "http://eu": Holder(region="eu")}

    async def inside() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(servers.answer))
        async with HttpEngines(["http://eu"], holders=lambda _: held, region="eu", client=client) as engines:
            for _ in range(6):
                assert [chunk async for chunk in engines.generate(ASKED)] == [FIRST, LAST]

    asyncio.run(inside())
    # one that fails is asked until it is ejected, and goes behind the far one then
    assert servers.asked == (asked or [*["eu", "us"] * EJECT_AFTER, *["us"] * (6 - EJECT_AFTER)])


def test_an_answer_that_broke_off_in_ones_own_region_is_not_begun_again_in_another() -> None:
    servers = Servers(eu=dies_later, us=whole)
    held = {"http://us": Holder(region="us"), "http://eu": Holder(region="eu")}

    async def inside() -> FinishReason | None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(servers.answer))
        async with HttpEngines(["http://eu"], holders=lambda _: held, region="eu", client=client) as engines:
            return [chunk async for chunk in engines.generate(ASKED)][-1].finish_reason

    assert (asyncio.run(inside()), servers.asked) == (FinishReason.ERROR, ["eu"])


def test_where_ones_own_region_does_not_hold_the_version_another_one_answers() -> None:
    servers = Servers(eu=whole, us=whole)

    async def inside() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(servers.answer))
        held = {"http://us": Holder(region="us")}
        async with HttpEngines(["http://eu"], holders=lambda _: held, region="eu", client=client) as engines:
            assert [chunk async for chunk in engines.generate(ASKED)] == [FIRST, LAST]

    asyncio.run(inside())
    assert servers.asked == ["us"]


def test_when_all_are_ejected_they_are_still_asked() -> None:
    servers = Servers(one=dead, two=dead)
    for _ in range(2):
        with pytest.raises(Unavailable, match="ratchet engine"):
            ask(servers, times=EJECT_AFTER + 2)
    servers.answers["one"] = whole

    async def comes_back() -> None:
        async with servers.engines() as engines:
            servers.answers["one"] = dead
            for _ in range(EJECT_AFTER):
                with pytest.raises(Unavailable):
                    _ = [chunk async for chunk in engines.generate(ASKED)]
            servers.answers["one"] = whole
            assert [chunk async for chunk in engines.generate(ASKED)] == [FIRST, LAST]
            (one, _) = await engines.sights()
            assert (one.answers, one.ejected, one.queue) == (True, False, 3)

    asyncio.run(comes_back())


def test_full_is_said_as_full() -> None:
    with pytest.raises(Overloaded):
        ask(Servers(one=refusing(429), two=dead))
