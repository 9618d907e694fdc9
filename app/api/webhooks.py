"""Where news of releases goes, over HTTP: receivers made (their secret is shown once), listed, rotated, stopped."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import json_response
from app.api.entry.access import Caller, requires
from app.api.releases import Limit, Name, Text, read_body, visible_policy
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.people import Action
from app.release.webhooks import check_url, new_secret

Messenger = Annotated[Caller, Depends(requires(Action.NOTIFY))]


class WebhookBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of release events."""

    url: Text
    policy: Name | None = None
    events: tuple[Name, ...] = ()
    """Prefixes of event types, such as `release.champion`; all where empty."""


class Webhooks(Protocol):
    """Receivers."""

    def add(self, *, policy: str | None, url: str, secret: str, events: Any, now: Any) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks`
    def all(self) -> list[Any]: ...
    def find(self, webhook_id: str) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    def set_secrets(self, webhook_id: str, secrets: list[str]) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    def disable(self, webhook_id: str, *, now: Any) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    def deliveries(self, webhook_id: str, *, limit: int = 100) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class WebhookRoom:
    """What these endpoints need."""

    webhooks: Webhooks
    allow_loopback: bool
    """Whether webhooks may go to this machine: on a loopback deployment only."""


def router(room: WebhookRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(prefix="/v1/webhooks", tags=["releases"], responses=openapi.ERRORS)

    @made.get("")
    async def webhooks(caller: Messenger) -> Response:
        """Receivers of release events, without their secrets."""
        found = await asyncio.to_thread(room.webhooks.all)
        return json_response({"data": [_receiver(hook) for hook in found if caller.policy in (None, hook.policy)]})

    @made.post("", openapi_extra=openapi.body(WebhookBody), status_code=201)
    async def register(caller: Messenger, request: Request) -> Response:
        """Register a receiver; its secret is shown in this answer only."""
        body, secret = await read_body(request, WebhookBody), new_secret()
        policy = visible_policy(body.policy, caller)

        def add() -> Any:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
            check_url(body.url, allow_loopback=room.allow_loopback)
            return room.webhooks.add(policy=policy, url=body.url, secret=secret, events=body.events, now=utc_now())

        return json_response({**_receiver(await asyncio.to_thread(add)), "secret": secret}, 201)

    @made.post("/{webhook_id}/rotate")
    async def rotate(caller: Messenger, webhook_id: str) -> Response:
        """A new secret; the one before it keeps signing until the next rotation."""
        secret = new_secret()

        def renew() -> Any:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
            hook = _hook(room, webhook_id, caller)
            return room.webhooks.set_secrets(webhook_id, [secret, *hook.secrets[:1]])

        return json_response({**_receiver(await asyncio.to_thread(renew)), "secret": secret})

    @made.delete("/{webhook_id}")
    async def disable(caller: Messenger, webhook_id: str) -> Response:
        """Stop deliveries to a receiver."""

        def stop() -> Any:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
            _hook(room, webhook_id, caller)
            return room.webhooks.disable(webhook_id, now=utc_now())

        return json_response(_receiver(await asyncio.to_thread(stop)))

    @made.get("/{webhook_id}/deliveries")
    async def deliveries(caller: Messenger, webhook_id: str, limit: Limit = 100) -> Response:
        """What became of the newest deliveries."""

        def read() -> list[dict[str, Any]]:
            _hook(room, webhook_id, caller)
            return room.webhooks.deliveries(webhook_id, limit=limit)

        return json_response({"data": await asyncio.to_thread(read)})

    return made


def _hook(room: WebhookRoom, webhook_id: str, caller: Caller) -> Any:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    """A receiver that the caller's key sees. Raises `NotFound`."""
    hook = room.webhooks.find(webhook_id)
    if caller.policy not in (None, hook.policy):
        raise NotFound(f"there is no webhook {webhook_id}: list them first")
    return hook


def _receiver(hook: Any) -> dict[str, Any]:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    return {name: value for name, value in vars(hook).items() if name != "secrets"}
