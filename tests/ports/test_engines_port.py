"""One suite over the scripted engines, the embedded engine over HTTP, and the adapter of other servers before ones of their shapes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from app.domain.errors import BadRequest, Unavailable
from app.domain.ports import GatewayEngines as Engines
from app.domain.telemetry.serving import GenerateRequest, ScoreRequest
from app.domain.telemetry.turns import SamplingParams
from app.policy.model import load_policy
from app.policy.storage.store import LocalWeights
from app.serving.client import HttpEngines
from app.serving.servers.engines import Dialect, ServerEngines
from app.serving.servers.sglang import Sglang
from app.serving.servers.vllm import Vllm
from tests.fakes.gateway import ScriptedEngines
from tests.fakes.servers.sglang import FakeSglang
from tests.fakes.servers.vllm import FakeVllm
from tests.integration.serving.running import engine

Scenario = Callable[[Engines], Coroutine[Any, Any, Any]]
SERVERS: dict[str, tuple[Dialect, type[FakeVllm] | type[FakeSglang]]] = {"vllm": (Vllm(), FakeVllm), "sglang": (Sglang(), FakeSglang)}


@dataclass(frozen=True, kw_only=True)
class Room:
    """One adapter, and a version it can sample from."""

    digest: str
    connect: Callable[[], AbstractAsyncContextManager[Engines]]

    def run(self, scenario: Scenario) -> Any:
        async def inside() -> Any:
            async with self.connect() as engines:
                return await scenario(engines)

        return asyncio.run(inside())


@pytest.fixture(params=["scripted", "embedded", "vllm", "sglang"])
def room(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[Room]:
    if request.param == "scripted":
        yield Room(digest="d" * 64, connect=_scripted)
    elif request.param in SERVERS:
        dialect, fake = SERVERS[request.param]
        server = fake("d" * 64)
        yield Room(digest="d" * 64, connect=lambda: _server(dialect, server))
    else:
        store = LocalWeights(tmp_path)
        digest = store.publish(tiny_model)
        with engine(store, digest, load=lambda folder, **more: load_policy(folder, dtype=torch.float32, **more)) as running:
            yield Room(digest=digest, connect=lambda: HttpEngines([running.url]))


@asynccontextmanager
async def _scripted() -> AsyncIterator[Engines]:
    yield ScriptedEngines()


@asynccontextmanager
async def _server(dialect: Dialect, server: FakeVllm | FakeSglang) -> AsyncIterator[Engines]:
    async with ServerEngines(dialect, ["http://server"], client=httpx.AsyncClient(transport=httpx.ASGITransport(server.app))) as engines:
        yield engines


def _asked(digest: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=12, seed=3)
    return GenerateRequest(policy="composer", digest=digest, messages=[{"role": "user", "content": "def f(x):"}], sampling=sampling)


def _score(digest: str, prompt: list[int], completion: list[int], **more: Any) -> ScoreRequest:
    return ScoreRequest(policy="composer", digest=digest, prompt_tokens=prompt, completion_tokens=completion, **more)


def test_every_sampled_token_has_its_logprob_and_the_last_chunk_has_the_reason(room: Room) -> None:
    async def scenario(engines: Engines) -> None:
        chunks = [chunk async for chunk in engines.generate(_asked(room.digest))]
        assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert sum(len(c.tokens) for c in chunks) == sum(len(c.logprobs) for c in chunks) > 0
        assert chunks[-1].prompt_tokens is not None

    room.run(scenario)


def test_the_prompt_has_a_length(room: Room) -> None:
    assert room.run(lambda engines: engines.count_tokens(_asked(room.digest))) > 0


def test_scoring_what_was_sampled_gives_the_logprobs_it_was_sampled_with(room: Room) -> None:
    async def scenario(engines: Engines) -> None:
        chunks = [chunk async for chunk in engines.generate(_asked(room.digest))]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        logged = [logprob for chunk in chunks for logprob in chunk.logprobs]
        scored = await engines.score(_score(room.digest, list(chunks[-1].prompt_tokens or []), tokens))
        assert scored == pytest.approx(logged, abs=2e-5)

    room.run(scenario)


@pytest.mark.parametrize("room", ["embedded", "vllm", "sglang"], indirect=True)  # the scripted engines hold every version
def test_weights_that_are_not_held_are_refused_and_never_substituted(room: Room) -> None:
    async def scenario(engines: Engines) -> None:
        with pytest.raises(Unavailable):
            await engines.score(_score("0" * 64, [7, 8], [9]))

    room.run(scenario)


def test_every_engine_can_be_looked_at(room: Room) -> None:
    (sight,) = room.run(lambda engines: engines.sights())
    assert (sight.answers, sight.ejected, sight.draining) == (True, False, False)
    assert sight.queue is not None


def test_tokens_that_cannot_be_scored_are_refused(room: Room) -> None:
    async def scenario(engines: Engines) -> None:
        with pytest.raises(BadRequest):
            await engines.score(_score(room.digest, [7] * 6000, [8] * 6000, temperature=0.5))

    room.run(scenario)
