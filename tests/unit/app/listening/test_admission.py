"""What the barrier answers itself, what it lets through untouched, and what a page of a named origin may read."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.listening.admission import admit
from app.listening.barrier import FORM, Barrier, reached_as
from app.listening.errors import HttpError, error_body
from app.listening.headers import as_headers, header

PAGE = "https://app.example.com"
BARRIER = Barrier(hosts=frozenset({"ratchet.example.com"}), origins=frozenset({PAGE}))
HEADERS = {"host": "ratchet.example.com"}


def admitted(method: str = "GET", path: str = "/status", barrier: Barrier = BARRIER, **headers: str) -> tuple[list[Message], int]:
    """What was sent, and how often the application was asked."""
    sent, asked = list[Message](), list[Scope]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b"whole", "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody reads")

    given = as_headers((HEADERS | {name.replace("_", "-"): value for name, value in headers.items()}).items())
    scope = {"type": "http", "method": method, "path": path, "headers": list(given.items())}
    asyncio.run(admit(barrier, app, scope, receive, send))
    return sent, len(asked)


def test_what_nobody_s_page_asks_goes_through_and_comes_back_as_it_is() -> None:
    (start, body), asked = admitted()
    assert (start["headers"], body["body"], asked) == ([(b"x-own", b"1")], b"whole", 1)


def test_the_service_s_own_page_is_told_nothing_about_origins() -> None:
    (start, _), asked = admitted(origin="http://ratchet.example.com")
    assert (start["headers"], asked) == ([(b"x-own", b"1")], 1)


def test_a_named_page_may_read_the_answer_and_these_of_its_headers() -> None:
    (start, body), asked = admitted(origin=PAGE)
    assert start["headers"] == [
        (b"x-own", b"1"), (b"access-control-allow-origin", PAGE.encode()), (b"vary", b"origin"),
        (b"access-control-expose-headers", b"x-request-id, x-ratchet-version, x-ratchet-inference-id, retry-after"),
    ]  # fmt: skip
    assert (start["status"], body["body"], asked) == (200, b"whole", 1)


def test_a_named_page_s_question_is_answered_without_the_application() -> None:
    (start, body), asked = admitted("OPTIONS", origin=PAGE)
    assert (start["status"], body["body"], asked) == (204, b"", 0)
    assert dict(start["headers"]) == {
        b"content-length": b"0", b"access-control-allow-origin": PAGE.encode(), b"vary": b"origin",
        b"access-control-allow-methods": b"GET, POST, PATCH, DELETE", b"access-control-max-age": b"600",
        b"access-control-allow-headers": b"authorization, content-type, idempotency-key, x-api-key, x-session-id, x-session-done, "
        b"x-turn-type",
    }  # fmt: skip


def test_what_is_refused_is_an_error_of_the_interface_whole_and_with_its_length() -> None:
    (start, body), asked = admitted(origin="https://evil.example")
    assert (start["status"], asked) == (403, 0)
    assert dict(start["headers"]) == {b"content-length": str(len(body["body"])).encode(), b"content-type": b"application/json"}
    said = json.loads(body["body"])["error"]
    assert (said["type"], said["code"], said["param"]) == ("permission_error", "origin", None)
    assert said["message"] == "pages of https://evil.example may not call this service: add the origin to RATCHET_ORIGINS"


def refused(method: str, path: str = "/v1/events", barrier: Barrier = BARRIER, /, **headers: str) -> int | None:
    """The status with which it is; None where it passes."""
    given = as_headers((HEADERS | {name.replace("_", "-"): value for name, value in headers.items()}).items())
    try:
        barrier.check(method, given, path=path)
    except HttpError as error:
        return error.status
    return None


@pytest.mark.parametrize("length", [{"content_length": "1"}, {"transfer_encoding": "chunked"}])
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", None), ("Application/JSON ; charset=utf-8", None), ("application/jsonl", None),
        ("application/x-jsonlines", None), ("application/x-ndjson", None), ("application/ndjson", None),
        ("application/x-protobuf", None), ("application/vnd.langfuse.v1-2+json", None), ("application/json-seq", 415),
        ("text/application/json", 415), ("application/xml", 415), (FORM, 415), ("", 415),
    ],
)  # fmt: skip
def test_a_body_says_that_it_is_json_or_otlp(kind: str, status: int | None, length: dict[str, str]) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert refused(method, content_type=kind, **length) == status
    for method in ("GET", "HEAD", "OPTIONS"):
        assert refused(method, content_type=kind, **length) is None, "nothing is done on these, whatever comes with them"
    assert refused("POST", content_type=kind, content_length="0") is None
    assert refused("POST", content_type=kind) is None


@pytest.mark.parametrize(
    ("path", "status"), [("/console/releases/r1", None), ("/console/", None), ("/console", 415), ("/consoles/x", 415), ("/v1/events", 415)]
)
def test_forms_are_taken_by_pages_alone(path: str, status: int | None) -> None:
    for kind in (FORM, f"{FORM.upper()}; charset=utf-8"):
        assert refused("POST", path, content_type=kind, content_length="9") == status
    assert refused("POST", path, content_type="text/plain", content_length="9") == 415


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", "none", ""])
def test_a_browser_that_says_it_comes_from_elsewhere_may_only_follow_a_link(site: str) -> None:
    elsewhere = site in ("cross-site", "same-site")
    said = {"sec_fetch_site": site} if site else {}
    for method in ("GET", "HEAD"):
        assert refused(method, **said, sec_fetch_mode="navigate") is None
        assert refused(method, **said, sec_fetch_mode="no-cors") == (403 if elsewhere else None)
        assert refused(method, **said) == (403 if elsewhere else None)
    assert refused("POST", **said, sec_fetch_mode="navigate") == (403 if elsewhere else None)
    assert refused("POST", **said, origin=PAGE) is None, "who is named may call it from wherever it is"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("ratchet.example.com", "https://ratchet.example.com", None), ("ratchet.example.com", "https://ratchet.example.com:443", None),
        ("ratchet.example.com:443", "https://ratchet.example.com", None), ("Ratchet.Example.com:80", "http://ratchet.example.COM", None),
        ("ratchet.example.com:8400", "http://ratchet.example.com:8400", None),
        ("ratchet.example.com:8400", "http://ratchet.example.com", 403),
        ("ratchet.example.com:8080", "http://ratchet.example.com", 403), ("ratchet.example.com", "ftp://ratchet.example.com", 403),
        ("ratchet.example.com", "http://", 403), ("ratchet.example.com", "null", 403), ("ratchet.example.com", "http://[", 403),
    ],
)  # fmt: skip
def test_a_page_is_the_service_s_own_where_host_and_port_are(host: str, origin: str, status: int | None) -> None:
    assert refused("GET", host=host, origin=origin) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", None), ("localhost.:8400", None), ("localhost:", None), ("127.9.9.9", None), ("[::1]:8400", None), ("::1", 421),
        ("10.0.0.7", 421), ("[2001:db8::1]", 421), ("[::1]x", 421), ("ratchet.example.com.", None), ("ratchet.example.com:x", 421),
    ],
)  # fmt: skip
def test_names_of_this_machine_are_ours_however_they_are_written(host: str, status: int | None) -> None:
    assert refused("GET", host=host) == status


def test_a_service_that_others_reach_answers_to_addresses_and_a_star_to_everything() -> None:
    outside = Barrier(loopback=False)
    assert [refused("GET", "/status", outside, host=host) for host in ("10.0.0.7", "[2001:db8::1]:8400", "x.example")] == [None, None, 421]
    assert refused("GET", "/status", Barrier(hosts=frozenset({"*"})), host="x.example") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_for_all_of_them_is_no_name(host: str) -> None:
    assert reached_as(host) == frozenset()
    assert reached_as("Engine") == {"engine"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
        (429, "rate_limit_error"), (499, "invalid_request_error"), (500, "server_error"),
    ],
)  # fmt: skip
def test_an_error_s_kind_goes_with_its_status(status: int, kind: str) -> None:
    body: dict[str, Any] = {"message": "say", "type": kind, "param": "p", "code": "c"}
    assert json.loads(error_body(status, "say", code="c", param="p")) == {"error": body}
    assert HttpError(status, "say", code="c").headers == {}
    assert HttpError(status, "say", code="c", headers={"Retry-After": "2"}).headers == {"Retry-After": "2"}


def test_headers_are_found_by_their_name_in_small_letters_and_what_is_no_latin_1_harms_nobody() -> None:
    sent = as_headers([("Host", "a"), ("HOST", "é"), ("x-odd", "€")])
    assert [header(sent, name) for name in (b"host", b"x-odd", b"origin")] == ["é", "?", None]
