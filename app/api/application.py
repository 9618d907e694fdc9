"""Puts the endpoints together: a FastAPI application with a fast lane past it for the three that carry the traffic."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import openapi
from app.api.chat.completions import CompletionBody
from app.api.chat.completions import read as read_completion
from app.api.chat.inference import InferenceBody
from app.api.chat.inference import read as read_inference
from app.api.chat.request import ChatBody
from app.api.chat.responses import ResponsesBody
from app.api.chat.responses import read as read_response
from app.api.chat.route import ChatRoute
from app.api.dialects.cloudevents import Envelope
from app.api.entry.access import Access
from app.api.entry.rates import SPENDING, Spending
from app.api.errors import Problem, problem
from app.api.telemetry.drafts import Draft
from app.api.telemetry.events import Answers, EventsRoute
from app.domain.errors import RatchetError
from app.domain.ids import uuid7
from app.domain.people import NotSignedIn
from app.listening.admission import admit
from app.listening.barrier import Barrier
from app.listening.errors import HttpError, error_body
from app.logging import REQUEST

log = logging.getLogger("ratchet.api")
TurnAway = Callable[[Request, Exception], Awaitable[Response]]
"""Answers who opens a page without being signed in."""
Lane = Mapping[tuple[str, str], ASGIApp]
"""Endpoints by (method, path)."""


class Application(FastAPI):
    """FastAPI, but for what the lane takes first: matching and middleware cost more there than the work."""

    lane: Lane = MappingProxyType({})
    barrier: Barrier = Barrier()
    chat: ChatRoute

    def openapi(self) -> dict[str, Any]:
        """The document, with the types that FastAPI cannot see."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi.completed(super().openapi())
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stop what another site's page sent; serve the lane's endpoints directly, everything else through FastAPI."""
        if scope["type"] == "http":
            await admit(self.barrier, self._serve, scope, receive, _stamped(send))
        else:
            await super().__call__(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.lane.get((scope["method"], scope["path"]))
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await _guarded(endpoint, scope, receive, send)


def _stamped(send: Send) -> Send:
    """Send, with what every answer says: its name (`x-request-id`), what is left of the key's rate, and that its type is meant."""
    spending = Spending()
    SPENDING.set(spending)
    request = uuid7()
    REQUEST.set(request)

    async def stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            stamps = [(b"x-request-id", request.encode()), (b"x-content-type-options", b"nosniff"), *spending.headers()]
            said = {name for name, _ in message.get("headers", [])}
            message = {**message, "headers": [*message.get("headers", []), *(stamp for stamp in stamps if stamp[0] not in said)]}
        await send(message)

    return stamped


async def _guarded(endpoint: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """A bug of ours is logged and answered 500, in OpenAI's shape, where nothing was sent yet."""
    started = False

    async def noting_send(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        await endpoint(scope, receive, noting_send)
    except Exception:
        log.exception("bug path=%s", scope["path"])
        if started:
            raise
        await _bug().response()(scope, receive, send)


def build(
    *, access: Access, barrier: Barrier, chat: ChatRoute, events: EventsRoute, routers: list[APIRouter], turn_away: TurnAway | None = None
) -> Application:
    """The application with its error handling; `routers` are mounted in order."""
    app = Application(title="Ratchet", version="0.1.0", docs_url=None, redoc_url=None)
    app.state.access = access
    app.chat = chat
    app.barrier = barrier
    completions, answered = replace(chat, read=read_completion), replace(chat, read=read_response)
    inferred = replace(chat, read=read_inference)
    app.lane = {
        ("POST", "/v1/chat/completions"): chat,
        ("POST", "/openai/v1/chat/completions"): chat,
        ("POST", "/v1/completions"): completions,
        ("POST", "/openai/v1/completions"): completions,
        ("POST", "/v1/responses"): answered,
        ("POST", "/openai/v1/responses"): answered,
        ("POST", "/inference"): inferred,
        ("POST", "/v1/events"): events,
    }
    app.add_exception_handler(RatchetError, _on_ratchet_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    if turn_away is not None:
        app.add_exception_handler(NotSignedIn, turn_away)
    for router in routers:
        app.include_router(router)
    for path in (*_BODIES, "/v1/events"):
        app.include_router(_described(path, app.lane["POST", path]))
    return app


_BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody, "/v1/responses": ResponsesBody,
    "/inference": InferenceBody,
}  # fmt: skip


def _described(path: str, endpoint: ASGIApp) -> APIRouter:
    """An endpoint of the lane in the OpenAPI document; requests to it never come this way."""
    router = APIRouter(responses=openapi.ERRORS)
    if path == "/v1/events":
        described = openapi.body(Draft, Envelope, also_array=True, media_types=("application/json", "application/cloudevents+json"))
        extra: dict[str, Any] = {"tags": ["feedback"], "responses": {202: openapi.answer(Answers, "One answer per event, in order.")}}
    else:
        described = openapi.body(_BODIES[path])
        stream = {"schema": {"type": "string"}}
        extra = {"tags": ["gateway"], "responses": {200: {"description": "An answer.", "content": {"text/event-stream": stream}}}}

    @router.post(path, name=path.removeprefix("/v1/").replace("/", "_"), openapi_extra=described, **extra)
    async def unreachable(request: Request) -> Response:
        raise AssertionError(f"{request.url.path} is served by {endpoint}")

    return router


async def _on_ratchet_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RatchetError)
    return problem(error).response()


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    """A query parameter or path of the wrong form: the first complaint, with the parameter's name."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return problem(HttpError(422, f"{param}: {first['msg']}", code="invalid_request", param=param)).response()


async def _on_http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "there is nothing at this path", 405: "this path does not take this method"}.get(error.status_code, error.detail)
    headers = dict(error.headers or {})
    return problem(HttpError(error.status_code, message, code=str(error.status_code), headers=headers)).response()


async def _on_bug(request: Request, _error: Exception) -> Response:
    log.exception("bug path=%s", request.url.path)
    return _bug().response()


def _bug() -> Problem:
    return Problem(status=500, body=error_body(500, "a bug of ours; it is in the log", code="internal"), headers={})
