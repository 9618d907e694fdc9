"""OpenTelemetry: `gen_ai.evaluation.result` over OTLP/HTTP, as a log record (`/v1/logs`) or a span event (`/v1/traces`).

`gen_ai.response.id` names the inference, else `gen_ai.conversation.id` the episode, else the trace id the inference. Anything else in
the payload is none of ours: it is accepted and left alone, as a collector sends everything everywhere, and as Langfuse's client sends its
traces (`/api/public/otel/v1/traces`). Busy is answered 503, not
429: the Python exporter drops on 429.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from fastapi import APIRouter
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import Counter, or_refused
from app.api.dialects.naming import Signal, inference_of
from app.api.errors import HttpError
from app.domain.errors import BadRequest, Overloaded

SOURCE = "sdk:otel"
EVENT = "gen_ai.evaluation.result"
PROTOBUF = "application/x-protobuf"
MOST_LOOKED_AT = 20_000
"""Resources, scopes, records and events in one body, whatever about; an exporter sends 512 at once. A microsecond each."""
TAG, MOST_TAGS = b"\x12", 80_000
"""What begins a record or a value, in texts too: ten milliseconds to parse."""
EMPTY = b"\x12\x00"
"""A record, scope or span of nothing in protobuf: half a million of them fit into a body, and take 40 ms in one piece to parse."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ID = re.compile(r'("(?:traceId|spanId|parentSpanId|trace_id|span_id)"\s*:\s*")((?:[0-9a-fA-F]{2})+)"')
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


Find = Callable[[Any], Iterator[Evaluation | None]]
"""The evaluations in a request; None for everything else that had to be looked at."""


def router(counter: Counter) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["dialects"], responses=openapi.ERRORS)

    @made.post("/v1/logs", openapi_extra=_RAW)
    async def logs(request: Request) -> Response:
        """Take evaluation results from log records."""
        return await _export(request, counter, ExportLogsServiceRequest(), _in_logs, _logs_answer)

    @made.post("/api/public/otel/v1/traces", name="langfuse_traces", openapi_extra=_RAW)
    @made.post("/v1/traces", openapi_extra=_RAW)
    async def traces(request: Request) -> Response:
        """Take evaluation results from span events."""
        return await _export(request, counter, ExportTraceServiceRequest(), _in_traces, _traces_answer)

    return made


async def _export(
    request: Request,
    counter: Counter,
    message: Any,  # noqa: ANN401 - one of two generated classes
    find: Find,
    answer: Callable[[int, str], Message],
) -> Response:
    try:
        async with counter.body(request, charged=False) as (caller, raw):
            is_json = "json" in (request.headers.get("content-type") or "")
            read = partial(_read, raw, message, find, is_json=is_json)
            evaluations = await counter.door.workshop.do(read, chars=len(raw))
            counter.charge(caller, len(evaluations))
            wrong = await counter.put_all([or_refused(partial(_signal, evaluation)) for evaluation in evaluations], caller)
            rejected = [str(error) for error in wrong if error is not None]
    except Overloaded as error:
        retry = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        raise HttpError(503, str(error), code="overloaded", headers=retry) from error
    return _encoded(answer(len(rejected), "; ".join(rejected[:5])), is_json=is_json)


def _read(raw: bytes, message: Message, find: Find, *, is_json: bool) -> list[Evaluation]:
    """Raises `BadRequest`."""
    _parse(raw, message, is_json=is_json)
    found: list[Evaluation] = []
    for number, evaluation in enumerate(find(message)):
        if number >= MOST_LOOKED_AT:
            raise _crowded()
        if evaluation is not None:
            found.append(evaluation)
    return found


def _crowded() -> BadRequest:
    return BadRequest(f"there are more than {MOST_LOOKED_AT} records in the body: send smaller batches", code="too_many_values")


def _parse(raw: bytes, message: Message, *, is_json: bool) -> None:
    if not is_json and (raw.count(EMPTY) > MOST_LOOKED_AT or raw.count(TAG) > MOST_TAGS):
        raise _crowded()
    try:
        if is_json:
            Parse(_base64_ids(raw), message, ignore_unknown_fields=True, max_recursion_depth=32)
        else:
            message.ParseFromString(raw)
    except (ParseError, DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRequest(f"the body is not an OTLP request: {error}", code="not_otlp") from error


def _base64_ids(raw: bytes) -> str:
    """OTLP's JSON writes trace and span ids as hex, where protobuf's JSON reads base64."""
    return _ID.sub(lambda m: m[1] + base64.b64encode(bytes.fromhex(m[2])).decode() + '"', raw.decode())


def _in_logs(message: ExportLogsServiceRequest) -> Iterator[Evaluation | None]:
    for resource in message.resource_logs:
        yield None
        for scope in resource.scope_logs:
            yield None
            for record in scope.log_records:
                yield None
                attributes = _plain(record.attributes)
                if record.event_name == EVENT or attributes.get("event.name") == EVENT:
                    at = record.time_unix_nano or record.observed_time_unix_nano
                    yield Evaluation(trace_id=record.trace_id.hex(), span_id=record.span_id.hex(), time_ns=at, attributes=attributes)


def _in_traces(message: ExportTraceServiceRequest) -> Iterator[Evaluation | None]:
    for resource in message.resource_spans:
        yield None
        for scope in resource.scope_spans:
            yield None
            for span in scope.spans:
                yield None
                around = _plain(span.attributes)
                for event in span.events:
                    yield None
                    if event.name == EVENT:
                        yield Evaluation(
                            trace_id=span.trace_id.hex(), span_id=span.span_id.hex(), time_ns=event.time_unix_nano,
                            attributes=around | _plain(event.attributes),
                        )  # fmt: skip


def _signal(found: Evaluation) -> Signal:
    """The score of an event. Raises `BadRequest` where the name or every id is missing."""
    name = found.attributes.get("gen_ai.evaluation.name")
    if not isinstance(name, str):
        raise BadRequest("gen_ai.evaluation.name is missing", param="gen_ai.evaluation.name")
    score = found.attributes.get("gen_ai.evaluation.score.value")
    response = found.attributes.get("gen_ai.response.id")
    conversation = found.attributes.get("gen_ai.conversation.id")
    target = str(response) if response else None if conversation else inference_of(found.trace_id or None)
    identity = f"{found.trace_id}:{found.span_id}:{found.time_ns}:{name}:{response}:{conversation}"
    return Signal(
        id=hashlib.sha256(identity.encode()).hexdigest()[:32], key=name,
        value=score if score is not None else found.attributes.get("gen_ai.evaluation.score.label"),
        inference_id=target, episode_id=str(conversation) if conversation and not response else None,
        comment=_text(found.attributes.get("gen_ai.evaluation.explanation")),
        occurred_at=_EPOCH + timedelta(microseconds=found.time_ns // 1000) if found.time_ns else None, source=SOURCE,
    )  # fmt: skip


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _plain(attributes: Any) -> dict[str, Any]:  # noqa: ANN401 - a repeated protobuf field
    found: dict[str, Any] = {}
    pair: KeyValue
    for pair in attributes:
        found[pair.key] = _value(pair.value)
    return found


def _value(value: AnyValue) -> str | bool | int | float | None:
    """A scalar; lists and maps mean nothing to us."""
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
