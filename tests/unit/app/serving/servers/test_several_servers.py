"""Several servers of one make: before the first token another one is asked, after it none; who keeps failing is passed over for a while."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.domain.errors import Unavailable
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.serving.replicas import EJECT_AFTER
from app.serving.servers.engines import Dialect, ServerEngines
from app.serving.servers.sglang import Sglang
from app.serving.servers.vllm import Vllm
from tests.fakes.servers.sglang import FakeSglang
from tests.fakes.servers.vllm import FakeVllm

DIGEST = "d" * 64
ASKED = GenerateRequest(policy="composer", digest=DIGEST, messages=[{"role": "user", "content": "hi"}], sampling=SamplingParams())
Fake = FakeVllm | FakeSglang
MAKES: list[Any] = [pytest.param(Vllm(), FakeVllm, id="vllm"), pytest.param(Sglang(), FakeSglang, id="sglang")]


class Hosts(httpx.AsyncBaseTransport):
    """Servers by host name; one without a server refuses connections. Counts who was asked."""

    def __init__(self, **servers: Fake | None) -> None:
        self.servers, self.asked = servers, list[str]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        server = self.servers[request.url.host]
        if server is None:
            raise httpx.ConnectError("refused")
        return await httpx.ASGITransport(server.app).handle_async_request(request)


def asking(
    dialect: Dialect, hosts: Hosts, times: int = 1, *, patience_s: float = 5.0
) -> tuple[list[list[GenerationChunk]], list[EngineSight]]:
    async def inside() -> tuple[list[list[GenerationChunk]], list[EngineSight]]:
        urls = [f"http://{name}" for name in hosts.servers]
        async with ServerEngines(dialect, urls, client=httpx.AsyncClient(transport=hosts), patience_s=patience_s) as engines:
            answers = [[chunk async for chunk in engines.generate(ASKED)] for _ in range(times)]
            return answers, await engines.sights()

    return asyncio.run(inside())


def generating(server: Fake) -> str:
    return "/inference/v1/generate" if isinstance(server, FakeVllm) else "/generate"


def dies_at_once(server: Fake) -> None:
    server.cut_after = 0


def is_broken(server: Fake) -> None:
    server.failing[generating(server)] = 500


def is_full(server: Fake) -> None:
    server.failing[generating(server)] = 429


@pytest.mark.parametrize(("dialect", "make"), MAKES)
@pytest.mark.parametrize("bad", [dies_at_once, is_broken, is_full])
def test_before_the_first_token_another_server_answers(dialect: Dialect, make: type[Fake], bad: Callable[[Fake], None]) -> None:
    one, two = make(DIGEST), make(DIGEST)
    bad(one)
    answers, _ = asking(dialect, Hosts(one=one, two=two), times=4)
    assert [[token for chunk in chunks for token in chunk.tokens] for chunks in answers] == [[11, 12, 2]] * 4
    assert any("input_ids" in body or "token_ids" in body for body in one.bodies) or bad is not dies_at_once


@pytest.mark.parametrize(("dialect", "make"), MAKES)
def test_after_the_first_token_nothing_is_asked_again(dialect: Dialect, make: type[Fake]) -> None:
    one, two = make(DIGEST), make(DIGEST)
    one.cut_after = two.cut_after = 1
    ((*begun, last),), _ = asking(dialect, Hosts(one=one, two=two))
    assert [token for chunk in begun for token in chunk.tokens] == [11]
    assert last.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize(("dialect", "make"), MAKES)
def test_a_server_that_is_gone_is_asked_no_more_for_a_while_and_shown_so(dialect: Dialect, make: type[Fake]) -> None:
    hosts = Hosts(one=None, two=make(DIGEST))
    answers, (one, two) = asking(dialect, hosts, times=12)
    assert all(chunks[-1].finish_reason is FinishReason.STOP for chunks in answers)
    looks = 1  # at its metrics, for the sights
    assert hosts.asked.count("one") == EJECT_AFTER + looks
    assert (one.answers, one.ejected) == (False, True)
    assert (two.answers, two.ejected, two.fault) == (True, False, None)


@pytest.mark.parametrize(("dialect", "make"), MAKES)
def test_one_that_was_passed_over_is_asked_where_nobody_else_has_the_version(dialect: Dialect, make: type[Fake]) -> None:
    hosts = Hosts(one=None, two=make("e" * 64))

    async def inside() -> GenerationChunk:
        client = httpx.AsyncClient(transport=hosts)
        async with ServerEngines(dialect, ["http://one", "http://two"], client=client, patience_s=0.0) as engines:
            for _ in range(EJECT_AFTER):
                with pytest.raises(Unavailable):
                    _ = [chunk async for chunk in engines.generate(ASKED)]
            hosts.servers["one"] = make(DIGEST)
            assert (await engines.sights())[0].ejected
            return [chunk async for chunk in engines.generate(ASKED)][-1]

    assert asyncio.run(inside()).finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("dialect", "make"), MAKES)
def test_a_server_whose_weights_are_being_replaced_is_not_passed_over(dialect: Dialect, make: type[Fake]) -> None:
    one = make(DIGEST)
    one.aborts = EJECT_AFTER + 1
    ((*_, last),), (sight,) = asking(dialect, Hosts(one=one))
    assert (last.finish_reason, sight.ejected) == (FinishReason.STOP, False)
