"""Small bodies, as every application of ours reads them."""

from starlette.requests import Request

from app.listening.errors import HttpError

TOO_LARGE = "body_too_large"


async def read_json(request: Request, *, most: int) -> bytes:
    """A body that was not read before its size is known, or while it grows. Raises `HttpError` 413, 415.

    Its type has to be named: a form on somebody else's page can send everything but that without asking first.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "send `content-type: application/json`", code="content_type")
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > most:
        raise HttpError(413, f"the body is larger than {most} bytes", code=TOO_LARGE)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise HttpError(413, f"the body is larger than {most} bytes", code=TOO_LARGE)
    return bytes(body)
