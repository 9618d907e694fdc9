"""Phoenix annotations (client 3.5): `POST /v1/span_annotations`, `/v1/trace_annotations` and `/v1/session_annotations`, before which the
client asks `GET /arize_phoenix_version`.

`metadata.inference_id` names the inference, else the span or trace id does (32 hex digits are a UUID); a session is an episode.
`identifier` is the upsert key.
"""

import hashlib
import re
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import Counter, json_response
from app.api.dialects.naming import Signal, beside, inference_of, named_inference
from app.api.telemetry.drafts import Label, TargetId, decode
from app.domain.errors import BadRequest

SOURCE = "sdk:phoenix"
VERSION = "12.0.0"
"""Of the first of its servers that takes annotations of sessions: a client that needs a later one says so, and asks us for nothing."""


class AnnotationResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was found."""

    label: str | None = None
    score: float | None = None
    explanation: str | None = None


class Annotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One annotation, of a span, a trace or a session."""

    name: Label
    annotator_kind: Literal["LLM", "CODE", "HUMAN"]
    span_id: TargetId | None = None
    trace_id: TargetId | None = None
    session_id: TargetId | None = None
    result: AnnotationResult | None = None
    metadata: dict[str, Any] | None = None
    identifier: str = ""


class Annotations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body."""

    data: list[Annotation]


_body = msgspec.json.Decoder(Annotations)


def router(counter: Counter) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["dialects"], responses=openapi.ERRORS)

    async def annotate(request: Request) -> Response:
        """Take annotations; all of them or, where one is wrong, none."""
        async with counter.body(request, charged=False) as (caller, raw):
            body: Annotations = decode(_body, raw)
            counter.charge(caller, len(body.data))
            signals = [_signal(annotation) for annotation in body.data]
            for signal in signals:
                await counter.check(signal, caller)
            for signal in signals:
                await counter.put(signal, caller)
            return json_response({"data": [{"id": signal.id} for signal in signals]})

    @made.get("/arize_phoenix_version")
    async def version() -> Response:
        """The server that we speak like; without an answer the client annotates no session."""
        return Response(VERSION, media_type="text/plain")

    for about in ("span", "trace", "session"):
        made.post(f"/v1/{about}_annotations", name=f"annotate_{about}", openapi_extra=openapi.body(Annotations))(annotate)
    return made


def _signal(annotation: Annotation) -> Signal:
    result = annotation.result or AnnotationResult()
    identity = [annotation.span_id or annotation.trace_id or annotation.session_id, annotation.name, annotation.identifier]
    target = _inference(annotation)
    return Signal(
        id=hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32], key=annotation.name,
        value=result.score if result.score is not None else result.label,
        inference_id=target, episode_id=annotation.session_id if target is None else None, comment=result.explanation,
        occurred_at=None, source=SOURCE,
        tags=beside(
            annotation.metadata, annotator_kind=annotation.annotator_kind, identifier=annotation.identifier or None,
            label=result.label if result.score is not None else None,
        ),
    )  # fmt: skip


def _inference(annotation: Annotation) -> str | None:
    """The inference it is about. Raises `BadRequest` where that can be none: stored under a span's own id it would never meet a turn."""
    named = named_inference(annotation.metadata) or inference_of(annotation.span_id or annotation.trace_id)
    if named is not None and re.fullmatch(r"[0-9a-fA-F]{16}", named):
        raise BadRequest(f"the span {named} is no answer of ours: say which in metadata.inference_id", param="metadata.inference_id")
    return named
