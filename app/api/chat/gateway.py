"""Serving one turn: assign an arm, commit the exposure, sample, commit the turn, and only then let the answer end.

    assign ──▶ exposure committed ──▶ engine ──▶ chunks out as they come ──▶ turn committed ──▶ last chunk out

However it ends (client gone, engine slow, broken or full), a turn follows every exposure. A rollout (an agent at practice, see
`app.api.entry.sessions`) is served by the champion without one: nobody was exposed to anything, so no gate hears of it. Neither is a turn
whose caller pinned the version (`app.api.chat.pinning`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from app.api.chat import pinning, tracing
from app.api.chat.conversations import Conversation, Conversations, may_continue
from app.api.chat.recording import Recording, exposure_event, turn_event, unkept
from app.api.chat.request import ChatRequest, read_body, understand
from app.api.chat.shadows import Shadows
from app.api.chat.sizes import BYTES_PER_WORK, refuse_longer_than_context
from app.api.chat.slots import Slots
from app.api.chat.summary import Context, context_of, shortened, trigger_of
from app.api.entry.access import Caller
from app.api.entry.feedback_tokens import FeedbackTokens
from app.api.metrics import Metrics
from app.api.telemetry.intake import Limits
from app.api.telemetry.redaction import Redactor, redact
from app.api.workshop import SMALL_CHARS, Workshop
from app.domain.errors import Overloaded, RatchetError, Unavailable, UnknownPolicy
from app.domain.ids import utc_now, uuid7
from app.domain.learning.batches import payload_of, without_payload
from app.domain.policies import PolicyConfig
from app.domain.ports import Claims, Clock, Engines, EpisodeSummary, Inbox, Routes
from app.domain.release.assignment import PINNED, Arm, assign, practise
from app.domain.telemetry.events import CloudEvent, is_rollout
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.traceparent import TRACEPARENT
from app.domain.telemetry.turns import FinishReason, TurnServed
from app.listening.errors import HttpError
from app.listening.headers import Headers
from app.telemetry.traces import NOWHERE, Span, SpanKind, Traces

log = logging.getLogger("ratchet.api")
CLAIM_ABOVE_BYTES, CLAIM_ABOVE_TOKENS = 256 * 1024, 32 * 1024
"""A turn whose event is larger than this leaves its payload in the trajectory store: brokers take 1 MiB, and hold every byte n times."""
COMMIT_PATIENCE_S = 10.0
"""How long a sampled turn waits for a full or unreachable inbox before its answer is given up with an error."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One answer to a request, its exposure durable."""

    request: ChatRequest
    caller: Caller
    config: PolicyConfig
    arm: Arm
    summaries: list[EpisodeSummary] = field(default_factory=list[EpisodeSummary])
    """What the model wrote about the episode's beginning; the answers to one request share it."""
    fitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the conversation is made to fit, so that it is summarised once for all of them."""
    span: Span | None = None
    """Where this answer is traced; it is over with the turn's commit."""
    release: Callable[[], None]
    """Gives its place among the policy's answers back; called when the answer is over, however it ended."""


@dataclass(kw_only=True)
class Gateway:
    """Serves turns. One per app."""

    inbox: Inbox
    routes: Routes
    engines: Engines
    policies: Mapping[str, PolicyConfig]
    conversations: Conversations
    redactor: Redactor
    metrics: Metrics
    clock: Clock
    limits: Limits
    actor_salt: str
    claims: Claims
    workshop: Workshop
    tokens: FeedbackTokens
    shadows: Shadows
    traces: Traces = NOWHERE
    slots: Slots = field(default_factory=Slots)
    _commits: set["asyncio.Task[None]"] = field(default_factory=set["asyncio.Task[None]"])
    """Commits under way: held here so that a cancelled request does not lose its turn."""

    async def open(self, raw: bytes, headers: Headers, caller: Caller) -> tuple[Opened, ...]:
        """Understand a request, assign its arm, commit the exposure of each answer it asks for. Raises `RatchetError`."""
        began = utc_now()
        work = partial(self._understood, raw, headers, caller)
        request, answers, digest = await self.workshop.do(work, chars=len(raw) // BYTES_PER_WORK, share=caller.share)
        name, config = request.policy, self.policies[request.policy]
        requests = _each(request, answers)
        for bucket in (caller.session_bucket, caller.bucket):
            if bucket is not None:
                bucket.owe(len(requests) - 1)  # the first is paid for
        known = await self.conversations.find_or_begin(request.episode_id, request.policy) if request.continues else None
        arm = self._arm(request, known) if digest is None else await asyncio.to_thread(pinning.pinned, self.routes, name, digest)
        summaries = known.summaries if known is not None else ()
        with ExitStack() as places:
            released = [places.callback(self.slots.take(name, most=config.max_concurrent)) for _ in requests]
            await self._expose(requests, arm, summaries)
            places.pop_all()
        fitting, shared = asyncio.Lock(), list(summaries)
        traced = [tracing.begin(self.traces, each, arm, headers, began) for each in requests]
        return tuple(
            Opened(request=each, caller=caller, config=config, arm=arm, summaries=shared, fitting=fitting, release=release, span=span)
            for (each, span), release in zip(traced, released, strict=True)
        )

    def _understood(self, raw: bytes, headers: Headers, caller: Caller) -> tuple[ChatRequest, int, str | None]:
        """What is asked, for how many answers, and the version where one is pinned. Raises `RatchetError`."""
        body, shape = read_body(raw, self.limits)
        name, digest = pinning.named(body.model)
        config = self._config(name, caller)
        refuse_longer_than_context(body.messages, config, self.limits, sent=len(raw))
        body = msgspec.structs.replace(body, model=name)
        return understand(body, headers, caller, config, salt=self.actor_salt, shape=shape), body.n or 1, digest

    async def _expose(self, requests: Sequence[ChatRequest], arm: Arm, summaries: tuple[EpisodeSummary, ...]) -> None:
        """Commit the exposures and note the episode's arm, where this is one that was drawn."""
        request = requests[-1]
        if not request.dryrun and arm.arm != PINNED:
            if not is_rollout(request.source):
                await self._append_patiently([exposure_event(each, arm, self.clock()) for each in requests], even_full=False)
            self.conversations.remember(
                request.episode_id, policy=request.policy, arm=arm, inference_id=request.inference_id, summaries=summaries
            )

    def recording(self, opened: Opened) -> Recording:
        """An empty recording of the answer."""
        request, now = opened.request, self.clock()
        is_rated = request.rateable and not request.dryrun
        key = opened.caller.key
        token = self.tokens.issue(request.inference_id, policy=request.policy, parent=key, now=now) if is_rated else None
        return Recording(
            request=request, arm=opened.arm, config=opened.config, started_at=now, messages=request.messages, feedback_token=token
        )

    async def serve(self, opened: Opened, recording: Recording) -> AsyncGenerator[GenerationChunk, None]:
        """The chunks of the answer; the last one comes after the turn's commit. Raises `RatchetError` when the engine fails."""
        last: GenerationChunk | None = None
        if not is_rollout(opened.request.source):
            self.metrics.waits.begin(opened.request.inference_id, opened.request.policy)
        try:
            async for chunk in self._sample(opened, recording):
                recording.take(chunk)
                self.metrics.waits.end(opened.request.inference_id)
                if recording.finish_reason is None:
                    yield chunk
                else:
                    last = chunk
            recording.finish(FinishReason.ERROR, "the engine stopped without saying why")
        except (asyncio.CancelledError, GeneratorExit):
            recording.finish(FinishReason.ABORTED)
            raise
        except TimeoutError:
            recording.finish(FinishReason.TIMEOUT, f"no answer within {opened.config.engine_timeout_s:g} s")
        except RatchetError as error:
            recording.finish(FinishReason.ERROR, str(error))
            raise
        except Exception as error:
            recording.finish(FinishReason.ERROR, f"{type(error).__name__}: {error}")
            raise
        finally:
            self.metrics.waits.end(opened.request.inference_id)
            recording.finish(FinishReason.ABORTED)
            await self.shielded(self._commit_traced(opened, recording))
        _raise_for(recording)
        assert last is not None
        yield last

    async def _sample(self, opened: Opened, recording: Recording) -> AsyncIterator[GenerationChunk]:
        """The engine's chunks, each awaited no longer than is left of the policy's time; closes the stream on every way out."""
        if recording.kind == "answer":
            recording.messages = await self._fitted(opened)
            self.shadows.cast(opened.request, opened.arm, opened.config, _generate_request(opened, recording.messages))
        chunks = self.engines.generate(_generate_request(opened, recording.messages))
        deadline = time.monotonic() + opened.config.engine_timeout_s
        try:
            while True:
                async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                    try:
                        chunk = await anext(chunks)
                    except StopAsyncIteration:
                        return
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    async def _fitted(self, opened: Opened) -> list[dict[str, Any]]:
        """The request's messages, or a summary and their end; writes the summaries that are needed."""

        async def count(messages: list[dict[str, Any]]) -> int:
            return await self.engines.count_tokens(_generate_request(opened, messages))

        async def write(messages: list[dict[str, Any]], tags: dict[str, str]) -> str:
            text = await self._summarise(opened, messages, tags)
            opened.summaries.append(EpisodeSummary(text=text.strip(), tags=tags))
            self.conversations.remember_summary(opened.request.episode_id, opened.request.policy, opened.summaries[-1])
            return text

        async def recall() -> Context:
            if opened.request.continues:
                opened.summaries[:] = await self.conversations.recalled(opened.request.episode_id, opened.request.policy, opened.summaries)
            return context_of(opened.request.messages, opened.summaries)

        trigger = trigger_of(opened.config.summary, opened.request.episode_id, practised=is_rollout(opened.request.source))
        async with opened.fitting:
            context = context_of(opened.request.messages, opened.summaries)
            return (await shortened(context, opened.config, trigger=trigger, count=count, write=write, recall=recall)).fed()

    async def _summarise(self, opened: Opened, messages: list[dict[str, Any]], tags: dict[str, str]) -> str:
        """Let the model write a summary: a turn of the same episode on the same arm."""
        sampling = msgspec.structs.replace(opened.request.sampling, max_tokens=opened.config.summary.max_tokens, stop=(), seed=None)
        request = replace(
            opened.request, inference_id=uuid7(), sampling=sampling, tools=None, logprobs=False, ends=False, shape=None, likely=None
        )
        asked = replace(opened, request=request)
        recording = Recording(
            request=request, arm=opened.arm, config=opened.config, started_at=self.clock(), messages=messages, kind="summary", tags=tags
        )
        async with aclosing(self.serve(asked, recording)) as chunks:
            async for _ in chunks:
                pass
        return recording.text

    def _config(self, name: str, caller: Caller) -> PolicyConfig:
        if caller.policy not in (None, name):
            raise HttpError(403, f"this key is for the policy {caller.policy!r} only", code="wrong_policy", param="model")
        config = self.policies.get(name)
        if config is None:
            known = ", ".join(sorted(self.policies)) or "none"
            raise UnknownPolicy(f"no policy is named {name!r} (declared: {known}): use one of these as `model`")
        return config

    def _arm(self, request: ChatRequest, known: Conversation | None) -> Arm:
        """The episode's arm while it may serve, else a fresh draw; a rollout's is always the champion."""
        route = self.routes.route(request.policy)
        if is_rollout(request.source):
            return practise(route)
        if known is not None and may_continue(known.arm, route):
            return known.arm
        return assign(route, request.actor or request.episode_id, at=self.clock(), recognised=request.actor is not None)

    async def _commit_traced(self, opened: Opened, recording: Recording) -> None:
        """Commit the turn, and end its span."""
        try:
            with self.traces.span("commit", parent=opened.request.tags.get(TRACEPARENT), kind=SpanKind.PRODUCER):
                await self._commit(opened, recording)
        finally:
            tracing.end(opened.span, recording)

    async def _commit(self, opened: Opened, recording: Recording) -> None:
        """Judge the answer's tool calls beside the event loop, and commit the turn."""
        request = opened.request
        finished_at = self.clock()
        chars = SMALL_CHARS + 1 if recording.may_call else 0
        await self.workshop.do(recording.parse, chars=chars, share=opened.caller.share, patient=True)
        self._count(request, recording)
        if request.ends:
            self.conversations.forget(request.episode_id, request.policy)
        if request.dryrun:
            return
        turn = recording.turn(finished_at=finished_at)
        if not request.stored:
            turn = unkept(turn)
        await self.commit_turn(turn, redacted=opened.config.redact)

    async def shielded(self, work: Coroutine[Any, Any, None]) -> None:
        """Finish `work` even when the request is cancelled meanwhile."""
        task = asyncio.ensure_future(work)
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
        await asyncio.shield(task)

    async def commit_turn(self, turn: TurnServed, *, redacted: bool) -> None:
        """Commit a turn, patiently: what was sampled is worth a few seconds of waiting."""
        if redacted:
            turn = await asyncio.to_thread(redact, turn, self.redactor)
        await self._append_patiently([await self._event(turn)])
        log.info(
            "turn_served inference_id=%s episode_id=%s policy=%s version=%s arm=%s finish=%s tokens=%d",
            turn.inference_id, turn.episode_id, turn.policy, turn.version[:12], turn.assignment.arm, turn.finish_reason,
            turn.usage.completion_tokens,
        )  # fmt: skip

    async def _event(self, turn: TurnServed) -> CloudEvent:
        """The turn as an event; a large payload is deposited first. Where that fails the inbox takes it whole, and no broker sees it."""
        if len(turn.prompt_tokens) <= CLAIM_ABOVE_TOKENS:  # what has more is large for sure, and is not written out to be measured
            event = turn_event(turn)
            if len(event.data) <= CLAIM_ABOVE_BYTES:
                return event
        try:
            claim = await asyncio.to_thread(lambda: self.claims.deposit(payload_of(turn)))
        except Unavailable as error:
            log.error("payload_not_deposited inference_id=%s tokens=%d error=%s", turn.inference_id, len(turn.prompt_tokens), error)
            return turn_event(turn)
        return turn_event(without_payload(turn, claim))

    async def _append_patiently(self, events: Sequence[CloudEvent], *, even_full: bool = True) -> None:
        """Commit, over a database that is being started anew: people wait for seconds and are not sent away.

        `even_full`: over a full inbox too, because what was sampled would be lost; who only comes is told so at once.
        """
        deadline = time.monotonic() + COMMIT_PATIENCE_S
        while True:
            try:
                await self.inbox.append(events)
                return
            except Unavailable as error:
                wait_s = min(error.retry_after_s, 1.0) if isinstance(error, Overloaded) else 0.25
                if time.monotonic() + wait_s > deadline or (isinstance(error, Overloaded) and not even_full):
                    log.error("events_lost ids=%s error=%s", ",".join(event.id for event in events), error)
                    raise
                await asyncio.sleep(wait_s)

    def _count(self, request: ChatRequest, recording: Recording) -> None:
        finish = recording.finish_reason or FinishReason.ERROR
        self.metrics.turns.labels(request.policy, recording.arm.digest[:12], recording.arm.arm, finish.value).inc()
        if not is_rollout(request.source):  # how long people wait: an agent at practice waits for idle engines
            self.metrics.request_s.labels(request.policy).observe(time.monotonic() - recording.started_s)
        if recording.first_token_s is not None and not is_rollout(request.source):
            self.metrics.first_token_s.labels(request.policy).observe(recording.first_token_s)
        self.metrics.tokens.labels(request.policy, "input").inc(recording.usage.prompt_tokens)
        self.metrics.tokens.labels(request.policy, "output").inc(recording.usage.completion_tokens)


def _each(request: ChatRequest, count: int) -> tuple[ChatRequest, ...]:
    """The request once for each answer: each is a turn of its own, drawn with a seed of its own where one is given."""
    others = (
        replace(request, inference_id=uuid7(), sampling=msgspec.structs.replace(request.sampling, seed=_next_seed(request, number)))
        for number in range(1, count)
    )
    return (request, *others)


def _next_seed(request: ChatRequest, number: int) -> int | None:
    seed = request.sampling.seed
    return None if seed is None else seed + number if seed + number < 2**63 else seed - number


def _generate_request(opened: Opened, messages: list[dict[str, Any]]) -> GenerateRequest:
    request = opened.request
    return GenerateRequest(
        policy=request.policy, digest=opened.arm.digest, messages=messages, tools=request.tools, sampling=request.sampling,
        shape=request.shape, likely=request.likely, record_experts=opened.config.record_experts, stream=request.stream,
    )  # fmt: skip


def _raise_for(recording: Recording) -> None:
    """An engine's failure as an HTTP error; the turn is recorded by now."""
    what = recording.message or "no reason given"
    turn = f"(recorded as inference {recording.request.inference_id})"
    if recording.finish_reason == FinishReason.TIMEOUT:
        raise HttpError(504, f"the engine was too slow: {what} {turn}", code="engine_timeout")
    if recording.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED):
        raise HttpError(502, f"the engine failed: {what} {turn}", code="engine_error")
