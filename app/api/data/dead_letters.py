"""Dead letters over HTTP: listed, shown, replayed once their cause is mended, deleted when that is long ago.

Nobody knows which policy a record that made no sense was meant for, so whoever is there for one policy alone sees none of them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.asking import Limit, Note, Text, read_body, require_every_policy, signer
from app.api.dialects.counter import json_response
from app.api.entry.access import Caller, requires
from app.domain.people import Action
from app.domain.ports import Clock
from app.domain.telemetry.dead_letters import Letters, letter_of, replay, told, told_whole
from app.domain.telemetry.streams import EffectStore

WHAT = "dead letters are of no policy"
Viewer = Annotated[Caller, Depends(requires(Action.LOOK))]
Mender = Annotated[Caller, Depends(requires(Action.MEND_DATA))]
Words = Annotated[str | None, Query(max_length=2000)]
After = Annotated[int, Query(ge=0, le=2**53)]
LetterId = Annotated[int, Path(ge=0, le=2**53)]


class ReplayBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which to replay: by id, by words of their reason, or all that wait."""

    ids: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**53)], ...], msgspec.Meta(max_length=1000)] = ()
    reason: Text | None = None
    after: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    """`after` of the answer before: one request replays a page."""


class PurgeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which to delete."""

    days: Annotated[float, msgspec.Meta(ge=0, le=36_500)]
    """Age since their replay."""


class LetterBook(Letters, Protocol):
    """Where they are kept."""

    def purge(self, *, before: datetime) -> int: ...


@dataclass(frozen=True, kw_only=True)
class LetterRoom:
    """What these endpoints need."""

    letters: LetterBook
    store: Callable[[], EffectStore]
    """Opened by the first replay: most services never need the trajectory store."""
    note: Note
    clock: Clock


def router(room: LetterRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(prefix="/v1/dead-letters", tags=["data"], responses=openapi.ERRORS)

    @made.get("")
    async def letters(caller: Viewer, reason: Words = None, replayed: bool = False, after: After = 0, limit: Limit = 100) -> Response:
        """Those that wait, oldest first, without what they say; with `replayed` all of them."""
        require_every_policy(caller, WHAT)
        found = await asyncio.to_thread(lambda: room.letters.find(reason=reason, pending=not replayed, after=after, limit=limit))
        return json_response({"data": [told(stored) for stored in found]})

    @made.get("/{id_}")
    async def letter(caller: Mender, id_: LetterId) -> Response:
        """One of them whole."""
        require_every_policy(caller, WHAT)
        return json_response(await asyncio.to_thread(lambda: told_whole(letter_of(room.letters, id_))))

    @made.post("/replay", openapi_extra=openapi.body(ReplayBody))
    async def replay_(caller: Mender, request: Request) -> Response:
        """Apply a page of them; `after` is null behind the last page, and `still` says why the others make no sense even now."""
        require_every_policy(caller, WHAT)
        body, who = await read_body(request, ReplayBody), signer(request, caller)

        def act() -> dict[str, Any]:
            done = replay(room.letters, room.store(), ids=body.ids, reason=body.reason, after=body.after, clock=room.clock)
            detail = {"applied": done.applied, "still": len(done.still), "ids": list(body.ids), "reason": body.reason}
            room.note(actor=who, action="dead_letters.replay", subject="dead letters", detail=detail)
            return {"applied": done.applied, "still": {str(id_): why for id_, why in done.still.items()}, "after": done.after}

        return json_response(await asyncio.to_thread(act))

    @made.post("/purge", openapi_extra=openapi.body(PurgeBody))
    async def purge(caller: Mender, request: Request) -> Response:
        """Delete those that were replayed long ago."""
        require_every_policy(caller, WHAT)
        body, who = await read_body(request, PurgeBody), signer(request, caller)

        def act() -> int:
            deleted = room.letters.purge(before=room.clock() - timedelta(days=body.days))
            room.note(actor=who, action="dead_letters.purge", subject="dead letters", detail={"deleted": deleted, "days": body.days})
            return deleted

        return json_response({"deleted": await asyncio.to_thread(act)})

    return made
