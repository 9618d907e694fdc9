"""OpenAI's response shapes around a recording, whole or chunk by chunk."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.api.chat.recording import Recording
from app.domain.telemetry import tools
from app.domain.telemetry.serving import GenerationChunk, Likely
from app.domain.telemetry.turns import FinishReason, ToolCall, ToolVerdict

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


Items = list[dict[str, Any]]
"""Log-probability items of one answer."""


def whole(answers: Sequence[tuple[Recording, Items]]) -> bytes:
    """The body of a finished completion with one choice for each answer."""
    choices = [_choice(index, recording, items) for index, (recording, items) in enumerate(answers)]
    recordings = [recording for recording, _ in answers]
    named = frame(recordings[0], "chat.completion") | token_of(recordings[0])
    return _encode(named | {"choices": choices, "usage": usage_of(recordings)})


def _choice(index: int, recording: Recording, items: Items) -> dict[str, Any]:
    calls, content = visible_calls(recording), spoken(recording)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": items, "refusal": None} if recording.request.logprobs else None,
        "finish_reason": finish_reason_of(recording),
        **rated_by(recording),
    }


class ChatStyle:
    """The gateway's own style."""

    def whole(self, answers: Sequence[tuple[Recording, Items]]) -> bytes:
        """See `whole`."""
        return whole(answers)

    def streaming(self, recordings: Sequence[Recording], index: int) -> "Streaming":
        """A writer of chunks."""
        return Streaming(recordings, index)

    def end(self, recordings: Sequence[Recording]) -> bytes:
        """The usage where it is wanted, `[DONE]`."""
        return end(recordings, "chat.completion.chunk")


def read(raw: bytes) -> tuple[bytes, ChatStyle]:
    """A chat completion is what it is."""
    return raw, ChatStyle()


class Streaming:
    """Writes one completion as server-sent events."""

    def __init__(self, recordings: Sequence[Recording], index: int) -> None:
        self._named, self._index = recordings[0], index
        self._recording = recordings[index]
        self._sent = 0
        self._items: list[dict[str, Any]] = []

    def first(self) -> bytes:
        """The chunk that names the role, and has the feedback token."""
        return self._event(
            {"role": "assistant", "content": "", "refusal": None}, more=token_of(self._recording), of_choice=rated_by(self._recording)
        )

    def chunk(self, chunk: GenerationChunk) -> bytes:
        """What a chunk of the engine adds; may be nothing while a tool call is being written."""
        self._items += logprob_items(chunk) if self._recording.request.logprobs else []
        return self._content(spoken_so_far(self._recording))

    def last(self, chunk: GenerationChunk) -> bytes:
        """The rest of the text or its tool calls, the finish reason."""
        self._items += logprob_items(chunk) if self._recording.request.logprobs else []
        recording, calls = self._recording, visible_calls(self._recording)
        out = self._content(spoken(recording))
        if calls:
            out += self._event({"tool_calls": [{"index": index, **_call(call)} for index, call in enumerate(calls)]})
        return out + self._event({}, finish_reason=finish_reason_of(recording))

    def failure(self, body: bytes) -> bytes:
        """An error in the middle."""
        return data(body)

    def _content(self, so_far: str) -> bytes:
        text, items = so_far[self._sent :], self._items
        if not text and not items:
            return b""
        self._sent, self._items = self._sent + len(text), []
        return self._event({"content": text}, logprobs={"content": items, "refusal": None} if items else None)

    def _event(
        self, delta: dict[str, Any], *, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None,
        more: Mapping[str, Any] | None = None, of_choice: Mapping[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason} | dict(of_choice or {})
        named = frame(self._named, "chat.completion.chunk") | dict(more or {}) | {"choices": [choice]}
        return sse(named | {"usage": None} if self._recording.request.include_usage else named)


def logprob_items(chunk: GenerationChunk) -> Items:
    """OpenAI's log-probability items. Where the engine does not say what a token writes, the text belongs to it if the chunk has just that
    one; others are named by id, as vLLM does."""
    if chunk.likely is not None:
        return [{**_item(itself), "top_logprobs": [_item(other) for other in others]} for itself, *others in chunk.likely]
    alone = chunk.text.encode("utf-8", "replace") if len(chunk.tokens) == 1 else None
    pairs = zip(chunk.tokens, chunk.logprobs, strict=False)
    return [{**_item(Likely(token, logprob, alone)), "top_logprobs": []} for token, logprob in pairs]


def _item(one: Likely) -> dict[str, Any]:
    """A token with its text; of half a character its bytes, as OpenAI writes them."""
    if one.piece is None:
        text = f"token_id:{one.token}"
    else:
        try:
            text = one.piece.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.piece)
    named = {} if one.token is None else {"token_id": one.token}
    return {"token": text, "logprob": one.logprob, "bytes": None if one.piece is None else list(one.piece)} | named


def visible_calls(recording: Recording) -> tuple[ToolCall, ...]:
    """The calls a client can do something with; one that does not parse stays part of the text."""
    calls = recording.parsed.calls if recording.parsed else ()
    return calls if calls and all(call.verdict != ToolVerdict.UNPARSABLE for call in calls) else ()


def spoken(recording: Recording) -> str:
    """What a finished answer says beside the calls that a client is shown."""
    return recording.parsed.content if recording.parsed and visible_calls(recording) else recording.text


def spoken_so_far(recording: Recording) -> str:
    """What an answer begins with whatever follows: the beginning of what `spoken` will be; grows and never changes."""
    return recording.text[: tools.settled(recording.text)] if recording.request.tools else recording.text


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}, "verdict": call.verdict}


def finish_reason_of(recording: Recording) -> str:
    """`tool_calls` where the client is shown some, and nowhere else: it would look for them."""
    reason = recording.finish_reason or FinishReason.STOP
    if reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        reason = FinishReason.TOOL_CALLS if visible_calls(recording) else FinishReason.STOP
    return reason.value


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


def rated_by(recording: Recording) -> dict[str, Any]:
    """A choice's own id and feedback token: each is a turn of its own."""
    return {"inference_id": recording.request.inference_id} | token_of(recording)


def usage_of(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Token counts: the prompt of all answers once, as OpenAI counts."""
    prompt, written = recordings[0].usage.prompt_tokens, sum(recording.usage.completion_tokens for recording in recordings)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def end(recordings: Sequence[Recording], kind: str) -> bytes:
    """The end of a stream of chunks of that kind."""
    if not recordings[0].request.include_usage:
        return DONE
    return sse(frame(recordings[0], kind) | {"choices": [], "usage": usage_of(recordings)}) + DONE


def sse(value: dict[str, Any]) -> bytes:
    return data(_encode(value))


def data(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"
