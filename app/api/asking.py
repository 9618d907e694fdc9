"""What endpoints for people have in common: the body they read, who signs, and which policies whoever asks may speak of."""

from collections.abc import Collection
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import Query
from starlette.requests import Request

from app.api.entry.access import ANONYMOUS, Caller
from app.domain.errors import BadRequest
from app.listening.bodies import read_json
from app.listening.errors import HttpError

NOBODY = "user:anonymous"
MOST_BYTES = 64 * 1024
"""Of a body: names, a reason, a rule set."""
T = TypeVar("T")
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=150)]
Limit = Annotated[int, Query(ge=1, le=1000)]


class Note(Protocol):
    """Writes an entry of the audit chain."""

    def __call__(self, *, actor: str, action: str, subject: str, detail: dict[str, Any]) -> object: ...


async def read_body(request: Request, kind: type[T]) -> T:
    """The body of an act. Raises `BadRequest`."""
    body = await read_json(request, most=MOST_BYTES)
    try:
        found = msgspec.json.decode(body, type=kind)
        if b"\\u0000" in body and _has_nul(msgspec.json.decode(body)):
            raise BadRequest("the body has a NUL character (\\u0000) in it: no database takes one")
        return found
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body: {error}") from error


def _has_nul(value: Any) -> bool:  # noqa: ANN401 - whatever JSON holds
    match value:
        case str():
            return "\x00" in value
        case dict():
            return any(_has_nul(part) for pair in value.items() for part in pair)
        case list():
            return any(map(_has_nul, value))
        case _:
            return False


def signer(request: Request, caller: Caller, said: str | None = None) -> str:
    """Who acts: the caller; on an open loopback deployment whoever is named, in the body or by `X-Ratchet-User`, which proves nothing.

    Raises `HttpError` 403 where the body names somebody else than the caller.
    """
    if caller is not ANONYMOUS:
        if said is not None and f"user:{said.removeprefix('user:')}" != caller.actor:
            raise HttpError(403, f"this is {caller.actor}, not {said}", code="wrong_person", param="approver")
        return caller.actor
    named = said or request.headers.get("x-ratchet-user", "").strip()
    return f"user:{named.removeprefix('user:')[:150]}" if named else NOBODY


def visible_policy(policy: str | None, caller: Caller) -> str | None:
    """The policy that is meant: a key that is good for one policy speaks of that one only. Raises `HttpError` 403."""
    if caller.policy is not None and policy not in (None, caller.policy):
        raise HttpError(403, f"this key is for the policy {caller.policy!r} only", code="wrong_policy", param="policy")
    return caller.policy or policy


def declared_policy(policy: str | None, declared: Collection[str]) -> str | None:
    """The same policy, where there is one of that name. Raises `BadRequest`."""
    if policy is not None and policy not in declared:
        raise BadRequest(f"no policy is named {policy!r} (declared: {', '.join(sorted(declared))})", param="policy", code="unknown_policy")
    return policy


def require_every_policy(caller: Caller, what: str) -> None:
    """Refuse whoever is there for one policy alone. Raises `HttpError` 403."""
    if caller.policy is not None:
        raise HttpError(403, f"{what}, and this is for {caller.policy!r} only: ask somebody who sees every policy", code="wrong_policy")
