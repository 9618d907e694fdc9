"""What an error of ours is over HTTP: status, kind, code and when to come back, as clients of OpenAI's API read them."""

import json
from functools import cache
from typing import Any

import pytest

from app.api.errors import HttpError, problem
from app.api.openapi import path_id
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


@cache
def document() -> dict[str, Any]:
    """The interface's document, which takes a while to write."""
    return create_app(collaborators()).openapi()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/events", "/feedback", "/api/public/scores"])
def test_the_interface_s_document_names_every_status_that_a_product_s_request_may_come_back_with(path: str) -> None:
    told = document()["paths"][path]["post"]["responses"]
    refused = {status: response["description"] for status, response in told.items() if status > "299"}
    assert " ".join(sorted(refused)) == "400 401 403 404 408 413 415 422 429 431 502 503 504"
    assert (refused["400"], refused["401"]) == ("The request is wrong; `param` names the field.", "No key, or a wrong one.")


def test_the_interface_s_document_says_that_what_is_read_of_the_database_may_be_away() -> None:
    told = document()["paths"]
    for path in ("/v1/models", "/v1/runs", "/v1/versions", "/v1/labels/report", "/v1/engines"):
        assert set(told[path]["get"]["responses"]) >= {"200", "401", "403", "503"}, path


@pytest.mark.parametrize(
    ("status", "meant"),
    [
        ("400", "The request is wrong; `param` names the field."), ("401", "No key, or a wrong one."), ("403", "The key may not do this."),
        ("404", "No such thing."), ("408", "The body came too slowly."), ("413", "The body is too large."),
        ("415", "The body's encoding is not known."), ("422", "The request is wrong; `param` names the field."),
        ("429", "A limit is reached; `Retry-After` says when to come back."), ("431", "The headers are too large."),
        ("502", "The engine failed."), ("503", "A dependency does not answer."), ("504", "The engine was too slow."),
    ],
)  # fmt: skip
def test_each_status_of_the_interface_s_document_has_its_own_meaning_and_the_shape_of_an_error(status: str, meant: str) -> None:
    told = document()["paths"]["/feedback"]["post"]["responses"][status]
    assert told["description"] == meant
    schema = told["content"]["application/json"]["schema"]
    assert (schema["required"], schema["properties"]["error"]["required"]) == (["error"], ["message", "type", "param", "code"])


def test_the_interface_s_document_says_what_a_body_is() -> None:
    paths = document()["paths"]
    events, chat = (paths[path]["post"]["requestBody"] for path in ("/v1/events", "/v1/chat/completions"))
    assert (events["required"], chat["required"]) == (True, True)
    one = {"oneOf": [{"$ref": "#/components/schemas/Draft"}, {"$ref": "#/components/schemas/Envelope"}]}
    assert events["content"]["application/cloudevents+json"]["schema"] == {"oneOf": [one, {"type": "array", "items": one, "minItems": 1}]}
    assert chat["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/ChatBody"}}}
    assert paths["/v1/events"]["post"]["responses"]["202"]["description"] == "One answer per event, in order."


@pytest.mark.parametrize("path", ["/openai/v1/models", "/console/login"])
def test_what_is_there_for_clients_of_others_and_for_people_is_not_in_the_interface_s_document(path: str) -> None:
    assert path not in document()["paths"]


@pytest.mark.parametrize("id_", ["", "x" * 181, "a\x00b"])
def test_an_id_in_a_path_has_its_bounds(id_: str) -> None:
    assert path_id("x" * 180) == "x" * 180
    with pytest.raises(errors.BadRequest, match="1 to 180 characters") as refused:
        path_id(id_)
    assert refused.value.param == "id"
