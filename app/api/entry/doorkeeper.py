"""Lets people into the pages: who is asking, what they may do, and whether a form that came back is one of ours.

`Depends(keeper)` on the pages' router leaves three things in `request.state`: `visitor` (`app.domain.people.Visitor`), `form` (the fields
of a form that was sent, its token checked) and `caller`. Who is not signed in is turned away with `NotSignedIn`; a form that was sent then
is kept in `request.state.form`, so that it can be filled in again.
"""

from urllib.parse import parse_qsl

from starlette.requests import Request

from app.access import SESSION_COOKIE, FormTokens
from app.api.entry.access import Access, Caller
from app.domain.errors import BadRequest
from app.domain.people import Action, NotSignedIn, Visitor
from app.listening.errors import HttpError

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
MOST_BYTES, MOST_FIELDS = 64 * 1024, 200
FORM = "application/x-www-form-urlencoded"
STALE_FORM = "this form is not from this session (it may have been open while you signed in again): reload the page and send it once more"


class Doorkeeper:
    """The dependency of every page."""

    def __init__(self, forms: FormTokens) -> None:
        self._forms = forms

    async def __call__(self, request: Request) -> Visitor:
        """Who is asking. Raises `NotSignedIn`, `HttpError` 403, `BadRequest`."""
        sends = request.method not in SAFE
        form = request.state.form = await read_form(request) if sends else {}
        caller, known_by = await self._who(request)
        if sends and not self._forms.fits(form.pop("csrf", ""), known_by):
            raise HttpError(403, STALE_FORM, code="csrf")
        access: Access = request.app.state.access
        request.state.caller = access.allow(caller, Action.LOOK)
        request.state.visitor = caller.visitor(csrf=self._forms.of(known_by))
        return request.state.visitor

    async def still_lets_in(self, request: Request) -> bool:
        """Whether whoever opened a stream may still look; what a stream says is about every policy at once, and of none."""
        try:
            caller, _ = await self._who(request)
            return caller.visitor().may(Action.LOOK)
        except (NotSignedIn, HttpError):
            return False

    async def _who(self, request: Request) -> tuple[Caller, str]:
        access: Access = request.app.state.access
        session = request.cookies.get(SESSION_COOKIE)
        if session is not None and (caller := await access.signed_in(session)) is not None:
            return caller, f"session {session}"
        headers = dict(request.scope["headers"])
        if access.open or b"authorization" in headers or b"x-api-key" in headers:
            caller = await access.identify(headers)
            return caller, caller.name
        raise NotSignedIn("sign in first: /console/login")


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form; of one that was sent twice the last. Raises `BadRequest`, `HttpError` 413."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise BadRequest(f"send the form as {FORM}")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HttpError(413, f"a form has {MOST_BYTES // 1024} KiB at most", code="too_large")
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=MOST_FIELDS, errors="strict")
    except (ValueError, UnicodeDecodeError) as error:
        raise BadRequest(f"the form cannot be read: {error}") from error
    if any("\x00" in text for pair in pairs for text in pair):
        raise BadRequest("the form has a NUL character in it: no database takes one")
    return dict(pairs)
