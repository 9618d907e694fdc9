"""`POST /v1/completions`: a text to go on with, and where a `suffix` follows, one to fit in between.

The prompt is one message of a user, so that a turn is sampled, recorded and trained on as any other; with a suffix it is written in the
marks that code models know (`<|fim_prefix|>…<|fim_suffix|>…<|fim_middle|>`). What the engine cannot honour is refused as in a chat.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from app.api.chat.answer import Items, data, end, finish_reason_of, frame, logprob_items, rated_by, sse, token_of, usage_of
from app.api.chat.recording import Recording
from app.api.chat.style import bounded
from app.api.telemetry.drafts import decode
from app.domain.errors import BadRequest
from app.domain.telemetry.serving import GenerationChunk

PREFIX, SUFFIX, MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
KIND = "text_completion"
_ALIKE = (
    "model", "stream", "stream_options", "temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "n", "presence_penalty",
    "frequency_penalty", "logit_bias", "user", "metadata", "store", "safety_identifier",
)  # fmt: skip
"""Said in a chat in the same words."""


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """OpenAI's completion; what a chat has too is checked there."""

    model: str
    """The policy's name."""
    prompt: str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]
    """One text: token ids would be another tokenizer's."""
    suffix: str | None = None
    stream: Any = None
    stream_options: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    max_tokens: Any = None
    seed: Any = None
    stop: Any = None
    n: Any = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    """How many alternatives are wanted beside each sampled token."""
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None


_body = msgspec.json.Decoder(CompletionBody)


def read(raw: bytes) -> tuple[bytes, "CompletionStyle"]:
    """The chat that says the same, and how its answer is written. Raises `BadRequest`."""
    body: CompletionBody = decode(_body, bounded(raw))
    if body.echo:
        raise BadRequest("echo is not done: the prompt is yours already, put it in front of the answer", param="echo", code="unsupported")
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    asked = prompt if body.suffix is None else f"{PREFIX}{prompt}{SUFFIX}{body.suffix}{MIDDLE}"
    chat = {name: value for name in _ALIKE if (value := getattr(body, name)) is not None}
    chat |= {"messages": [{"role": "user", "content": asked}], "logprobs": body.logprobs is not None, "top_logprobs": body.logprobs or 0}
    return msgspec.json.encode(chat), CompletionStyle()


class CompletionStyle:
    """Writes text completions."""

    def whole(self, answers: Sequence[tuple[Recording, Items]]) -> bytes:
        """The body of a finished completion."""
        choices = [
            _choice(index, recording.text, finish_reason_of(recording), _logprobs(recording, items)) | rated_by(recording)
            for index, (recording, items) in enumerate(answers)
        ]
        recordings = [recording for recording, _ in answers]
        named = frame(recordings[0], KIND) | token_of(recordings[0])
        return msgspec.json.encode(named | {"choices": choices, "usage": usage_of(recordings)})

    def streaming(self, recordings: Sequence[Recording], index: int) -> "CompletionStreaming":
        """A writer of chunks."""
        return CompletionStreaming(recordings, index)

    def end(self, recordings: Sequence[Recording]) -> bytes:
        """The usage where it is wanted, `[DONE]`."""
        return end(recordings, KIND)


class CompletionStreaming:
    """Writes one completion as server-sent events."""

    def __init__(self, recordings: Sequence[Recording], index: int) -> None:
        self._named, self._index = recordings[0], index
        self._recording = recordings[index]
        self._sent = 0
        self._named_chars = 0

    def first(self) -> bytes:
        """An empty text, with the feedback token."""
        begun = _choice(self._index, "", None, None) | rated_by(self._recording)
        return sse(frame(self._named, KIND) | token_of(self._recording) | {"choices": [begun]})

    def chunk(self, chunk: GenerationChunk) -> bytes:
        """What a chunk of the engine adds."""
        return self._event(None, chunk)

    def last(self, chunk: GenerationChunk) -> bytes:
        """The rest, the finish reason."""
        return self._event(finish_reason_of(self._recording), chunk)

    def failure(self, body: bytes) -> bytes:
        """An error in the middle."""
        return data(body)

    def _event(self, finish_reason: str | None, chunk: GenerationChunk) -> bytes:
        text, self._sent = self._recording.text[self._sent :], len(self._recording.text)
        items = logprob_items(chunk) if self._recording.request.logprobs else []
        said = _choice(self._index, text, finish_reason, _logprobs(self._recording, items, after=self._named_chars))
        self._named_chars += sum(len(item["token"]) for item in items)
        return sse(frame(self._named, KIND) | {"choices": [said]})


def _choice(index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(recording: Recording, items: Items, *, after: int = 0) -> dict[str, Any] | None:
    """The tokens of a text that begins `after` so many characters of the answer's tokens."""
    if not recording.request.logprobs:
        return None
    names = [item["token"] for item in items]
    offsets = [after + sum(map(len, names[:number])) for number in range(len(names))]
    best = [{other["token"]: other["logprob"] for other in item["top_logprobs"]} for item in items] if recording.request.likely else None
    return {"tokens": names, "token_logprobs": [item["logprob"] for item in items], "top_logprobs": best, "text_offset": offsets}
