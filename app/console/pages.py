"""The console's pages: everything can be read and decided without JavaScript, and every table is a CSV and a JSON file as well.

GET  /console, /console/releases, …       a page; `?sheet=NAME&as=csv` one of its tables
GET  /console/releases/ID@EVIDENCE        the evidence as it was, for ever
GET  /console/act/ACT/SUBJECT             what an act would do, to be confirmed
POST /console/act/ACT/SUBJECT             the act, once and on what was seen (`app.console.acts`)
GET  /console/do/DEED/SUBJECT             the same of acts on keys, people and stored data; POST does it (`app.console.deeds`)
GET  /console/pairs/RELEASE                two answers of which nobody knows whose they are; POST votes (`app.console.views.pairs`)
GET  /console/readings                    a follow-up that the labeller was unsure of; POST says how one reads it
GET  /console/stream                      says that something changed (`app.console.live`)
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse

from app.console.acts import ActPages, Desk
from app.console.deeds import DeedPages, Hands
from app.console.live import Live
from app.console.rendering import HEADERS, HERE, Renderer, VisitorOf
from app.console.sheets import Sheet
from app.console.views import access, candidate, data, inbox, pairs, reading, records, replays, rewards, versions
from app.console.views.asked import Asked
from app.console.views.reading import Readings
from app.domain.errors import BadInput, NotFound, RatchetError, Refused, Unavailable
from app.domain.people import Action
from app.domain.retention import Retention
from app.domain.views.pages import Sight, Trace
from app.release.jury import Jury

Content = Callable[..., dict[str, Any]]
DONE = "Done. What is shown is how it is now."
AGAIN = "Done already: nothing was done twice. What is shown is how it is now."


class Pages:
    """The pages over one deployment."""

    def __init__(
        self, sight: Sight, *, desk: Desk, jury: Jury, readings: Readings, live: Live, visitor_of: VisitorOf,
        left_of: Callable[[str], Sequence[Trace]] | None = None, hands: Hands | None = None,
        kept: Retention | None = None,
    ) -> None:  # fmt: skip
        self._sight = sight
        self._visitor_of = visitor_of
        self._renderer = Renderer()
        self._acts = ActPages(sight, desk)
        self._deeds = None if hands is None else DeedPages(hands)
        self._jury = jury
        self._kept = kept or Retention()
        self._readings = readings
        self._left_of = left_of
        self.live = live

    def router(self) -> APIRouter:
        """Everything below /console but for the entrance and the static files."""
        made = APIRouter(prefix="/console", include_in_schema=False)
        self._page(made, "", "inbox.html", "Inbox", inbox.inbox, here="")
        self._page(made, "/releases", "list.html", "Candidates", candidate.candidates)
        self._page(made, "/versions", "versions.html", "Versions", versions.versions)
        self._page(made, "/history", "list.html", "What was live when", versions.history, here="versions")
        self._page(made, "/versions/{digest}", "version.html", "Version", versions.version)
        self._page(made, "/rewards", "rewards.html", "Rewards", rewards.rewards)
        self._page(made, "/replays/{replay_id}", "replay.html", "Replay", replays.replay, here="rewards")
        self._page(made, "/labels/{inference_id}", "label.html", "Label", rewards.label, here="rewards")
        self._page(made, "/data", "data.html", "Data", partial(data.data, kept=self._kept))
        self._page(made, "/erasures/{actor}", "list.html", "Proof of an erasure", partial(data.proof, left_of=self._left_of), here="data")
        self._page(made, "/trust", "trust.html", "Trust", data.trust)
        self._page(made, "/access", "access.html", "Access", access.access)
        self._page(made, "/people/{name}", "holder.html", "Person", access.person, here="access")
        self._page(made, "/keys/{prefix}", "holder.html", "Key", access.key, here="access")
        self._page(made, "/audit", "audit.html", "Audit", records.audit)
        self._singles(made)
        self._judging(made)
        self._reading(made)
        self._doing(made)
        self._acting(made)
        return made

    def _page(self, made: APIRouter, path: str, template: str, title: str, content: Content, *, here: str | None = None) -> None:
        at = path.strip("/").partition("/")[0] if here is None else here

        @made.get(path, name=title)
        def page(request: Request) -> Response:
            return self._answer(request, template, title, at, lambda asked: content(asked, **request.path_params))

    def _singles(self, made: APIRouter) -> None:
        @made.get("/", response_class=RedirectResponse)
        def slash() -> str:
            return "/console"

        @made.get("/releases/{release_id}")
        def release(request: Request, release_id: str) -> Response:
            id_, at, evidence = release_id.partition("@")
            if at:
                title = "Evidence, as it was"
                return self._answer(request, "frozen.html", title, "releases", lambda asked: records.frozen(asked, id_, evidence), of=id_)
            return self._answer(request, "candidate.html", "Candidate", "releases", lambda asked: candidate.candidate(asked, id_), of=id_)

        @made.get("/audit.jsonl")
        def export(request: Request) -> Response:
            visitor = self._visitor_of(request)
            if visitor.policy is not None or not visitor.may(Action.READ_AUDIT):
                return self._trouble(request, NotFound("the whole chain is for those who may see every policy"))
            headers = HEADERS | {"content-disposition": 'attachment; filename="ratchet-audit.jsonl"'}
            return StreamingResponse(self._chain(), media_type="application/x-ndjson", headers=headers)

        @made.get("/find")
        def find(request: Request) -> Response:
            return self._answer(request, "trouble.html", "Find", "", self._found)

        @made.get("/stream")
        async def stream(request: Request) -> Response:
            return self.live.stream(request)

    def _judging(self, made: APIRouter) -> None:
        @made.get("/pairs/{release_id}")
        def look(request: Request, release_id: str) -> Response:
            return self._answer(
                request, "pairs.html", "Blind pairs", "releases", lambda asked: pairs.page(asked, release_id), of=release_id
            )

        @made.post("/pairs/{release_id}")
        def vote(request: Request, release_id: str) -> Response:
            form: dict[str, str] = request.state.form

            def content(asked: Asked) -> dict[str, Any] | Response:
                try:
                    return RedirectResponse(pairs.vote(asked, release_id, form, self._jury), 303, HEADERS)
                except Refused as error:
                    return pairs.page(asked, release_id, moved=str(error))

            return self._answer(request, "pairs.html", "Blind pairs", "releases", content, of=release_id, policy=form.get("policy"))

    def _reading(self, made: APIRouter) -> None:
        @made.get("/readings")
        def look(request: Request) -> Response:
            return self._answer(request, "readings.html", "Read follow-ups", "rewards", reading.page)

        @made.post("/readings")
        def said(request: Request) -> Response:
            form: dict[str, str] = request.state.form

            def content(asked: Asked) -> dict[str, Any] | Response:
                try:
                    return RedirectResponse(reading.say(asked, form, self._readings), 303, HEADERS)
                except Refused as error:
                    return reading.page(asked, moved=str(error))

            return self._answer(request, "readings.html", "Read follow-ups", "rewards", content, policy=form.get("policy"))

    def _doing(self, made: APIRouter) -> None:
        deeds = self._deeds
        if deeds is None:
            return

        @made.get("/do/{deed}/{subject}")
        def ask(request: Request, deed: str, subject: str) -> Response:
            return self._answer(request, "deed.html", "Confirm", "do", lambda asked: deeds.confirm(asked, deed, subject))

        @made.post("/do/{deed}/{subject}")
        def done(request: Request, deed: str, subject: str) -> Response:
            form: dict[str, str] = request.state.form

            def content(asked: Asked) -> dict[str, Any] | Response:
                came = deeds.do(asked, deed, subject, form)
                return came if isinstance(came, dict) else RedirectResponse(_with(came, done=deed), 303, HEADERS)

            return self._answer(request, "deed.html", "Confirm", "do", content, policy=form.get("policy"))

    def _acting(self, made: APIRouter) -> None:
        @made.get("/act/{act}/{subject}")
        def confirm(request: Request, act: str, subject: str) -> Response:
            return self._answer(request, "act.html", "Confirm", "act", lambda asked: self._acts.confirm(asked, act, subject), of=subject)

        @made.post("/act/{act}/{subject}")
        def do(request: Request, act: str, subject: str) -> Response:
            form: dict[str, str] = request.state.form

            def content(asked: Asked) -> dict[str, Any] | Response:
                try:
                    again = self._acts.do(asked, act, subject, form)
                except Refused as error:
                    return self._acts.confirm(asked, act, subject, typed=form, moved=str(error))
                back = self._acts.back(asked, act, subject)
                return RedirectResponse(_with(back, done="again" if again else act), 303, HEADERS)

            return self._answer(request, "act.html", "Confirm", "act", content, of=subject, policy=form.get("policy"))

        @made.get("/{path:path}")
        def elsewhere(request: Request, path: str) -> Response:
            return self._trouble(request, NotFound(f"there is no page /console/{path[:80]}"))

    def _answer(
        self, request: Request, template: str, title: str, here: str, content: Callable[[Asked], dict[str, Any] | Response], *,
        of: str | None = None, policy: str | None = None,
    ) -> Response:  # fmt: skip
        """The page of the policy that is asked for, or of the release, or of the first one that whoever asks may see."""
        try:
            visitor = self._visitor_of(request)
            # only what a pulse made pages fetch again is shared: whoever opens a page sees how it is now, an act of a moment ago included
            sight = self.live.steady(self._sight) if "hx-request" in request.headers else self._sight
            policies = [name for name in sight.policies() if visitor.sees(name)]
            chosen = self._policy(request.query_params.get("policy") or policy, policies, of)
            if chosen is None:
                return self._renderer.page(
                    request, "empty.html", title="Welcome", here=here, visitor=visitor, policy=None, policies=[], values={}
                )
            asked = Asked(sight=sight, viewer=visitor, policy=chosen, query=request.query_params)
            values = content(asked)
            if isinstance(values, Response):
                return values
            if (kind := request.query_params.get("as")) is not None:
                return _file(values.get("sheets", {}), request.query_params.get("sheet", ""), kind)
            said = request.query_params.get("done")
            common = {
                "top": sight.pointer(chosen),
                "head": sight.head(),
                "done": "" if said is None else AGAIN if said == "again" else DONE,
            }
            status = 409 if values.get("moved") else 200
            template = "outcome.html" if "outcome" in values else template
            return self._renderer.page(
                request, template, title=values.get("title") or title, here=here, visitor=visitor, policy=chosen, policies=policies,
                values={**common, **values}, status=status,
            )  # fmt: skip
        except RatchetError as error:
            if not isinstance(error, NotFound | BadInput | Refused | Unavailable):
                raise
            return self._trouble(request, error)

    def _policy(self, named: str | None, policies: list[str], of: str | None) -> str | None:
        if named is not None:
            if named not in policies:
                raise NotFound(f"there is no policy {named[:100]}; /console lists those there are")
            return named
        found = None if of is None else self._sight.release(of.partition("@")[0])
        if found is not None and found.policy in policies:
            return found.policy
        return next(iter(policies), None)

    def _trouble(self, request: Request, error: RatchetError) -> Response:
        """An error as a page: the sentence that says what to do."""
        kinds = ((NotFound, 404, "Not there"), (Refused, 409, "Refused"), (Unavailable, 503, "The database does not answer"))
        status, title = next(((status, title) for kind, status, title in kinds if isinstance(error, kind)), (400, "That makes no sense"))
        return self._renderer.page(
            request, "trouble.html", title=title, here="none", visitor=self._visitor_of(request), policy=None, policies=[],
            values={"sentence": str(error)}, status=status,
        )  # fmt: skip

    def _found(self, asked: Asked) -> dict[str, Any] | Response:
        """Where a release, a version or a turn is, by what somebody typed."""
        wanted = asked.word("q")
        path = None if wanted is None else asked.sight.find(asked.policy, wanted)
        if path is None:
            raise NotFound(f"nothing of {asked.policy} is called {wanted or ''!r}: type a name, or the beginning of a digest or id")
        return RedirectResponse(asked.link(path), 303, HEADERS)

    def _chain(self) -> Iterator[str]:
        """The audit chain, an entry a line, as `ratchet audit verify FILE` reads it."""
        for entry in self._sight.audit_entries():
            plain = dict(vars(entry)) | {"occurred_at": entry.occurred_at.isoformat()}
            yield json.dumps(plain, ensure_ascii=False, default=str) + "\n"


def _with(address: str, **more: str) -> str:
    """An address with more said in it."""
    path, mark, place = address.partition("#")
    return f"{path}{'&' if '?' in path else '?'}{urlencode(more)}{mark}{place}"


def _file(sheets: dict[str, Sheet], name: str, kind: str) -> Response:
    sheet = sheets.get(name)
    if sheet is None:
        raise NotFound(f"this page has no table {name[:50]!r}; it has {', '.join(sheets) or 'none'}")
    headers = HEADERS | {"content-disposition": f'attachment; filename="{sheet.name}.{"csv" if kind == "csv" else "json"}"'}
    if kind == "csv":
        return Response(sheet.csv(), media_type="text/csv; charset=utf-8", headers=headers)
    return Response(sheet.json(), media_type="application/json", headers=headers)


def static() -> APIRouter:
    """What every page loads, for whoever opens the entrance too."""
    router = APIRouter(prefix="/console/static", include_in_schema=False)
    kinds = {"console.css": "text/css", "console.js": "text/javascript", "vendor/htmx.min.js": "text/javascript"}

    @router.get("/{name:path}")
    def file(name: str) -> Response:
        if name not in kinds:
            return PlainTextResponse("there is no such file", 404, headers=HEADERS)
        return FileResponse(HERE / "static" / name, media_type=kinds[name], headers=HEADERS | {"cache-control": "no-cache"})

    return router
