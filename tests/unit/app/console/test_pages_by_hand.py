"""The pages over a sight that says what it is told to: whose policy is shown, what is a file, where an act leads, and what goes wrong."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qsl

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.testclient import TestClient

from app.console.pages import Pages, static
from app.console.rendering import HEADERS
from app.domain.errors import BadRequest, DoneAlready, NotFound, OwnFault, RatchetError, Refused, Unavailable
from app.domain.people import Role, Visitor, actions_of
from app.domain.release.releases import AuditEntry, Pointer
from app.domain.views.pages import Moved, Page
from tests.fakes.sights import Canned, canned

AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
POINTER = Pointer(policy="tab", digest="v1", generation=3, previous=None, anchor="v1", holdback=0.0, release_id=None, changed_at=AT)
MOVE = Moved(
    generation=3,
    digest="v1",
    previous=None,
    anchor="v1",
    action="bootstrap",
    actor="user:ada",
    reason="=1",
    occurred_at=AT,
    release_id=None,
)
ENTRY = AuditEntry(
    seq=1, occurred_at=AT, actor="user:ä", action="x", subject="r1", detail={"a": 1}, previous_hash="", hash="h"
)  # fmt: skip


class Desk:
    """Does what it is told, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def on(self, _basis: object) -> "Desk":
        return self

    def unfreeze(self, _policy: str, *, actor: str) -> bool:
        if self.error is not None:
            raise self.error
        return actor != ""


def browser(
    *roles: Role, of: str | None = None, sight: Canned | None = None, error: Exception | None = None, shared: Canned | None = None,
    **answers: Any,
) -> TestClient:  # fmt: skip
    """Somebody who looks; `shared` is what a pulse has read already."""
    told: dict[str, Any] = {
        "policies": ["composer", "tab"], "pointer": POINTER, "head": (9, "hash"), "names": {"v1": "tab-v1"},
        "history": Page(rows=(MOVE,)), "release": None,
    }  # fmt: skip
    own = sight or Canned(**told | answers)
    visitor = Visitor(actor="user:ada", actions=actions_of(roles or (Role.ADMIN,)), policy=of, csrf="token")
    live = canned(steady=lambda sight: shared or sight)
    pages = Pages(
        cast("Any", own), desk=cast("Any", Desk(error)), jury=canned(), readings=canned(), live=live, visitor_of=lambda _request: visitor
    )
    app, guarded = FastAPI(), APIRouter(dependencies=[Depends(_form)])
    guarded.include_router(pages.router())
    app.include_router(static())
    app.include_router(guarded)
    return TestClient(app, follow_redirects=False)


async def _form(request: Request) -> None:
    request.state.form = dict(parse_qsl((await request.body()).decode(), keep_blank_values=True))


def shown(answer: Any) -> str:
    return str(answer.text.split("<main")[1].split("</main>")[0])


@pytest.mark.parametrize(
    ("of", "query", "policy"), [(None, "", "composer"), (None, "?policy=tab", "tab"), ("tab", "", "tab"), ("tab", "?policy=tab", "tab")]
)
def test_the_policy_that_is_asked_for_is_shown_or_the_first_one_of_theirs(of: str | None, query: str, policy: str) -> None:
    sight = Canned(
        policies=["composer", "tab"], pointer=POINTER, head=(9, "h"), names={}, history=Page(rows=(MOVE,)), release=None
    )  # fmt: skip
    page = browser(of=of, sight=sight).get(f"/console/history{query}")
    assert page.status_code == 200
    assert {words[0] for name, words, _ in sight.heard if name in ("history", "pointer")} == {policy}
    assert {name: page.headers[name] for name in HEADERS} == HEADERS


def test_a_policy_of_somebody_else_is_none_and_without_any_one_is_welcome() -> None:
    missing = browser(of="tab").get("/console/history?policy=composer")
    assert missing.status_code == 404
    assert "there is no policy composer" in missing.text
    for answer in (browser(policies=[]).get("/console"), browser(of="other").get("/console/history")):
        assert answer.status_code == 200
        assert "<title>Welcome" in answer.text


@pytest.mark.parametrize(
    ("roles", "of", "opens"),
    [
        ((Role.ADMIN,), None, {"Inbox", "Candidates", "Versions", "Rewards", "Data", "Trust", "Access", "Audit"}),
        ((Role.ADMIN,), "tab", {"Inbox", "Candidates", "Versions", "Rewards", "Trust", "Audit"}),
        ((Role.OPERATOR,), None, {"Inbox", "Candidates", "Versions", "Rewards", "Data", "Trust", "Audit"}),
        ((Role.VIEWER,), None, {"Inbox", "Candidates", "Versions", "Rewards", "Data", "Trust"}),
    ],
)  # fmt: skip
def test_the_way_leads_to_those_pages_alone_that_open(roles: tuple[Role, ...], of: str | None, opens: set[str]) -> None:
    page = browser(*roles, of=of).get("/console/history?policy=tab").text
    way = page.split("<nav")[1].split("</nav>")[0]
    every = {"Inbox", "Candidates", "Versions", "Rewards", "Data", "Trust", "Access", "Audit"}
    assert {name for name in every if f">{name}" in way} == opens


@pytest.mark.parametrize(
    ("kind", "media", "ending", "begins"),
    [
        ("csv", "text/csv; charset=utf-8", "csv", "\ufeffgeneration,"),
        ("json", "application/json", "json", "[{"),
        ("x", "application/json", "json", "[{"),
    ],
)
def test_a_table_is_a_file_of_its_name(kind: str, media: str, ending: str, begins: str) -> None:
    file = browser().get(f"/console/history?sheet=live&as={kind}")
    assert (file.status_code, file.headers["content-type"]) == (200, media)
    assert file.headers["content-disposition"] == f'attachment; filename="live.{ending}"'
    assert file.text.startswith(begins)
    assert file.headers["cache-control"] == "no-store"
    missing = browser().get(f"/console/history?sheet=dead&as={kind}")
    assert missing.status_code == 404
    assert "it has live" in missing.text


@pytest.mark.parametrize(("done", "told"), [("", "Done. What is shown"), ("unfreeze", "Done. What is shown"), ("again", "Done already:")])
def test_what_came_of_an_act_is_told_on_the_page_it_leads_to(done: str, told: str) -> None:
    assert told in browser().get(f"/console/history?done={done}").text
    assert "Done" not in shown(browser().get("/console/history"))


@pytest.mark.parametrize(
    ("error", "status", "title"),
    [
        (NotFound("no such thing"), 404, "Not there"), (Refused("it is frozen"), 409, "Refused"),
        (Unavailable("it is away"), 503, "The database does not answer"), (BadRequest("what a word"), 400, "That makes no sense"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_a_page_with_the_sentence_that_says_what_to_do(error: RatchetError, status: int, title: str) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise error

    answer = browser(history=broken).get("/console/history")
    assert answer.status_code == status
    assert f"<title>{title}" in answer.text
    assert str(error) in answer.text


def test_what_is_no_page_s_fault_is_none_of_theirs() -> None:
    def broken(*_: object, **__: object) -> Any:
        raise OwnFault("a bug of ours")

    with pytest.raises(OwnFault):
        browser(history=broken).get("/console/history")


def test_a_page_that_fetches_itself_reads_what_others_read_and_one_that_is_opened_reads_anew() -> None:
    told: dict[str, Any] = {
        "policies": ["tab"],
        "pointer": POINTER,
        "head": (9, "h"),
        "names": {},
        "history": Page(rows=()),
        "release": None,
    }
    own, shared = Canned(**told), Canned(**told)
    client = browser(sight=own, shared=shared)
    client.get("/console/history", headers={"hx-request": "true"})
    assert (own.heard, len(shared.heard) > 0) == ([], True)
    heard = len(shared.heard)
    client.get("/console/history")
    assert (len(own.heard) > 0, len(shared.heard)) == (True, heard)


UNFREEZE = {"policy": "tab", "reason": "so", "generation": "3", "request_id": "q1"}


@pytest.mark.parametrize(
    ("error", "status", "leads"),
    [
        (None, 303, "/console?policy=tab&done=unfreeze"),
        (DoneAlready("it was"), 303, "/console?policy=tab&done=again"),
        (Refused("frozen"), 409, None),
    ],
)
def test_an_act_leads_on_and_one_that_is_refused_asks_again_with_what_was_typed(
    error: Exception | None, status: int, leads: str | None
) -> None:
    answer = browser(error=error).post("/console/act/unfreeze/tab", data=UNFREEZE | {"reason": "because I looked"})
    assert (answer.status_code, answer.headers.get("location")) == (status, leads)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    if leads is None:
        assert "frozen" in answer.text
        assert "because I looked" in answer.text


@pytest.mark.parametrize("path", ["/console/nowhere", "/console/do/add_person/new", "/console/act/promote/tab"])
def test_what_is_not_there_is_a_page_that_says_so(path: str) -> None:
    answer = browser().get(path)
    assert answer.status_code == 404
    assert "<title>Not there" in answer.text


def test_a_slash_too_many_leads_home_and_a_word_to_what_it_names() -> None:
    slash = browser().get("/console/")
    assert (slash.status_code, slash.headers["location"]) == (307, "/console")
    found = browser(find="/releases/r1").get("/console/find?policy=tab&q=v2")
    assert (found.status_code, found.headers["location"]) == (303, "/console/releases/r1?policy=tab")
    for query in ("&q=v9", ""):
        missing = browser(find=None).get(f"/console/find?policy=tab{query}")
        assert missing.status_code == 404
        assert "type a name, or the beginning of a digest or id" in missing.text


def test_the_whole_chain_is_a_file_for_who_reads_every_policy() -> None:
    file = browser(Role.AUDITOR, audit_entries=[ENTRY, replace(ENTRY, seq=2)]).get("/console/audit.jsonl")
    assert (file.status_code, file.headers["content-type"]) == (200, "application/x-ndjson")
    assert file.headers["content-disposition"] == 'attachment; filename="ratchet-audit.jsonl"'
    one, two = file.text.splitlines()
    assert json.loads(one) == {**vars(ENTRY), "occurred_at": "2026-11-24T06:00:00+00:00"}
    assert '"user:ä"' in one
    assert json.loads(two)["seq"] == 2
    for client in (browser(Role.VIEWER), browser(Role.ADMIN, of="tab")):
        assert client.get("/console/audit.jsonl").status_code == 404


def test_a_release_brings_its_own_policy_along() -> None:
    release = SimpleNamespace(id="r1", policy="tab", version_name="tab-v2")
    asked = browser(release=lambda id_: release if id_ == "r1" else None)
    assert asked.get("/console/act/approve/r9").status_code == 404
    assert "no release r9 of policy composer" in asked.get("/console/act/approve/r9").text
    assert "no release r1 of policy tab" in browser(release=lambda id_: replace_policy(release), pointer=POINTER).get(
        "/console/act/approve/r1?policy=tab"
    ).text  # fmt: skip


def replace_policy(release: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(release), "policy": "composer"})


@pytest.mark.parametrize(
    ("name", "status", "media"),
    [
        ("console.css", 200, "text/css; charset=utf-8"), ("console.js", 200, "text/javascript; charset=utf-8"),
        ("vendor/htmx.min.js", 200, "text/javascript; charset=utf-8"), ("../pages.py", 404, None), ("vendor/htmx.LICENSE.txt", 404, None),
    ],
)  # fmt: skip
def test_files_of_the_pages_are_checked_for_a_newer_one_each_time_and_no_other_file_is_given(
    name: str, status: int, media: str | None
) -> None:
    file = browser().get(f"/console/static/{name}")
    assert file.status_code == status
    assert media is None or (file.headers["content-type"], file.headers["cache-control"]) == (media, "no-cache")
    assert file.headers.get("x-content-type-options", "nosniff") == "nosniff"
