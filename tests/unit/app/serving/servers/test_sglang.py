"""The SGLang dialect against a fake server of SGLang's shapes."""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httpx
import pytest

from app.domain.errors import BadRequest, NotFound, Overloaded, Unavailable
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk, Likely, ScoreRequest
from app.domain.telemetry.turns import FinishReason, Form, SamplingParams, Shape
from app.serving.servers.engines import ServerEngines
from app.serving.servers.sglang import Sglang
from tests.fakes.servers.sglang import KEPT, FakeSglang

DIGEST, OTHER = "d" * 64, "e" * 64


def request(**changes: Any) -> GenerateRequest:
    given: dict[str, Any] = {
        "policy": "composer", "digest": DIGEST, "messages": [{"role": "user", "content": "hi"}], "sampling": SamplingParams(seed=4),
    }  # fmt: skip
    return GenerateRequest(**{**given, **changes})


def with_engines(
    server: FakeSglang, scenario: Callable[[ServerEngines], Coroutine[Any, Any, Any]], *, patience_s: float = 0.0,
    holders: Callable[[str], Mapping[str, str | None]] | None = None,
) -> Any:  # fmt: skip
    async def run() -> Any:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(server.app))
        async with ServerEngines(Sglang(), ["http://sglang"], client=client, patience_s=patience_s, holders=holders) as engines:
            return await scenario(engines)

    return asyncio.run(run())


def complete(server: FakeSglang, asked: GenerateRequest, **how: Any) -> list[GenerationChunk]:
    async def scenario(engines: ServerEngines) -> list[GenerationChunk]:
        return [chunk async for chunk in engines.generate(asked)]

    return with_engines(server, scenario, **how)


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_logprobs_prompt_and_reason_arrive_once_whether_the_stream_repeats_itself_or_not(incremental: bool) -> None:
    server = FakeSglang(DIGEST)
    server.incremental = incremental
    chunks = complete(server, request())
    assert [token for chunk in chunks for token in chunk.tokens] == [11, 12, 2]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [-0.5, -1.5, -0.25]
    assert "".join(chunk.text for chunk in chunks) == "a b"
    assert (chunks[-1].finish_reason, chunks[-1].prompt_tokens) == (FinishReason.STOP, [7, 8, 9, 4, 5])
    assert (chunks[-1].mixed_versions, chunks[-1].kept_log_mass) == (None, None)


@pytest.mark.parametrize("cut", [SamplingParams(top_p=0.9), SamplingParams(top_k=40)], ids=["top_p", "top_k"])
@pytest.mark.parametrize("incremental", [False, True])
def test_what_top_p_kept_comes_with_the_answer_and_logprobs_are_of_what_was_sampled(incremental: bool, cut: SamplingParams) -> None:
    server = FakeSglang(DIGEST)
    server.incremental = incremental
    chunks = complete(server, request(sampling=cut))
    assert server.bodies[-1]["sampling_params"]["top_k"] == (cut.top_k or -1)
    assert server.bodies[-1]["return_sampling_mask"] is True
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [-0.5, -1.5, -0.25]
    assert chunks[-1].kept_log_mass == pytest.approx([math.log(KEPT)] * 3)


def test_nothing_bends_the_distribution_beyond_what_the_turn_records() -> None:
    server = FakeSglang(DIGEST)
    bent = Shape(presence_penalty=0.5, frequency_penalty=-1.0, logit_bias={7: 3.0})
    complete(server, request(sampling=SamplingParams(temperature=0.7, max_tokens=5, seed=4, stop=("x",)), shape=bent))
    body = server.bodies[-1]
    assert body["sampling_params"] == {
        "temperature": 0.7, "top_p": 1.0, "max_new_tokens": 5, "stop": ["x"], "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.5, "frequency_penalty": -1.0, "logit_bias": {"7": 3.0}, "sampling_seed": 4,
    }  # fmt: skip
    assert (body["input_ids"], body["return_sampling_mask"], body.get("lora_path")) == ([7, 8, 9, 4, 5], False, None)


def test_its_own_masks_are_said_to_be_unscorable_and_calls_cannot_be_forced() -> None:
    server = FakeSglang(DIGEST)
    kept = complete(server, request(shape=Shape(form=Form(answer={"type": "object"}))))[-1]
    assert json.loads(server.bodies[-1]["sampling_params"]["json_schema"]) == {"type": "object"}
    assert "SGLang's own token masks" in str(kept.unscorable)
    with pytest.raises(BadRequest, match="cannot be made to call a tool"):
        complete(server, request(shape=Shape(form=Form(call={"type": "object"}))))


def test_the_likeliest_tokens_come_beside_the_sampled_one() -> None:
    chunks = complete(FakeSglang(DIGEST), request(likely=2))
    named = [place for chunk in chunks for place in chunk.likely or []]
    assert named[1] == [Likely(12, -1.5, b" b"), Likely(13, -0.25, b"c"), Likely(14, -2.0, b"d")]
    assert len(named) == 3


def test_a_version_that_is_not_held_is_unavailable_and_one_loaded_as_an_adapter_is_named() -> None:
    server = FakeSglang(OTHER)
    with pytest.raises(Unavailable, match="no SGLang server holds the weights dddd"):
        complete(server, request())
    server.adapters[DIGEST] = None
    complete(server, request())
    assert server.bodies[-1]["lora_path"] == DIGEST


def test_a_server_whose_weights_were_replaced_is_known_by_their_label() -> None:
    server = FakeSglang(DIGEST)
    server.base, server.version = "/weights/somewhere", OTHER
    with pytest.raises(Unavailable, match="no SGLang server holds"):
        complete(server, request())
    assert complete(server, request(digest=OTHER))[-1].finish_reason is FinishReason.STOP


def test_a_turn_across_two_versions_says_so_and_which() -> None:
    server = FakeSglang(DIGEST)
    server.version, server.labels = DIGEST, [DIGEST, OTHER, OTHER]
    assert "dddddddddddd from token 0, eeeeeeeeeeee from token 1" in str(complete(server, request())[-1].mixed_versions)


def test_an_answer_that_a_swap_aborted_before_its_first_token_is_asked_for_again() -> None:
    server = FakeSglang(DIGEST)
    server.aborts = 1
    assert [token for chunk in complete(server, request(), patience_s=5.0) for token in chunk.tokens] == [11, 12, 2]
    server.aborts = 99
    last = complete(server, request())[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "SGLang aborted it" in str(last.message)


@pytest.mark.parametrize(("status", "kind"), [(400, BadRequest), (429, Overloaded), (503, Unavailable)])
def test_a_refusal_in_the_stream_is_one_as_long_as_nothing_was_sampled(status: int, kind: type[Exception]) -> None:
    server = FakeSglang(DIGEST)
    server.cut_after, server.ends = 0, {"type": "abort", "message": "the input is longer than the context length", "status_code": status}
    with pytest.raises(kind, match="context length"):
        complete(server, request())
    server.cut_after = 2
    last = complete(server, request())[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "context length" in str(last.message)


def test_an_error_in_the_stream_is_a_refusal_too() -> None:
    async def heard() -> None:
        lines = 'data: {"error": {"message": "bad stop", "code": 400}}\n\ndata: [DONE]\n\n'
        response = httpx.Response(200, text=lines)
        place = (await Sglang().held(_client(FakeSglang(DIGEST)), "http://sglang", {})).place(DIGEST, "http://sglang")
        assert place is not None
        with pytest.raises(BadRequest, match="bad stop"):
            _ = [chunk async for chunk in Sglang().answer(response, place, [1], request())]

    asyncio.run(heard())


def _client(server: FakeSglang) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.app))


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_an_answer_that_is_cut_off_ends_as_an_error(tokens: int) -> None:
    server = FakeSglang(DIGEST)
    server.cut_after = tokens
    last = complete(server, request())[-1]
    assert (last.finish_reason, "too early" in str(last.message)) == (FinishReason.ERROR, True)


@pytest.mark.parametrize(("status", "kind"), [(429, Overloaded), (400, BadRequest), (503, Unavailable), (500, Unavailable)])
def test_refusals_are_told_apart(status: int, kind: type[Exception]) -> None:
    server = FakeSglang(DIGEST)
    server.failing["/generate"] = status
    with pytest.raises(kind):
        complete(server, request())


def test_a_server_that_is_too_old_is_said_to_be_so() -> None:
    error = Sglang().refusal("http://sglang", 404, b'{"detail": "Not Found"}', {})
    assert isinstance(error, NotFound)
    assert "SGLang at http://sglang has no such endpoint: use SGLang 0.5.23 or newer" in str(error)


def test_a_server_in_doubt_answers_without_log_probabilities() -> None:
    chunks = complete(FakeSglang(DIGEST), request(sampling=SamplingParams(top_p=0.9)), holders=lambda _: {"sglang+http://sglang": "raw"})
    assert [token for chunk in chunks for token in chunk.tokens] == [11, 12, 2]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == []
    assert chunks[-1].kept_log_mass is None


def test_given_tokens_are_scored_by_the_version_that_was_asked_for() -> None:
    server = FakeSglang(OTHER)
    server.adapters[DIGEST] = None
    asked = ScoreRequest(policy="composer", digest=DIGEST, prompt_tokens=[7, 8], completion_tokens=[11, 12, 2])
    assert with_engines(server, lambda engines: engines.score(asked)) == [-0.5, -1.5, -0.25]
    assert server.bodies[-1]["lora_path"] == DIGEST
    with pytest.raises(BadRequest, match="SGLang gave log-probabilities of 2 other tokens for 3"):
        Sglang().scored({"meta_info": {"input_token_logprobs": [[None, 7, None], [-1.0, 8, None]]}}, [7, 8, 9])
