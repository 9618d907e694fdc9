"""Pages from templates, with the headers that every page goes out with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse

from app.console.wording import age, clock_time, left, share, short
from app.domain.ids import utc_now
from app.domain.people import Action, Visitor

HERE = Path(__file__).parent
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "same-origin", "cache-control": "no-store",
}  # fmt: skip
"""Of every page: what a name or a reason might smuggle in runs nothing and fetches nothing, no other site shows the page in a frame, and
nothing of it stays in a cache. Scripts and styles are files of ours. Addresses go to no other site; under `no-referrer`
browsers would sign our own forms with `Origin: null`, which the barrier refuses."""
PAGES = (
    ("", "Inbox", "i"), ("releases", "Candidates", "c"), ("versions", "Versions", "v"), ("rewards", "Rewards", "w"), ("data", "Data", "d"),
    ("trust", "Trust", "t"), ("access", "Access", "a"), ("audit", "Audit", "u"),
)  # fmt: skip
"""(path, name, key after g)."""
ABOUT_ALL = frozenset({"data", "access"})
"""Pages for those alone who see every policy."""
TAKES = {"access": Action.SEE_ACCESS, "audit": Action.READ_AUDIT}
"""Pages that take more than looking."""
VisitorOf = Callable[[Request], Visitor]


class Renderer:
    """Templates of the pages."""

    def __init__(self) -> None:
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self._pages = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        self._pages.filters.update(short=short, age=age, clock_time=clock_time, share=share, left=left)

    def page(
        self, request: Request, template: str, *, title: str, here: str, visitor: Visitor, policy: str | None, policies: list[str],
        values: Mapping[str, Any], status: int = 200,
    ) -> HTMLResponse:  # fmt: skip
        """A page."""
        shown = [page for page in PAGES if (visitor.policy is None or page[0] not in ABOUT_ALL) and _opens(visitor, page[0])]
        common = {
            "title": title, "here": here, "visitor": visitor, "policy": policy, "policies": policies, "pages": shown, "now": utc_now(),
            "link": _linker(request, policy), "done": "", "top": None, "head": None,
        }  # fmt: skip
        text = self._pages.get_template(template).render({**common, **values})
        return HTMLResponse(text, status, headers=HEADERS)


def _opens(visitor: Visitor, page: str) -> bool:
    action = TAKES.get(page)
    return action is None or visitor.may(action)


def _linker(request: Request, policy: str | None) -> Callable[..., str]:
    """Makes addresses of this page with some fields changed."""
    kept = {name: value for name, value in request.query_params.items() if name not in ("sheet", "as", "done", "again")}

    def link(**changes: str) -> str:
        asked = {**({"policy": policy} if policy else {}), **kept, **changes}
        return f"{request.url.path}?{urlencode({name.rstrip('_'): value for name, value in asked.items()})}"

    return link
