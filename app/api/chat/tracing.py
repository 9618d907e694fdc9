"""An answer's span: begun with the request, ended with the turn's commit, with ids and counts and nothing that was said."""

from dataclasses import replace
from datetime import datetime

from app.api.chat.recording import Recording
from app.api.chat.request import ChatRequest
from app.domain.release.assignment import Arm
from app.domain.telemetry.traceparent import TRACEPARENT
from app.domain.telemetry.turns import FinishReason
from app.listening.headers import Headers, header
from app.telemetry.traces import Span, SpanKind, Traces

FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT)


def begin(traces: Traces, request: ChatRequest, arm: Arm, headers: Headers, began: datetime) -> tuple[ChatRequest, Span | None]:
    """The request with the context that its turn takes along, and its span; as it is, and nothing, where it is not traced."""
    if not traces.on and TRACEPARENT not in request.tags:
        return request, None
    span = traces.begin(
        f"chat {request.policy}", kind=SpanKind.SERVER, parent=header(headers, TRACEPARENT.encode()), started=began,
        gen_ai__operation__name="chat", gen_ai__request__model=request.policy, ratchet__inference_id=request.inference_id,
        ratchet__episode_id=request.episode_id, ratchet__version=arm.digest, ratchet__arm=arm.arm,
    )  # fmt: skip
    tags = {name: value for name, value in request.tags.items() if name != TRACEPARENT}  # a context is nobody's to claim in a tag
    return replace(request, tags=tags if span is None else {**tags, TRACEPARENT: span.traceparent}), span


def end(span: Span | None, recording: Recording) -> None:
    """The answer is over. A summary, which is a turn too, is in the span of its answer and does not end it."""
    if span is None or recording.kind != "answer":
        return
    reason, usage = recording.finish_reason or FinishReason.ERROR, recording.usage
    span.set(
        gen_ai__usage__input_tokens=usage.prompt_tokens, gen_ai__usage__output_tokens=usage.completion_tokens,
        gen_ai__response__finish_reason=reason.value,
    )  # fmt: skip
    span.end(failed=reason.value if reason in FAILED else None)
