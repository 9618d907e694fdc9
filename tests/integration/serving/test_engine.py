"""The embedded engine over HTTP: streams, refusals, hot versions, and clients that go away."""

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ports import EngineState
from app.domain.telemetry.turns import FinishReason, Form, SamplingParams, Shape
from app.policy.decoding.sampling import sample
from app.policy.model import Policy, load_policy
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.store import LocalWeights
from app.policy.tiny import write_tiny
from app.serving.client import HttpEngines
from app.serving.worker import Limits
from app.telemetry.catalogue import of_process
from tests.integration.serving.running import RunningEngine, ask, complete, engine, request, until


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LocalWeights:
    return LocalWeights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def first(weights: LocalWeights, tiny_model: Path) -> str:
    return weights.publish(tiny_model)


@pytest.fixture(scope="module")
def second(weights: LocalWeights, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "second"
    write_tiny(folder, seed=2)
    return weights.publish(folder)


@pytest.fixture(scope="module")
def endless(weights: LocalWeights, tied_model: Path) -> str:
    """Taken greedily, it repeats itself until it may not."""
    return weights.publish(tied_model)


@pytest.fixture(scope="module")
def running(weights: LocalWeights, first: str, second: str) -> Iterator[RunningEngine]:
    with engine(weights, first, second, load=in_float32) as started:
        yield started


def in_float32(folder: Path, **options: Any) -> Policy:
    return load_policy(folder, dtype=torch.float32, **options)


def test_a_completion_streams_with_tokens_logprobs_and_the_prompt(running: RunningEngine, weights: LocalWeights, first: str) -> None:
    async def scenario() -> None:
        chunks = await ask(request(first), running.url)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        policy = in_float32(weights.path(first))
        prompt = chunks[-1].prompt_tokens
        assert prompt is not None
        assert prompt == policy.chat.prompt([{"role": "user", "content": "def f(x):"}])
        with torch.no_grad():
            expected = token_logprobs(policy.model, prompt, tokens)
        assert torch.allclose(torch.tensor(logprobs), expected, atol=2e-5)
        assert "".join(chunk.text for chunk in chunks) == policy.chat.decode(tokens)

    asyncio.run(scenario())


def test_an_answer_that_nobody_streams_comes_in_few_pieces_with_the_same_content(running: RunningEngine, first: str) -> None:
    streamed = request(first, max_tokens=40)
    pieces = asyncio.run(ask(streamed, running.url))
    began = time.monotonic()
    whole = asyncio.run(ask(msgspec.structs.replace(streamed, stream=False), running.url))
    assert len(whole) <= 3 + (time.monotonic() - began)  # the first token, the last, and one line a second in between
    assert whole[0].tokens  # the time to the first token stays what it is
    assert "".join(piece.text for piece in whole) == "".join(piece.text for piece in pieces)
    for part in ("tokens", "logprobs"):
        assert [one for piece in whole for one in getattr(piece, part)] == [one for piece in pieces for one in getattr(piece, part)]


def test_requests_for_two_versions_at_once_are_each_sampled_from_their_own(
    running: RunningEngine, weights: LocalWeights, first: str, second: str
) -> None:
    async def scenario() -> None:
        asked = [request(digest, seed=seed) for seed in range(12) for digest in (first, second)]
        async with HttpEngines([running.url]) as engines:
            answers = await asyncio.gather(*[complete(engines, each) for each in asked])
        for digest in (first, second):
            policy = in_float32(weights.path(digest))
            for each, chunks in zip(asked, answers, strict=True):
                if each.digest == digest:
                    (alone,) = sample(policy, [chunks[-1].prompt_tokens or []], each.sampling)
                    assert [token for chunk in chunks for token in chunk.tokens] == alone.tokens

    asyncio.run(scenario())


def test_the_prompt_is_counted_as_it_would_be_fed(running: RunningEngine, first: str) -> None:
    async def scenario() -> None:
        async with HttpEngines([running.url]) as engines:
            counted = await engines.count_tokens(request(first))
            assert counted == len((await complete(engines, request(first)))[-1].prompt_tokens or [])
            await engines.ping()

    asyncio.run(scenario())


def test_weights_that_are_not_held_are_refused_and_never_substituted(running: RunningEngine) -> None:
    async def scenario() -> None:
        with pytest.raises(Unavailable, match="no engine holds the weights 000000000000"):
            await ask(request("0" * 64), running.url)

    asyncio.run(scenario())


def test_a_bad_request_keeps_its_parameter_and_code_over_the_wire(running: RunningEngine, first: str) -> None:
    async def scenario() -> None:
        with pytest.raises(BadRequest, match="top_p") as refused:
            await ask(request(first, top_p=3.0), running.url)
        assert refused.value.param == "top_p"
        with pytest.raises(BadRequest, match="top_k is -1: use the number of tokens to draw from, or 0 for all"):
            await ask(request(first, top_k=-1), running.url)
        with pytest.raises(BadRequest) as too_long:
            await ask(request(first, content="ä" * 2000), running.url)
        assert too_long.value.code == "context_length_exceeded"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"policy": 1}', b"\xff\xfe", b'{"policy":"p","digest":"d","messages":[],"sampling":{},"x":1}']
)
def test_a_body_that_is_no_request_is_refused_in_words(running: RunningEngine, body: bytes) -> None:
    answer = httpx.post(f"{running.url}/generate", content=body, headers={"content-type": "application/json"}, trust_env=False)
    assert answer.status_code == 400
    assert "GenerateRequest" in answer.json()["error"]["message"]


def test_an_engine_says_how_it_is_in_the_format_that_prometheus_reads(running: RunningEngine) -> None:
    found = {family.name: family for family in text_string_to_metric_families(httpx.get(f"{running.url}/metrics").raise_for_status().text)}
    shown = {f"{name}_total" if family.type == "counter" else name for name, family in found.items()}
    swaps = {"ratchet_engine_swap_seconds"}  # of whoever makes the residency: the process
    assert {name for name in shown if name.startswith("ratchet_")} == of_process("engine").keys() - swaps
    assert httpx.get(f"{running.url}/ready").status_code == 200
    assert sum(sample.value for sample in found["ratchet_engine_versions"].samples if sample.labels == {"state": "ready"}) >= 1


def test_an_engine_says_whether_its_answers_depend_on_who_else_is_asked(running: RunningEngine) -> None:
    told = httpx.get(f"{running.url}/health").raise_for_status().json()
    found = running.residency.invariance
    assert found is not None, "it tried before it took anything"
    assert found.compared > 0
    assert told["batch_invariant"] is found.holds


def test_a_dead_engine_costs_nothing_while_another_lives(running: RunningEngine, first: str) -> None:
    async def scenario() -> None:
        async with HttpEngines(["http://127.0.0.1:9", running.url]) as engines:
            for _ in range(4):  # whichever comes first in turn
                assert (await complete(engines, request(first)))[-1].finish_reason is not None
        with pytest.raises(Unavailable, match="ratchet engine"):
            await ask(request(first), "http://127.0.0.1:9")
        async with HttpEngines(["http://127.0.0.1:9"]) as dead:
            with pytest.raises(Unavailable, match="ratchet engine"):
                await dead.ping()

    asyncio.run(scenario())


def test_the_ledger_says_where_a_version_is(running: RunningEngine, first: str) -> None:
    async def scenario() -> None:
        chunks = await ask(request(first), "http://127.0.0.1:9", holders=running.ledger.holders)
        assert chunks[-1].finish_reason is not None

    asyncio.run(scenario())


def test_a_full_engine_says_when_to_come_back(weights: LocalWeights, endless: str) -> None:
    async def scenario(url: str) -> None:
        async with HttpEngines([url]) as engines:
            asked = [complete(engines, request(endless, max_tokens=400, temperature=0.0)) for _ in range(20)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, Overloaded)]
        assert refused
        assert all(error.retry_after_s >= 1 for error in refused)
        assert any(isinstance(answer, list) for answer in answers)

    with engine(weights, endless, limits=Limits(rows=2, waiting=3)) as small:
        asyncio.run(scenario(small.url))


@pytest.mark.parametrize("what", ["prompt", "prepare"])
def test_who_waits_for_a_prompt_or_a_form_to_be_made_is_counted(weights: LocalWeights, endless: str, what: str) -> None:
    """Both are made on one thread each: without a count any number of requests, of 8 MB each, waited there."""
    go = threading.Event()

    async def scenario(running: RunningEngine) -> None:
        shape = Shape(form=Form(answer={"type": "object"})) if what == "prepare" else None
        asked = msgspec.structs.replace(request(endless, max_tokens=1), shape=shape)
        async with HttpEngines([running.url]) as engines:
            waiting = [asyncio.ensure_future(complete(engines, asked)) for _ in range(running.worker.capacity)]
            while running.worker.load < running.worker.capacity:
                await asyncio.sleep(0.01)
            for path in (complete(engines, asked), engines.count_tokens(asked)):
                with pytest.raises(Overloaded):
                    await path
            go.set()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert running.worker.load == 0, "whatever became of them"

    with engine(weights, endless, limits=Limits(rows=1, waiting=2)) as running:
        made = getattr(running.worker, what)
        setattr(running.worker, what, lambda asked: go.wait(60) and made(asked))
        asyncio.run(scenario(running))


def test_a_client_that_leaves_frees_its_row(weights: LocalWeights, endless: str) -> None:
    async def leave(url: str) -> None:
        async with HttpEngines([url]) as engines:
            stream = engines.generate(request(endless, max_tokens=1900, temperature=0.0))
            assert (await anext(aiter(stream))).finish_reason is None
            await stream.aclose()  # type: ignore[attr-defined] - it is a generator

    with engine(weights, endless) as running:
        asyncio.run(leave(running.url))
        until(lambda: running.worker.load == 0, within_s=60)


def test_clients_that_leave_before_their_first_token_leave_nothing_behind(weights: LocalWeights, endless: str) -> None:
    async def scenario(running: RunningEngine) -> None:
        async with HttpEngines([running.url]) as engines:
            served = engines.generate(request(endless, max_tokens=1900, temperature=0.0))
            assert (await anext(aiter(served))).finish_reason is None
            waiting = [asyncio.ensure_future(complete(engines, request(endless, max_tokens=9))) for _ in range(3)]
            while running.worker.load < 4:
                await asyncio.sleep(0.01)
            for one in waiting:
                one.cancel()
            while running.worker.load > 1:
                await asyncio.sleep(0.01)
            assert running.worker.sampled_tokens < 400, "long before the one who is there has its answer"
            await served.aclose()  # type: ignore[attr-defined] - it is a generator

    with engine(weights, endless, limits=Limits(rows=1, waiting=3)) as running:
        asyncio.run(asyncio.wait_for(scenario(running), 60))


def test_a_completion_that_takes_too_long_ends_as_a_timeout(weights: LocalWeights, endless: str) -> None:
    async def scenario(url: str) -> None:
        chunks = await ask(request(endless, max_tokens=2000, temperature=0.0), url)
        assert chunks[-1].finish_reason is FinishReason.TIMEOUT
        assert sum(len(chunk.tokens) for chunk in chunks) > 0

    with engine(weights, endless, limits=Limits(rows=2, time_s=0.1)) as running:
        asyncio.run(scenario(running.url))


def test_versions_come_and_go_while_requests_run(weights: LocalWeights, first: str, second: str) -> None:
    async def traffic(url: str, stop: asyncio.Event) -> int:
        served = 0
        async with HttpEngines([url]) as engines:
            while not stop.is_set():
                chunks = await complete(engines, request(first, seed=served))
                assert chunks[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                served += 1
        return served

    async def scenario(running: RunningEngine) -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(traffic(running.url, stop))
        for _ in range(3):
            running.ledger.wants = {("composer", first), ("composer", second)}
            await asyncio.to_thread(until, lambda: running.ledger.states[("composer", second)][0] is EngineState.READY)
            assert (await ask(request(second), running.url))[-1].finish_reason is not None
            running.ledger.wants = {("composer", first)}
            await asyncio.to_thread(until, lambda: running.ledger.states[("composer", second)][0] is EngineState.DROPPED)
        stop.set()
        assert await task > 0
        await asyncio.to_thread(until, lambda: len(left) == 3)

    left: list[int] = []
    with engine(weights, first, linger_s=0.1, freed=lambda: left.append(1)) as running:
        running.ledger.states[("composer", second)] = (EngineState.DROPPED, None)
        asyncio.run(scenario(running))
        states = [state for digest, state in running.ledger.history if digest == second]
        assert states == [EngineState.LOADING, EngineState.READY, EngineState.DROPPED] * 3


def test_a_damaged_version_is_reported_failed_and_the_others_serve_on(
    weights: LocalWeights, first: str, tiny_model: Path, tmp_path: Path
) -> None:
    store = LocalWeights(tmp_path)
    shutil.copytree(weights.path(first), tmp_path / first)
    shutil.copytree(tiny_model, tmp_path / ("b" * 64))
    (tmp_path / ("b" * 64) / "model.safetensors").write_bytes(b"ruin")

    async def scenario(running: RunningEngine) -> None:
        running.ledger.wants |= {("composer", "b" * 64), ("composer", "c" * 64)}
        await asyncio.to_thread(until, lambda: running.ledger.states.get(("composer", "c" * 64), (None,))[0] is EngineState.FAILED)
        assert running.ledger.states[("composer", "b" * 64)][0] is EngineState.FAILED
        assert "safetensors" in str(running.ledger.states[("composer", "b" * 64)][1])
        assert (await ask(request(first), running.url))[-1].finish_reason is not None

    with engine(store, first) as running:
        asyncio.run(scenario(running))


def test_whole_weights_of_another_version_are_not_taken_for_the_wanted_one(
    weights: LocalWeights, first: str, second: str, tmp_path: Path
) -> None:
    store = LocalWeights(tmp_path)
    shutil.copytree(weights.path(first), tmp_path / first)
    shutil.copytree(weights.path(first), tmp_path / second)

    async def scenario(running: RunningEngine) -> None:
        running.ledger.wants |= {("composer", second)}
        await asyncio.to_thread(until, lambda: running.ledger.states.get(("composer", second), (None,))[0] is EngineState.FAILED)
        assert not running.worker.holds(second)
        with pytest.raises(Unavailable):
            await ask(request(second), running.url)

    with engine(store, first) as running:
        asyncio.run(scenario(running))


def test_a_step_that_breaks_costs_its_batch_and_not_the_engine(weights: LocalWeights, first: str) -> None:
    broken: list[Policy] = []

    def load(folder: Path, **options: Any) -> Policy:
        broken.append(load_policy(folder, **options))
        return broken[0]

    async def scenario(url: str) -> None:
        fail = cast("torch.nn.Module", broken[0].model.get_output_embeddings()).register_forward_pre_hook(_raise)
        with pytest.raises(Unavailable, match=r"before its first token.*out of memory"):  # another replica would have been asked
            await ask(request(first), url)
        fail.remove()
        assert (await ask(request(first), url))[-1].finish_reason is not FinishReason.ERROR

    with engine(weights, first, load=load) as running:
        asyncio.run(scenario(running.url))


def _raise(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_an_engine_that_dies_in_the_middle_ends_the_answer_as_an_error(first: str) -> None:
    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        line = b'{"text":"a","tokens":[1],"logprobs":[-1.0]}\n'
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(line), line))
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(cut_off, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            chunks = await ask(request(first), f"http://127.0.0.1:{port}")
        assert chunks[0].tokens == [1]
        assert chunks[-1].finish_reason is FinishReason.ERROR
        assert "went away" in str(chunks[-1].message)

    asyncio.run(scenario())


def test_sampling_params_default_to_an_honest_draw() -> None:
    assert (SamplingParams().temperature, SamplingParams().top_p) == (1.0, 1.0)
