"""`POST /inference`: TensorZero's way to ask. The function is the policy; `variant_name` is kept as a tag and chooses nothing."""

from collections.abc import Sequence
from typing import Any

import msgspec

from app.api.chat.answer import DONE, Items, data, finish_reason_of, spoken, spoken_so_far, sse, token_of, visible_calls
from app.api.chat.recording import Recording
from app.api.chat.style import bounded
from app.api.telemetry.drafts import decode
from app.domain.errors import BadRequest
from app.domain.telemetry.serving import GenerationChunk

VARIANT = "ratchet"
"""TensorZero's answers name a variant; which weights answered is in the header `x-ratchet-version`."""
_PARAMS = {
    "temperature": "temperature", "top_p": "top_p", "max_tokens": "max_tokens", "seed": "seed", "stop_sequences": "stop",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip


class Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation."""

    messages: list[dict[str, Any]]
    system: str | None = None


class InferenceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TensorZero's inference; what a chat has too is checked there."""

    input: Input
    function_name: str | None = None
    """The policy's name."""
    model_name: str | None = None
    """The same."""
    episode_id: str | None = None
    stream: bool | None = None
    params: dict[str, Any] | None = None
    variant_name: str | None = None
    dryrun: bool | None = None
    tags: dict[str, str] | None = None
    internal: bool | None = None
    additional_tools: list[dict[str, Any]] | None = None
    allowed_tools: Any = None
    provider_tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    output_schema: Any = None
    internal_dynamic_variant_config: Any = None
    credentials: Any = None
    cache_options: Any = None
    extra_body: Any = None
    extra_headers: Any = None
    include_original_response: bool | None = None
    include_raw_response: bool | None = None
    include_raw_usage: bool | None = None
    include_aggregated_response: bool | None = None
    namespace: Any = None
    api_key: Any = None
    otlp_traces_extra_headers: Any = None
    otlp_traces_extra_attributes: Any = None
    otlp_traces_extra_resources: Any = None


_body = msgspec.json.Decoder(InferenceBody)
_REFUSED = ("allowed_tools", "extra_body", "provider_tools", "internal_dynamic_variant_config")


def read(raw: bytes) -> tuple[bytes, "InferenceStyle"]:
    """The chat that says the same, and how its answer is written. Raises `BadRequest`."""
    body: InferenceBody = decode(_body, bounded(raw))
    for name in _REFUSED:
        if getattr(body, name):
            raise BadRequest(f"{name}: not done here; leave it out", param=name, code="unsupported")
    named = body.function_name or body.model_name
    if named is None:
        raise BadRequest("function_name: the policy's name", param="function_name")
    chat: dict[str, Any] = {"model": named, "messages": _messages(body.input), "stream": bool(body.stream)}
    chat |= {
        "tensorzero::episode_id": body.episode_id, "tensorzero::variant_name": body.variant_name, "tensorzero::dryrun": body.dryrun,
        "tensorzero::tags": body.tags, "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
    }  # fmt: skip
    if body.output_schema is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": body.output_schema}}
    if body.additional_tools:
        chat["tools"] = [{"type": "function", "function": tool} for tool in body.additional_tools]
    for name, value in _given(body.params or {}).items():
        if name not in _PARAMS:
            raise BadRequest(f"params.chat_completion.{name}: unknown", param=f"params.chat_completion.{name}")
        chat[_PARAMS[name]] = value
    return msgspec.json.encode(chat), InferenceStyle()


def _choice(wanted: object) -> object:
    """TensorZero's `off`, `auto`, `required` and `{"specific": NAME}` as OpenAI says them."""
    if isinstance(wanted, dict) and isinstance(wanted.get("specific"), str):
        return {"type": "function", "function": {"name": wanted["specific"]}}
    return "none" if wanted == "off" else wanted


def _given(params: dict[str, Any]) -> dict[str, Any]:
    found = params.get("chat_completion", {})
    if not isinstance(found, dict):
        raise BadRequest("params.chat_completion: an object", param="params.chat_completion")
    return {name: value for name, value in found.items() if value is not None}


def _messages(given: Input) -> list[dict[str, Any]]:
    system = [] if given.system is None else [{"role": "system", "content": given.system}]
    return system + [_message(index, message) for index, message in enumerate(given.messages)]


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    at, content = f"input.messages[{index}]", message.get("content")
    if not isinstance(content, list):
        return {"role": message.get("role"), "content": content}
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise BadRequest(f"{at}.content: only parts of text are understood", param=f"{at}.content", code="unsupported_content")
        texts.append(text)
    return {"role": message.get("role"), "content": "".join(texts)}


class InferenceStyle:
    """Writes TensorZero's answers."""

    def whole(self, answers: Sequence[tuple[Recording, Items]]) -> bytes:
        """The body of a finished inference."""
        ((recording, _),) = answers
        calls = visible_calls(recording)
        text = spoken(recording)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
        content += [_call(call.id, call.name, call.arguments) for call in calls]
        ended = {"content": content, "usage": _usage(recording), "finish_reason": _reason(recording)}
        return msgspec.json.encode(_named(recording) | ended)

    def streaming(self, recordings: Sequence[Recording], index: int) -> "InferenceStreaming":
        """A writer of chunks."""
        return InferenceStreaming(recordings[index])

    def end(self, recordings: Sequence[Recording]) -> bytes:
        """`[DONE]`."""
        return DONE


class InferenceStreaming:
    """Writes one inference as server-sent events."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._sent = 0

    def first(self) -> bytes:
        """Nothing: chunks name everything."""
        return b""

    def chunk(self, chunk: GenerationChunk) -> bytes:
        """What a chunk of the engine adds; nothing while a tool call may be being written."""
        return self._say(spoken_so_far(self._recording))

    def last(self, chunk: GenerationChunk) -> bytes:
        """The rest, the calls, the usage."""
        recording, calls = self._recording, visible_calls(self._recording)
        out = self._say(spoken(recording))
        said = [{"type": "tool_call", "id": call.id, "raw_name": call.name, "raw_arguments": call.arguments} for call in calls]
        ended = {"content": said, "usage": _usage(recording), "finish_reason": _reason(recording)}
        return out + sse(_named(recording) | ended)

    def failure(self, body: bytes) -> bytes:
        """An error in the middle."""
        return data(body)

    def _say(self, so_far: str) -> bytes:
        text, self._sent = so_far[self._sent :], len(so_far)
        return sse(_named(self._recording) | {"content": [{"type": "text", "id": "0", "text": text}]}) if text else b""


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        read_arguments = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        read_arguments = None
    return {"type": "tool_call", "id": call_id, "raw_name": name, "raw_arguments": arguments, "name": name, "arguments": read_arguments}


def _named(recording: Recording) -> dict[str, Any]:
    request = recording.request
    return {"inference_id": request.inference_id, "episode_id": request.episode_id, "variant_name": VARIANT} | token_of(recording)


def _reason(recording: Recording) -> str:
    reason = finish_reason_of(recording)
    return "tool_call" if reason == "tool_calls" else reason


def _usage(recording: Recording) -> dict[str, int]:
    return {"input_tokens": recording.usage.prompt_tokens, "output_tokens": recording.usage.completion_tokens}
