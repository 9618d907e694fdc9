"""The entrance: signing in and out, the link with which somebody sets a password, and what was being filled in when a session ended.

Every page here works before anybody is signed in, so each form carries a token that fits a cookie of the page it is on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import quote

import jinja2
import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.access import FORM_COOKIE, SESSION_COOKIE, FormTokens, Porch, local_path
from app.console.rendering import HEADERS
from app.domain.errors import BadRequest, Overloaded, RatchetError, Unavailable
from app.domain.people import SESSION_LASTS, Person, SignInRefused

OIDC_COOKIE, OIDC_PATH = "ratchet_oidc", "/console/oidc"
HERE = Path(__file__).parent
STALE = "this form is not from this browser, or too old: here is a fresh one"
Form = dict[str, str]
ReadForm = Callable[[Request], Awaitable[Form]]


class SignInDesk(Protocol):
    """Checks passwords and links."""

    def with_password(self, name: str, password: str, *, instead_of: str | None = None) -> str: ...
    def invited(self, link: str) -> Person: ...
    def accept(self, link: str, password: str, *, instead_of: str | None = None) -> str: ...
    def leave(self, session: str) -> None: ...


class Provider(Protocol):
    """Where people have accounts."""

    @property
    def name(self) -> str: ...
    def begin(self, next_: str) -> tuple[str, str]: ...
    def finish(self, kept: str | None, answer: Mapping[str, str], *, instead_of: str | None = None) -> tuple[str, str]: ...


class Entrance:
    """The pages of signing in. `secure`: whether browsers reach the service by https alone."""

    def __init__(
        self, desk: SignInDesk, *, forms: FormTokens, read_form: ReadForm, keeper: Callable[..., Any], secure: bool,
        provider: Provider | None = None,
    ) -> None:  # fmt: skip
        self._desk = desk
        self._porch, self._bridge = Porch(), Porch()
        """Before our own door, and where a provider is asked, who may be slow."""
        self._provider = provider
        self._forms = forms
        self._read_form = read_form
        self._keeper = keeper
        self._secure = secure
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self._pages = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)

    async def turn_away(self, request: Request, _error: Exception) -> Response:
        """Who is not signed in: to the entrance, and with a form that was being sent, to fill it in again afterwards."""
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if request.method not in ("GET", "HEAD"):
            held = {name: value for name, value in request.state.form.items() if name != "csrf"}
            why = "your session has ended: sign in, and what you filled in comes back"
            return self._login(request, next_=request.url.path, held=held, why=why, status=401)
        if "text/event-stream" in request.headers.get("accept", "") or "hx-request" in request.headers:
            return Response("sign in first: /console/login", 401, media_type="text/plain", headers=HEADERS)
        return RedirectResponse(f"/console/login?next={quote(local_path(here), safe='')}", 303, headers=HEADERS)

    def router(self) -> APIRouter:
        """The endpoints."""
        made = APIRouter(prefix="/console", include_in_schema=False)

        @made.get("/login")
        async def login(request: Request) -> Response:
            return self._login(request, next_=request.query_params.get("next"))

        @made.post("/login")
        async def sign_in(request: Request) -> Response:
            form = await self._read_form(request)
            next_, held = local_path(form.get("next")), _held(form.get("held"))
            if not self._is_ours(request, form):
                return self._login(request, next_=next_, held=held, why=STALE, status=403)
            before = request.cookies.get(SESSION_COOKIE)
            try:
                name, password = form.get("name", ""), form.get("password", "")
                session = await self._porch.take(lambda: self._desk.with_password(name, password, instead_of=before))
            except (SignInRefused, Overloaded) as error:
                status = 401 if isinstance(error, SignInRefused) else 429
                return self._login(request, next_=next_, held=held, why=str(error), name=form.get("name", ""), status=status)
            return self._entered(session, next_=next_, held=held)

        @made.post("/logout")
        async def sign_out(request: Request, _visitor: Annotated[object, Depends(self._keeper)]) -> Response:
            if (session := request.cookies.get(SESSION_COOKIE)) is not None:
                await asyncio.to_thread(self._desk.leave, session)
            answer = RedirectResponse("/console/login", 303, headers=HEADERS)
            answer.delete_cookie(SESSION_COOKIE, httponly=True, samesite="lax", secure=self._secure)
            return answer

        self._links(made)
        if self._provider is not None:
            self._oidc(made, self._provider)
        return made

    def _links(self, made: APIRouter) -> None:
        @made.get("/welcome")
        async def welcome(request: Request, link: str = "") -> Response:
            return await self._welcome(request, link)

        @made.post("/welcome")
        async def set_password(request: Request) -> Response:
            form = await self._read_form(request)
            link, password = form.get("link", ""), form.get("password", "")
            if not self._is_ours(request, form):
                return await self._welcome(request, link, why=STALE, status=403)
            if password != form.get("again", ""):
                return await self._welcome(request, link, why="the two passwords are not the same: type it twice", status=400)
            try:
                before = request.cookies.get(SESSION_COOKIE)
                session = await self._porch.take(lambda: self._desk.accept(link, password, instead_of=before))
            except (SignInRefused, BadRequest) as error:
                return await self._welcome(request, link, why=str(error), status=400)
            return self._entered(session, next_=local_path(None))

    def _oidc(self, made: APIRouter, provider: Provider) -> None:
        @made.get("/oidc/start")
        async def start(request: Request) -> Response:
            next_ = local_path(request.query_params.get("next"))
            url, kept = await self._bridge.take(lambda: provider.begin(next_))
            answer = RedirectResponse(url, 303, headers=HEADERS)
            answer.set_cookie(OIDC_COOKIE, kept, max_age=600, httponly=True, samesite="lax", secure=self._secure, path=OIDC_PATH)
            return answer

        @made.get("/oidc")
        async def back(request: Request) -> Response:
            kept, before = request.cookies.get(OIDC_COOKIE), request.cookies.get(SESSION_COOKIE)
            said = dict(request.query_params)
            try:
                session, next_ = await self._bridge.take(lambda: provider.finish(kept, said, instead_of=before))
            except (SignInRefused, Unavailable, Overloaded) as error:
                return self._login(request, next_=None, why=str(error), status=429 if isinstance(error, Overloaded) else 401)
            answer = self._entered(session, next_=local_path(next_))
            answer.delete_cookie(OIDC_COOKIE, httponly=True, samesite="lax", secure=self._secure, path=OIDC_PATH)
            return answer

    def _is_ours(self, request: Request, form: Form) -> bool:
        cookie = request.cookies.get(FORM_COOKIE)
        return cookie is not None and self._forms.fits(form.get("csrf", ""), f"form {cookie}")

    def _login(
        self, request: Request, *, next_: str | None, held: Form | None = None, why: str = "", name: str = "", status: int = 200
    ) -> Response:
        held_text = msgspec.json.encode(held).decode() if held else ""
        return self._page(request, "login.html", status, next=local_path(next_), held=held_text, why=why, name=name)

    async def _welcome(self, request: Request, link: str, *, why: str = "", status: int = 200) -> Response:
        try:
            person = await asyncio.to_thread(self._desk.invited, link)
        except RatchetError as error:
            return self._page(request, "login.html", 400, next=local_path(None), held="", why=str(error), name="")
        return self._page(request, "welcome.html", status, link=link, name=person.name, why=why)

    def _page(self, request: Request, template: str, status: int, **values: object) -> Response:
        """A page with a form, whose token fits the cookie that comes with it."""
        cookie = request.cookies.get(FORM_COOKIE) or self._forms.fresh_cookie()
        provider = None if self._provider is None else self._provider.name
        text = self._pages.get_template(template).render(provider=provider, csrf=self._forms.of(f"form {cookie}"), **values)
        answer = HTMLResponse(text, status, headers=HEADERS)
        answer.set_cookie(FORM_COOKIE, cookie, httponly=True, samesite="lax", secure=self._secure)
        return answer

    def _entered(self, session: str, *, next_: str, held: Form | None = None) -> Response:
        """Signed in: on to where they were going, or back to what they had filled in, to look at it once more and send it."""
        if held:
            csrf = self._forms.of(f"session {session}")
            answer: Response = HTMLResponse(self._pages.get_template("held.html").render(to=next_, held=held, csrf=csrf), headers=HEADERS)
        else:
            answer = RedirectResponse(next_, 303, headers=HEADERS)
        lasts = int(SESSION_LASTS.total_seconds())
        answer.set_cookie(SESSION_COOKIE, session, max_age=lasts, httponly=True, samesite="lax", secure=self._secure)
        answer.delete_cookie(FORM_COOKIE, httponly=True, samesite="lax", secure=self._secure)
        return answer


def _held(text: str | None) -> Form | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the form cannot be read: {error}") from error
