"""What an error of ours is over HTTP: status, kind, code and when to come back, as clients of OpenAI's API read them."""

import json

import pytest

from app.api.errors import HttpError, problem
from app.domain import errors
from app.domain.people import NotSignedIn, SignInRefused


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (HttpError(401, "say", code="invalid_api_key"), 401, "authentication_error", "invalid_api_key", None),
        (HttpError(403, "say", code="forbidden"), 403, "permission_error", "forbidden", None),
        (HttpError(413, "say", code="too_large", param="body"), 413, "invalid_request_error", "too_large", "body"),
        (errors.BadRequest("say", param="user", code="odd"), 400, "invalid_request_error", "odd", "user"),
        (errors.BadConfig("say"), 400, "invalid_request_error", "invalid_request", None),
        (NotSignedIn("say"), 401, "authentication_error", "not_signed_in", None),
        (SignInRefused("say"), 401, "authentication_error", "sign_in_refused", None),
        (errors.DoneAlready("say"), 200, "invalid_request_error", "done_already", None),
        (errors.UnknownPolicy("say"), 404, "not_found_error", "model_not_found", "model"),
        (errors.NotFound("say"), 404, "not_found_error", "not_found", None),
        (errors.StaleGeneration("say"), 409, "invalid_request_error", "refused", None),
        (errors.Overloaded("say", retry_after_s=2.0), 429, "rate_limit_error", "overloaded", None),
        (errors.Unavailable("say"), 503, "server_error", "unavailable", None),
        (HttpError(500, "say", code="broken"), 500, "server_error", "broken", None),
        (errors.OwnFault("say"), 500, "server_error", "internal", None),
    ],
)
def test_an_error_has_the_status_and_the_kind_that_clients_know(
    error: errors.RatchetError, status: int, kind: str, code: str, param: str | None
) -> None:
    found = problem(error)
    answered = found.response()
    assert (found.status, answered.status_code, answered.media_type) == (status, status, "application/json")
    assert json.loads(bytes(answered.body)) == {"error": {"message": "say", "type": kind, "param": param, "code": code}}


@pytest.mark.parametrize(("wait_s", "said"), [(0.2, "1"), (1.4, "1"), (1.6, "2"), (30.0, "30")])
def test_who_is_too_many_is_told_whole_seconds_and_at_least_one(wait_s: float, said: str) -> None:
    assert problem(errors.Overloaded("full", retry_after_s=wait_s)).headers == {"Retry-After": said}
    assert problem(errors.Unavailable("away")).headers == {"Retry-After": "2"}
    assert problem(errors.NotFound("nothing")).headers == {}
