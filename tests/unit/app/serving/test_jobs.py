"""What is told of an answer on its way: each token once, and at the end what only the end knows."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest

from app.domain.telemetry.serving import GenerateRequest, Likely
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.policy.decoding.generation import Generation
from app.policy.decoding.sampling import Decoder
from app.policy.precision import Precision
from app.serving.jobs import Job, last_of, news_of


class Weights:
    """A decoder's policy by its precision alone."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.policy = self


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def sampled(**more: Any) -> Generation:
    made = Generation(
        prompt=[1, 2], sampling=SamplingParams(), record_experts=False, max_tokens=9, stream=cast("Any", None), random=random.Random(1)
    )
    for name, value in {"tokens": [7, 8, 9], "logprobs": [-0.1, -0.2, -0.3], "text": "abc", **more}.items():
        setattr(made, name, value)
    return made


def job(loop: asyncio.AbstractEventLoop, generation: Generation, **more: Any) -> Job:
    request = GenerateRequest(policy="p", digest="d", messages=[], sampling=SamplingParams())
    return Job(request=request, loop=loop, deadline=0.0, generation=generation, **more)


def test_a_token_is_told_once_and_what_came_after_it_the_next_time(loop: asyncio.AbstractEventLoop) -> None:
    generation = sampled(tokens=[7], logprobs=[-0.1], text="a")
    going = job(loop, generation)
    first = news_of(going)
    assert (first.text, first.tokens, first.logprobs, first.likely) == ("a", [7], [-0.1], None)
    generation.tokens += [8, 9]
    generation.logprobs += [-0.2, -0.3]
    generation.text = "abc"
    second = news_of(going)
    assert (second.text, second.tokens, second.logprobs) == ("bc", [8, 9], [-0.2, -0.3])
    third = news_of(going)
    assert (third.text, third.tokens, third.logprobs, third.finish_reason) == ("", [], [], None)


LIKELY = [[cast("Likely", (7, -0.1))], [cast("Likely", (8, -0.2))], [cast("Likely", (9, -0.3))]]


@pytest.mark.parametrize(("wants", "logged", "told"), [(0, True, LIKELY), (1, True, LIKELY), (None, True, None), (0, False, None)])
def test_likely_tokens_are_told_where_they_were_asked_for_and_are_true(
    loop: asyncio.AbstractEventLoop, wants: int | None, logged: bool, told: list[Any] | None
) -> None:
    found = news_of(job(loop, sampled(wants=wants, likely=LIKELY), logged=logged))
    assert found.likely == told
    assert found.logprobs == ([-0.1, -0.2, -0.3] if logged else [])
    assert found.tokens == [7, 8, 9], "what was said is told in either case"


def test_the_end_tells_the_prompt_and_why_it_ended(loop: asyncio.AbstractEventLoop) -> None:
    told = last_of(job(loop, sampled()), FinishReason.LENGTH)
    assert (told.finish_reason, told.prompt_tokens, told.text) == (FinishReason.LENGTH, [1, 2], "abc")
    assert (told.routed_experts, told.kept_log_mass, told.message, told.precision) == (None, None, None, None)


@pytest.mark.parametrize(("fault", "message", "told"), [("torn", None, "torn"), ("torn", "late", "late"), (None, "late", "late")])
def test_the_end_tells_what_went_wrong(loop: asyncio.AbstractEventLoop, fault: str | None, message: str | None, told: str) -> None:
    assert last_of(job(loop, sampled(fault=fault)), FinishReason.ERROR, message=message).message == told


def test_the_end_tells_experts_where_they_were_recorded_and_mass_where_some_was_cut(loop: asyncio.AbstractEventLoop) -> None:
    experts = [[[1, 2]]]
    assert last_of(job(loop, sampled(experts=experts, record_experts=True)), FinishReason.STOP).routed_experts == experts
    assert last_of(job(loop, sampled(experts=experts, record_experts=False)), FinishReason.STOP).routed_experts is None
    assert last_of(job(loop, sampled(kept_log_mass=[-0.5])), FinishReason.STOP).kept_log_mass == [-0.5]


@pytest.mark.parametrize(("precision", "told"), [(Precision.BF16, None), (Precision.MXFP8, "mxfp8"), (Precision.NVFP4, "nvfp4")])
def test_rounded_weights_are_told_with_the_end(loop: asyncio.AbstractEventLoop, precision: Precision, told: str | None) -> None:
    going = job(loop, sampled(), decoder=cast("Decoder", Weights(precision)))
    assert last_of(going, FinishReason.STOP).precision == told
