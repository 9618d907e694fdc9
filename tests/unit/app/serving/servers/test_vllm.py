"""The vLLM adapter against a fake server of vLLM's shapes."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient

from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ports import Holder
from app.domain.telemetry.events import EventType
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk, Likely, ScoreRequest
from app.domain.telemetry.turns import MIXED_VERSIONS, FinishReason, Form, SamplingParams, Shape, TurnServed
from app.main import create_app
from app.serving.servers.engines import ServerEngines
from app.serving.servers.vllm import Vllm, chunk_of
from tests.fakes.gateway import CHAMPION, collaborators, events_of
from tests.fakes.inbox import MemoryInbox
from tests.fakes.servers.vllm import FakeVllm

DIGEST, OTHER = "d" * 64, "e" * 64


def request(**changes: Any) -> GenerateRequest:
    given: dict[str, Any] = {
        "policy": "composer", "digest": DIGEST, "messages": [{"role": "user", "content": "hi"}], "sampling": SamplingParams(seed=4),
    }  # fmt: skip
    return GenerateRequest(**{**given, **changes})


def with_engines(
    server: FakeVllm, scenario: Callable[[ServerEngines], Coroutine[Any, Any, Any]], *, urls: int = 1, patience_s: float = 0.0,
    holders: Callable[[str], Mapping[str, Holder]] | None = None,
) -> Any:  # fmt: skip
    async def run() -> Any:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(server.app))
        names = [f"http://vllm-{index}" for index in range(urls)]
        async with ServerEngines(Vllm(), names, client=client, patience_s=patience_s, holders=holders) as engines:
            return await scenario(engines)

    return asyncio.run(run())


def complete(server: FakeVllm, asked: GenerateRequest, **how: Any) -> list[GenerationChunk]:
    async def scenario(engines: ServerEngines) -> list[GenerationChunk]:
        return [chunk async for chunk in engines.generate(asked)]

    return with_engines(server, scenario, **how)


def test_what_bends_the_draw_goes_to_vllm_and_its_own_masks_are_said_to_be_unscorable() -> None:
    server = FakeVllm(DIGEST)
    bent = Shape(presence_penalty=0.5, frequency_penalty=-1.0, logit_bias={7: 3.0})
    assert complete(server, request(shape=bent, likely=2))[-1].unscorable is None
    told = server.bodies[-1]["sampling_params"]
    assert (told["presence_penalty"], told["frequency_penalty"], told["logit_bias"], told["logprobs"]) == (0.5, -1.0, {"7": 3.0}, 3)
    kept = complete(server, request(shape=Shape(form=Form(answer={"type": "object"}))))[-1]
    assert server.bodies[-1]["sampling_params"]["structured_outputs"] == {"json": {"type": "object"}}
    assert "cannot be worked out again" in str(kept.unscorable)
    with pytest.raises(BadRequest, match="cannot be made to call a tool"):
        complete(server, request(shape=Shape(form=Form(call={"type": "object"}))))


def test_the_likeliest_tokens_come_by_their_texts() -> None:
    alternatives = [{"token": " b", "logprob": -2.0, "bytes": [32, 98]}, {"token": "a", "logprob": -0.5, "bytes": [97]}]
    item = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": alternatives}
    chunk = chunk_of({"text": "a", "token_ids": [11], "logprobs": {"content": [item]}}, logged=True, likely=2)
    assert chunk is not None
    assert chunk.likely == [[Likely(11, -0.5, b"a"), Likely(None, -0.5, b"a"), Likely(None, -2.0, b" b")]]


def test_tokens_logprobs_prompt_and_reason_arrive_as_sampled() -> None:
    chunks = complete(FakeVllm(DIGEST), request())
    assert [token for chunk in chunks for token in chunk.tokens] == [11, 12, 2]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [-0.5, -1.5, -0.25]
    assert "".join(chunk.text for chunk in chunks) == "a b"
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[-1].prompt_tokens == [7, 8, 9, 4, 5]
    assert chunks[-1].mixed_versions is None
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_nothing_bends_the_distribution_beyond_what_the_turn_records() -> None:
    server = FakeVllm(DIGEST)
    complete(
        server,
        request(sampling=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5, seed=4, stop=("x",)), tools=[{"type": "function"}]),
    )
    prompt, body = server.bodies
    assert prompt["tools"] == [{"type": "function"}]
    asked = body["sampling_params"]
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"], asked["seed"], asked["stop"]) == (0.7, 0.9, 5, 4, ["x"])
    assert (asked["top_k"], asked["min_p"], asked["repetition_penalty"], asked["logprobs"]) == (0, 0.0, 1.0, 0)
    assert body["token_ids"] == [7, 8, 9, 4, 5]
    assert complete(server, request(sampling=SamplingParams(top_k=40)))[-1].unscorable is None, "the update works out what was kept"
    assert server.bodies[-1]["sampling_params"]["top_k"] == 40


def test_a_version_the_server_does_not_hold_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no vLLM server holds the weights dddd"):
        complete(FakeVllm(OTHER), request())


def test_a_version_loaded_as_an_adapter_is_asked_for_by_its_digest() -> None:
    server = FakeVllm(OTHER)
    server.adapters[DIGEST] = None
    complete(server, request())
    assert [body["model"] for body in server.bodies] == [DIGEST, DIGEST]


def test_a_server_whose_weights_were_replaced_no_longer_answers_to_the_digest_it_was_started_under() -> None:
    server = FakeVllm(DIGEST)
    server.version = OTHER
    with pytest.raises(Unavailable, match="no vLLM server holds"):
        complete(server, request())
    complete(server, request(digest=OTHER))
    assert server.bodies[-1]["model"] == DIGEST  # the name it was started under


def test_a_turn_across_two_versions_says_so_and_which() -> None:
    server = FakeVllm(DIGEST)
    server.version = DIGEST
    server.labels = [DIGEST, OTHER, OTHER]
    last = complete(server, request())[-1]
    assert "dddddddddddd from token 0, eeeeeeeeeeee from token 1" in str(last.mixed_versions)


def test_a_turn_that_other_weights_sampled_as_a_whole_says_so() -> None:
    server = FakeVllm(DIGEST)
    server.version, server.labels = DIGEST, [OTHER] * 3
    assert "not by dddddddddddd" in str(complete(server, request())[-1].mixed_versions)


def test_weights_that_came_back_in_the_middle_of_an_answer_are_seen() -> None:
    server = FakeVllm(DIGEST)
    server.version, server.labels = DIGEST, [DIGEST, OTHER, DIGEST]
    assert complete(server, request())[-1].mixed_versions is not None


def test_an_answer_aborted_before_its_first_token_is_asked_for_again() -> None:
    server = FakeVllm(DIGEST)
    server.aborts = 1
    chunks = complete(server, request(), patience_s=5.0)
    assert [token for chunk in chunks for token in chunk.tokens] == [11, 12, 2]
    assert chunks[-1].finish_reason is FinishReason.STOP


def test_an_answer_aborted_by_the_server_is_the_engines_fault_and_not_the_persons() -> None:
    server = FakeVllm(DIGEST)
    server.aborts = 99
    last = complete(server, request())[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "aborted" in str(last.message)


def test_a_server_in_doubt_answers_without_log_probabilities() -> None:
    chunks = complete(FakeVllm(DIGEST), request(), holders=lambda _: {"vllm+http://vllm-0": Holder(doubt="raw")})
    assert [token for chunk in chunks for token in chunk.tokens] == [11, 12, 2]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == []


def test_a_request_waits_for_a_version_that_is_being_put_in_place() -> None:
    server = FakeVllm(OTHER)

    async def scenario(engines: ServerEngines) -> FinishReason | None:
        async def arrive() -> None:
            await asyncio.sleep(0.3)
            server.version = DIGEST

        arriving = asyncio.create_task(arrive())
        chunks = [chunk async for chunk in engines.generate(request())]
        await arriving
        return chunks[-1].finish_reason

    assert with_engines(server, scenario, patience_s=20.0) is FinishReason.STOP


def test_servers_of_ones_own_region_are_asked_first() -> None:
    async def run() -> set[str]:
        asked: set[str] = set()

        async def note(sent: httpx.Request) -> None:
            if "generate" in sent.url.path:
                asked.add(sent.url.host)

        client = httpx.AsyncClient(transport=httpx.ASGITransport(FakeVllm(DIGEST).app), event_hooks={"request": [note]})
        held = {f"vllm+http://vllm-{n}": Holder(region=region) for n, region in enumerate(("us", "eu", ""))}
        urls = ["http://vllm-0", "http://vllm-1", "http://vllm-2"]
        async with ServerEngines(Vllm(), urls, client=client, holders=lambda _: held, region="eu") as engines:
            for _ in range(3):
                assert [chunk async for chunk in engines.generate(request())]
        return asked

    assert asyncio.run(run()) == {"vllm-1"}


def test_only_servers_that_the_ledger_calls_ready_are_asked() -> None:
    async def run() -> set[str]:
        asked: set[str] = set()

        async def note(sent: httpx.Request) -> None:
            asked.add(sent.url.host)

        client = httpx.AsyncClient(transport=httpx.ASGITransport(FakeVllm(DIGEST).app), event_hooks={"request": [note]})
        urls = ["http://vllm-0", "http://vllm-1", "http://vllm-2"]
        async with ServerEngines(Vllm(), urls, client=client, holders=lambda _: {"vllm+http://vllm-1": Holder()}) as engines:
            for _ in range(3):
                assert [chunk async for chunk in engines.generate(request())]
        return asked

    assert asyncio.run(run()) == {"vllm-1"}


@pytest.mark.parametrize(("status", "kind"), [(429, Overloaded), (400, BadRequest), (503, Unavailable), (500, Unavailable)])
def test_refusals_are_told_apart(status: int, kind: type[Exception]) -> None:
    server = FakeVllm(DIGEST)
    server.failing["/inference/v1/generate"] = status
    with pytest.raises(kind) as refused:
        complete(server, request())
    if isinstance(refused.value, Overloaded):
        assert refused.value.retry_after_s == 3.0


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_an_answer_that_is_cut_off_ends_as_an_error(tokens: int) -> None:
    server = FakeVllm(DIGEST)
    server.cut_after = tokens
    last = complete(server, request())[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "too early" in str(last.message)


def test_tokens_are_counted_by_the_server_and_it_can_be_pinged() -> None:
    server = FakeVllm(DIGEST)

    async def scenario(engines: ServerEngines) -> int:
        await engines.ping()
        return await engines.count_tokens(request())

    assert with_engines(server, scenario, urls=2) == 5
    server.failing["/health"] = 503
    with pytest.raises(Unavailable, match="RATCHET_ENGINES"):
        with_engines(server, lambda engines: engines.ping())


def test_given_tokens_are_scored_by_the_version_that_was_asked_for() -> None:
    server = FakeVllm(OTHER)
    server.adapters[DIGEST] = None
    asked = ScoreRequest(policy="composer", digest=DIGEST, prompt_tokens=[7, 8], completion_tokens=[11, 12, 2])
    assert with_engines(server, lambda engines: engines.score(asked)) == [-0.5, -1.5, -0.25]
    assert server.bodies[-1]["model"] == DIGEST


def test_a_turn_across_two_versions_is_answered_and_recorded_as_one_that_nobody_may_learn_from() -> None:
    server = FakeVllm(CHAMPION)
    server.version, server.labels = CHAMPION, [CHAMPION, CHAMPION, OTHER]
    inbox, client = MemoryInbox(), httpx.AsyncClient(transport=httpx.ASGITransport(server.app))
    app = create_app(collaborators(inbox=inbox, engines=ServerEngines(Vllm(), ["http://vllm"], client=client)))
    with TestClient(app) as people:
        answer = people.post("/v1/chat/completions", json={"model": "composer", "messages": [{"role": "user", "content": "hi"}]})
    assert answer.json()["choices"][0]["message"]["content"] == "a b"
    (turn,) = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert (turn.version, turn.logprobs, turn.completion_tokens) == (CHAMPION, None, [11, 12, 2])
    assert "eeeeeeeeeeee from token 2" in turn.tags[MIXED_VERSIONS]
