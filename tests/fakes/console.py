"""The console's pages over a database for tests: whoever is said to look, looks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, FastAPI, Request
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.console import Hands, Live, Pages, static
from app.db.access.erasures import SqlEraser
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.db.engine import writing
from app.db.ingestion.dead_letters import SqlDeadLetters
from app.db.ingestion.streams import SqlEffects
from app.db.learning.readings import SqlReadings
from app.db.learning.rule_sets import SqlReplays, SqlRules
from app.db.release.audit import append
from app.db.release.done import SqlRequests
from app.db.release.releases import SqlReleaseLedger
from app.db.sight import SqlPages
from app.domain.ids import checked_pseudonym, hash_actor, utc_now, uuid7
from app.domain.people import Action, Role, Visitor, actions_of
from app.domain.telemetry.events import Erasure
from app.domain.telemetry.streams import EffectStore, ErasureReport, JoinRules
from app.release.jury import ReleaseJury
from tests.fakes.streaming import MemorySegments

OPERATOR = Visitor(actor="user:ada", actions=actions_of({Role.OPERATOR}), policy=None, csrf="token")
VIEWER = Visitor(actor="user:vic", actions=actions_of({Role.VIEWER}), policy=None)
ADMIN = Visitor(actor="user:root", actions=actions_of({Role.ADMIN}), policy=None, csrf="token")
OPEN = Visitor(actor="anonymous", actions=frozenset(Action), policy=None)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A place where nothing is."""

    place: str
    found: int = 0
    cure: str = ""


def hands_of(engine: Engine) -> Hands:
    """What pages act through, over this database alone: there are no segments, and nobody's letters make sense."""
    eraser = SqlEraser(engine, engine, segments=MemorySegments())

    def forget(pseudonym: str, *, by: str) -> ErasureReport:
        erasure = Erasure(id=uuid7(), actor=pseudonym, requested_by=by, occurred_at=utc_now())
        return eraser.erase(erasure, now=utc_now())

    def pseudonym_of(*, actor: str | None, pseudonym: str | None) -> str:
        return hash_actor(actor or "", salt="pepper") if pseudonym is None else checked_pseudonym(pseudonym)

    def store() -> EffectStore:
        return SqlEffects(engine, rules=lambda: JoinRules(policies={}), segments=MemorySegments())

    return Hands(
        people=SqlPeople(engine), keys=SqlKeys(engine), requests=SqlRequests(engine), letters=SqlDeadLetters(engine), store=store,
        rules=SqlRules(engine, ""), replays=SqlReplays(engine),
        pseudonym_of=pseudonym_of, forget=forget, rotate=partial(_rotated, engine), policies=("tab", "composer"), address="http://here",
        clock=utc_now,
    )  # fmt: skip


def _rotated(engine: Engine, *, by: str) -> None:
    with writing(engine) as connection:
        append(connection, actor=by, action="session_secret.rotated", subject="keys of sessions", detail={}, now=utc_now())


def pages_app(engine: Engine, desk: Any = None, *, visitor: Callable[[], Visitor] = lambda: OPERATOR) -> FastAPI:
    """The pages as an application; `visitor` says who looks, at each request. The doorkeeper, who checks forms, is not here."""
    sight, app = SqlPages(engine), FastAPI()

    async def read(request: Request) -> None:
        request.state.form = dict(parse_qsl((await request.body()).decode(), keep_blank_values=True))

    guarded = APIRouter(dependencies=[Depends(read)])
    pages = Pages(
        sight, desk=desk, jury=ReleaseJury(SqlReleaseLedger(engine)), readings=SqlReadings(engine), live=Live(sight),
        visitor_of=lambda _request: visitor(),
        left_of=lambda actor: [Found(place=f"turns of {actor}")], hands=hands_of(engine),
    )  # fmt: skip
    guarded.include_router(pages.router())
    app.include_router(static())
    app.include_router(guarded)
    return app


def browser(engine: Engine, desk: Any = None, *, visitor: Visitor = OPERATOR) -> TestClient:
    """A client that follows nothing by itself."""
    return TestClient(pages_app(engine, desk, visitor=lambda: visitor), follow_redirects=False)
