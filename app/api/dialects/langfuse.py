"""Langfuse scores (client 5.0.4): `POST /api/public/scores` with an object or an array, `DELETE /api/public/scores/{id}`.

`traceId` is the inference id (also as 32 hex digits), `sessionId` the episode. Basic authentication: the secret key is our key.
"""

import hashlib
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import Counter, json_response
from app.api.dialects.naming import NO, YES, Signal, beside, inference_of, named_inference
from app.api.entry.access import Caller
from app.api.telemetry.drafts import AwareTime, EventId, Label, TargetId, decode, members
from app.domain.access import Scope
from app.domain.errors import BadRequest

SOURCE = "sdk:langfuse"


class LangfuseScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A score as the client sends it."""

    name: Label
    value: float | str | bool
    id: EventId | None = None
    trace_id: TargetId | None = None
    session_id: TargetId | None = None
    observation_id: TargetId | None = None
    dataset_run_id: str | None = None
    comment: str | None = None
    metadata: Any = None
    data_type: Literal["NUMERIC", "CATEGORICAL", "BOOLEAN", "CORRECTION", "TEXT"] | None = None
    config_id: str | None = None
    source: Literal["API", "ANNOTATION", "EVAL"] | None = None
    environment: str | None = None
    queue_id: str | None = None
    timestamp: AwareTime | None = None


_one = msgspec.json.Decoder(LangfuseScore)


def router(counter: Counter) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["dialects"], responses=openapi.ERRORS)

    @made.post("/api/public/scores", openapi_extra=openapi.body(LangfuseScore, also_array=True))
    async def scores(request: Request) -> Response:
        """Take scores."""
        async with counter.body(request, charged=False) as (caller, raw):
            if raw[:64].lstrip()[:1] == b"[":
                return await _batch(raw, counter, caller)
            counter.charge(caller, 1)
            return json_response({"id": await _put(raw, counter, caller)})

    @made.get("/api/public/projects")
    async def projects(request: Request) -> Response:
        """What the client's `auth_check` asks: the projects of a key are the policies it may speak about."""
        caller = await counter.access.caller(dict(request.scope["headers"]), Scope.INGEST)
        names = [name for name in sorted(counter.door.desk.policies) if caller.policy in (None, name)]
        organization = {"id": "ratchet", "name": "ratchet"}
        return json_response({"data": [{"id": name, "name": name, "organization": organization, "metadata": {}} for name in names]})

    @made.delete("/api/public/scores/{score_id}", status_code=202)
    async def delete(request: Request, score_id: str) -> Response:
        """Retract a score."""
        caller = await counter.access.caller(dict(request.scope["headers"]), Scope.INGEST)
        await counter.take_back(SOURCE, openapi.path_id(score_id), caller)
        return json_response({"message": "Score deletion request has been accepted"}, 202)

    return made


async def _batch(raw: bytes, counter: Counter, caller: Caller) -> Response:
    """202 when all are taken, else 207 with what was wrong, as the client expects it."""
    scores = members(raw, most=counter.intake.limits.batch_events)
    counter.charge(caller, len(scores))
    if not scores:
        raise BadRequest("a batch has at least one score", code="empty")
    wrong = await counter.put_all(scores, _signal, caller)
    errors = [f"[{index}] {error}" for index, error in enumerate(wrong) if error is not None]
    if not errors:
        return json_response({"message": "Accepted"}, 202)
    status = 207 if len(errors) < len(scores) else 400
    answer = {"accepted": len(scores) - len(errors), "rejected": len(errors), "errors": [{"message": text} for text in errors]}
    return json_response(answer, status)


async def _put(raw: bytes, counter: Counter, caller: Caller) -> str:
    signal = _signal(raw)
    await counter.put(signal, caller)
    return signal.id


def _signal(raw: bytes | msgspec.Raw) -> Signal:
    """Raises `BadRequest`."""
    score: LangfuseScore = decode(_one, raw)
    target = named_inference(score.metadata) or inference_of(score.trace_id)
    score_id = score.id or hashlib.sha256(bytes(memoryview(raw))).hexdigest()[:32]
    correction = score.data_type == "CORRECTION"
    value = _boolean(score.value) if score.data_type == "BOOLEAN" else score.value
    return Signal(
        id=score_id, key=score.name, value=None if correction else value, inference_id=target,
        episode_id=score.session_id if target is None else None, comment=score.comment,
        demonstration=str(score.value) if correction else None, occurred_at=score.timestamp, source=SOURCE,
        tags=beside(
            score.metadata, observation_id=score.observation_id, dataset_run_id=score.dataset_run_id, config_id=score.config_id,
            source=score.source, environment=score.environment, queue_id=score.queue_id,
        ),
    )  # fmt: skip


def _boolean(value: float | str | bool) -> bool:
    if isinstance(value, str) and value.lower() not in YES | NO:
        raise BadRequest(f"a BOOLEAN is 0 or 1, true or false, and this is {value[:40]!r}", param="value")
    return value.lower() in YES if isinstance(value, str) else bool(value)
