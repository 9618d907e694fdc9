"""The pages, read-only; every one works without JavaScript, and none changes under who reads it."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse

from app.console.charts import bars, lines, reaction_series
from app.console.wording import age, clock_time, mood, share, short
from app.domain.ids import utc_now
from app.domain.releases import IN_FLIGHT
from app.domain.views import LabelRow, Operations, VersionRow

HERE = Path(__file__).parent
NEWEST_LABELS = 5_000
"""A page is about what happens now, and is made within a fifth of a second: it reads so many labels, once."""
PAGES = (("", "Overview"), ("releases", "Releases"), ("versions", "Versions"), ("labels", "Labels"), ("cycles", "Cycles"))
Render = Callable[[str, Request, str | None, Callable[[str], dict[str, object]]], HTMLResponse]
"""(template, request, policy asked for, values of the policy shown) → page."""


HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src 'self' data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "no-referrer", "cache-control": "no-store",
}  # fmt: skip
"""Of every page: what a name or a reason might smuggle in runs nothing and fetches nothing, no other site shows the page in a frame, and
nothing of it stays in a cache."""


def everything(_request: Request) -> str | None:
    """Whoever asks sees every policy."""
    return None


def console(operations: Operations, bound_to: Callable[[Request], str | None] = everything) -> APIRouter:
    """The router of the console, to be mounted at the root; every address begins with /console.

    `bound_to` names the one policy that whoever asks may see; None is all of them.
    """
    router = APIRouter(prefix="/console", include_in_schema=False)
    render = _renderer(operations, bound_to)

    @router.get("")
    def overview(request: Request, policy: str | None = None) -> HTMLResponse:
        shared = bound_to(request) is None
        return render("overview.html", request, policy, lambda name: _overview(operations, name, shared=shared))

    @router.get("/", response_class=RedirectResponse)
    def slash() -> str:
        return "/console"

    @router.get("/releases")
    def releases(request: Request, policy: str | None = None) -> HTMLResponse:
        return render("releases.html", request, policy, lambda name: {"releases": operations.releases(name, limit=200)})

    @router.get("/releases/{release_id}")
    def release(request: Request, release_id: str, policy: str | None = None) -> HTMLResponse:
        return render("release.html", request, policy, lambda name: _release(operations, name, release_id))

    @router.get("/versions")
    def versions(request: Request, policy: str | None = None) -> HTMLResponse:
        return render("versions.html", request, policy, lambda name: _versions(operations, name))

    @router.get("/labels")
    def labels(request: Request, policy: str | None = None) -> HTMLResponse:
        return render("labels.html", request, policy, lambda name: _labels(operations, name))

    @router.get("/cycles")
    def cycles(request: Request, policy: str | None = None) -> HTMLResponse:
        return render("cycles.html", request, policy, lambda name: {"cycles": operations.cycles(name, limit=200)})

    return router


def static() -> APIRouter:
    """What every page loads, for whoever opens the entrance too."""
    router = APIRouter(prefix="/console", include_in_schema=False)

    @router.get("/static/console.css")
    def style() -> FileResponse:
        return FileResponse(HERE / "static" / "console.css", media_type="text/css", headers=HEADERS | {"cache-control": "no-cache"})

    return router


def _renderer(operations: Operations, bound_to: Callable[[Request], str | None]) -> Render:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(short=short, age=age, clock_time=clock_time, share=share)

    def render(template: str, request: Request, policy: str | None, content: Callable[[str], dict[str, object]]) -> HTMLResponse:
        """The page of the named policy, or of the first one that whoever asks may see."""
        mine = bound_to(request)
        names = [name for name in operations.policies() if mine in (None, name)]
        if policy is not None and policy not in names:
            raise HTTPException(404, f"there is no policy {policy}; /console lists those there are")
        chosen = policy or next(iter(names), None)
        page = template if chosen is not None else "empty.html"
        stem = template.removesuffix(".html")
        here = {"overview": "", "release": "releases"}.get(stem, stem)
        values = content(chosen) if chosen is not None else {}
        text = environment.get_template(page).render(policy=chosen, policies=names, pages=PAGES, here=here, now=utc_now(), **values)
        return HTMLResponse(text, headers=HEADERS)

    return render


def _overview(operations: Operations, policy: str, *, shared: bool) -> dict[str, object]:
    """`shared`: whether sums over all policies are shown too."""
    releases, labels = operations.releases(policy, limit=12), operations.labels(policy, limit=NEWEST_LABELS)
    versions = operations.versions(policy, labels)
    return {
        "pointer": operations.pointer(policy),
        "versions": versions[-8:],
        "names": {version.digest: version.name for version in versions},
        "in_flight": [release for release in releases if release.state in IN_FLIGHT],
        "releases": releases,
        "progress": operations.progress(policy),
        "accepted": operations.accepted_events() if shared else None,
        "waiting": operations.waiting_turns(policy),
        "chart": _persistence_chart(versions, labels),
    }


def _release(operations: Operations, policy: str, release_id: str) -> dict[str, object]:
    found = operations.release(release_id)
    if found is None or found.policy != policy:
        raise HTTPException(404, f"no release {release_id} of policy {policy}; /console/releases lists those there are")
    return {
        "release": found, "gates": operations.gates(release_id), "steps": operations.steps(release_id),
        "exposed": operations.exposed(found.digest), "alarms": operations.alarms(policy, release_id),
    }  # fmt: skip


def _versions(operations: Operations, policy: str) -> dict[str, object]:
    labels = operations.labels(policy, limit=NEWEST_LABELS)
    versions = operations.versions(policy, labels)
    return {"versions": versions, "pointer": operations.pointer(policy), "chart": _persistence_chart(versions, labels)}


def _labels(operations: Operations, policy: str) -> dict[str, object]:
    rows = operations.labels(policy, limit=NEWEST_LABELS)
    left_out = Counter(row.exclusion for row in rows if row.exclusion is not None)
    follow_ups = Counter(mood(row.follow_up) for row in rows)
    return {
        "used": operations.labels_used_share(policy),
        "total": len(rows), "left_out": left_out.most_common(), "follow_ups": follow_ups.most_common(),
        "rewards": bars([row.reward for row in rows], low=-1.0, high=1.0, buckets=20),
        "segments": Counter(row.segment or "none" for row in rows).most_common(20),
    }  # fmt: skip


def _persistence_chart(versions: Sequence[VersionRow], labels: Sequence[LabelRow]) -> str:
    names = {version.digest: version.name for version in versions}
    return lines(reaction_series(labels, names), title="share of an answer that is still there, by version")
