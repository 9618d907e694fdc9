"""`POST /v1/responses`: OpenAI's newer way to ask, translated into a chat and back.

A response is one answer to a conversation that the client sends whole: nothing is kept on the server for `previous_response_id` to name.
`id` is the inference id, so that feedback finds its answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from app.api.chat.answer import Items, finish_reason_of, logprob_items, spoken, spoken_so_far, token_of, visible_calls
from app.api.chat.recording import Recording
from app.api.chat.response_items import messages_of, tools_of
from app.api.chat.style import bounded
from app.api.telemetry.drafts import decode
from app.domain.errors import BadRequest
from app.domain.telemetry.serving import GenerationChunk

_ALIKE = (
    "model", "stream", "temperature", "top_p", "top_k", "metadata", "user", "safety_identifier", "store", "top_logprobs",
    "parallel_tool_calls",
)  # fmt: skip


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's request for a response; what a chat has too is checked there."""

    model: str
    """The policy's name."""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Any = None
    stream: Any = None
    stream_options: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    metadata: Any = None
    user: Any = None
    safety_identifier: Any = None
    store: Any = None
    text: dict[str, Any] | None = None
    top_logprobs: Any = None
    parallel_tool_calls: Any = None
    reasoning: Any = None
    include: list[str] | None = None
    truncation: str | None = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    max_tool_calls: Any = None


_body = msgspec.json.Decoder(ResponsesBody)


def read(raw: bytes) -> tuple[bytes, "ResponseStyle"]:
    """The chat that says the same, and how its answer is written. Raises `BadRequest`."""
    body: ResponsesBody = decode(_body, bounded(raw))
    _refuse_what_is_not_kept(body)
    chat: dict[str, Any] = {name: value for name in _ALIKE if (value := getattr(body, name)) is not None}
    chat["messages"] = messages_of(body.input, body.instructions)
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = tools_of(body.tools)
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice)
    if (wanted := (body.text or {}).get("format")) is not None:
        chat["response_format"] = _format(wanted)
    if "message.output_text.logprobs" in (body.include or []) or body.top_logprobs:
        chat["logprobs"] = True
    return msgspec.json.encode(chat), ResponseStyle(body)


def _format(wanted: object) -> object:
    """A schema as a chat says it."""
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}


def _choice(wanted: object) -> object:
    """A named function as a chat says it."""
    if not isinstance(wanted, dict) or wanted.get("type") != "function":
        return wanted
    return {"type": "function", "function": {name: value for name, value in wanted.items() if name != "type"}}


def _refuse_what_is_not_kept(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            cure = "nothing is kept here to continue from; send the whole conversation in `input`"
            raise BadRequest(f"{name}: {cure}", param=name, code="unsupported")
    if body.background:
        raise BadRequest("background: an answer is sampled while you wait; leave it out, or stream", param="background", code="unsupported")
    if body.truncation not in (None, "disabled"):
        raise BadRequest("truncation: a conversation is never cut silently; use `disabled`", param="truncation", code="unsupported")


class ResponseStyle:
    """Writes responses."""

    def __init__(self, asked: ResponsesBody) -> None:
        self._asked = asked

    def whole(self, answers: Sequence[tuple[Recording, Items]]) -> bytes:
        """The body of a finished response."""
        ((recording, items),) = answers
        return msgspec.json.encode(self.response(recording, items))

    def streaming(self, recordings: Sequence[Recording], index: int) -> "ResponseStreaming":
        """A writer of events."""
        return ResponseStreaming(self, recordings[index])

    def end(self, recordings: Sequence[Recording]) -> bytes:
        """Nothing: the last event says that it ended."""
        return b""

    def response(self, recording: Recording, items: Items, *, running: bool = False) -> dict[str, Any]:
        """The response object, as far as it is."""
        request, asked = recording.request, self._asked
        cut = not running and finish_reason_of(recording) == "length"
        return {
            "id": request.inference_id, "object": "response", "created_at": int(recording.started_at.timestamp()),
            "status": "in_progress" if running else "incomplete" if cut else "completed", "background": False, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens, "metadata": asked.metadata or {}, "model": request.policy,
            "output": [] if running else output_of(recording, items), "previous_response_id": None,
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "text": asked.text or {"format": {"type": "text"}},
            "temperature": request.sampling.temperature, "top_p": request.sampling.top_p,
            "tool_choice": asked.tool_choice or "auto", "tools": asked.tools or [], "truncation": "disabled",
            "usage": None if running else _usage(recording), "user": asked.user, "system_fingerprint": recording.arm.digest,
            "episode_id": request.episode_id,
            **token_of(recording),
        }  # fmt: skip


def output_of(recording: Recording, items: Items) -> list[dict[str, Any]]:
    """The items of the finished answer: a message where anything is said, then the calls."""
    calls, text = visible_calls(recording), spoken(recording)
    said = [_message(recording, text, "completed", items)] if text or not calls else []
    return said + [_call(call.id, call.name, call.arguments, "completed") for call in calls]


def _message(recording: Recording, text: str | None, status: str, items: Items | None = None) -> dict[str, Any]:
    parts = [] if text is None else [_part(text, items or [])]
    return {"type": "message", "id": f"msg_{recording.request.inference_id}", "status": status, "role": "assistant", "content": parts}


def _part(text: str, items: Items) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": items}


def _call(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": name, "arguments": arguments, "status": status}


def _usage(recording: Recording) -> dict[str, Any]:
    usage = recording.usage
    return {
        "input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }  # fmt: skip


class ResponseStreaming:
    """Writes one response as typed server-sent events, numbered."""

    def __init__(self, style: ResponseStyle, recording: Recording) -> None:
        self._style = style
        self._recording = recording
        self._number = 0
        self._sent = 0
        self._speaking = False
        self._items: Items = []

    def first(self) -> bytes:
        """That it began."""
        begun = self._style.response(self._recording, [], running=True)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def chunk(self, chunk: GenerationChunk) -> bytes:
        """What a chunk of the engine adds; nothing while a tool call may be being written."""
        self._hear(chunk)
        return self._say(spoken_so_far(self._recording))

    def last(self, chunk: GenerationChunk) -> bytes:
        """The rest of the text, its calls, and the whole response."""
        self._hear(chunk)
        recording = self._recording
        out = self._say(spoken(recording))
        for index, item in enumerate(output_of(recording, self._items)):
            out += b"".join(self._closing(index, item) if item["type"] == "message" else self._calling(index, item))
        response = self._style.response(recording, self._items)
        return out + self._event("response.incomplete" if response["status"] == "incomplete" else "response.completed", response=response)

    def failure(self, body: bytes) -> bytes:
        """An error in the middle."""
        error = cast("dict[str, Any]", msgspec.json.decode(body)["error"])
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _hear(self, chunk: GenerationChunk) -> None:
        self._items += logprob_items(chunk) if self._recording.request.logprobs else []

    def _say(self, so_far: str) -> bytes:
        delta = so_far[self._sent :]
        if not delta:
            return b""
        self._sent = len(so_far)
        return self._opening() + self._text_event("response.output_text.delta", delta=delta, logprobs=[])

    def _opening(self) -> bytes:
        if self._speaking:
            return b""
        self._speaking = True
        item = _message(self._recording, None, "in_progress")
        return self._event("response.output_item.added", output_index=0, item=item) + self._text_event(
            "response.content_part.added", part=_part("", [])
        )

    def _closing(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        """The end of the message; one that said nothing is opened first."""
        yield self._opening()
        part = item["content"][0]
        yield self._text_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._text_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _calling(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        about = {"output_index": index, "item_id": item["id"]}
        yield self._event("response.function_call_arguments.delta", delta=item["arguments"], **about)
        yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"], **about)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _text_event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - what the event says
        return self._event(kind, output_index=0, content_index=0, item_id=f"msg_{self._recording.request.inference_id}", **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - what the event says
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"
