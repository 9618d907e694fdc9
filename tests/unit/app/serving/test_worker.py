"""What the sampling thread takes on, delivers, breaks and frees: each rule by hand, on decoders that only count."""

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from app.domain.errors import BadRequest, NotFound, Overloaded
from app.domain.telemetry.serving import GenerateRequest
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.policy.decoding.drafting import Drafting
from app.policy.decoding.generation import Generation
from app.policy.decoding.sampling import Decoder
from app.policy.model import Policy
from app.policy.precision import Precision
from app.serving.jobs import Job
from app.serving.worker import PULSE_S, Draining, Limits, Worker


class Weights:
    """A policy by name alone."""

    precision = Precision.BF16

    def __init__(self, digest: str) -> None:
        self.digest = digest


class Counting:
    """A decoder of which a step gives what it is told."""

    def __init__(self, digest: str = "d") -> None:
        self.policy = Weights(digest)
        self.busy = False
        self.drafted = self.accepted = self.prompted = 0
        self.drafting = Drafting(rows=0, context=1)
        self.steps, self.closed, self.read = 0, 0, 0
        self.gives: Any = []
        self.feeds = 0
        self.cancelled: list[tuple[Generation, FinishReason]] = []
        self.submitted: list[tuple[Any, ...]] = []

    def step(self) -> Any:
        self.steps += 1
        self.prompted += self.feeds
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives

    def close(self) -> None:
        self.closed += 1

    def cancel(self, generation: Generation, reason: FinishReason) -> None:
        self.cancelled.append((generation, reason))
        generation.finish_reason = reason

    def submit(self, prompt: list[int], sampling: SamplingParams, **more: Any) -> Generation:
        if not prompt:
            raise BadRequest("no prompt")
        self.submitted.append((prompt, more))
        return generation()

    def scored(self, prompt: list[int], completion: list[int], **more: Any) -> Iterator[list[float]]:
        if completion == [0]:
            raise OSError("no memory")
        if not completion:
            raise BadRequest("nothing to score")
        for piece in ([], [float(len(prompt)), more["temperature"]], [more["top_p"], float(more["top_k"])]):
            self.read += 1
            yield piece


class Bench(Worker):
    """A worker whose thread never begins: each part of its round is taken by hand."""

    def __init__(self, *decoders: Counting, **limits: Any) -> None:
        super().__init__(Limits(**limits))
        self.made = list[str]()
        self._decoders = {decoder.policy.digest: cast(Decoder, decoder) for decoder in decoders}

    def _decoder(self, policy: Policy) -> Decoder:
        self.made.append(policy.digest)
        return cast(Decoder, Counting(policy.digest))

    def obey(self) -> None:
        """Every command that was left."""
        for command in self._take():
            assert command is not None
            command()


def generation(**more: Any) -> Generation:
    made = Generation(
        prompt=[1, 2], sampling=SamplingParams(), record_experts=False, max_tokens=9, stream=cast(Any, None), random=random.Random(1)
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


def asked(digest: str = "d", **more: Any) -> GenerateRequest:
    return GenerateRequest(policy="p", digest=digest, messages=[], sampling=SamplingParams(), **more)


def running(worker: Bench, decoder: Counting, loop: asyncio.AbstractEventLoop, *, deadline: float = 1e18, **request: Any) -> Job:
    job = Job(request=asked(decoder.policy.digest, **request), loop=loop, deadline=deadline, generation=generation())
    job.decoder = cast(Decoder, decoder)
    worker._jobs.append(job)
    worker._count(1)
    return job


@pytest.fixture
def loop() -> Any:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def told(loop: asyncio.AbstractEventLoop, job: Job) -> list[Any]:
    loop.run_until_complete(asyncio.sleep(0))
    return [job.updates.get_nowait() for _ in range(job.updates.qsize())]


def test_what_an_engine_takes_on_unless_it_is_told_otherwise() -> None:
    found = Limits()
    assert (found.rows, found.waiting, found.prefill_chunk, found.prompt_cache_bytes, found.time_s) == (16, 64, 256, 167_772_160, 300.0)
    assert PULSE_S == 1.0


@pytest.mark.parametrize(("decoders", "capacity"), [(0, 7), (1, 7), (2, 9)])
def test_there_is_room_for_a_row_each_and_for_those_who_wait(decoders: int, capacity: int) -> None:
    assert Bench(*(Counting(f"d{n}") for n in range(decoders)), rows=2, waiting=5).capacity == capacity


def test_a_request_is_counted_when_it_is_taken_and_the_one_too_many_is_not() -> None:
    worker = Bench(held := Counting(), rows=1, waiting=1)
    assert cast(Any, worker.policy("d")) is held.policy
    for _ in range(2):
        worker.take(asked())
    with pytest.raises(Overloaded, match="has 2 requests in hand") as raised:
        worker.take(asked())
    assert (worker.load, raised.value.retry_after_s) == (2, 1.0)
    worker.let_go()
    assert worker.load == 1
    with pytest.raises(NotFound, match="does not hold the weights another"):
        worker.take(asked("another"))
    worker.draining = True
    with pytest.raises(Draining):
        worker.take(asked())
    assert worker.load == 1


def test_a_version_that_leaves_takes_nothing_new_and_is_freed_when_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="app.serving.worker")
    leaving, staying = Counting("l"), Counting("s")
    worker = Bench(leaving, staying)
    worker.drop("l")
    assert worker.holds("l")
    worker.obey()
    assert (worker.holds("l"), worker.holds("s"), worker.digests, worker.copies, worker.is_dropping) == (False, True, {"s"}, 2, True)
    with pytest.raises(NotFound):
        worker.policy("l")
    leaving.busy = True
    worker._round()
    assert (leaving.steps, leaving.closed, worker.copies) == (1, 0, 2)
    leaving.busy = False
    worker._round()
    assert (leaving.closed, worker.copies, worker.is_dropping, worker.holds("l")) == (1, 1, False, False)
    assert "version freed digest=l" in caplog.text
    worker.drop("never held")
    worker.obey()
    assert not worker.is_dropping, "else an engine with three copies would take up nothing more"
    worker._round()
    assert (staying.closed, worker.copies) == (0, 1)


def test_a_version_that_comes_back_while_it_leaves_stays_as_it_is() -> None:
    first = Counting("d")
    worker = Bench(first)
    worker.drop("d")
    worker.obey()
    worker._add(cast(Decoder, Counting("d")))
    assert worker.holds("d")
    assert worker._decoders["d"] is first, "with the answers that it is writing"
    worker._add(cast(Decoder, Counting("e")))
    assert worker.holds("e")


def test_a_decoder_is_made_before_the_sampling_thread_is_asked_to_take_it() -> None:
    class Asked(Bench):
        @property
        def alive(self) -> bool:
            return False  # nobody takes the command

    worker = Asked()
    assert worker.add(cast(Policy, Weights("d"))) == 0.0
    assert (worker.made, worker.holds("d")) == (["d"], False)
    worker.obey()
    assert (worker.made, worker.holds("d")) == (["d"], True)


def test_how_many_of_the_tokens_that_were_fed_ahead_were_drawn() -> None:
    one, other = Counting("a"), Counting("b")
    assert Bench(one, other).acceptance is None
    one.drafted, one.accepted, other.drafted, other.accepted = 3, 1, 5, 3
    assert Bench(one, other).acceptance == 0.5


def test_a_round_counts_what_was_sampled_and_says_nothing_of_one_that_fed_a_prompt() -> None:
    one, other, idle = Counting("a"), Counting("b"), Counting("c")
    one.busy = other.busy = True
    one.gives, other.gives = [1, 2], [3]
    worker = Bench(one, other, idle)
    assert (worker._round(), worker.sampled_tokens, idle.steps) == (3, 3, 0)
    other.feeds = 4
    assert (worker._round(), worker.sampled_tokens) == (0, 6)


def test_a_step_that_breaks_ends_its_batch_and_begins_a_fresh_decoder(loop: asyncio.AbstractEventLoop) -> None:
    broken, whole = Counting("b"), Counting("w")
    broken.busy = whole.busy = True
    broken.gives, whole.gives = OSError("no memory"), [1]
    worker = Bench(broken, whole)
    lost, kept = running(worker, broken, loop), running(worker, whole, loop)
    assert (worker._round(), worker.load, worker._jobs) == (1, 1, [kept])
    (last,) = told(loop, lost)
    assert (last.finish_reason, last.message) == (FinishReason.ERROR, "sampling failed: no memory")
    assert (broken.closed, worker.made, whole.closed, worker.copies) == (1, ["b"], 0, 2)
    assert cast(Any, worker._decoders["b"]) is not broken


@pytest.mark.parametrize(("seconds", "late"), [(60.0, False), (-0.001, True)])
def test_an_answer_that_takes_longer_ends_with_its_reason(loop: asyncio.AbstractEventLoop, seconds: float, late: bool) -> None:
    decoder = Counting()
    worker = Bench(decoder)
    job = running(worker, decoder, loop, deadline=time.monotonic() + seconds)
    worker._round()
    assert [reason for _, reason in decoder.cancelled] == ([FinishReason.TIMEOUT] if late else [])
    worker._deliver(worker._news())
    assert [chunk.finish_reason for chunk in told(loop, job)] == ([FinishReason.TIMEOUT] if late else [])
    assert worker.load == (0 if late else 1)


def test_a_request_has_its_time_from_the_moment_it_begins(loop: asyncio.AbstractEventLoop) -> None:
    worker, decoder = Bench(Counting(), time_s=7.0), Counting()

    async def begin() -> Job:
        return worker.submit(asked(), [1])

    before = time.monotonic()
    job = loop.run_until_complete(begin())
    assert before + 7.0 <= job.deadline <= time.monotonic() + 7.0
    worker.obey()
    assert (worker._jobs, job.logged, decoder.steps) == ([job], True, 0)


def test_what_cannot_begin_is_told_and_counted_no_more(loop: asyncio.AbstractEventLoop) -> None:
    worker = Bench(Counting())
    for digest, prompt, error in (("gone", [1], NotFound), ("d", list[int](), BadRequest)):
        worker._count(1)
        job = Job(request=asked(digest), loop=loop, deadline=1e18)
        worker._begin(job, prompt)
        (said,) = told(loop, job)
        assert (type(said), worker.load, worker._jobs) == (error, 0, [])


def test_a_version_whose_numbers_are_wrong_sends_none(loop: asyncio.AbstractEventLoop) -> None:
    worker = Bench(Counting())
    worker._unlogged = {"d"}
    job = Job(request=asked(likely=2, record_experts=True), loop=loop, deadline=1e18)
    worker._begin(job, [1, 2])
    assert job.logged is False
    ((prompt, more),) = cast(Any, worker._decoders["d"]).submitted
    assert (prompt, more["likely"], more["record_experts"], more["processor"]) == ([1, 2], 2, True, None)


def test_what_is_streamed_comes_at_once_and_the_rest_every_second_as_a_sign_of_life(loop: asyncio.AbstractEventLoop) -> None:
    decoder = Counting()
    worker = Bench(decoder)
    streamed, whole = running(worker, decoder, loop), running(worker, decoder, loop, stream=False)
    seen = list[tuple[int, int]]()
    for now in range(3):
        if now == 2:
            whole.sent_at -= PULSE_S
        for job in (streamed, whole):
            assert job.generation is not None
            job.generation.tokens.append(now)
            job.generation.logprobs.append(-1.0)
        worker._deliver(worker._news())
        seen.append((len(told(loop, streamed)), len(told(loop, whole))))
    assert seen == [(1, 1), (1, 0), (1, 1)]
    assert worker._news() == [], "nothing new was sampled"


def test_who_is_cancelled_is_told_at_once_and_whoever_is_done_already_is_not(loop: asyncio.AbstractEventLoop) -> None:
    decoder = Counting()
    worker = Bench(decoder)
    job, other = running(worker, decoder, loop), running(worker, decoder, loop)
    for _ in range(2):
        worker.cancel(job)
        worker.obey()
    assert ([reason for _, reason in decoder.cancelled], worker._jobs, worker.load) == ([FinishReason.ABORTED], [other], 1)
    assert [chunk.finish_reason for chunk in told(loop, job)] == [FinishReason.ABORTED]


def test_whoever_no_longer_listens_costs_the_others_nothing(loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="app.serving.worker")
    gone = asyncio.new_event_loop()
    gone.close()
    decoder = Counting()
    worker = Bench(decoder)
    jobs = [running(worker, decoder, where) for where in (gone, gone, loop)]
    for job in jobs:
        assert job.generation is not None
        job.generation.finish_reason = FinishReason.STOP
    worker._deliver(worker._news())
    assert len(told(loop, jobs[2])) == 1
    assert "updates dropped count=2" in caplog.text


def test_commands_are_taken_all_at_once_and_nobody_waits_for_one_while_there_is_work() -> None:
    decoder = Counting()
    worker = Bench(decoder)
    decoder.busy = True
    assert worker._take() == []
    decoder.busy = False
    worker._asked.append(("d", iter(())))
    assert worker._take() == []
    worker._asked.clear()
    for _ in range(3):
        worker._commands.put(None)
    assert worker._take() == [None] * 3
    assert worker.alive is False


def test_a_fresh_decoder_drafts_with_the_head_of_the_broken_one_and_one_that_is_gone_gets_none(loop: asyncio.AbstractEventLoop) -> None:
    broken = Counting("b")
    broken.busy, broken.gives = True, OSError("no memory")
    worker, head = Bench(broken), cast(Any, object())
    worker.equip("b", head)
    worker.equip("gone", head)
    worker.obey()
    assert broken.drafting.head is head
    worker._round()
    assert worker._decoders["b"].drafting.head is head
    worker.equip("b", None)
    worker.obey()
    assert worker._decoders["b"].drafting.head is None


def test_each_version_that_left_is_counted_and_an_engine_s_thread_keeps_no_process_alive() -> None:
    worker = Bench(Counting("a"), Counting("b"))
    for digest in ("a", "b"):
        worker._free(digest)
    assert (worker.freed, worker.digests, worker._thread.daemon) == (2, frozenset(), True)
