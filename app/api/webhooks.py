"""Where news of releases goes, over HTTP: receivers made (their secret is shown once), listed, tried, rotated, stopped."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.asking import Limit, Name, Text, declared_policy, read_body, signer, visible_policy
from app.api.dialects.counter import json_response
from app.api.entry.access import Caller, requires
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.people import Action
from app.release.addresses import check_url
from app.release.webhooks import new_secret

Messenger = Annotated[Caller, Depends(requires(Action.NOTIFY))]


class WebhookBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of release events."""

    url: Text
    policy: Name | None = None
    events: tuple[Name, ...] = ()
    """Prefixes of event types, such as `release.champion`; all where empty."""


class Webhooks(Protocol):
    """Receivers."""

    def add(self, *, policy: str | None, url: str, secret: str, events: Any, now: Any, by: str) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks`
    def all(self) -> list[Any]: ...
    def find(self, webhook_id: str) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    def rotate(self, webhook_id: str, secret: str, *, now: Any, by: str) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    def disable(self, webhook_id: str, *, now: Any, by: str) -> Any: ...  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
    def deliveries(self, webhook_id: str, *, limit: int = 100) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class WebhookRoom:
    """What these endpoints need."""

    webhooks: Webhooks
    send_test: Callable[[Any], Awaitable[tuple[str, bool]]]
    """Sends `webhook.test` to a receiver: what it answered, and whether it took it."""
    allow_loopback: bool
    """Whether webhooks may go to this machine: on a loopback deployment only."""
    policies: Collection[str]


def router(room: WebhookRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(prefix="/v1/webhooks", tags=["releases"], responses=openapi.ERRORS)

    @made.get("")
    async def webhooks(caller: Messenger) -> Response:
        """Receivers of release events, without their secrets."""
        found = await asyncio.to_thread(room.webhooks.all)
        return json_response({"data": [hook.told() for hook in found if caller.policy in (None, hook.policy)]})

    @made.post("", openapi_extra=openapi.body(WebhookBody), status_code=201)
    async def register(caller: Messenger, request: Request) -> Response:
        """Register a receiver; its secret is shown in this answer only."""
        body, secret, who = await read_body(request, WebhookBody), new_secret(), signer(request, caller)
        policy = declared_policy(visible_policy(body.policy, caller), room.policies)

        def add() -> Any:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
            check_url(body.url, allow_loopback=room.allow_loopback)
            return room.webhooks.add(policy=policy, url=body.url, secret=secret, events=body.events, now=utc_now(), by=who)

        return json_response((await asyncio.to_thread(add)).told() | {"secret": secret}, 201)

    @made.post("/{webhook_id}/rotate")
    async def rotate(caller: Messenger, webhook_id: str, request: Request) -> Response:
        """A new secret; the one before it keeps signing until the next rotation."""
        secret, who = new_secret(), signer(request, caller)

        def renew() -> Any:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
            _hook(room, webhook_id, caller)
            return room.webhooks.rotate(webhook_id, secret, now=utc_now(), by=who)

        return json_response((await asyncio.to_thread(renew)).told() | {"secret": secret})

    @made.delete("/{webhook_id}")
    async def disable(caller: Messenger, webhook_id: str, request: Request) -> Response:
        """Stop deliveries to a receiver."""
        who = signer(request, caller)

        def stop() -> Any:  # noqa: ANN401 - `app.db.release.webhooks.Webhook`
            _hook(room, webhook_id, caller)
            return room.webhooks.disable(webhook_id, now=utc_now(), by=who)

        return json_response((await asyncio.to_thread(stop)).told())

    @made.post("/{webhook_id}/test")
    async def test(caller: Messenger, webhook_id: str) -> Response:
        """Send `webhook.test` to a receiver, signed like any event; `arrived` says whether it took it."""
        status, arrived = await room.send_test(await asyncio.to_thread(_hook, room, webhook_id, caller))
        return json_response({"status": status, "arrived": arrived})

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
