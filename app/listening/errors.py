"""An answer over HTTP that is no error of the domain, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import msgspec

from app.domain.errors import RatchetError


class HttpError(RatchetError):
    """An answer that is not from the domain's tree: wrong key, body too large, …"""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}


def error_body(status: int, message: str, *, code: str, param: str | None = None) -> bytes:
    """The JSON body of an error."""
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
