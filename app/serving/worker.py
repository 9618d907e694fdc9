"""The thread that samples: one decoder per resident version, a step of each in turn, so that a batch never mixes weights.

    submit ─▶ commands ─▶ ┌ take commands ─▶ one step of every busy decoder ─▶ deliver tokens ─▶ score a piece ┐ ─▶ Job.updates (asyncio)
                          └──────────────────────────────────── for ever ──────────────────────────────────────┘

| waits for                                             | unblocked by                            |
|-------------------------------------------------------|-----------------------------------------|
| a command, when no decoder is busy and none to score  | submit, score, cancel, add, drop, close |

Everything that touches a decoder happens on this thread; other threads only leave commands.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from app.domain.errors import BadRequest, NotFound, Overloaded, Unavailable
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import FinishReason
from app.policy.decoding.drafting import Head
from app.policy.decoding.sampling import Decoder
from app.policy.decoding.shaping import Shaper
from app.policy.model import Policy
from app.serving.beside import Beside
from app.serving.jobs import Job, last_of, news_of
from app.serving.scoring import scored
from app.serving.threads import Threads

log = logging.getLogger(__name__)

PULSE_S = 1.0
"""An answer that is not streamed shows this often that it is being written."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one engine process takes on."""

    rows: int = 16
    """Sequences decoded together, per version. Each costs its context in cache: 23 kB per token for SmolLM2."""
    waiting: int = 64
    """Requests that may wait for a row, over all versions; more are refused with 429."""
    prefill_chunk: int = 256
    """Prompt tokens fed per step: bounds how long a long prompt holds up the answers that are being written."""
    prompt_cache_bytes: int = 160 << 20
    """Per version: prompts that were fed before are not fed again; 160 MB hold fifty of 140 tokens for SmolLM2. Feeding costs more than
    half as much as writing the answer: a cache for twenty of forty prompts in use cost 55 % of an engine's time."""
    time_s: float = 300.0
    """A completion that takes longer ends with finish_reason `timeout`."""


class Draining(Unavailable):
    """The engine finishes what it has, and ends."""


class Worker:
    """Samples for everybody who submits; start with `start()`, end with `close()`."""

    def __init__(self, limits: Limits) -> None:
        """Takes torch's number of threads for the most that a step may take."""
        self.limits = limits
        self._threads, self._beside = Threads(torch.get_num_threads()), Beside(torch.get_num_threads())
        self._decoders: dict[str, Decoder] = {}
        self._leaving: set[str] = set()
        self.freed = 0
        """Versions that were here and left."""
        self._unlogged: set[str] = set()
        self._jobs: list[Job] = []
        self._asked: deque[tuple[str, Iterator[None]]] = deque()
        """Completions to score, by version: a piece of the first one between two steps, so that answers being written wait for one forward
        pass at most."""
        self._load = 0
        self._counting = threading.Lock()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)
        self.sampled_tokens = 0
        self.draining = False
        """Set to take nothing new; what was taken is finished."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; what was being sampled is dropped."""
        self._commands.put(None)
        self._thread.join(timeout=5)
        self._beside.close()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; when it does not (a bug of ours), the process has to end and be started again."""
        return self._thread.is_alive()

    @property
    def load(self) -> int:
        """Requests taken and not finished."""
        return self._load

    @property
    def capacity(self) -> int:
        """Requests it takes on: a row each, and those that may wait."""
        return self.limits.rows * max(1, len(self._decoders)) + self.limits.waiting

    # --- versions ---------------------------------------------------------------------------------------------------------------

    def add(self, policy: Policy, *, logged: bool = True) -> float:
        """Make a version available and wait until it is (one step at most); harmless when it is. Not `logged`: answers carry no
        log-probabilities. Returns for how many seconds sampling stood still."""
        done: Future[float] = Future()
        decoder = self._decoder(policy)  # made here, so that the sampling thread has nothing to do but to take it

        def command() -> None:
            started = time.perf_counter()
            (self._unlogged.discard if logged else self._unlogged.add)(policy.digest)
            self._add(decoder)
            done.set_result(time.perf_counter() - started)

        self._commands.put(command)
        while self.alive:
            with suppress(TimeoutError):
                return done.result(timeout=1.0)
        return 0.0

    def equip(self, digest: str, head: Head | None) -> None:
        """Let a version draft with this head from the next step on, or with none; nothing where the version is not in memory."""

        def command() -> None:
            if (decoder := self._decoders.get(digest)) is not None:
                decoder.drafting.equip(head)

        self._commands.put(command)

    def drop(self, digest: str) -> None:
        """Take no more requests for a version and free it when those it has are done."""

        def command() -> None:
            if digest in self._decoders:  # what is not here cannot leave: it would be leaving for ever
                self._leaving.add(digest)

        self._commands.put(command)

    def holds(self, digest: str) -> bool:
        """Whether requests for this version are taken."""
        return digest in self._decoders and digest not in self._leaving

    @property
    def acceptance(self) -> float | None:
        """Of the tokens that were fed ahead for the versions in memory, the share that were drawn; None where none were."""
        drafted = sum(decoder.drafted for decoder in self._decoders.values())
        return sum(decoder.accepted for decoder in self._decoders.values()) / drafted if drafted else None

    @property
    def drafters(self) -> dict[str, dict[str, Any]]:
        """By version and drafter: what was drafted and drawn."""
        return {digest: decoder.drafting.said() for digest, decoder in self._decoders.items()}

    @property
    def digests(self) -> frozenset[str]:
        """The versions for which requests are taken."""
        return frozenset(digest for digest in self._decoders if digest not in self._leaving)

    @property
    def copies(self) -> int:
        """Versions in memory, those that are leaving included."""
        return len(self._decoders)

    @property
    def is_dropping(self) -> bool:
        """Whether a version is leaving that still has answers to finish."""
        return bool(self._leaving)

    def policy(self, digest: str) -> Policy:
        """A resident version. Raises `NotFound`."""
        decoder = self._decoders.get(digest)
        if decoder is None or digest in self._leaving:
            raise NotFound(f"this engine does not hold the weights {digest[:12]}")
        return decoder.policy

    def _add(self, decoder: Decoder) -> None:
        digest = decoder.policy.digest
        self._leaving.discard(digest)
        if digest not in self._decoders:
            # a dictionary that readers on other threads iterate is replaced, never changed
            self._decoders = {**self._decoders, digest: decoder}

    def _decoder(self, policy: Policy) -> Decoder:
        limits = self.limits
        return Decoder(policy, max_rows=limits.rows, chunk=limits.prefill_chunk, prompt_cache_bytes=limits.prompt_cache_bytes)

    # --- requests ---------------------------------------------------------------------------------------------------------------

    def prompt(self, request: GenerateRequest) -> list[int]:
        """The request's prompt as it will be fed: long work, for another thread than the event loop's. Raises `NotFound`, `BadRequest`."""
        policy = self.policy(request.digest)
        return policy.chat.prompt(request.messages, tools=request.tools, most=policy.context)

    def prepare(self, request: GenerateRequest) -> None:
        """Make what its tokens are drawn or told with: seconds, the first time; on yet another thread, because nothing bounds how long a
        form takes. Raises `NotFound`, `BadRequest`."""
        grammars = self.policy(request.digest).grammars
        if request.shape is not None and request.shape.form is not None:
            grammars.prepare(request.shape.form)
        if request.likely is not None:
            grammars.piece(0)  # reads the tokenizer

    def take(self, request: GenerateRequest) -> None:
        """Count a request before anything is done for it, so that nobody waits uncounted for a prompt or a form to be made; `submit` or
        `let_go` it. Raises `NotFound` (not held), `Draining` (going away), `Overloaded` (full)."""
        if self.draining:
            raise Draining("this engine is going away and takes nothing new: ask another one")
        self.policy(request.digest)
        with self._counting:
            if self._load >= self.capacity:
                raise Overloaded(f"the engine has {self._load} requests in hand and takes no more: retry in a second", retry_after_s=1.0)
            self._load += 1

    def let_go(self) -> None:
        """A request that was taken and not submitted is over."""
        self._count(-1)

    def submit(self, request: GenerateRequest, prompt: list[int]) -> Job:
        """Begin a request that was taken, with its prompt (call from the event loop)."""
        job = Job(request=request, loop=asyncio.get_running_loop(), deadline=time.monotonic() + self.limits.time_s)
        self._commands.put(lambda: self._begin(job, prompt))
        return job

    def score(self, request: ScoreRequest) -> "Future[list[float]]":
        """Log-probabilities of given tokens, as soon as there is time; once cancelled, they are read no further. Raises `NotFound` (not
        held) and `Overloaded`."""
        self.policy(request.digest)
        if len(self._asked) >= self.limits.waiting:
            raise Overloaded(f"the engine has {len(self._asked)} completions to score: ask for fewer at a time", retry_after_s=1.0)
        answer: Future[list[float]] = Future()
        pieces = scored(request, answer, lambda digest: self._decoders.get(digest))
        self._commands.put(lambda: self._asked.append((request.digest, pieces)))
        return answer

    def cancel(self, job: Job, reason: FinishReason = FinishReason.ABORTED) -> None:
        """End a request from outside; harmless when it is done."""
        self._commands.put(lambda: self._cancel(job, reason))

    def _begin(self, job: Job, prompt: list[int]) -> None:
        decoder = self._decoders.get(job.request.digest)
        try:
            if decoder is None:
                raise NotFound(f"this engine does not hold the weights {job.request.digest[:12]} any more")
            asked = job.request
            processor = asked.shape and Shaper.of(asked.shape, decoder.policy)
            job.generation = decoder.submit(
                prompt, asked.sampling, likely=asked.likely, record_experts=asked.record_experts, processor=processor
            )
        except (BadRequest, NotFound) as error:
            self._count(-1)
            self._deliver([(job, error)])
            return
        job.decoder, job.logged = decoder, job.request.digest not in self._unlogged
        self._jobs.append(job)

    def _cancel(self, job: Job, reason: FinishReason) -> None:
        if job in self._jobs and job.generation is not None and job.decoder is not None:
            job.decoder.cancel(job.generation, reason)
            self._deliver(self._news())

    def _count(self, change: int) -> None:
        with self._counting:
            self._load += change

    # --- the loop ---------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._threads.begin()
        while True:
            for command in self._take():
                if command is None:
                    return
                command()
            self._threads.round(self._round)
            self._deliver(self._news())
            if self._asked:
                self._score()

    def _score(self) -> None:
        """Go on by a piece with what was asked for first."""
        _, pieces = self._asked[0]
        try:
            next(pieces)
        except StopIteration:
            self._asked.popleft()

    def _take(self) -> list[Callable[[], None] | None]:
        """All commands there are; waits for one when there is nothing to sample."""
        idle = not self._asked and not any(decoder.busy for decoder in self._decoders.values())
        commands: list[Callable[[], None] | None] = []
        try:
            # a second at most: a version may be leaving, and is freed between commands
            commands.append(self._commands.get(timeout=1.0) if idle else self._commands.get_nowait())
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _round(self) -> int:
        """A step of every version that decodes; frees what is leaving and done. Returns the tokens sampled, 0 where prompts were fed."""
        busy = {digest: decoder for digest, decoder in self._decoders.items() if decoder.busy}
        for digest in (self._leaving & self._decoders.keys()) - busy.keys() - {asked for asked, _ in self._asked}:
            self._free(digest)
        fed = sum(decoder.prompted for decoder in busy.values())
        taken = self._beside.run([decoder.step for decoder in busy.values()])
        sampled = sum(len(rows) for rows in taken if not isinstance(rows, Exception))
        self.sampled_tokens += sampled
        for (digest, decoder), error in zip(busy.items(), taken, strict=True):
            if isinstance(error, Exception):
                self._break(digest, decoder, error)
        now = time.monotonic()
        for job in self._jobs:
            if now > job.deadline and job.generation is not None and job.decoder is not None:
                job.decoder.cancel(job.generation, FinishReason.TIMEOUT)
        return sampled if fed == sum(decoder.prompted for decoder in busy.values()) else 0

    def _break(self, digest: str, decoder: Decoder, error: Exception) -> None:
        """One broken step (out of memory, say) costs the requests of its batch, not the engine."""
        log.error("step failed digest=%s", digest, exc_info=error)
        broken = [job for job in self._jobs if job.decoder is decoder]
        self._jobs = [job for job in self._jobs if job.decoder is not decoder]
        self._count(-len(broken))
        decoder.close()
        fresh = self._decoder(decoder.policy)
        fresh.drafting.equip(decoder.drafting.head)
        self._decoders = {**self._decoders, digest: fresh}
        self._deliver([(job, last_of(job, FinishReason.ERROR, message=f"sampling failed: {error}")) for job in broken])

    def _free(self, digest: str) -> None:
        self._decoders[digest].close()
        self._decoders = {held: decoder for held, decoder in self._decoders.items() if held != digest}
        self._leaving.discard(digest)
        self.freed += 1
        log.info("version freed digest=%s", digest)

    def _news(self) -> list[tuple[Job, GenerationChunk | Exception]]:
        """What was sampled since the last time, per job; finished jobs leave."""
        news: list[tuple[Job, GenerationChunk | Exception]] = []
        kept: list[Job] = []
        now = time.monotonic()
        for job in self._jobs:
            generation = job.generation
            assert generation is not None
            if generation.finish_reason is not None:
                news.append((job, last_of(job, generation.finish_reason)))
                self._count(-1)
                continue
            kept.append(job)
            due = job.request.stream or not job.sent_tokens or now - job.sent_at >= PULSE_S
            if due and len(generation.tokens) > job.sent_tokens:
                job.sent_at = now
                news.append((job, news_of(job)))
        self._jobs = kept
        return news

    def _deliver(self, news: list[tuple[Job, GenerationChunk | Exception]]) -> None:
        """Hand the news over to the event loops they belong to, one call per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, GenerationChunk | Exception]]] = {}
        for job, update in news:
            by_loop.setdefault(job.loop, []).append((job, update))
        for loop, updates in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, updates)
            except RuntimeError:  # the loop was closed: nobody listens any more
                log.info("updates dropped count=%d", len(updates))


def _put(updates: list[tuple[Job, GenerationChunk | Exception]]) -> None:
    for job, update in updates:
        job.updates.put_nowait(update)
