"""An engine that is stopped or cut off with its connections open, and one that is only slow. Real sockets: it is they that hang."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest

from app.domain.errors import Unavailable
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.serving.client import HttpEngines
from app.serving.silence import Patience

ASKED = GenerateRequest(policy="composer", digest="d" * 64, messages=[], sampling=SamplingParams())
FIRST = GenerationChunk(text="a", tokens=[1], logprobs=[-0.5])
LAST = GenerationChunk(text="b", tokens=[2], logprobs=[-0.1], finish_reason=FinishReason.STOP, prompt_tokens=[7])
SHORT = Patience(silent_s=0.1, probe_s=0.2, probes=2)
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def engine(*, before_s: float = 0.0, between_s: float = 0.0, well: bool = True) -> AsyncGenerator[str]:
    """A server that takes so long before its first token and between the two, and answers /health or does not."""

    serving: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if b"/health" in asked:
            await asyncio.sleep(0 if well else 60)
            writer.write(HEAD + b"{}")
        else:
            writer.write(HEAD if between_s else b"")
            for pause_s, chunk in ((before_s, FIRST), (between_s, LAST)):
                await asyncio.sleep(pause_s)
                writer.write((b"" if between_s or chunk is LAST else HEAD) + msgspec.json.encode(chunk) + b"\n")
                await writer.drain()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


async def ask(*urls: str) -> tuple[list[GenerationChunk], float]:
    """An answer, and how long it took."""
    began = time.monotonic()
    async with HttpEngines(urls, patience=SHORT) as engines:
        return [chunk async for chunk in engines.generate(ASKED)], time.monotonic() - began


def test_an_engine_that_is_gone_before_its_first_token_is_passed_over_for_the_next() -> None:
    async def inside() -> None:
        async with engine(before_s=60, well=False) as gone, engine() as alive, HttpEngines([alive, gone], patience=SHORT) as engines:
            took: list[float] = []
            for _ in range(4):
                began = time.monotonic()
                assert [chunk async for chunk in engines.generate(ASKED)] == [FIRST, LAST]
                took.append(time.monotonic() - began)
            assert sum(seconds > 0.3 for seconds in took) == 1, took  # one finds out, nobody else waits

    asyncio.run(asyncio.wait_for(inside(), 30))


def test_where_the_only_engine_is_gone_it_is_named_with_the_cure() -> None:
    async def inside() -> None:
        async with engine(before_s=60, well=False) as gone:
            with pytest.raises(
                Unavailable, match=f"no engine holds the weights {ASKED.digest[:12]}.*the engine at {gone} is gone .*start it"
            ):
                await ask(gone)

    asyncio.run(asyncio.wait_for(inside(), 30))


def test_a_slow_engine_that_answers_beside_is_waited_for() -> None:
    async def inside() -> None:
        async with engine(before_s=1.5, between_s=1.5) as slow:
            chunks, took = await ask(slow)
            assert chunks == [FIRST, LAST]
            assert took > 2.9

    asyncio.run(asyncio.wait_for(inside(), 30))


def test_one_that_falls_silent_in_the_middle_ends_the_answer_instead_of_holding_it() -> None:
    async def inside() -> None:
        async with engine(between_s=60, well=False) as dying:
            chunks, took = await ask(dying)
            assert chunks[0] == FIRST
            assert chunks[-1].finish_reason is FinishReason.ERROR
            assert "silent" in (chunks[-1].message or "")
            assert took < 20

    asyncio.run(asyncio.wait_for(inside(), 30))
