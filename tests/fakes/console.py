"""The console's pages over a database for tests: whoever is said to look, looks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, FastAPI, Request
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.console import Live, Pages, static
from app.db.release.releases import SqlReleaseLedger
from app.db.sight import SqlPages
from app.domain.people import Action, Role, Visitor, actions_of
from app.release.jury import ReleaseJury

OPERATOR = Visitor(actor="user:ada", actions=actions_of({Role.OPERATOR}), policy=None, csrf="token")
VIEWER = Visitor(actor="user:vic", actions=actions_of({Role.VIEWER}), policy=None)
ADMIN = Visitor(actor="user:root", actions=actions_of({Role.ADMIN}), policy=None)
OPEN = Visitor(actor="anonymous", actions=frozenset(Action), policy=None)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A place where nothing is."""

    place: str
    found: int = 0
    cure: str = ""


def pages_app(engine: Engine, desk: Any = None, *, visitor: Callable[[], Visitor] = lambda: OPERATOR) -> FastAPI:
    """The pages as an application; `visitor` says who looks, at each request. The doorkeeper, who checks forms, is not here."""
    sight, app = SqlPages(engine), FastAPI()

    async def read(request: Request) -> None:
        request.state.form = dict(parse_qsl((await request.body()).decode(), keep_blank_values=True))

    guarded = APIRouter(dependencies=[Depends(read)])
    pages = Pages(
        sight, desk=desk, jury=ReleaseJury(SqlReleaseLedger(engine)), live=Live(sight), visitor_of=lambda _request: visitor(),
        left_of=lambda actor: [Found(place=f"turns of {actor}")],
    )  # fmt: skip
    guarded.include_router(pages.router())
    app.include_router(static())
    app.include_router(guarded)
    return app


def browser(engine: Engine, desk: Any = None, *, visitor: Visitor = OPERATOR) -> TestClient:
    """A client that follows nothing by itself."""
    return TestClient(pages_app(engine, desk, visitor=lambda: visitor), follow_redirects=False)
