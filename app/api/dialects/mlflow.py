"""MLflow assessments (client 3.17): create, update and delete under `/api/3.0/mlflow/traces/{trace_id}/assessments`.

The trace id stands for the inference (`tr-` and the UUID's 32 hex digits, or `metadata.inference_id`). MLflow has no idempotency
key; the assessment's id is a hash of what identifies it, so that a repeated request is the same assessment. The id begins with the
name, which an update does not repeat.
"""

import asyncio
import hashlib
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import Counter, json_response
from app.api.dialects.naming import Signal, beside, inference_of, metadata_in, named_inference, structure_in, text_of
from app.api.entry.access import Caller
from app.api.telemetry.drafts import AwareTime, EventId, Label, decode
from app.domain.access import Scope
from app.domain.errors import BadRequest, NotFound

SOURCE = "sdk:mlflow"
PATH = "/api/3.0/mlflow/traces/{trace_id}/assessments"


class AssessmentSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who says so."""

    source_type: str | None = None
    source_id: str | None = None


class Serialized(msgspec.Struct, frozen=True, kw_only=True):
    """A value as text: how the client sends an expectation that is no scalar."""

    value: str
    serialization_format: str = "JSON_FORMAT"


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A feedback's or an expectation's value; more may stand beside it."""

    value: Any = None
    serialized_value: Serialized | None = None
    error: Any = None


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """What of an assessment means something to us."""

    assessment_name: Label | None = None
    trace_id: str | None = None
    source: AssessmentSource | None = None
    feedback: Value | None = None
    expectation: Value | None = None
    rationale: str | None = None
    metadata: dict[str, str] | None = None
    span_id: str | None = None
    overrides: EventId | None = None
    """The assessment whose place it takes: that one is retracted."""
    create_time: AwareTime | None = None
    last_update_time: AwareTime | None = None


class AssessmentBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of create and update."""

    assessment: Assessment
    update_mask: str | None = None


class _Echo(msgspec.Struct):
    assessment: dict[str, Any]


_body = msgspec.json.Decoder(AssessmentBody)
_echo = msgspec.json.Decoder(_Echo)


def router(counter: Counter) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["dialects"], responses=openapi.ERRORS)

    @made.post(PATH, openapi_extra=openapi.body(AssessmentBody))
    async def create(request: Request, trace_id: str) -> Response:
        """Take an assessment."""
        async with counter.body(request, max_bytes=counter.intake.limits.event_bytes) as (caller, raw):
            assessment = _read(raw)
            if assessment.assessment_name is None or "." in assessment.assessment_name:
                raise BadRequest("an assessment has a name without `.`", param="assessment.assessment_name")
            assessment_id = _id_of(openapi.path_id(trace_id), assessment)
            await counter.put(_signal(assessment_id, assessment.assessment_name, trace_id, assessment), caller)
            if assessment.overrides is not None and assessment.overrides != assessment_id:
                await counter.take_back(SOURCE, assessment.overrides, caller)
            return _answer(raw, assessment_id)

    @made.patch(PATH + "/{assessment_id}", openapi_extra=openapi.body(AssessmentBody))
    async def update(request: Request, trace_id: str, assessment_id: str) -> Response:
        """Correct an assessment."""
        async with counter.body(request, max_bytes=counter.intake.limits.event_bytes) as (caller, raw):
            assessment = _read(raw)
            name = assessment.assessment_name or openapi.path_id(assessment_id).partition(".")[0]
            await counter.put(_signal(assessment_id, name, openapi.path_id(trace_id), assessment), caller)
            return _answer(raw, assessment_id, name=name, trace_id=trace_id)

    @made.get(PATH + "/{assessment_id}")
    async def read(request: Request, trace_id: str, assessment_id: str) -> Response:
        """An assessment as it was accepted; needs the scope `read`."""
        caller: Caller = await counter.access.caller(dict(request.scope["headers"]), Scope.READ)
        return json_response({"assessment": await _stored(openapi.path_id(assessment_id), openapi.path_id(trace_id), counter, caller)})

    @made.delete(PATH + "/{assessment_id}")
    async def delete(request: Request, trace_id: str, assessment_id: str) -> Response:
        """Retract an assessment."""
        caller: Caller = await counter.access.caller(dict(request.scope["headers"]), Scope.INGEST)
        await counter.take_back(SOURCE, openapi.path_id(assessment_id), caller)
        return json_response({})

    return made


async def _stored(assessment_id: str, trace_id: str, counter: Counter, caller: Caller) -> dict[str, Any]:
    """The standing parts of an assessment in MLflow's shape. Raises `NotFound`."""
    ledger, target = counter.door.ledger, inference_of(trace_id)
    first = await counter.find(SOURCE, assessment_id, caller)
    about = [] if first is None or first.inference_id is None else [first.inference_id]
    heard = await asyncio.to_thread(lambda: ledger.about(inference_ids=about, policy=caller.policy))
    parts = {
        observation.id.removeprefix(assessment_id).partition("#")[0]: observation
        for observation in (h.observation for h in heard if not h.retracted and h.observation.source.partition("@")[0] == SOURCE)
        if observation.id.partition("#")[0].removesuffix(":comment").removesuffix(":demonstration") == assessment_id
    }
    if not parts:
        raise NotFound(f"no assessment {assessment_id!r} of the trace {trace_id} stands (inference {target})")
    newest = max(observation.occurred_at for observation in parts.values())
    tags = next(iter(parts.values())).tags
    found: dict[str, Any] = {
        "assessment_id": assessment_id, "assessment_name": assessment_id.partition(".")[0], "trace_id": trace_id,
        "source": structure_in(tags, "source") or {"source_type": "HUMAN", "source_id": "unknown"}, "create_time": newest,
        "last_update_time": newest, "valid": True,
    }  # fmt: skip
    if "" in parts:
        found["feedback"] = {"value": parts[""].value}
    if ":demonstration" in parts:
        found["expectation"] = {"value": parts[":demonstration"].value}
    if metadata := metadata_in(tags):
        found["metadata"] = metadata
    found |= {name: tags[name] for name in ("span_id", "overrides") if name in tags}
    return found | ({"rationale": parts[":comment"].value} if ":comment" in parts else {})


def _read(raw: bytes) -> Assessment:
    body: AssessmentBody = decode(_body, raw)
    return body.assessment


def _id_of(trace_id: str, assessment: Assessment) -> str:
    who = assessment.source or AssessmentSource()
    parts = [trace_id, assessment.assessment_name, who.source_type, who.source_id, assessment.create_time]
    if assessment.create_time is None:
        parts += [assessment.feedback, assessment.expectation, assessment.rationale]
    return f"{assessment.assessment_name}.{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:24]}"


def _signal(assessment_id: str, name: str, trace_id: str, assessment: Assessment) -> Signal:
    human = assessment.source is not None and assessment.source.source_type == "HUMAN"
    return Signal(
        id=assessment_id, key=name, value=assessment.feedback.value if assessment.feedback else None,
        inference_id=named_inference(assessment.metadata) or inference_of(trace_id), comment=assessment.rationale,
        demonstration=_expected(assessment.expectation),
        occurred_at=assessment.last_update_time or assessment.create_time, source=SOURCE,
        actor=assessment.source.source_id if human and assessment.source else None,
        tags=beside(
            assessment.metadata, source=None if human else assessment.source, span_id=assessment.span_id or None,
            overrides=assessment.overrides, error=assessment.feedback.error if assessment.feedback else None,
        ),
    )  # fmt: skip


def _expected(expectation: Value | None) -> str | None:
    """The text that was expected. Raises `BadRequest` where it is something else, which would be lost."""
    if expectation is None:
        return None
    if expectation.serialized_value is None:
        return text_of(expectation.value)
    try:
        return text_of(msgspec.json.decode(expectation.serialized_value.value))
    except msgspec.DecodeError as error:
        raise BadRequest(f"the serialized value is not JSON: {error}", param="assessment.expectation.serialized_value") from error


def _answer(raw: bytes, assessment_id: str, *, name: str | None = None, trace_id: str | None = None) -> Response:
    """The assessment with its id, as the client parses it."""
    known = {"assessment_name": name, "trace_id": trace_id} if name else {}
    return json_response({"assessment": {**known, **_echo.decode(raw).assessment, "assessment_id": assessment_id}})
