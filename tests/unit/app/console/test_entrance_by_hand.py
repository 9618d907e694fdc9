"""The entrance over a desk that does as it is told: every answer's status, cookies and way on."""

from collections.abc import Mapping
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qsl

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from app.access import FORM_COOKIE, SESSION_COOKIE, FormTokens
from app.console.entrance import OIDC_COOKIE, Entrance
from app.console.rendering import HEADERS
from app.domain.errors import BadRequest, NotFound, Overloaded, Unavailable
from app.domain.people import NotSignedIn, Person, SignInRefused
from tests.fakes.clock import FrozenClock

FORMS = FormTokens(lambda: ("a secret of this deployment",))
PERSON = Person(id="p1", name="eve", roles=frozenset(), policy=None, created_at=FrozenClock()(), made_by="user:root")


class Desk:
    """Lets everybody in but where `error` says why not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    def _heard(self, *words: Any) -> None:
        self.asked.append(words)
        if self.error is not None:
            raise self.error

    def with_password(self, name: str, password: str, *, instead_of: str | None = None) -> str:
        self._heard("password", name, password, instead_of)
        return "s1"

    def invited(self, link: str) -> Person:
        if link == "gone":
            raise NotFound("this link was used, or is too old")
        return PERSON

    def accept(self, link: str, password: str, *, instead_of: str | None = None) -> str:
        self._heard("accept", link, password, instead_of)
        return "s2"

    def leave(self, session: str) -> None:
        self._heard("leave", session)


class Provider:
    """An account elsewhere."""

    name = "Somewhere"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    def begin(self, next_: str) -> tuple[str, str]:
        self.asked.append(("begin", next_))
        return "https://idp.example/authorize", "kept"

    def finish(self, kept: str | None, answer: Mapping[str, str], *, instead_of: str | None = None) -> tuple[str, str]:
        self.asked.append(("finish", kept, dict(answer), instead_of))
        if self.error is not None:
            raise self.error
        return "s3", "/console/trust"


async def read_form(request: Request) -> dict[str, str]:
    return dict(parse_qsl((await request.body()).decode(), keep_blank_values=True))


def door(desk: Desk, *, provider: Provider | None = None, secure: bool = True, inside: bool = True) -> TestClient:
    """The entrance, and a page behind it that nobody who is not `inside` gets to."""

    async def keeper(request: Request) -> None:
        request.state.form = await read_form(request)
        if not inside:
            raise NotSignedIn("sign in first")

    entrance = Entrance(desk, forms=FORMS, read_form=read_form, keeper=keeper, secure=secure, provider=provider)
    app = FastAPI()
    app.include_router(entrance.router())

    @app.api_route("/console/data", methods=["GET", "POST", "HEAD"])
    async def data(request: Request) -> None:
        await keeper(request)

    app.add_exception_handler(NotSignedIn, entrance.turn_away)
    return TestClient(app, base_url="https://testserver", follow_redirects=False)


def cookies(answer: Any) -> dict[str, dict[str, str]]:
    """What an answer says of each cookie, without its dates."""
    found: dict[str, dict[str, str]] = {}
    for line in answer.headers.get_list("set-cookie"):
        for name, morsel in SimpleCookie(line).items():
            found[name] = {key: str(value) for key, value in morsel.items() if value and key not in ("expires",)} | {"value": morsel.value}
    return found


def sent(client: TestClient, path: str, **form: str) -> Any:
    """A form of ours, sent back."""
    client.cookies.set(FORM_COOKIE, "c")
    return client.post(path, data={"csrf": FORMS.of("form c"), **form})


SAFE = {"path": "/", "httponly": "True", "samesite": "lax"}


@pytest.mark.parametrize("secure", [True, False])
def test_a_session_lasts_as_long_as_it_may_is_no_script_s_and_takes_the_form_s_cookie_away(*, secure: bool) -> None:
    more = {"secure": "True"} if secure else {}
    entered = sent(door(Desk(), secure=secure), "/console/login", name="eve", password="p", next="/console/trust")
    assert (entered.status_code, entered.headers["location"]) == (303, "/console/trust")
    assert cookies(entered) == {
        SESSION_COOKIE: {**SAFE, **more, "max-age": str(12 * 3600), "value": "s1"},
        FORM_COOKIE: {**SAFE, **more, "max-age": "0", "value": ""},
    }  # fmt: skip
    page = door(Desk(), secure=secure).get("/console/login")
    assert page.status_code == 200
    assert cookies(page)[FORM_COOKIE].keys() - {"value"} == {*SAFE, *more}
    left = sent(door(Desk(), secure=secure), "/console/logout")
    assert (left.status_code, left.headers["location"], left.headers["cache-control"]) == (303, "/console/login", "no-store")
    assert cookies(left) == {SESSION_COOKIE: {**SAFE, **more, "max-age": "0", "value": ""}}


def test_a_name_and_a_password_reach_the_desk_with_the_session_that_was_there() -> None:
    desk = Desk()
    client = door(desk)
    client.cookies.set(SESSION_COOKIE, "old")
    sent(client, "/console/login", name="eve", password=" p ")
    sent(client, "/console/welcome", link="l", password="new", again="new")
    assert desk.asked == [("password", "eve", " p ", "old"), ("accept", "l", "new", "s1")]


@pytest.mark.parametrize(
    ("error", "status"), [(SignInRefused("name or password is wrong"), 401), (Overloaded("too many try", retry_after_s=1.0), 429)]
)
def test_who_is_not_let_in_reads_why_beside_the_name_that_was_typed(error: Exception, status: int) -> None:
    refused = sent(door(Desk(error)), "/console/login", name="eve", password="p")
    assert refused.status_code == status
    assert str(error) in refused.text
    assert 'value="eve"' in refused.text
    assert SESSION_COOKIE not in cookies(refused)


@pytest.mark.parametrize("path", ["/console/login", "/console/welcome"])
@pytest.mark.parametrize(("cookie", "token"), [(None, "form c"), ("c", "form d"), ("c", "")])
def test_a_form_of_another_browser_is_shown_afresh_and_nothing_is_asked(path: str, cookie: str | None, token: str) -> None:
    desk = Desk()
    client = door(desk)
    if cookie is not None:
        client.cookies.set(FORM_COOKIE, cookie)
    stale = client.post(path, data={"csrf": FORMS.of(token) if token else "", "name": "eve", "password": "p", "again": "p", "link": "l"})
    assert (stale.status_code, desk.asked) == (403, [])
    assert "here is a fresh one" in stale.text


def test_who_leaves_without_a_session_leaves_all_the_same() -> None:
    desk = Desk()
    assert sent(door(desk), "/console/logout").status_code == 303
    client = door(desk)
    client.cookies.set(SESSION_COOKIE, "mine")
    sent(client, "/console/logout")
    assert desk.asked == [("leave", "mine")]


@pytest.mark.parametrize(
    ("link", "again", "error", "status", "told"),
    [
        ("l", "q", None, 400, "the two passwords are not the same"), ("l", "p", BadRequest("it is too short"), 400, "it is too short"),
        ("l", "p", SignInRefused("this link was used"), 400, "this link was used"), ("gone", "q", None, 400, "is too old"),
        ("l", "p", None, 303, ""),
    ],
)  # fmt: skip
def test_a_password_is_set_with_a_link_that_is_good_and_typed_twice(
    link: str, again: str, error: Exception | None, status: int, told: str
) -> None:
    answer = sent(door(Desk(error)), "/console/welcome", link=link, password="p", again=again)
    assert answer.status_code == status
    assert told in answer.text
    if status == 303:
        assert (answer.headers["location"], cookies(answer)[SESSION_COOKIE]["value"]) == ("/console", "s2")


@pytest.mark.parametrize(("link", "status"), [("l", 200), ("gone", 400)])
def test_a_link_opens_the_page_for_its_person(link: str, status: int) -> None:
    page = door(Desk()).get(f"/console/welcome?link={link}")
    assert page.status_code == status
    assert ("eve" in page.text) is (status == 200)


@pytest.mark.parametrize("secure", [True, False])
def test_an_account_elsewhere_is_asked_within_ten_minutes_and_brings_one_in(*, secure: bool) -> None:
    provider, more = Provider(), {"secure": "True"} if secure else {}
    client = door(Desk(), provider=provider, secure=secure)
    begun = client.get("/console/oidc/start?next=/console/data")
    assert (begun.status_code, begun.headers["location"]) == (303, "https://idp.example/authorize")
    assert cookies(begun) == {OIDC_COOKIE: {**SAFE, **more, "path": "/console/oidc", "max-age": "600", "value": "kept"}}
    client.cookies.set(OIDC_COOKIE, "kept")
    client.cookies.set(SESSION_COOKIE, "old")
    back = client.get("/console/oidc?code=x&state=y")
    assert (back.status_code, back.headers["location"]) == (303, "/console/trust")
    assert cookies(back)[SESSION_COOKIE]["value"] == "s3"
    assert cookies(back)[OIDC_COOKIE] == {**SAFE, **more, "path": "/console/oidc", "max-age": "0", "value": ""}
    assert provider.asked == [("begin", "/console/data"), ("finish", "kept", {"code": "x", "state": "y"}, "old")]
    assert "Somewhere" in client.get("/console/login").text
    assert door(Desk()).get("/console/oidc/start").status_code == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SignInRefused("nobody here has it"), 401),
        (Unavailable("it does not answer"), 401),
        (Overloaded("too many", retry_after_s=1.0), 429),
    ],
)
def test_whom_the_account_elsewhere_does_not_bring_in_reads_why(error: Exception, status: int) -> None:
    refused = door(Desk(), provider=Provider(error)).get("/console/oidc")
    assert refused.status_code == status
    assert str(error) in refused.text


@pytest.mark.parametrize(
    ("headers", "status", "to"),
    [
        ({}, 303, "/console/login?next=%2Fconsole%2Fdata%3Fa%3D1"), ({"hx-request": "true"}, 401, None),
        ({"accept": "text/event-stream"}, 401, None), ({"accept": "text/html"}, 303, "/console/login?next=%2Fconsole%2Fdata%3Fa%3D1"),
    ],
)  # fmt: skip
def test_who_is_not_signed_in_is_led_to_the_entrance_and_a_program_is_told(headers: dict[str, str], status: int, to: str | None) -> None:
    client = door(Desk(), inside=False)
    for method in ("GET", "HEAD"):
        turned = client.request(method, "/console/data?a=1", headers=headers)
        assert (turned.status_code, turned.headers.get("location")) == (status, to)
        assert {name: turned.headers[name] for name in HEADERS} == HEADERS
    assert client.get("/console/data").headers.get("location") == "/console/login?next=%2Fconsole%2Fdata"


def test_what_was_being_filled_in_comes_back_behind_the_door_with_another_token() -> None:
    client = door(Desk(), inside=False)
    turned = client.post("/console/data?x=1", data={"csrf": "old", "reason": "because <b>"})
    assert turned.status_code == 401
    assert "your session has ended" in turned.text
    assert "{&#34;reason&#34;:&#34;because &lt;b&gt;&#34;}" in turned.text, "with everything but the token of the session that ended"
    held = '{"reason":"because <b>"}'
    back = sent(door(Desk()), "/console/login", name="eve", password="p", next="/console/data", held=held)
    assert back.status_code == 200
    assert "because &lt;b&gt;" in back.text
    assert FORMS.of("session s1") in back.text
    assert cookies(back)[SESSION_COOKIE]["value"] == "s1"


@pytest.mark.parametrize("held", ["[1]", "x", '{"a": 1}'])
def test_a_form_that_was_not_held_by_us_is_refused(held: str) -> None:
    with pytest.raises(BadRequest, match="the form cannot be read"):
        sent(door(Desk()), "/console/login", name="eve", password="p", held=held)
