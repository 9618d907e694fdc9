"""OpenAI's response shapes around a recording, whole or chunk by chunk."""

from collections.abc import Mapping
from typing import Any

import msgspec

from app.api.chat.recording import Recording
from app.domain import tools
from app.domain.serving import GenerationChunk
from app.domain.turns import FinishReason, ToolCall, ToolVerdict

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def whole(recording: Recording, items: list[dict[str, Any]]) -> bytes:
    """The body of a finished completion; `items` are its log-probability items."""
    calls = visible_calls(recording)
    content = recording.parsed.content if recording.parsed and calls else recording.text
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": items, "refusal": None} if recording.request.logprobs else None,
        "finish_reason": finish_reason_of(recording),
    }
    named = frame(recording, "chat.completion") | token_of(recording)
    return _encode(named | {"choices": [choice], "usage": usage_of(recording)})


class ChatStyle:
    """The gateway's own style."""

    def whole(self, recording: Recording, items: list[dict[str, Any]]) -> bytes:
        """See `whole`."""
        return whole(recording, items)

    def streaming(self, recording: Recording) -> "Streaming":
        """A writer of chunks."""
        return Streaming(recording)


def read(raw: bytes) -> tuple[bytes, ChatStyle]:
    """A chat completion is what it is."""
    return raw, ChatStyle()


class Streaming:
    """Writes one completion as server-sent events."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._sent = 0
        self._items: list[dict[str, Any]] = []

    def first(self) -> bytes:
        """The chunk that names the role, and has the feedback token."""
        return self._event({"role": "assistant", "content": "", "refusal": None}, more=token_of(self._recording))

    def chunk(self, chunk: GenerationChunk) -> bytes:
        """What a chunk of the engine adds; may be nothing while a tool call is being written."""
        self._items += logprob_items(chunk) if self._recording.request.logprobs else []
        text = self._recording.text
        upto = tools.settled(text) if self._recording.request.tools else len(text)
        if upto <= self._sent and not self._items:
            return b""
        return self._content(upto)

    def last(self, chunk: GenerationChunk) -> bytes:
        """The rest of the text or its tool calls, the finish reason, the usage, `[DONE]`."""
        self._items += logprob_items(chunk) if self._recording.request.logprobs else []
        recording, out = self._recording, b""
        calls = visible_calls(recording)
        upto = tools.settled(recording.text) if calls else len(recording.text)
        if upto > self._sent or self._items:
            out += self._content(upto)
        if calls:
            out += self._event({"tool_calls": [{"index": index, **_call(call)} for index, call in enumerate(calls)]})
        out += self._event({}, finish_reason=finish_reason_of(recording))
        if recording.request.include_usage:
            out += sse(frame(recording, "chat.completion.chunk") | {"choices": [], "usage": usage_of(recording)})
        return out + DONE

    def failure(self, body: bytes) -> bytes:
        """An error in the middle."""
        return data(body)

    def _content(self, upto: int) -> bytes:
        text = self._recording.text[self._sent : upto]
        self._sent = max(self._sent, upto)
        items, self._items = self._items, []
        return self._event({"content": text}, logprobs={"content": items, "refusal": None} if items else None)

    def _event(
        self, delta: dict[str, Any], *, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        named = frame(self._recording, "chat.completion.chunk") | dict(more or {}) | {"choices": [choice]}
        return sse(named | {"usage": None} if self._recording.request.include_usage else named)


def logprob_items(chunk: GenerationChunk) -> list[dict[str, Any]]:
    """OpenAI's log-probability items. Text belongs to a token where the chunk has just one; others are named by id, as vLLM does."""
    text = chunk.text if len(chunk.tokens) == 1 else None
    return [
        {
            "token": text if text is not None else f"token_id:{token}",
            "logprob": logprob,
            "bytes": list(text.encode("utf-8", "replace")) if text is not None else None,
            "top_logprobs": [],
            "token_id": token,
        }
        for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=False)
    ]


def visible_calls(recording: Recording) -> tuple[ToolCall, ...]:
    """The calls a client can do something with; one that does not parse stays part of the text."""
    calls = recording.parsed.calls if recording.parsed else ()
    return calls if calls and all(call.verdict != ToolVerdict.UNPARSABLE for call in calls) else ()


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}, "verdict": call.verdict}


def finish_reason_of(recording: Recording) -> str:
    if visible_calls(recording) and recording.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return FinishReason.TOOL_CALLS.value
    return (recording.finish_reason or FinishReason.STOP).value


def frame(recording: Recording, kind: str) -> dict[str, Any]:
    return {
        "id": recording.request.inference_id,
        "object": kind,
        "created": int(recording.started_at.timestamp()),
        "model": recording.request.policy,
        "system_fingerprint": recording.arm.digest,
        "episode_id": recording.request.episode_id,
    }


def token_of(recording: Recording) -> dict[str, Any]:
    return {} if recording.feedback_token is None else {"feedback_token": recording.feedback_token}


def usage_of(recording: Recording) -> dict[str, Any]:
    usage = recording.usage
    total = usage.prompt_tokens + usage.completion_tokens
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": total}


def sse(value: dict[str, Any]) -> bytes:
    return data(_encode(value))


def data(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"
