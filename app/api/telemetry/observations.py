"""`GET /v1/observations`: what was accepted about an answer or an episode, and what became of it."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from app.api import openapi
from app.api.entry.access import Caller, requires
from app.domain.errors import BadRequest
from app.domain.people import Action
from app.domain.ports import Ledger
from app.domain.telemetry.events import Heard

Target = Annotated[str | None, Query(min_length=1, max_length=64)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Reader = Annotated[Caller, Depends(requires(Action.LOOK))]


def router(ledger: Ledger) -> APIRouter:
    """The endpoint."""
    made = APIRouter(tags=["feedback"], responses=openapi.ERRORS)

    @made.get("/v1/observations")
    async def observations(caller: Reader, inference_id: Target = None, episode_id: Target = None, limit: Limit = 100) -> Response:
        """Observations of one turn or episode, oldest first; a key for one policy reads those that carry it."""
        if (inference_id is None) == (episode_id is None):
            raise BadRequest("set exactly one of inference_id and episode_id", param="inference_id")
        turns = [] if inference_id is None else [openapi.path_id(inference_id)]
        episodes = [] if episode_id is None else [openapi.path_id(episode_id)]
        heard = await asyncio.to_thread(lambda: ledger.about(inference_ids=turns, episode_ids=episodes, policy=caller.policy, most=limit))
        return Response(msgspec.json.encode({"data": [_plain(h) for h in heard]}), media_type="application/json")

    return made


def _plain(heard: Heard) -> dict[str, Any]:
    """Without the person: pseudonyms are not for reading back."""
    fields = msgspec.structs.asdict(heard.observation)
    return {name: value for name, value in fields.items() if name != "actor"} | {"status": heard.status, "retracted": heard.retracted}
