"""The vLLM adapter against a fake server of vLLM's documented shapes."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi.testclient import TestClient

from app.domain.errors import BadRequest, Overloaded, Refused, Unavailable
from app.domain.ports import EngineState
from app.domain.serving import GenerateRequest, GenerationChunk
from app.domain.turns import FinishReason, SamplingParams
from app.policy.store import LocalWeights
from app.serving.vllm import VllmControl, VllmEngines, VllmResidency
from tests.fakes.engines import MemoryEngineLedger
from tests.fakes.vllm import FakeVllm

DIGEST = "d" * 64


def request(**changes: Any) -> GenerateRequest:
    given: dict[str, Any] = {
        "policy": "composer", "digest": DIGEST, "messages": [{"role": "user", "content": "hi"}], "sampling": SamplingParams(seed=4),
    }  # fmt: skip
    return GenerateRequest(**{**given, **changes})


def control_of(server: FakeVllm) -> VllmControl:
    return VllmControl("http://vllm", client=cast("httpx.Client", TestClient(server.app)))


def with_engines(server: FakeVllm, scenario: Callable[[VllmEngines], Coroutine[Any, Any, Any]], *, urls: int = 1) -> Any:
    async def run() -> Any:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(server.app))
        async with VllmEngines([f"http://vllm-{index}" for index in range(urls)], client=client) as engines:
            return await scenario(engines)

    return asyncio.run(run())


def complete(server: FakeVllm, asked: GenerateRequest) -> list[GenerationChunk]:
    async def scenario(engines: VllmEngines) -> list[GenerationChunk]:
        return [chunk async for chunk in engines.generate(asked)]

    return with_engines(server, scenario)


def test_tokens_logprobs_prompt_and_reason_arrive_as_sampled() -> None:
    chunks = complete(FakeVllm(DIGEST), request())
    assert [token for chunk in chunks for token in chunk.tokens] == [11, 12, 2]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [-0.5, -1.5, -0.25]
    assert "".join(chunk.text for chunk in chunks) == "a b"
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[-1].prompt_tokens == [7, 8, 9]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_nothing_bends_the_distribution_beyond_what_the_turn_records() -> None:
    server = FakeVllm(DIGEST)
    complete(
        server,
        request(sampling=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5, seed=4, stop=("x",)), tools=[{"type": "function"}]),
    )
    (body,) = server.bodies
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"], body["stop"]) == (0.7, 0.9, 5, 4, ["x"])
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert body["logprobs"] is True
    assert body["return_token_ids"] is True
    assert body["tool_choice"] == "none"


def test_a_version_the_server_does_not_hold_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        complete(FakeVllm("other"), request())


@pytest.mark.parametrize(("status", "kind"), [(429, Overloaded), (400, BadRequest), (503, Unavailable), (500, Unavailable)])
def test_refusals_are_told_apart(status: int, kind: type[Exception]) -> None:
    server = FakeVllm(DIGEST)
    server.failing["/v1/chat/completions"] = status
    with pytest.raises(kind) as refused:
        complete(server, request())
    if isinstance(refused.value, Overloaded):
        assert refused.value.retry_after_s == 3.0


@pytest.mark.parametrize("events", [0, 1, 3])
def test_an_answer_that_is_cut_off_ends_as_an_error(events: int) -> None:
    server = FakeVllm(DIGEST)
    server.cut_after = events
    last = complete(server, request())[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "too early" in str(last.message)


def test_tokens_are_counted_by_the_server_and_it_can_be_pinged() -> None:
    server = FakeVllm(DIGEST)

    async def scenario(engines: VllmEngines) -> int:
        await engines.ping()
        return await engines.count_tokens(request())

    assert with_engines(server, scenario, urls=2) == 5
    server.failing["/health"] = 503
    with pytest.raises(Unavailable, match="RATCHET_ENGINES"):
        with_engines(server, lambda engines: engines.ping())


def test_weights_are_replaced_only_between_requests() -> None:
    server = FakeVllm(DIGEST)
    control = control_of(server)
    control.replace_weights({"names": ["w"]})
    assert server.calls == [
        "/pause?mode=wait&clear_cache=true", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_server_with_half_replaced_weights_is_never_resumed(path: str) -> None:
    server = FakeVllm(DIGEST)
    server.failing[path] = 500
    with pytest.raises(Refused, match="stays paused"):
        control_of(server).replace_weights({})
    assert "/resume" not in server.calls


def test_wanted_adapters_are_loaded_and_unwanted_ones_unloaded(tmp_path: Path, tiny_model: Path) -> None:
    adapter, whole = "a" * 64, "b" * 64
    for digest in (adapter, whole):
        shutil.copytree(tiny_model, tmp_path / digest)
    (tmp_path / adapter / "adapter_config.json").write_text("{}")
    server, ledger = FakeVllm(DIGEST), MemoryEngineLedger()
    residency = VllmResidency(control_of(server), ledger, LocalWeights(tmp_path))
    ledger.wants = {("composer", DIGEST), ("composer", adapter), ("composer", whole), ("composer", "c" * 64)}
    residency.turn()
    assert server.calls == [f"load {adapter} {tmp_path / adapter}"]
    states = {digest: state for (_, digest), (state, _) in ledger.states.items()}
    assert states == {DIGEST: EngineState.READY, adapter: EngineState.READY, whole: EngineState.FAILED, "c" * 64: EngineState.FAILED}
    assert f"--served-model-name {whole}" in str(ledger.states[("composer", whole)][1])
    ledger.wants = set()
    residency.turn()
    assert server.calls[-1] == f"unload {adapter}"
    assert server.models == {DIGEST}
