"""OpenTelemetry: `gen_ai.evaluation.result` over OTLP/HTTP, as a log record (`/v1/logs`) or a span event (`/v1/traces`).

`gen_ai.response.id` names the inference, else `gen_ai.conversation.id` the episode, else the trace id the inference. Anything else in
the payload is none of ours: it is accepted and left alone, as a collector sends everything everywhere, and as Langfuse's client sends its
traces (`/api/public/otel/v1/traces`). Busy is answered 503, not
429: the Python exporter drops on 429.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.chat.style import bounded
from app.api.dialects import otlp_json
from app.api.dialects.counter import Counter
from app.api.dialects.naming import Signal, beside, inference_of
from app.api.telemetry.intake import more_than
from app.api.workshop import breathe
from app.domain.errors import BadRequest, Overloaded
from app.listening.errors import HttpError

SOURCE = "sdk:otel"
PROTOBUF = "application/x-protobuf"
EVENT = "gen_ai.evaluation.result"
ABOUT = "gen_ai.evaluation."
"""Begins what is said about the evaluation itself, not about the span that it lies in."""
MOST_LOOKED_AT = 20_000
"""Resources, scopes, records and events in one body, whatever about; an exporter sends 512 at once. A microsecond each."""
TAG, MOST_TAGS = b"\x12", 80_000
"""What begins a record or a value, in texts too: ten milliseconds to parse."""
EMPTY = b"\x12\x00"
"""A record, scope or span of nothing in protobuf: half a million of them fit into a body, and take 40 ms in one piece to parse."""
MOST_NS = 2**64
MOST_EVALUATIONS = 2_000
"""In one body, put down a slice at a time: the exporters of OpenTelemetry's SDKs send 512."""
P = TypeVar("P")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RAW = {
    "requestBody": {
        "required": True,
        "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}, "application/json": {"schema": {"type": "object"}}},
    }
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation event, wherever it was found."""

    trace_id: str
    span_id: str
    time_ns: int
    attributes: dict[str, Any]


class Other(Enum):
    """What is no evaluation."""

    AROUND = "around"
    """A resource, a scope, an event."""
    WITHOUT = "without"
    """A span or record that holds none: it is not kept."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One of the two kinds of export."""

    message: Callable[[], Message]
    from_json: Callable[[bytes], object]
    """Raises `ValueError`."""
    find: Callable[[Any], Iterator[Evaluation | Other]]
    """The evaluations in it, and everything else that had to be looked at."""
    parts: str
    """What it consists of, in words."""
    answer: Callable[[int, str], Message]


def router(counter: Counter) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["dialects"], responses=openapi.ERRORS)

    @made.post("/v1/logs", openapi_extra=_RAW)
    async def logs(request: Request) -> Response:
        """Take evaluation results from log records."""
        return await _export(request, counter, LOGS)

    @made.post("/api/public/otel/v1/traces", name="langfuse_traces", openapi_extra=_RAW)
    @made.post("/v1/traces", openapi_extra=_RAW)
    async def traces(request: Request) -> Response:
        """Take evaluation results from span events."""
        return await _export(request, counter, TRACES)

    return made


async def _export(request: Request, counter: Counter, form: "Form") -> Response:
    try:
        async with counter.body(request, charged=False, on_loop=False) as (caller, raw):
            is_json = "json" in (request.headers.get("content-type") or "")
            read = partial(_read, raw, form, is_json=is_json)
            evaluations, without = await counter.door.workshop.do(read, chars=len(raw), share=caller.share)
            counter.charge(caller, len(evaluations), most=MOST_EVALUATIONS)
            each = counter.intake.limits.batch_events
            slices = [evaluations[at : at + each] for at in range(0, len(evaluations), each)]
            wrong = [error for part in slices for error in await counter.put_all(part, _signal, caller)]
            rejected = [str(error) for error in wrong if error is not None]
            reasons = rejected[:5] + ([f"{without} {form.parts} hold no {EVENT}, and nothing else is kept here"] if without else [])
    except Overloaded as error:
        retry = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        raise HttpError(503, str(error), code="overloaded", headers=retry) from error
    return _encoded(form.answer(len(rejected) + without, "; ".join(reasons)), is_json=is_json)


def _read(raw: bytes, form: "Form", *, is_json: bool) -> tuple[list[Evaluation], int]:
    """Evaluations, and how many spans or records hold none. Raises `BadRequest`."""
    found, without = list[Evaluation](), 0
    try:
        for number, evaluation in enumerate(form.find(_parsed(raw, form, is_json=is_json))):
            breathe()
            if number >= MOST_LOOKED_AT:
                raise _crowded()
            if isinstance(evaluation, Evaluation):
                found.append(evaluation)
            without += evaluation is Other.WITHOUT
    except (DecodeError, RecursionError, ValueError) as error:
        raise BadRequest(f"the body is not an OTLP request: {error}", code="not_otlp") from error
    return found, without


def _crowded() -> BadRequest:
    return BadRequest(f"there are more than {MOST_LOOKED_AT} records in the body: send smaller batches", code="too_many_values")


def _parsed(raw: bytes, form: "Form", *, is_json: bool) -> Any:  # noqa: ANN401 - one of four classes
    if is_json:
        return form.from_json(bounded(raw))
    if more_than(MOST_LOOKED_AT, raw, TAG) and (more_than(MOST_TAGS, raw, TAG) or more_than(MOST_LOOKED_AT, raw, EMPTY)):
        raise _crowded()
    message = form.message()
    message.ParseFromString(raw)
    return message


def _in_logs(message: ExportLogsServiceRequest | otlp_json.Logs) -> Iterator[Evaluation | Other]:
    for resource in message.resource_logs or ():
        yield Other.AROUND
        for scope in _ours(resource).scope_logs or ():
            yield Other.AROUND
            for each in _ours(scope).log_records or ():
                record = otlp_json.record(each) if isinstance(each, msgspec.Raw) else each
                attributes = _plain(record.attributes)
                if record.event_name == EVENT or attributes.get("event.name") == EVENT:
                    yield _evaluation(record, record.time_unix_nano or record.observed_time_unix_nano, attributes)
                else:
                    yield Other.WITHOUT


def _in_traces(message: ExportTraceServiceRequest | otlp_json.Spans) -> Iterator[Evaluation | Other]:
    for resource in message.resource_spans or ():
        yield Other.AROUND
        for scope in _ours(resource).scope_spans or ():
            yield Other.AROUND
            for each in scope.spans or ():
                span = otlp_json.span(each) if isinstance(each, msgspec.Raw) else each
                around = _plain(span.attributes)
                found = False
                for event in span.events or ():
                    if event.name == EVENT:
                        found = True
                        yield _evaluation(span, event.time_unix_nano, around | _plain(event.attributes))
                    else:
                        yield Other.AROUND
                if not found:
                    yield Other.WITHOUT


def _ours(part: P) -> P:
    """The part, of JSON in the keys of the standard. Raises `ValueError`."""
    if isinstance(part, otlp_json.LogResource | otlp_json.LogScope | otlp_json.SpanResource):
        part.in_our_keys()
    return part


def _evaluation(within: Any, time_ns: int | None, attributes: dict[str, Any]) -> Evaluation:  # noqa: ANN401 - what has both ids
    if not 0 <= (time_ns or 0) < MOST_NS:
        raise BadRequest(f"{time_ns} is no time in nanoseconds since 1970", code="not_otlp")
    return Evaluation(trace_id=_hex(within.trace_id), span_id=_hex(within.span_id), time_ns=time_ns or 0, attributes=attributes)


def _hex(id_: bytes | str | None) -> str:
    return id_.hex() if isinstance(id_, bytes) else otlp_json.hexadecimal(id_)


def _signal(found: Evaluation) -> Signal:
    """The score of an event. Raises `BadRequest` where the name or every id is missing."""
    said = {name.removeprefix(ABOUT): value for name, value in found.attributes.items() if name.startswith(ABOUT)}
    name, score, label, explanation = (said.pop(part, None) for part in ("name", "score.value", "score.label", "explanation"))
    if not isinstance(name, str):
        raise BadRequest("gen_ai.evaluation.name is missing", param="gen_ai.evaluation.name")
    response = found.attributes.get("gen_ai.response.id")
    conversation = found.attributes.get("gen_ai.conversation.id")
    target = str(response) if response else None if conversation else inference_of(found.trace_id or None)
    identity = f"{found.trace_id}:{found.span_id}:{found.time_ns}:{name}:{response}:{conversation}"
    return Signal(
        id=hashlib.sha256(identity.encode()).hexdigest()[:32], key=name, value=score if score is not None else label,
        inference_id=target, episode_id=str(conversation) if conversation and not response else None, comment=_text(explanation),
        occurred_at=_EPOCH + timedelta(microseconds=found.time_ns // 1000) if found.time_ns else None, source=SOURCE,
        tags=beside(label=label if score is not None else None, **{ABOUT + part: value for part, value in said.items()}),
    )  # fmt: skip


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _plain(attributes: Any) -> dict[str, Any]:  # noqa: ANN401 - a repeated protobuf field, a list or nothing
    found: dict[str, Any] = {}
    pair: KeyValue | otlp_json.Pair
    for pair in attributes or ():
        found[pair.key or ""] = _value(pair.value)
    return found


def _value(value: AnyValue | otlp_json.Value | None) -> str | bool | int | float | None:
    """A scalar; lists and maps mean nothing to us."""
    if value is None or isinstance(value, otlp_json.Value):
        return None if value is None else value.plain()
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind in ("string_value", "bool_value", "int_value", "double_value") else None


def _logs_answer(rejected: int, reason: str) -> Message:
    answer = ExportLogsServiceResponse()
    if rejected:
        answer.partial_success.rejected_log_records = rejected
        answer.partial_success.error_message = reason
    return answer


def _traces_answer(rejected: int, reason: str) -> Message:
    answer = ExportTraceServiceResponse()
    if rejected:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = reason
    return answer


def _encoded(answer: Message, *, is_json: bool) -> Response:
    if is_json:
        return Response(MessageToJson(answer), 200, media_type="application/json")
    return Response(answer.SerializeToString(), 200, media_type=PROTOBUF)


LOGS = Form(message=ExportLogsServiceRequest, from_json=otlp_json.logs, find=_in_logs, answer=_logs_answer, parts="log records")
TRACES = Form(message=ExportTraceServiceRequest, from_json=otlp_json.spans, find=_in_traces, answer=_traces_answer, parts="spans")
