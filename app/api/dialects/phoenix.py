"""Phoenix annotations (client 3.5): `POST /v1/span_annotations`.

`metadata.inference_id` names the inference, else the span id does (32 hex digits are a UUID). `identifier` is the upsert key.
"""

import hashlib
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import Counter, json_response
from app.api.dialects.naming import Signal, inference_of, named_inference
from app.api.drafts import Label, TargetId, decode

SOURCE = "sdk:phoenix"


class AnnotationResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was found."""

    label: str | None = None
    score: float | None = None
    explanation: str | None = None


class SpanAnnotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One annotation."""

    span_id: TargetId
    name: Label
    annotator_kind: Literal["LLM", "CODE", "HUMAN"]
    result: AnnotationResult | None = None
    metadata: dict[str, Any] | None = None
    identifier: str = ""


class SpanAnnotations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body."""

    data: list[SpanAnnotation]


_body = msgspec.json.Decoder(SpanAnnotations)


def router(counter: Counter) -> APIRouter:
    """The endpoint."""
    made = APIRouter(tags=["dialects"], responses=openapi.ERRORS)

    @made.post("/v1/span_annotations", openapi_extra=openapi.body(SpanAnnotations))
    async def annotate(request: Request) -> Response:
        """Take annotations; all of them or, where one is wrong, none."""
        async with counter.body(request, charged=False) as (caller, raw):
            body: SpanAnnotations = decode(_body, raw)
            counter.charge(caller, len(body.data))
            signals = [_signal(annotation) for annotation in body.data]
            for signal in signals:
                counter.check(signal, caller)
            for signal in signals:
                await counter.put(signal, caller)
            return json_response({"data": [{"id": signal.id} for signal in signals]})

    return made


def _signal(annotation: SpanAnnotation) -> Signal:
    result = annotation.result or AnnotationResult()
    identity = [annotation.span_id, annotation.name, annotation.identifier]
    return Signal(
        id=hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32], key=annotation.name,
        value=result.score if result.score is not None else result.label,
        inference_id=named_inference(annotation.metadata) or inference_of(annotation.span_id), comment=result.explanation,
        occurred_at=None, source=SOURCE,
    )  # fmt: skip
