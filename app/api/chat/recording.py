"""A turn while it is being sampled, and the `TurnServed` it becomes, however it ends."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from app.api.chat.request import ChatRequest
from app.domain.ids import uuid7
from app.domain.policies import PolicyConfig
from app.domain.release.assignment import Arm
from app.domain.telemetry import tools
from app.domain.telemetry.events import GATEWAY, CloudEvent, EventType, Exposure
from app.domain.telemetry.serving import GenerationChunk
from app.domain.telemetry.traceparent import TRACEPARENT
from app.domain.telemetry.turns import MIXED_VERSIONS, UNSCORABLE, Assignment, FinishReason, ToolVerdict, TurnServed, Usage

_encode = msgspec.json.Encoder(enc_hook=list).encode
"""A long prompt may be an array of its token ids."""


@dataclass(kw_only=True)
class Recording:
    """Collects the chunks of one turn. Mutable: it is the one place where a turn grows."""

    request: ChatRequest
    arm: Arm
    config: PolicyConfig
    started_at: datetime
    feedback_token: str | None = None
    """With which whoever is answered may rate this answer, and nothing else."""
    messages: list[dict[str, Any]]
    """What the engine is fed: the request's messages, or a summary and their end."""
    kind: str = "answer"
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    started_s: float = field(default_factory=time.monotonic)
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    token_logprobs: list[float] = field(default_factory=list[float])
    prompt_tokens: Sequence[int] | None = None
    routed_experts: list[list[list[int]]] | None = None
    kept_log_mass: list[float] | None = None
    finish_reason: FinishReason | None = None
    message: str | None = None
    mixed_versions: str | None = None
    unscorable: str | None = None
    precision: str | None = None
    first_token_s: float | None = None
    parsed: tools.Parsed | None = None

    def take(self, chunk: GenerationChunk) -> None:
        """Add a chunk."""
        if chunk.tokens and self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.started_s
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.token_logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            self.prompt_tokens = chunk.prompt_tokens
            self.routed_experts = chunk.routed_experts
            self.kept_log_mass = chunk.kept_log_mass
            self.mixed_versions = chunk.mixed_versions
            self.unscorable = chunk.unscorable
            self.precision = chunk.precision
            self.finish(chunk.finish_reason, chunk.message)

    def finish(self, reason: FinishReason, message: str | None = None) -> None:
        """How it ended; the first end counts."""
        if self.finish_reason is not None:
            return
        self.message = message
        self.finish_reason = reason

    @property
    def may_call(self) -> bool:
        """Whether the answer could hold tool calls, whose arguments take up to `schemas.STEPS` to judge, each."""
        return bool(self.request.tools) and self.kind == "answer" and tools.OPEN in self.text

    def parse(self) -> None:
        """Find the tool calls of the finished answer and judge them; one that can be made makes `stop` into `tool_calls`."""
        if not self.request.tools or self.kind != "answer":
            return
        self.parsed = tools.parse(self.text, self.request.tools, call_id_prefix=f"call_{self.request.inference_id}")
        if self.finish_reason == FinishReason.STOP and any(call.verdict == ToolVerdict.VALID for call in self.parsed.calls):
            self.finish_reason = FinishReason.TOOL_CALLS

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(prompt_tokens=len(self.prompt_tokens or ()), completion_tokens=len(self.tokens))

    def turn(self, *, finished_at: datetime) -> TurnServed:
        """The event. Tokens without a prompt, with another number of log-probabilities or of several versions are not trained on."""
        assert self.finish_reason is not None
        whole = bool(self.prompt_tokens) and len(self.tokens) == len(self.token_logprobs) and self.mixed_versions is None
        said = {"fault": self.message, MIXED_VERSIONS: self.mixed_versions, UNSCORABLE: self.unscorable}
        return TurnServed(
            inference_id=self.request.inference_id,
            episode_id=self.request.episode_id,
            policy=self.request.policy,
            version=self.arm.digest,
            started_at=self.started_at,
            finished_at=finished_at,
            messages=self.messages,
            completion=self.text.replace("\x00", "\ufffd"),
            prompt_tokens=self.prompt_tokens or [],
            completion_tokens=self.tokens,
            logprobs=self.token_logprobs if whole else None,
            routed_experts=self.routed_experts,
            kept_log_mass=self.kept_log_mass,
            sampling=self.request.sampling,
            shape=self.request.shape or msgspec.UNSET,
            precision=self.precision or msgspec.UNSET,
            finish_reason=self.finish_reason,
            tool_calls=list(self.parsed.calls) if self.parsed else [],
            usage=self.usage,
            actor=self.request.actor,
            segment=self.request.segment,
            consent=self.request.consent,
            assignment=Assignment(
                release_id=self.arm.release_id, stage=self.arm.stage, arm=self.arm.arm, probability=self.arm.probability
            ),
            kind=self.kind,
            source=self.request.source,
            time_to_first_token_s=self.first_token_s,
            tags={**self.request.tags, **self.tags, **{name: text[:200] for name, text in said.items() if text}},
        )  # fmt: skip


def unkept(turn: TurnServed) -> TurnServed:
    """`store: false`: that a turn was served, by which version, how long it took and how it ended; nothing that anybody said."""
    calls = [msgspec.structs.replace(call, arguments="") for call in turn.tool_calls]
    kept = {name: text for name, text in turn.tags.items() if name in ("fault", TRACEPARENT)}
    return msgspec.structs.replace(
        turn, messages=[], completion="", prompt_tokens=[], completion_tokens=[], logprobs=None, routed_experts=None, kept_log_mass=None,
        shape=msgspec.UNSET, tool_calls=calls, tags=kept | {"stored": "false"},
    )  # fmt: skip


def turn_event(turn: TurnServed) -> CloudEvent:
    """The turn as it goes into the inbox."""
    return CloudEvent(
        id=turn.inference_id, source=GATEWAY, type=EventType.TURN.value, time=turn.finished_at, key=turn.episode_id, data=_encode(turn)
    )


def exposure_event(request: ChatRequest, arm: Arm, now: datetime) -> CloudEvent:
    """The exposure as it goes into the inbox, before the engine is asked."""
    exposure = Exposure(
        id=uuid7(),
        policy=request.policy,
        inference_id=request.inference_id,
        episode_id=request.episode_id,
        actor=request.actor or request.episode_id,
        release_id=arm.release_id,
        stage=arm.stage,
        arm=arm.arm,
        probability=arm.probability,
        share=arm.share,
        holdback=arm.holdback,
        digest=arm.digest,
        occurred_at=now,
    )
    return CloudEvent(
        id=exposure.id, source=GATEWAY, type=EventType.EXPOSURE.value, time=now, key=request.episode_id, data=_encode(exposure)
    )
