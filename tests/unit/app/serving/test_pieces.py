"""Long lists of token ids, read piece by piece: the same numbers, and others have their turn meanwhile."""

import asyncio
import json
import time
from array import array

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.chat.recording import turn_event
from app.domain.learning.batches import payload_of
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason, SamplingParams, TurnServed
from app.serving.client import HttpEngines
from app.serving.pieces import PIECE_BYTES, fields_of, numbers
from tests.fakes.served import turn

LONG = [49_000 + number % 152 for number in range(131_072)]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.sampled_from([(",", ":"), (", ", ": ")]), st.integers(1, 400))
def test_read_in_pieces_they_are_the_same_numbers(ids: list[int], separators: tuple[str, str], times: int) -> None:
    text = json.dumps(ids * times, separators=separators).encode()
    assert list(asyncio.run(numbers(text))) == ids * times


@pytest.mark.parametrize("wrong", ["true", "1.5", '"7"', "-1", str(2**31), "null", "[1]"])
@pytest.mark.parametrize("before", [0, PIECE_BYTES])
def test_what_is_no_token_id_is_refused_wherever_it_stands(wrong: str, before: int) -> None:
    with pytest.raises(msgspec.DecodeError):
        asyncio.run(numbers(f"[{'7,' * before}{wrong}]".encode()))


def test_a_text_of_numbers_is_no_list() -> None:
    with pytest.raises(msgspec.DecodeError):
        asyncio.run(numbers(b'"%b7"' % (b"7," * PIECE_BYTES)))


def test_other_fields_stay_as_they_were_written() -> None:
    fields, listed = asyncio.run(fields_of(b'{"count": 2, "tokens": [5, 6], "max": 9}', long="tokens"))
    assert ({name: bytes(value) for name, value in fields.items()}, listed) == ({"count": b"2", "max": b"9"}, [5, 6])
    assert asyncio.run(fields_of(b'{"tokens": null}', long="tokens")) == ({}, None)


def test_while_a_long_prompt_is_read_the_loop_answers_others() -> None:
    text, beats = json.dumps(LONG).encode(), list[float]()

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0)

    async def inside() -> None:
        beating = asyncio.create_task(beat())
        await numbers(text)
        beating.cancel()

    asyncio.run(inside())
    assert len(beats) > len(text) // PIECE_BYTES, "at least once between every two pieces"


def test_a_long_prompt_comes_back_from_an_engine_as_an_array_and_goes_into_the_event_as_a_list() -> None:
    last = GenerationChunk(
        text="b", tokens=[2], logprobs=[-0.1], finish_reason=FinishReason.STOP, prompt_tokens=LONG, kept_log_mass=[-0.2],
        mixed_versions="two"
    )  # fmt: skip

    async def inside() -> list[GenerationChunk]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=msgspec.json.encode(last) + b"\n"))
        asked = GenerateRequest(policy="composer", digest="d" * 64, messages=[], sampling=SamplingParams())
        async with HttpEngines(["http://one"], client=httpx.AsyncClient(transport=transport)) as engines:
            return [chunk async for chunk in engines.generate(asked)]

    (chunk,) = asyncio.run(inside())
    assert isinstance(chunk.prompt_tokens, array)
    assert msgspec.structs.replace(chunk, prompt_tokens=list(chunk.prompt_tokens)) == last
    served = msgspec.structs.replace(turn("i"), prompt_tokens=chunk.prompt_tokens)
    assert msgspec.json.decode(turn_event(served).data, type=TurnServed).prompt_tokens == LONG
    assert payload_of(served).tokens == (*LONG, *served.completion_tokens)
