"""People over HTTP: who there is and what they may do, added, changed, invited; and everybody's own tokens.

Adding somebody makes a link with which they set a password, once, within a day; it is shown in this one answer. Who made it counts for
nothing beside them for a day (four eyes). Tokens are personal: everybody makes their own, and can do with it what their roles allow then.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.access import Porch
from app.api import openapi
from app.api.asking import Name, declared_policy, read_body, visible_policy
from app.api.dialects.counter import json_response
from app.api.entry.access import Access, Caller, requires
from app.domain.access import ApiKey, Scope
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.people import (
    INVITATION_LASTS,
    MAY,
    TOKEN_LASTS_DAYS,
    TOKEN_LONGEST_DAYS,
    Action,
    Person,
    Role,
)
from app.listening.errors import HttpError

Viewer = Annotated[Caller, Depends(requires(Action.LOOK))]
Auditor = Annotated[Caller, Depends(requires(Action.SEE_ACCESS))]
Admin = Annotated[Caller, Depends(requires(Action.MANAGE_PEOPLE))]


class PeopleBook(Protocol):
    """Where people are kept."""

    def all(self) -> list[Person]: ...
    def find(self, name: str) -> Person: ...
    def add(
        self, name: str, *, roles: Collection[Role], policy: str | None = None, email: str | None = None, os_user: str | None = None,
        by: str,
    ) -> Person: ...  # fmt: skip
    def change(
        self, name: str, *, by: str, roles: Collection[Role] | None = None, policy: Any = ..., email: Any = ..., os_user: Any = ...,  # noqa: ANN401 - None is a value
        disabled: bool | None = None,
    ) -> Person: ...  # fmt: skip
    def invite(self, name: str, *, lasts: timedelta, by: str) -> str: ...
    def sign_out(self, name: str, *, by: str) -> Person: ...


class TokenBook(Protocol):
    """Where tokens are kept."""

    def history(self) -> list[ApiKey]: ...
    def create(
        self, *, name: str, scopes: Iterable[Scope], policy: str | None = None, expires_at: datetime | None = None, by: str = "",
        of: Person | None = None,
    ) -> tuple[ApiKey, str]: ...  # fmt: skip
    def revoke(self, prefix: str, *, by: str = "") -> ApiKey: ...


class PersonBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody to add."""

    name: Name
    roles: Annotated[tuple[Role, ...], msgspec.Meta(min_length=1, max_length=10)]
    policy: Name | None = None
    """The one policy they are there for; all without it."""
    email: Name | None = None
    os_user: Name | None = None
    """Their user on the machine, who is then the same person where four eyes are counted."""


class ChangeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change; what is not named stays."""

    roles: Annotated[tuple[Role, ...], msgspec.Meta(min_length=1, max_length=10)] | msgspec.UnsetType = msgspec.UNSET
    policy: Name | msgspec.UnsetType | None = msgspec.UNSET
    email: Name | msgspec.UnsetType | None = msgspec.UNSET
    os_user: Name | msgspec.UnsetType | None = msgspec.UNSET
    disabled: bool | msgspec.UnsetType = msgspec.UNSET
    """Every session and token of theirs ends at once."""


class TokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token of one's own."""

    name: Name
    """What it is for."""
    policy: Name | None = None
    expires_days: Annotated[float, msgspec.Meta(gt=0, le=TOKEN_LONGEST_DAYS)] = TOKEN_LASTS_DAYS


class SignInBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody at a terminal."""

    name: Name
    password: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
    token_name: Name = "terminal"
    expires_days: Annotated[float, msgspec.Meta(gt=0, le=TOKEN_LONGEST_DAYS)] = TOKEN_LASTS_DAYS


class SignInDesk(Protocol):
    """Checks passwords."""

    def person_with(self, name: str, password: str) -> Person: ...


@dataclass(frozen=True, kw_only=True)
class PeopleRoom:
    """What these endpoints need."""

    people: PeopleBook
    keys: TokenBook
    desk: SignInDesk
    policies: Collection[str]
    address: str
    """Where links lead to."""
    clock: Callable[[], datetime] = utc_now
    porch: Porch = field(default_factory=Porch)


def router(room: PeopleRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["access"], responses=openapi.ERRORS)
    _everybody(made, room)
    _tokens(made, room)
    return made


def _everybody(made: APIRouter, room: PeopleRoom) -> None:
    @made.get("/v1/roles")
    async def roles(_caller: Viewer) -> Response:
        """Which role may do what: the table that everything here asks."""
        return json_response({action.value: sorted(allowed) for action, allowed in MAY.items()})

    @made.get("/v1/people")
    async def everybody(caller: Auditor) -> Response:
        """Who there is, with which roles; whoever is there for one policy sees who is there for it alone, as they do."""
        found = await asyncio.to_thread(room.people.all)
        return json_response({"people": [told(person) for person in found if caller.policy in (None, person.policy)]})

    @made.post("/v1/people", openapi_extra=openapi.body(PersonBody), status_code=201)
    async def add(caller: Admin, request: Request) -> Response:
        """Add somebody; `link` is shown this once."""
        body = await read_body(request, PersonBody)
        declared_policy(body.policy, room.policies)

        def act() -> tuple[Person, str]:
            person = room.people.add(
                body.name, roles=body.roles, policy=body.policy, email=body.email, os_user=body.os_user, by=caller.actor
            )
            return person, room.people.invite(person.name, lasts=INVITATION_LASTS, by=caller.actor)

        person, secret = await asyncio.to_thread(act)
        return json_response(told(person) | {"link": link_of(room.address, secret)}, 201)

    @made.patch("/v1/people/{name}", openapi_extra=openapi.body(ChangeBody))
    async def change(caller: Admin, name: str, request: Request) -> Response:
        """Give and take roles, name the policy, disable and enable."""
        body = await read_body(request, ChangeBody)
        changes = {field: value for field in body.__struct_fields__ if (value := getattr(body, field)) is not msgspec.UNSET}
        declared_policy(changes.get("policy"), room.policies)
        who = openapi.path_id(name)
        return json_response(told(await asyncio.to_thread(lambda: room.people.change(who, by=caller.actor, **changes))))

    @made.post("/v1/people/{name}/link", status_code=201)
    async def invite(caller: Admin, name: str) -> Response:
        """A new link to set a password with; links given before end, and with the password every session and token."""
        who = openapi.path_id(name)
        secret = await asyncio.to_thread(lambda: room.people.invite(who, lasts=INVITATION_LASTS, by=caller.actor))
        return json_response({"name": name, "link": link_of(room.address, secret)}, 201)

    @made.post("/v1/people/{name}/sign-out")
    async def sign_out(caller: Admin, name: str) -> Response:
        """End every session and token of theirs; they may sign in again."""
        who = openapi.path_id(name)
        return json_response(told(await asyncio.to_thread(lambda: room.people.sign_out(who, by=caller.actor))))


def _tokens(made: APIRouter, room: PeopleRoom) -> None:
    @made.get("/v1/me")
    async def me(request: Request) -> Response:
        """Who is asking, and what they may do."""
        access: Access = request.app.state.access
        caller = await access.identify(dict(request.scope["headers"]))
        visitor = caller.visitor()
        roles = sorted(caller.person.roles) if caller.person else []
        return json_response({"actor": caller.actor, "roles": roles, "policy": caller.policy, "may": sorted(visitor.actions)})

    @made.post("/v1/sign-in", openapi_extra=openapi.body(SignInBody), status_code=201)
    async def sign_in(request: Request) -> Response:
        """A token for a terminal, against name and password; its text is shown this once."""
        body = await read_body(request, SignInBody)
        person = await room.porch.take(lambda: room.desk.person_with(body.name, body.password))
        return await _made(request, person, body.token_name, body.expires_days, person.policy)

    @made.get("/v1/tokens")
    async def tokens(caller: Viewer) -> Response:
        """One's own tokens, never their secrets."""
        person = _somebody(caller)
        found = await asyncio.to_thread(room.keys.history)
        return json_response({"tokens": [_token(key, room.clock()) for key in found if key.person_id == person.id]})

    @made.post("/v1/tokens", openapi_extra=openapi.body(TokenBody), status_code=201)
    async def create(caller: Viewer, request: Request) -> Response:
        """A token of one's own; its text is shown this once."""
        person, body = _somebody(caller), await read_body(request, TokenBody)
        policy = declared_policy(visible_policy(body.policy, caller), room.policies)
        return await _made(request, person, body.name, body.expires_days, policy)

    async def _made(request: Request, person: Person, name: str, days: float, policy: str | None) -> Response:
        ends = room.clock() + timedelta(days=days)
        key, text = await asyncio.to_thread(
            lambda: room.keys.create(name=name, scopes=(), policy=policy, expires_at=ends, by=person.actor, of=person)
        )
        access: Access = request.app.state.access
        await access.reread()
        return json_response({**_token(key, room.clock()), "token": text}, 201)

    @made.delete("/v1/tokens/{prefix}")
    async def revoke(caller: Viewer, prefix: str) -> Response:
        """End a token of one's own."""
        person, wanted = _somebody(caller), openapi.path_id(prefix)
        found = await asyncio.to_thread(room.keys.history)
        if not any(key.prefix == wanted and key.person_id == person.id for key in found):
            raise NotFound(f"no token of yours begins with {wanted!r}: GET /v1/tokens lists them")
        return json_response(_token(await asyncio.to_thread(lambda: room.keys.revoke(wanted, by=person.actor)), room.clock()))


def link_of(address: str, secret: str) -> str:
    """Where somebody sets their password."""
    return f"{address}/console/welcome?link={secret}"


def told(person: Person) -> dict[str, Any]:
    """A person as others see them."""
    return {
        "name": person.name, "roles": sorted(person.roles), "policy": person.policy, "email": person.email, "os_user": person.os_user,
        "has_password": person.has_password, "provider": person.subject is not None, "created_at": person.created_at,
        "made_by": person.made_by, "disabled_at": person.disabled_at,
    }  # fmt: skip


def _token(key: ApiKey, now: datetime) -> dict[str, Any]:
    return {
        "prefix": key.prefix, "name": key.name, "policy": key.policy, "created_at": key.created_at, "expires_at": key.expires_at,
        "revoked_at": key.revoked_at, "usable": key.usable_at(now), "last_used_at": key.last_used_at,
    }  # fmt: skip


def _somebody(caller: Caller) -> Person:
    if caller.person is None:
        raise HttpError(403, "tokens belong to people, and this is a program's key or nobody: sign in as yourself", code="no_person")
    return caller.person
