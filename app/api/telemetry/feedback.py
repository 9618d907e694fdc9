"""`POST /feedback` in TensorZero's shape, field for field, `PATCH` (LangSmith's) and `DELETE /feedback/{id}`.

Feedback may come before its inference is known: it is accepted and parked. LangSmith's client posts to the same path; its body
has `key` and `run_id` where TensorZero's has `metric_name`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects import langsmith
from app.api.dialects.counter import Counter, json_response
from app.api.entry import feedback_tokens
from app.api.entry.access import Caller
from app.api.entry.feedback_tokens import Answered, observation_id
from app.api.telemetry.door import Door
from app.api.telemetry.drafts import AwareTime, Draft, EventId, Label, TargetId, decode
from app.domain.access import Scope
from app.domain.errors import BadRequest
from app.domain.ids import uuid7

PAGE = 100
TOKEN_BODY_BYTES = 16 * 1024
"""What an unknown browser may send."""
Runs = Annotated[list[str], Query(min_length=1, max_length=100)]
Keys = Annotated[Sequence[str], Query(max_length=100)]


class FeedbackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TensorZero's body; `id`, `occurred_at`, `actor` and `policy` are ours and optional."""

    metric_name: Label
    value: Any
    episode_id: TargetId | None = None
    inference_id: TargetId | None = None
    internal: bool | None = None
    tags: dict[str, str] | None = None
    dryrun: bool | None = None
    id: EventId | None = None
    occurred_at: AwareTime | None = None
    actor: Annotated[str, msgspec.Meta(min_length=1, max_length=400)] | None = None
    policy: Label | None = None
    """Of an episode that several policies served: whose turns it is about."""


class FeedbackAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """TensorZero's answer."""

    feedback_id: str


_body = msgspec.json.Decoder(FeedbackBody)


def router(counter: Counter) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["feedback"], responses=openapi.ERRORS)

    @made.post(
        "/feedback",
        openapi_extra=openapi.body(FeedbackBody, langsmith.LangSmithFeedback),
        responses={200: openapi.answer(FeedbackAnswer, "Durable.")},
    )
    async def post(request: Request) -> Response:
        """Take one piece of feedback, TensorZero's or LangSmith's; with an answer's `feedback_token` as the key, about that one."""
        if (right := await counter.access.answered(dict(request.scope["headers"]))) is not None:
            return await _of_answer(request, counter, *right)
        async with counter.body(request, max_bytes=counter.intake.limits.event_bytes) as (caller, raw):
            if langsmith.is_feedback(raw):
                return await langsmith.post(raw, counter, caller)
            return await _tensorzero(raw, request, counter.door, caller)

    @made.get("/feedback")
    async def read(request: Request, run: Runs, key: Keys = (), source: Keys = (), offset: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The feedback about runs that came through LangSmith's client, as it reads it; needs the scope `read`."""
        caller = await counter.access.caller(dict(request.scope["headers"]), Scope.READ)
        found = await langsmith.listed([openapi.path_id(each) for each in run], key, source, counter, caller)
        return json_response(found[offset : offset + PAGE])

    @made.patch("/feedback/{feedback_id}", openapi_extra=openapi.body(langsmith.LangSmithUpdate))
    async def patch(request: Request, feedback_id: str) -> Response:
        """Correct feedback that came through LangSmith's client; TensorZero's is corrected by sending it again under its own id."""
        async with counter.body(request, max_bytes=counter.intake.limits.event_bytes) as (caller, raw):
            return await langsmith.patch(openapi.path_id(feedback_id), raw, counter, caller)

    @made.delete("/feedback/{feedback_id}")
    async def delete(request: Request, feedback_id: str) -> Response:
        """Retract feedback; also before it arrived."""
        if (right := await counter.access.answered(dict(request.scope["headers"]))) is not None:
            return await _take_back_of_answer(openapi.path_id(feedback_id), counter, *right)
        caller = await counter.access.caller(dict(request.scope["headers"]), Scope.INGEST)
        source = langsmith.SOURCE if "langsmith" in (request.headers.get("user-agent") or "").lower() else "api"
        await counter.take_back(source, openapi.path_id(feedback_id), caller)
        return json_response({"feedback_id": feedback_id})

    return made


async def _of_answer(request: Request, counter: Counter, answered: Answered, caller: Caller) -> Response:
    """What the holder of an answer's token says of it; said again, it replaces."""
    raw = await counter.intake.read(request.scope, request.receive, max_bytes=TOKEN_BODY_BYTES)
    try:
        body: FeedbackBody = decode(_body, raw)
        if body.episode_id is not None or body.inference_id not in (None, answered.answer):
            raise BadRequest("this feedback token is for another answer: leave inference_id and episode_id out", param="inference_id")
        if body.metric_name not in feedback_tokens.SAYABLE:
            said = ", ".join(sorted(feedback_tokens.SAYABLE))
            raise BadRequest(f"with a feedback token one says {said}; anything else needs an API key", param="metric_name")
        if (body.actor, body.id, body.occurred_at, body.policy) != (None, None, None, None):
            raise BadRequest("with a feedback token the rater, the id and the time are given: leave actor, id, occurred_at and policy out")
        draft = Draft(
            id=observation_id(answered, body.metric_name), name=body.metric_name, value=body.value, inference_id=answered.answer,
            source=feedback_tokens.SOURCE, tags=body.tags or {},
        )  # fmt: skip
        await counter.say(draft, caller)
        return json_response(FeedbackAnswer(feedback_id=draft.id or ""))
    finally:
        counter.intake.release(len(raw))


async def _take_back_of_answer(feedback_id: str, counter: Counter, answered: Answered, caller: Caller) -> Response:
    if feedback_id not in {observation_id(answered, name) for name in feedback_tokens.SAYABLE}:
        raise BadRequest("with a feedback token one takes back what was said with it, and nothing else", param="feedback_id")
    await counter.take_back(feedback_tokens.SOURCE, feedback_id, caller)
    return json_response({"feedback_id": feedback_id})


async def _tensorzero(raw: bytes, request: Request, door: Door, caller: Caller) -> Response:
    body: FeedbackBody = decode(_body, raw)
    event_id = body.id or request.headers.get("idempotency-key") or uuid7()
    if len(event_id) > 180:
        raise BadRequest("the id has more than 180 characters", param="id")
    draft = Draft(
        id=event_id, name=body.metric_name, value=body.value, inference_id=body.inference_id, episode_id=body.episode_id,
        occurred_at=body.occurred_at, actor=body.actor, tags=body.tags or {}, policy=body.policy,
    )  # fmt: skip
    if body.dryrun:
        await door.prepared(draft, caller)
        return json_response(FeedbackAnswer(feedback_id=event_id))
    answer = await door.observe(draft, caller)
    if answer.status == "conflict":
        raise BadRequest(f"{event_id}: {answer.reason}; send a correction under an id of its own", param="id", code="conflict")
    return json_response(FeedbackAnswer(feedback_id=event_id))
