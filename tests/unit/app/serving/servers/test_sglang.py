"""The SGLang dialect against a fake server of SGLang's shapes."""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httpx
import pytest

from app.domain.errors import BadRequest, NotFound, Overloaded, Unavailable
from app.domain.ports import Holder
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk, Likely, ScoreRequest
from app.domain.telemetry.turns import FinishReason, Form, SamplingParams, Shape
from app.serving.servers.engines import ServerEngines
from app.serving.servers.held import Place
from app.serving.servers.sglang import Reading, Sglang, generating_body, is_cut
from tests.fakes.servers.sglang import KEPT, FakeSglang

DIGEST, OTHER = "d" * 64, "e" * 64


def request(**changes: Any) -> GenerateRequest:
    given: dict[str, Any] = {
        "policy": "composer", "digest": DIGEST, "messages": [{"role": "user", "content": "hi"}], "sampling": SamplingParams(seed=4),
    }  # fmt: skip
    return GenerateRequest(**{**given, **changes})


def with_engines(
    server: FakeSglang, scenario: Callable[[ServerEngines], Coroutine[Any, Any, Any]], *, patience_s: float = 0.0,
    holders: Callable[[str], Mapping[str, Holder]] | None = None,
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
    chunks = complete(
        FakeSglang(DIGEST), request(sampling=SamplingParams(top_p=0.9)), holders=lambda _: {"sglang+http://sglang": Holder(doubt="raw")}
    )
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


# --- its words, one by one ---------------------------------------------------------------------------------------------------------------

ON_BASE = Place(url="http://sglang", model="base", label=None)
ON_ADAPTER = Place(url="http://sglang", model=DIGEST, label=None, adapter=True)
METRICS = """sglang:num_running_reqs{model="m",rank="0"} 3.0
sglang:num_running_reqs{model="m",rank="1"} 1.0
sglang:num_queue_reqs{model="m"} 2.0
sglang:generation_tokens_total{model="m"} 700.0
sglang:generation_tokens_total{model="n"} 300.0
sglang:spec_accept_rate 0.75
"""


def test_a_server_is_seen_by_its_metrics_and_what_it_does_not_tell_is_not_known() -> None:
    seen = Sglang().sight("http://s", METRICS)
    assert (seen.address, seen.answers, seen.queue, seen.sampled_tokens, seen.acceptance) == ("http://s", True, 6, 1000, 0.75)
    nothing = Sglang().sight("http://s", "sglang:spec_accept_rate 0.0\n")
    assert (nothing.answers, nothing.queue, nothing.sampled_tokens, nothing.acceptance) == (True, None, None, None)
    assert Sglang().sight("http://s", "sglang:num_running_reqs 3\n").queue is None
    assert Sglang().sight("http://s", "sglang:num_queue_reqs 3\n").queue is None


@pytest.mark.parametrize(
    ("sampling", "cut"),
    [
        (SamplingParams(), False), (SamplingParams(top_p=0.999), True), (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=0.001), False),
    ],
)  # fmt: skip
def test_what_cuts_the_distribution_is_asked_for_its_own_log_probabilities(sampling: SamplingParams, cut: bool) -> None:
    assert is_cut(sampling) is cut
    body = generating_body(ON_BASE, [1], sampling)
    assert (body["return_sampling_mask"], body["return_logprob"], body["top_logprobs_num"]) == (cut, True, 0)
    assert "sampling_seed" not in body["sampling_params"]
    assert "logit_bias" not in body["sampling_params"]


def test_a_text_is_scored_at_temperature_one_from_its_first_token_on() -> None:
    told = {
        "input_ids": [7, 8], "return_logprob": True, "logprob_start_len": 0,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "top_k": -1, "top_p": 1.0},
    }  # fmt: skip
    assert Sglang().scoring(ON_BASE, [7, 8]) == ("/generate", told)
    assert Sglang().scoring(ON_ADAPTER, [7, 8]) == ("/generate", told | {"lora_path": DIGEST})


def test_tools_go_with_a_prompt_that_has_some_and_seeds_with_a_draw_that_has_one() -> None:
    assert Sglang().tokenizing(ON_BASE, request())[1] == {"messages": request().messages}
    assert Sglang().tokenizing(ON_BASE, request(tools=[{"x": 1}]))[1] == {"messages": request().messages, "tools": [{"x": 1}]}
    path, body = Sglang().generating(ON_ADAPTER, [1], request(likely=3))
    assert (path, body["stream"], body["return_text_in_logprobs"], body["top_logprobs_num"]) == ("/generate", True, True, 3)
    assert (body["lora_path"], body["sampling_params"]["sampling_seed"]) == (DIGEST, 4)
    assert Sglang().generating(ON_BASE, [1], request())[1]["return_text_in_logprobs"] is False


def event(ids: list[int], text: str, *, total: int, **told: Any) -> dict[str, Any]:
    return {"output_ids": ids, "text": text, "meta_info": {"completion_tokens": total, **told}}


def test_what_comes_anew_or_again_is_told_apart_by_the_count_of_tokens() -> None:
    whole, parts = (Reading(cut=False, likely=None, logged=True) for _ in range(2))
    logs = [[-0.5, 11, None], [-1.5, 12, None], [-0.25, 13, None]]
    again = [whole.take(event([11, 12, 13][:n], "abc"[:n], total=n, output_token_logprobs=logs[:n])) for n in (1, 3)]
    anew = [
        parts.take(event([11], "a", total=1, output_token_logprobs=logs[:1])),
        parts.take(event([12, 13], "bc", total=3, output_token_logprobs=logs[1:])),
    ]
    for chunks in (again, anew):
        assert [(c.tokens, c.text, c.logprobs) for c in chunks if c] == [([11], "a", [-0.5]), ([12, 13], "bc", [-1.5, -0.25])]
    assert whole.take(event([11, 12, 13], "abc", total=3)) is None, "nothing is new in it"


def test_where_fewer_log_probabilities_come_than_tokens_none_are_passed_on() -> None:
    reading = Reading(cut=True, likely=None, logged=True)
    said = [[-0.5, 11, None], [-1.5, 12, None]]
    short = reading.take(event([11, 12], "ab", total=2, output_token_logprobs=said, output_token_sampling_logprobs=[-0.1]))
    assert short is not None
    assert (short.tokens, short.logprobs, reading.kept) == ([11, 12], [], [])
    full = reading.take(
        event([13, 14], "cd", total=4, output_token_logprobs=[*said, *said], output_token_sampling_logprobs=[-9.0, -9.0, -0.25, -1.0])
    )
    assert full is not None
    assert (full.logprobs, reading.kept) == ([-0.25, -1.0], [-0.25, -0.5])


def test_the_likeliest_are_cut_to_as_many_as_were_asked_for() -> None:
    reading = Reading(cut=False, likely=1, logged=True)
    others = [[[-0.1, 5, "x"], [-0.2, 6, "y"]]]
    chunk = reading.take(event([11], "a", total=1, output_token_logprobs=[[-0.5, 11, "a"]], output_top_logprobs=others))
    assert chunk is not None
    assert chunk.likely == [[Likely(11, -0.5, b"a"), Likely(5, -0.1, b"x")]]


def test_an_error_without_a_code_is_the_server_s_and_one_after_the_first_token_ends_the_answer() -> None:
    reading = Reading(cut=False, likely=None, logged=True)
    with pytest.raises(Unavailable, match="broken"):
        reading.take({"error": {"message": "broken"}})
    with pytest.raises(Overloaded):
        reading.take({"meta_info": {"finish_reason": {"type": "abort", "status_code": 429, "message": "full"}}})
    fresh = Reading(cut=False, likely=None, logged=False)
    first = fresh.take(event([11], "a", total=1, output_token_logprobs=[[-0.5, 11, None]]))
    assert first is not None
    assert first.logprobs == []
    assert fresh.take({"error": {"message": "broken", "code": 503}}) is None
    assert fresh.reason == {"type": "abort", "status_code": 503, "message": "broken"}
