"""Errors over HTTP, always `{"error": {"message", "type", "param", "code"}}`, OpenAI's shape."""

from dataclasses import dataclass

from starlette.responses import Response

from app.domain import errors
from app.domain.people import NotSignedIn, SignInRefused
from app.listening.errors import HttpError, error_body


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What goes over the wire for an error."""

    status: int
    body: bytes
    headers: dict[str, str]

    def response(self) -> Response:
        """As a Starlette response."""
        return Response(self.body, self.status, headers=self.headers, media_type="application/json")


def problem(error: errors.RatchetError) -> Problem:
    """Status, body and headers of a domain error. What is not a `RatchetError` is a bug of ours and answered 500 elsewhere."""
    status, code, param, headers = _describe(error)
    return Problem(status=status, body=error_body(status, str(error), code=code, param=param), headers=headers)


def _describe(error: errors.RatchetError) -> tuple[int, str, str | None, dict[str, str]]:
    match error:
        case HttpError():
            return error.status, error.code, error.param, error.headers
        case errors.BadRequest():
            return 400, error.code, error.param, {}
        case NotSignedIn():
            return 401, "not_signed_in", None, {}
        case SignInRefused():
            return 401, "sign_in_refused", None, {}
        case errors.DoneAlready():
            return 200, "done_already", None, {}
        case errors.UnknownPolicy():
            return 404, "model_not_found", "model", {}
        case errors.NotFound():
            return 404, "not_found", None, {}
        case errors.Refused():
            return 409, "refused", None, {}
        case errors.Overloaded():
            return 429, "overloaded", None, {"Retry-After": str(max(1, round(error.retry_after_s)))}
        case errors.Unavailable():
            return 503, "unavailable", None, {"Retry-After": "2"}
        case errors.BadInput():
            return 400, "invalid_request", None, {}
        case _:
            return 500, "internal", None, {}
