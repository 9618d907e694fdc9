"""Keys over HTTP, as `ratchet keys` makes them: made (and shown once), listed without secrets, revoked. For admins and such keys.

A key of one policy makes, sees and ends keys of that policy alone. Whoever does it stands in the audit chain. To rotate a key, make the
new one, hand it out, and revoke the old one: until then both are good. The first key is made on the command line: it closes the service,
and that is not for whoever is let in without one to decide.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import json_response
from app.api.entry.access import ANONYMOUS, Access, Caller, requires
from app.api.errors import HttpError
from app.api.telemetry.drafts import decode
from app.api.telemetry.intake import read_json
from app.domain.access import ApiKey, Scope
from app.domain.errors import BadRequest, NotFound
from app.domain.ids import utc_now
from app.domain.people import Action

MOST_BYTES = 16 * 1024
Admin = Annotated[Caller, Depends(requires(Action.MANAGE_KEYS))]
Reader = Annotated[Caller, Depends(requires(Action.SEE_ACCESS))]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=150)]


class KeyBook(Protocol):
    """Where keys are kept."""

    def history(self) -> list[ApiKey]: ...
    def create(
        self, *, name: str, scopes: Iterable[Scope], policy: str | None = None, rate_per_s: float | None = None,
        expires_at: datetime | None = None, by: str = "",
    ) -> tuple[ApiKey, str]: ...  # fmt: skip
    def revoke(self, prefix: str, *, by: str = "") -> ApiKey: ...


class KeyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to make."""

    name: Name
    """What or whom it is for."""
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1, max_length=10)]
    policy: Name | None = None
    """The one policy it is good for; all without it."""
    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    expires_days: Annotated[float, msgspec.Meta(gt=0, le=36_500)] | None = None


class KeyMade(msgspec.Struct, frozen=True, kw_only=True):
    """A new key; `key` is shown this once."""

    key: str
    prefix: str


_body = msgspec.json.Decoder(KeyBody)


def router(book: KeyBook, *, policies: Collection[str], clock: Callable[[], datetime] = utc_now) -> APIRouter:
    """The endpoints."""
    made = APIRouter(prefix="/v1/keys", tags=["keys"], responses=openapi.ERRORS)

    @made.get("")
    async def keys(caller: Reader) -> Response:
        """The keys there are and were, oldest first; never their secrets."""
        found = await asyncio.to_thread(book.history)
        return json_response({"keys": [_told(key, clock()) for key in found if caller.policy in (None, key.policy)]})

    @made.post("", openapi_extra=openapi.body(KeyBody), responses={201: openapi.answer(KeyMade, "Made; its text is shown this once.")})
    async def create(caller: Admin, request: Request) -> Response:
        """Make a key."""
        body: KeyBody = decode(_body, await read_json(request, most=MOST_BYTES))
        policy = _policy_of(body, caller, policies)
        expires_at = clock() + timedelta(days=body.expires_days) if body.expires_days else None
        by = _person(caller)
        key, text = await asyncio.to_thread(
            lambda: book.create(name=body.name, scopes=body.scopes, policy=policy, rate_per_s=body.rate_per_s, expires_at=expires_at, by=by)
        )
        access: Access = request.app.state.access
        await access.reread()
        return json_response(KeyMade(key=text, prefix=key.prefix), 201)

    @made.delete("/{prefix}")
    async def revoke(caller: Admin, prefix: str) -> Response:
        """End a key for good; running services refuse it within two seconds."""
        wanted, by = openapi.path_id(prefix), _person(caller)
        found = await asyncio.to_thread(book.history)
        if not any(key.prefix == wanted and caller.policy in (None, key.policy) for key in found):
            raise NotFound(f"no key of yours begins with {wanted!r}: GET /v1/keys lists them")
        return json_response(_told(await asyncio.to_thread(lambda: book.revoke(wanted, by=by)), clock()))

    return made


def _policy_of(body: KeyBody, caller: Caller, policies: Collection[str]) -> str | None:
    """The policy of a new key, never wider than that of the key which makes it. Raises `BadRequest`, `HttpError` 403."""
    if caller.policy is not None and body.policy not in (None, caller.policy):
        raise HttpError(403, f"this key is for the policy {caller.policy!r} only", code="wrong_policy", param="policy")
    policy = body.policy or caller.policy
    if policy is not None and policy not in policies:
        raise BadRequest(f"no policy is named {policy!r} (declared: {', '.join(sorted(policies))})", param="policy", code="unknown_policy")
    return policy


def _person(caller: Caller) -> str:
    if caller is ANONYMOUS:
        raise HttpError(403, "make the first key with `ratchet keys create`: it closes this service, and says who you are", code="no_key")
    return caller.actor


def _told(key: ApiKey, now: datetime) -> dict[str, Any]:
    return {
        "prefix": key.prefix, "name": key.name, "personal": key.person_id is not None, "made_by": key.made_by,
        "scopes": sorted(key.scopes), "policy": key.policy, "rate_per_s": key.rate_per_s,
        "created_at": key.created_at, "expires_at": key.expires_at, "revoked_at": key.revoked_at, "usable": key.usable_at(now),
    }  # fmt: skip
