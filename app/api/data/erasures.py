"""Forgetting people over HTTP, as `ratchet erase` asks for it: forget somebody, and look into every place for what is left.

It is about every policy at once, so nobody who is there for one policy may. The person's id travels in a body, never in an address.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.asking import Note, Text, read_body, signer
from app.api.dialects.counter import json_response
from app.api.entry.access import Caller, requires
from app.domain.errors import BadRequest
from app.domain.people import Action
from app.domain.telemetry.streams import ErasureReport
from app.domain.views.pages import Trace

Eraser = Annotated[Caller, Depends(requires(Action.ERASE))]


class PersonBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody: exactly one of the two."""

    actor: Text | None = None
    """Their id as the product sends it."""
    pseudonym: Text | None = None
    """The 32 hex digits under which they are stored."""


@dataclass(frozen=True, kw_only=True)
class ErasureRoom:
    """What these endpoints need."""

    pseudonym_of: Callable[..., str]
    """Of `actor` or `pseudonym`; raises `BadInput` where it is neither or both."""
    forget: Callable[..., ErasureReport]
    """Everything of `pseudonym`, as asked `by` somebody."""
    left_of: Callable[[str], Sequence[Trace]]
    sweep: Callable[[], int]
    note: Note


def router(room: ErasureRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(prefix="/v1/erasures", tags=["data"], responses=openapi.ERRORS)

    @made.post("", openapi_extra=openapi.body(PersonBody))
    async def forget(caller: Eraser, request: Request) -> Response:
        """Forget somebody. May be repeated: what came since is removed as well."""
        body, who = await read_body(request, PersonBody), signer(request, caller)
        report = await asyncio.to_thread(lambda: room.forget(_named(room, body), by=who))
        return json_response(dict(vars(report)))

    @made.post("/verify", openapi_extra=openapi.body(PersonBody))
    async def verify(_caller: Eraser, request: Request) -> Response:
        """Every place that was looked into, with how much of them is left there; it reads everything."""
        body = await read_body(request, PersonBody)

        def look() -> dict[str, Any]:
            pseudonym = _named(room, body)
            found = room.left_of(pseudonym)
            return {"pseudonym": pseudonym, "places": [{"place": t.place, "found": t.found, "cure": t.cure} for t in found]}

        return json_response(await asyncio.to_thread(look))

    @made.post("/sweep")
    async def sweep(caller: Eraser, request: Request) -> Response:
        """Remove segment files that no row knows, left by kills."""
        who = signer(request, caller)

        def act() -> int:
            removed = room.sweep()
            room.note(actor=who, action="segments.swept", subject="segments", detail={"removed": removed})
            return removed

        return json_response({"removed": await asyncio.to_thread(act)})

    return made


def _named(room: ErasureRoom, body: PersonBody) -> str:
    if (body.actor is None) == (body.pseudonym is None):
        raise BadRequest("name the person with `actor`, or with `pseudonym`", param="actor")
    return room.pseudonym_of(actor=body.actor, pseudonym=body.pseudonym)
