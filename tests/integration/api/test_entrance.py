"""Signing in to the pages: cookies, the tokens of forms, and what other sites, old sessions and strange addresses get."""

import html
import re
from collections.abc import Mapping
from datetime import timedelta

import pytest
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.access import FORM_COOKIE, SESSION_COOKIE, FormTokens, SignIn, local_path
from app.api.entry.doorkeeper import Doorkeeper, read_form
from app.console.entrance import OIDC_COOKIE, Entrance, Provider
from app.db.access.keys import SqlKeys
from app.domain.access import Scope
from app.domain.errors import Unavailable
from app.domain.people import Action, Role, SignInRefused, Visitor
from app.main import create_app
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import collaborators
from tests.fakes.people import PASSWORD, Town, quick_passwords

FORMS = FormTokens(lambda: ("a secret of this deployment",))
HERE = "https://testserver"


@pytest.fixture
def town(sqlite_engine: Engine) -> Town:
    return Town(sqlite_engine, FrozenClock())


def service(town: Town, provider: Provider | None = None) -> TestClient:
    """Pages that say who is there, and one that acts."""
    keeper = Doorkeeper(FORMS)
    pages = APIRouter(prefix="/console", dependencies=[Depends(keeper)])

    @pages.get("")
    async def page(request: Request) -> HTMLResponse:
        visitor: Visitor = request.state.visitor
        return HTMLResponse(f"{visitor.actor} {visitor.may(Action.APPROVE)} <input name=csrf value={visitor.csrf}>")

    @pages.post("/act")
    async def act(request: Request) -> HTMLResponse:
        return HTMLResponse(f"{request.state.visitor.actor} said {request.state.form}")

    desk = SignIn(town.people, passwords=quick_passwords(), clock=town.clock)
    entrance = Entrance(desk, forms=FORMS, read_form=read_form, keeper=keeper, secure=True, provider=provider)
    keys = SqlKeys(town.engine, clock=town.clock)
    given = collaborators(
        keys=keys, people=town.people, turn_away=entrance.turn_away, clock=town.clock, routers=[entrance.router(), pages],
    )  # fmt: skip
    return TestClient(create_app(given), base_url=HERE, follow_redirects=False, raise_server_exceptions=False)


def csrf_in(page: str) -> str:
    found = re.search(r'name="?csrf"? value="?([0-9a-f]{64})', page)
    assert found is not None, page
    return found[1]


def sign_in(client: TestClient, name: str = "ada", password: str = PASSWORD, **fields: str) -> int:
    token = csrf_in(client.get("/console/login").text)
    return client.post("/console/login", data={"csrf": token, "name": name, "password": password, **fields}).status_code


def test_somebody_signs_in_acts_and_signs_out(town: Town) -> None:
    town.person("ada")
    client = service(town)
    turned = client.get("/console")
    assert (turned.status_code, turned.headers["location"]) == (303, "/console/login?next=%2Fconsole")
    assert sign_in(client, password="wrong") == 401
    assert sign_in(client) == 303
    page = client.get("/console").text
    assert page.startswith("user:ada True")
    done = client.post("/console/act", data={"csrf": csrf_in(page), "reason": "because"})
    assert done.text == "user:ada said {'reason': 'because'}"
    session = client.cookies[SESSION_COOKIE]
    assert client.post("/console/logout", data={"csrf": csrf_in(page)}).status_code == 303
    client.cookies.set(SESSION_COOKIE, session)
    assert client.get("/console").status_code == 303, "the session is over, whoever kept its cookie"


def test_cookies_are_out_of_reach_of_scripts_other_sites_and_plain_http(town: Town) -> None:
    town.person("ada")
    client = service(town)
    answer = client.post("/console/login", data={"csrf": csrf_in(client.get("/console/login").text), "name": "ada", "password": PASSWORD})
    for cookie in answer.headers.get_list("set-cookie"):
        assert {"httponly", "samesite=lax", "secure"} <= {part.strip().lower() for part in cookie.split(";")}, cookie
    assert "no-store" in answer.headers["cache-control"]
    assert FORM_COOKIE not in client.cookies, "the form's is dropped"


def test_a_form_without_its_token_or_with_somebody_elses_does_nothing(town: Town) -> None:
    town.person("ada")
    town.person("eve")
    ada, eve = service(town), service(town)
    sign_in(ada)
    sign_in(eve, "eve")
    theirs = csrf_in(eve.get("/console").text)
    assert ada.post("/console/act").status_code == 400
    for fields in ({"csrf": ""}, {"csrf": theirs}, {"csrf": "0" * 64}, {"csrf": "é"}):
        refused = ada.post("/console/act", data=fields)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf"), fields
    mine = csrf_in(ada.get("/console").text)
    crossed = ada.post("/console/act", data={"csrf": mine}, headers={"origin": "https://evil.example"})
    assert (crossed.status_code, crossed.json()["error"]["code"]) == (403, "origin")
    sign_in(ada)
    assert ada.post("/console/act", data={"csrf": mine}).status_code == 403, "of the session before"


def test_nobody_is_signed_in_to_a_strangers_account(town: Town) -> None:
    """Login CSRF: the attacker has a form and a token of a browser of their own; the victim's browser has another cookie, or none."""
    town.person("eve")
    victim, attacker = service(town), service(town)
    token = csrf_in(attacker.get("/console/login").text)
    body = {"csrf": token, "name": "eve", "password": PASSWORD}
    assert victim.post("/console/login", data=body).status_code == 403
    victim.get("/console/login")
    assert victim.post("/console/login", data=body).status_code == 403
    assert SESSION_COOKIE not in victim.cookies
    assert victim.post("/console/login", data=body, headers={"origin": "https://evil.example"}).status_code == 403


def test_a_session_that_was_planted_before_is_not_the_one_after(town: Town) -> None:
    """Session fixation: signing in makes a fresh session and ends the one that the browser had."""
    town.person("ada")
    town.person("eve")
    attacker, client = service(town), service(town)
    sign_in(attacker, "eve")
    planted = attacker.cookies[SESSION_COOKIE]
    client.cookies.set(SESSION_COOKIE, planted, domain="testserver.local")
    sign_in(client)
    assert client.get("/console").text.startswith("user:ada")
    assert client.cookies[SESSION_COOKIE] != planted
    assert attacker.get("/console").status_code == 303, "it ended"


@pytest.mark.parametrize(
    "asked",
    [
        "//evil.example", "/\\evil.example", "\\\\evil.example", "https://evil.example", "https:evil.example", "/console//evil.example",
        "/consolation", "javascript:alert(1)", "/console/../x//y", "/v1/keys", "/console\t", "\t//evil.example",
        "/console/\r\nset-cookie: a=b", "/console/é", "", None,
    ],
)  # fmt: skip
def test_after_signing_in_nobody_leaves_the_console(asked: str | None) -> None:
    assert local_path(asked) == "/console"


def test_the_way_back_is_kept(town: Town) -> None:
    town.person("ada")
    client = service(town)
    assert local_path("/console/releases/r1?policy=tab") == "/console/releases/r1?policy=tab"
    token = csrf_in(client.get("/console/login").text)
    for next_, to in (("/console/releases/r1", "/console/releases/r1"), ("//evil.example", "/console")):
        answer = client.post("/console/login", data={"csrf": token, "name": "ada", "password": PASSWORD, "next": next_})
        assert answer.headers["location"] == to
        token = csrf_in(client.get("/console/login").text)


def test_what_was_filled_in_when_the_session_ended_comes_back(town: Town) -> None:
    ada = town.person("ada")
    client = service(town)
    sign_in(client)
    stale = csrf_in(client.get("/console").text)
    town.people.leave(client.cookies[SESSION_COOKIE])
    turned = client.post("/console/act", data={"csrf": stale, "reason": '<b>"because"</b>', "evidence": "e1"})
    assert turned.status_code == 401
    assert "<b>" not in turned.text
    held = re.search(r'name="held" value="([^"]*)"', turned.text)
    assert held is not None
    fields = {"csrf": csrf_in(turned.text), "name": ada.name, "password": PASSWORD, "next": "/console/act", "held": html.unescape(held[1])}
    back = client.post("/console/login", data=fields)
    assert back.status_code == 200
    assert 'action="/console/act"' in back.text
    assert "&lt;b&gt;" in back.text
    sent = client.post("/console/act", data={"csrf": csrf_in(back.text), "reason": "because", "evidence": "e1"})
    assert sent.text == "user:ada said {'reason': 'because', 'evidence': 'e1'}"


def test_a_link_welcomes_somebody_once(town: Town) -> None:
    town.people.add("ada", roles=[Role.ADMIN], by="user:root")
    link = town.people.invite("ada", lasts=timedelta(minutes=15), by="user:root")
    client = service(town)
    page = client.get("/console/welcome", params={"link": link})
    assert "Welcome, ada" in page.text
    assert page.headers["referrer-policy"] == "same-origin", "the link goes nowhere"
    fields = {"csrf": csrf_in(page.text), "link": link, "password": PASSWORD}
    assert "not the same" in client.post("/console/welcome", data={**fields, "again": "x"}).text
    assert client.post("/console/welcome", data={**fields, "again": PASSWORD, "csrf": "0" * 64}).status_code == 403
    assert client.post("/console/welcome", data={**fields, "again": PASSWORD}).status_code == 303
    assert client.get("/console").text.startswith("user:ada")
    again = service(town).get("/console/welcome", params={"link": link})
    assert (again.status_code, "used already" in again.text) == (400, True)


def test_a_role_taken_away_counts_at_the_next_request(town: Town) -> None:
    town.person("root", Role.ADMIN)
    town.person("ada")
    client = service(town)
    sign_in(client)
    town.people.change("ada", by="user:root", roles=[Role.VIEWER])
    assert client.get("/console").text.startswith("user:ada False")
    town.people.change("ada", by="user:root", disabled=True)
    assert client.get("/console").status_code == 303


def test_streams_and_parts_of_pages_are_told_instead_of_sent_elsewhere(town: Town) -> None:
    town.person("ada")
    client = service(town)
    for headers in ({"accept": "text/event-stream"}, {"hx-request": "true", "accept": "text/html"}):
        assert client.get("/console", headers=headers).status_code == 401


def test_a_programs_key_still_opens_the_pages_and_forms_are_checked_there_too(town: Town) -> None:
    _, text = SqlKeys(town.engine, clock=town.clock).create(name="screen", scopes=[Scope.READ])
    client = service(town)
    page = client.get("/console", auth=("x", text))
    assert page.text.startswith("service:screen False")
    assert client.post("/console/act", data={"a": "b"}, auth=("x", text)).status_code == 403
    assert client.post("/console/act", data={"a": "b", "csrf": csrf_in(page.text)}, auth=("x", text)).status_code == 200


def test_an_open_deployment_needs_no_signing_in_until_somebody_is_added(town: Town) -> None:
    client = service(town)
    page = client.get("/console")
    assert page.text.startswith("anonymous True")
    assert client.post("/console/act", data={"a": "b"}).status_code == 403
    assert client.post("/console/act", data={"a": "b", "csrf": csrf_in(page.text)}).status_code == 200
    town.people.add("ada", roles=[Role.ADMIN], by="user:root")
    assert service(town).get("/console").status_code == 303


def test_only_forms_of_the_pages_are_taken(town: Town) -> None:
    client = service(town)
    for path, kind in (
        ("/v1/events", "application/x-www-form-urlencoded"),
        ("/console/act", "text/plain"),
        ("/console/login", "multipart/form-data; boundary=x"),
    ):
        assert client.post(path, content="a=b", headers={"content-type": kind}).status_code == 415
    big = client.post("/console/login", data={"name": "x" * 70_000})
    assert big.status_code == 413


def test_the_form_cookie_is_not_a_session(town: Town) -> None:
    town.person("ada")
    client = service(town)
    client.get("/console/login")
    client.cookies.set(SESSION_COOKIE, client.cookies[FORM_COOKIE])
    assert client.get("/console").status_code == 303


def test_a_form_that_cannot_be_filled_in_again_is_refused_in_words(town: Town) -> None:
    client = service(town)
    csrf = csrf_in(client.get("/console/login").text)
    broken = client.post("/console/login", data={"csrf": csrf, "held": "{", "name": "ada", "password": PASSWORD})
    assert (broken.status_code, "the form cannot be read" in broken.text) == (400, True)


def test_a_link_that_is_none_leads_to_the_entrance_and_a_password_typed_differently_is_asked_for_again(town: Town) -> None:
    town.people.add("ada", roles=[Role.VIEWER], by="user:root")
    link = town.people.invite("ada", lasts=timedelta(days=1), by="user:root")
    client = service(town)
    stranger = client.get("/console/welcome", params={"link": "none"})
    assert (stranger.status_code, "/console/welcome" in stranger.text) == (400, False)
    csrf = csrf_in(client.get("/console/welcome", params={"link": link}).text)
    form = {"csrf": csrf, "link": link, "password": PASSWORD, "again": PASSWORD}
    assert "type it twice" in client.post("/console/welcome", data=form | {"again": "other"}).text
    assert client.post("/console/welcome", data=form | {"csrf": "0" * 64}).status_code == 403
    short = client.post("/console/welcome", data=form | {"password": "x", "again": "x"})
    assert (short.status_code, csrf_in(short.text)) == (400, csrf), "the form is there again, to be filled in better"
    assert client.post("/console/welcome", data=form).headers["location"] == "/console"


class Accounts:
    """A provider that lets in whoever comes back as `ada`, from where it sent them."""

    name = "Accounts of the house"

    def __init__(self, town: Town) -> None:
        self.town, self.seen = town, list[object]()
        self.down = False

    def begin(self, next_: str) -> tuple[str, str]:
        return f"https://accounts.example/authorize?next={next_}", f"kept:{next_}"

    def finish(self, kept: str | None, answer: Mapping[str, str], *, instead_of: str | None = None) -> tuple[str, str]:
        self.seen.append((kept, answer.get("code"), instead_of))
        if self.down:
            raise Unavailable("Accounts of the house does not answer as a provider: sign in with a password, or try again")
        if kept is None or answer.get("code") != "ada":
            raise SignInRefused("this sign-in did not begin in this browser: begin again")
        return self.town.people.enter(self.town.people.find("ada"), how="oidc"), kept.removeprefix("kept:")


def test_somebody_comes_in_by_a_provider_back_to_where_they_were_going(town: Town) -> None:
    town.person("ada")
    accounts = Accounts(town)
    client = service(town, accounts)
    assert "Accounts of the house" in client.get("/console/login").text
    begun = client.get("/console/oidc/start", params={"next": "/console/releases?page=2"})
    assert begun.headers["location"] == "https://accounts.example/authorize?next=/console/releases?page=2"
    cookie = begun.headers["set-cookie"].lower()
    assert all(said in cookie for said in ("path=/console/oidc", "httponly", "secure", "samesite=lax", "max-age=600")), cookie
    back = client.get("/console/oidc", params={"code": "ada"})
    assert (back.status_code, back.headers["location"]) == (303, "/console/releases?page=2")
    assert OIDC_COOKIE not in client.cookies, "what was kept for the way is used once"
    assert client.get("/console").text.startswith("user:ada")


def test_whom_a_provider_does_not_vouch_for_stands_at_the_entrance_and_is_told_why(town: Town) -> None:
    town.person("ada")
    accounts = Accounts(town)
    client = service(town, accounts)
    strange = client.get("/console/oidc", params={"code": "ada"})
    assert (strange.status_code, "did not begin in this browser" in strange.text) == (401, True)
    client.get("/console/oidc/start", params={"next": "https://evil.example/"})
    accounts.down = True
    away = client.get("/console/oidc", params={"code": "ada"})
    assert (away.status_code, "sign in with a password" in away.text) == (401, True)
    assert accounts.seen == [(None, "ada", None), ("kept:/console", "ada", None)], "nobody is sent on to another site"
    assert SESSION_COOKIE not in client.cookies
    assert service(town).get("/console/oidc/start").status_code == 404, "without a provider there is no such way"
