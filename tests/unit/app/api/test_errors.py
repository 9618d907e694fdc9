"""What an error of ours is over HTTP: status, kind, code and when to come back, as clients of OpenAI's API read them."""

import json

import pytest

from app.api.errors import HttpError, problem
from app.domain import errors
from app.domain.people import NotSignedIn, SignInRefused
from app.main import create_app
from tests.fakes.gateway import collaborators


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/events", "/feedback", "/api/public/scores"])
def test_the_interface_s_document_names_every_status_that_a_product_s_request_may_come_back_with(path: str) -> None:
    told = create_app(collaborators()).openapi()["paths"][path]["post"]["responses"]
    refused = {status: response["description"] for status, response in told.items() if status > "299"}
    assert " ".join(sorted(refused)) == "400 401 403 404 408 413 415 422 429 431 502 503 504"
    assert (refused["400"], refused["401"]) == ("The request is wrong; `param` names the field.", "No key, or a wrong one.")


def test_the_interface_s_document_says_that_what_is_read_of_the_database_may_be_away() -> None:
    told = create_app(collaborators()).openapi()["paths"]
    for path in ("/v1/models", "/v1/runs", "/v1/versions", "/v1/labels/report", "/v1/engines"):
        assert set(told[path]["get"]["responses"]) >= {"200", "401", "403", "503"}, path
