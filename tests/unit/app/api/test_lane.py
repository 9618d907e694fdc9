"""What every answer has in common: its name, what goes wrong in it, and where its body is read."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import workshop
from app.api.application import Application, build
from app.api.chat.style import Style
from app.api.telemetry.events import EventsRoute
from app.domain.errors import BadRequest, NotFound
from app.domain.people import NotSignedIn
from app.main import create_app
from tests.fakes.gateway import collaborators

LANE = ("POST", "/v1/events")


def app_with(*routers: APIRouter, events: ASGIApp | None = None) -> Application:
    app = create_app(collaborators(routers=list(routers)))
    app.lane = app.lane if events is None else {**app.lane, LANE: events}
    return app


def client(app: Application) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("a bug")


async def breaks_late(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("a bug")


BUG = {"error": {"message": "a bug of ours; it is in the log", "type": "server_error", "param": None, "code": "internal"}}


def elsewhere() -> APIRouter:
    router = APIRouter()

    @router.get("/broken")
    async def bug() -> Response:
        raise RuntimeError("a bug")

    @router.get("/numbered")
    async def numbered(limit: int) -> Response:
        return Response(str(limit))

    @router.get("/refused")
    async def refused() -> Response:
        raise NotFound("nothing of that name")

    @router.get("/teapot")
    async def teapot() -> Response:
        raise HTTPException(418, "short and stout", headers={"x-why": "tea"})

    @router.get("/named")
    async def named() -> Response:
        return StreamingResponse(chunks(), headers={"x-request-id": "mine", "x-content-type-options": "sniff"})

    @router.get("/page")
    async def page() -> Response:
        raise NotSignedIn("sign in first")

    return router


async def chunks() -> AsyncIterator[bytes]:
    yield b"x"


@pytest.mark.parametrize("path", ["/v1/events", "/broken"])
def test_a_bug_of_ours_is_a_500_that_says_nothing_of_it(path: str) -> None:
    asked = client(app_with(elsewhere(), events=broken))
    answer = asked.post(path, json={}) if path == LANE[1] else asked.get(path)
    assert (answer.status_code, answer.json()) == (500, BUG)


def test_a_bug_behind_the_first_byte_cuts_the_answer_off_instead_of_beginning_another() -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": LANE[1], "headers": [(b"host", b"testserver")], "query_string": b"", "client": None,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(app_with(events=breaks_late)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start"]


@pytest.mark.parametrize(
    ("path", "status", "code", "param", "message"),
    [
        ("/nowhere", 404, "404", None, "there is nothing at this path"), ("/refused", 404, "not_found", None, "nothing of that name"),
        ("/v1/sign-nowhere", 404, "404", None, "there is nothing at this path"), ("/teapot", 418, "418", None, "short and stout"),
        ("/numbered?limit=x", 422, "invalid_request", "limit", "limit: Input should be a valid integer"),
        ("/numbered", 422, "invalid_request", "limit", "limit: Field required"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_said_in_one_shape(path: str, status: int, code: str, param: str | None, message: str) -> None:
    answer = client(app_with(elsewhere())).get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"].startswith(message)
    assert answer.headers.get("x-why") == ("tea" if status == 418 else None)


def test_a_path_says_which_method_it_does_not_take() -> None:
    answer = client(app_with(elsewhere())).delete("/numbered")
    assert (answer.status_code, answer.json()["error"]["message"]) == (405, "this path does not take this method")
    assert answer.headers["allow"] == "GET"


def test_every_answer_has_a_name_of_its_own_and_keeps_what_it_says_itself() -> None:
    asked = client(app_with(elsewhere()))
    first, second = (asked.get("/nowhere").headers for _ in range(2))
    assert len(first["x-request-id"]) == 36
    assert first["x-request-id"] != second["x-request-id"]
    assert first["x-content-type-options"] == "nosniff"
    named = asked.get("/named").headers
    assert (named.get_list("x-request-id"), named.get_list("x-content-type-options")) == (["mine"], ["sniff"])


def test_who_is_not_signed_in_is_turned_away_where_there_is_a_page_for_that() -> None:
    made = create_app(collaborators())

    async def turn_away(request: Request, _error: Exception) -> Response:
        return Response(f"to the entrance from {request.url.path}", 303)

    def asked(**more: Any) -> Any:
        app = build(
            access=made.state.access,
            barrier=made.barrier,
            chat=made.chat,
            events=cast("EventsRoute", made.lane[LANE]),
            routers=[elsewhere()],
            **more,
        )
        return client(app).get("/page", follow_redirects=False)

    turned = asked(turn_away=turn_away)
    assert (turned.status_code, turned.text) == (303, "to the entrance from /page")
    assert asked().status_code == 401


@pytest.mark.parametrize(("size", "beside"), [(0, False), (32 * 1024 + 63, False), (32 * 1024 + 64, True)])
def test_a_body_of_more_than_thirty_two_kilobytes_is_read_beside_the_loop(size: int, *, beside: bool) -> None:
    read = list[tuple[int, str]]()

    def reading(body: bytes) -> tuple[bytes, Style]:
        read.append((len(body), threading.current_thread().name))
        raise BadRequest("read")

    app = app_with()
    app.lane = {**app.lane, ("POST", "/v1/chat/completions"): replace(app.chat, read=reading)}
    asyncio.run(_post(app, b"x" * size))
    assert [(length, name.startswith("workshop")) for length, name in read] == [(size, beside)]


async def _post(app: Application, body: bytes) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        pass

    headers = [(b"host", b"testserver"), (b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b"", "client": None,
    }  # fmt: skip
    await app(scope, receive, send)


def stepping(chars: int) -> bool:
    """Whether the steps were taken with rests between them."""
    seen = list[bool]()

    def step() -> None:
        seen.append(workshop._pace.beside)  # pyright: ignore[reportPrivateUsage]

    assert workshop.unhurried((step() for _ in range(3)), chars=chars) == [None] * 3
    assert len(set(seen)) == 1
    return seen[0]


@pytest.mark.parametrize(("chars", "rests"), [(512, False), (513, True), (100_000, True)])
def test_long_work_in_a_thread_rests_between_its_steps_and_short_work_does_not(chars: int, *, rests: bool) -> None:
    assert stepping(chars) is rests


@pytest.mark.parametrize("chars", [1, 100_000])
def test_on_the_loop_nothing_rests(chars: int) -> None:
    async def inside(work: Callable[[int], bool]) -> bool:
        return work(chars)

    assert asyncio.run(inside(stepping)) is False


def test_answers_are_json_in_utf_8() -> None:
    answer = client(app_with()).get("/status")
    assert (answer.headers["content-type"], msgspec.json.decode(answer.content)) == ("application/json", {"status": "ok"})
