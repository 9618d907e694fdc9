"""Keys over HTTP, as `ratchet keys` makes them: made (and shown once), listed without secrets, revoked. For admins and such keys.

A key of one policy makes, sees and ends keys of that policy alone. Whoever does it stands in the audit chain. To rotate a key, make the
new one, hand it out, and revoke the old one: until then both are good. The first key is made on the machine itself: it closes the service,
and that is not for whoever is let in without one to decide.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta
from typing import Annotated, Protocol

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.asking import Name, declared_policy, read_body, require_every_policy, visible_policy
from app.api.dialects.counter import json_response
from app.api.entry.access import ANONYMOUS, Access, Caller, requires
from app.domain.access import ApiKey, Scope
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.people import Action
from app.listening.errors import HttpError

Admin = Annotated[Caller, Depends(requires(Action.MANAGE_KEYS))]
Reader = Annotated[Caller, Depends(requires(Action.SEE_ACCESS))]


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


def router(
    book: KeyBook, *, rotate: Callable[..., object], policies: Collection[str], clock: Callable[[], datetime] = utc_now
) -> APIRouter:
    """The endpoints. `rotate` puts a fresh secret in front of those that sign keys of sessions, as asked `by` somebody."""
    made = APIRouter(prefix="/v1/keys", tags=["keys"], responses=openapi.ERRORS)

    @made.get("")
    async def keys(caller: Reader) -> Response:
        """The keys there are and were, oldest first; never their secrets."""
        found = await asyncio.to_thread(book.history)
        return json_response({"keys": [key.told(clock()) for key in found if caller.policy in (None, key.policy)]})

    @made.post("", openapi_extra=openapi.body(KeyBody), responses={201: openapi.answer(KeyMade, "Made; its text is shown this once.")})
    async def create(caller: Admin, request: Request) -> Response:
        """Make a key."""
        body = await read_body(request, KeyBody)
        policy = declared_policy(visible_policy(body.policy, caller), policies)  # never wider than that of the key which makes it
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
        ended = await asyncio.to_thread(lambda: book.revoke(wanted, by=by))
        return json_response(ended.told(clock()))

    @made.post("/rotate-sessions")
    async def rotate_sessions(caller: Admin) -> Response:
        """Sign the keys of sessions with a fresh secret; those signed with the one before it stay good, older ones end."""
        require_every_policy(caller, "keys of sessions are of every policy")
        who = _person(caller)
        await asyncio.to_thread(lambda: rotate(by=who))
        return json_response({"rotated": True})

    return made


def _person(caller: Caller) -> str:
    if caller is ANONYMOUS:
        raise HttpError(
            403,
            "this service is open, and whoever makes its first key closes it: `ratchet people first` and `ratchet login` say who you are, "
            "or make it on the machine itself (`ratchet keys create --break-glass`)",
            code="no_key",
        )
    return caller.actor
