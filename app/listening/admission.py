"""The barrier before an ASGI application: who does not pass is answered here, and pages of named origins may read the answers."""

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.listening.barrier import Barrier
from app.listening.errors import HttpError, error_body
from app.listening.headers import header

_ALLOWED_HEADERS = b"authorization, content-type, idempotency-key, x-api-key, x-session-id, x-session-done, x-turn-type"


async def admit(barrier: Barrier, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Let the request through to the application, or answer it here."""
    headers = dict(scope["headers"])
    try:
        barrier.check(scope["method"], headers, path=scope["path"])
        if "\x00" in scope["path"] or b"%00" in scope.get("query_string", b""):
            raise HttpError(400, "an address has no NUL character in it: no database takes one", code="invalid_request")
    except HttpError as error:
        body = error_body(error.status, str(error), code=error.code, param=error.param)
        await _answer(send, error.status, body, [(b"content-type", b"application/json")])
        return
    origin = header(headers, b"origin")
    if origin is None or origin not in barrier.origins:
        await app(scope, receive, send)
    elif scope["method"] == "OPTIONS":
        await _answer(send, 204, b"", _preflight(origin))
    else:
        await app(scope, receive, _signed(send, origin))


def _preflight(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        *_cors(origin), (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"), (b"access-control-allow-headers", _ALLOWED_HEADERS),
        (b"access-control-max-age", b"600"),
    ]  # fmt: skip


def _cors(origin: str) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]


def _signed(send: Send, origin: str) -> Send:
    """Send, with what lets the page at this origin read the answer."""

    async def signed(message: Message) -> None:
        if message["type"] == "http.response.start":
            exposed = (b"access-control-expose-headers", b"x-request-id, x-ratchet-version, x-ratchet-inference-id, retry-after")
            message = {**message, "headers": [*message.get("headers", []), *_cors(origin), exposed]}
        await send(message)

    return signed


async def _answer(send: Send, status: int, body: bytes, extra: Collection[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", str(len(body)).encode()), *extra]})
    await send({"type": "http.response.body", "body": body})
