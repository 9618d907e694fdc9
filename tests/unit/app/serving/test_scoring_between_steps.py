"""What is scored is read a piece at a time: between two pieces whoever is being answered gets a token, and whoever asked may leave."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch

from app.domain.errors import BadRequest, NotFound, Overloaded, Unavailable
from app.domain.telemetry.serving import GenerateRequest, ScoreRequest
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Decoder
from app.policy.model import Policy, load_policy
from app.policy.tiny_moe import Architecture, write_tiny_moe
from app.serving.scoring import scored
from app.serving.worker import Limits, Worker
from tests.unit.app.serving.test_worker import Bench, Counting

CHUNK = 16


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Of a kind that goes through transformers' modules, where passes can be watched."""
    folder = tmp_path_factory.mktemp("models") / "moe"
    write_tiny_moe(folder, Architecture.QWEN3_MOE)
    return replace(load_policy(folder, dtype=torch.float32), end_tokens=frozenset())


@contextmanager
def passes(policy: Policy) -> Iterator[list[tuple[object, int]]]:
    """Every forward pass: the cache that it writes to, and how many tokens it is fed."""
    found: list[tuple[object, int]] = []

    def note(_module: object, _given: object, named: dict[str, Any]) -> None:
        found.append((named["past_key_values"], named["input_ids"].numel()))

    hook = policy.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    yield found
    hook.remove()


def test_between_two_pieces_of_what_is_scored_whoever_is_answered_gets_a_token(endless: Policy) -> None:
    prompt, completion = [5] * 70, [(7 * n) % 512 for n in range(131)]
    worker = Worker(Limits(rows=2, prefill_chunk=CHUNK))

    async def scenario() -> list[float]:
        asked = GenerateRequest(
            policy="p", digest=endless.digest, messages=[], sampling=SamplingParams(max_tokens=2000, seed=1), stream=True
        )
        worker.take(asked)
        job = worker.submit(asked, [5, 6, 7])
        await job.updates.get()
        scored = worker.score(ScoreRequest(policy="p", digest=endless.digest, prompt_tokens=prompt, completion_tokens=completion))
        return await asyncio.wrap_future(scored)

    worker.start()
    try:
        worker.add(endless)
        with passes(endless) as seen:
            found = asyncio.run(scenario())
    finally:
        worker.close()
    sampling = seen[0][0]
    read = [at for at, (cache, _) in enumerate(seen) if cache is not sampling]
    assert sum(seen[at][1] for at in read) == len(prompt) + len(completion) - 1
    assert max(seen[at][1] for at in read) <= CHUNK
    assert all(later - earlier > 1 for earlier, later in pairwise(read)), "somebody's token in between"
    alone = Decoder(endless, chunk=2048).score(prompt, completion, temperature=1.0, top_p=1.0)
    assert found == pytest.approx(alone, abs=2e-5)


def to_score(*completion: int, digest: str = "d") -> ScoreRequest:
    return ScoreRequest(
        policy="p", digest=digest, prompt_tokens=[1, 2, 3], completion_tokens=[*completion], temperature=0.5, top_p=0.75, top_k=4
    )


def test_completions_to_score_wait_in_a_line_with_an_end() -> None:
    decoder = Counting()
    worker = Bench(decoder, waiting=2)
    answers = [worker.score(to_score(1)) for _ in range(2)]
    worker.obey()
    with pytest.raises(Overloaded, match="has 2 completions to score") as raised:
        worker.score(to_score(1))
    assert raised.value.retry_after_s == 1.0
    with pytest.raises(NotFound):
        worker.score(to_score(1, digest="another"))
    for pieces in (1, 2, 3):
        worker._score()
        assert (decoder.read, answers[0].done(), len(worker._asked)) == (pieces, False, 2)
    worker._score()
    assert (answers[0].result(0), answers[1].done(), len(worker._asked)) == ([3.0, 0.5, 0.75, 4.0], False, 1)


@pytest.mark.parametrize("read", [0, 1, 2, 3])
def test_what_is_scored_for_somebody_who_left_is_read_no_further(read: int) -> None:
    decoder = Counting()
    worker = Bench(decoder)
    left, stays = worker.score(to_score(1)), worker.score(to_score(1))
    worker.obey()
    for _ in range(read):
        worker._score()
    assert left.cancel()
    worker._score()
    assert (decoder.read, len(worker._asked), worker.alive) == (read, 1, False)
    while worker._asked:
        worker._score()
    assert stays.result(0) == [3.0, 0.5, 0.75, 4.0]


def test_a_version_that_leaves_is_freed_when_what_it_was_asked_to_score_is_scored() -> None:
    decoder = Counting()
    worker = Bench(decoder)
    answer = worker.score(to_score(1))
    worker.drop("d")
    worker.obey()
    while worker._asked:
        worker._round()
        assert (decoder.closed, worker.holds("d")) == (0, False)
        worker._score()
    worker._round()
    assert (answer.result(0), decoder.closed, worker.freed) == ([3.0, 0.5, 0.75, 4.0], 1, 1)


def test_a_score_that_breaks_is_an_error_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    worker = Bench(Counting())
    for request, error, words in (
        (to_score(), BadRequest, "nothing to score"), (to_score(0), Unavailable, "scoring failed: no memory"),
        (msgspec.structs.replace(to_score(1), digest="gone"), NotFound, "any more"),
    ):  # fmt: skip
        answer: Future[list[float]] = Future()
        assert list(scored(request, answer, worker._decoders.get)) == []
        with pytest.raises(error, match=words):
            answer.result(0)
    assert "scoring failed digest=d" in caplog.text
