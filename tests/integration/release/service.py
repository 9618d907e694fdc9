"""The endpoints of releases over a desk, with people and keys of the same database."""

from fastapi import FastAPI
from sqlalchemy import Engine
from starlette.requests import Request
from starlette.responses import Response

from app.api import webhooks
from app.api.entry.access import Access
from app.api.entry.sessions import Sessions
from app.api.errors import problem
from app.api.operations import views
from app.api.releases import ReleaseRoom as ApiRoom
from app.api.releases import router
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.db.reads import SqlReads
from app.db.release.pointer import SqlRoutes
from app.db.release.release_views import SqlReleaseViews
from app.db.release.webhooks import SqlWebhookBook
from app.domain.errors import RatchetError
from app.domain.ids import utc_now
from tests.fakes.gateway import policy_config
from tests.fakes.releases import POLICY, ReleaseRoom
from tests.fakes.sealed import SEAL, taken


def release_service(engine: Engine, room: ReleaseRoom, *, loopback: bool = False) -> FastAPI:
    """With `loopback`, and once keys were loaded, whoever is on this machine needs no key as long as there is none."""
    app = FastAPI()
    sessions = Sessions(lambda: ("secret",))
    app.state.access = Access(SqlKeys(engine), clock=utc_now, sessions=sessions, people=SqlPeople(engine), alone=loopback)
    app.include_router(router(ApiRoom(desk=room.desk, releases=room.ledger, views=SqlReleaseViews(engine))))
    hooks = webhooks.WebhookRoom(webhooks=SqlWebhookBook(engine, SEAL), send_test=taken, policies=(POLICY, "other"), allow_loopback=True)
    app.include_router(webhooks.router(hooks))
    app.include_router(views(reads=SqlReads(engine, engine), routes=SqlRoutes(engine), policies={POLICY: policy_config()}, clock=utc_now))

    def answer(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RatchetError)
        return problem(error).response()

    app.add_exception_handler(RatchetError, answer)
    return app
