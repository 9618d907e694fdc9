"""AReaL's reward protocol: `/rl/start_session`, `/rl/set_reward`, `/rl/end_session`.

A session is an episode. Its key is signed, not stored: chat requests under it belong to the episode, and that is all it may do.
The agent at work holds it, and who acts must not say how well: a reward is posted with the key that started the session, naming
`session_id` (or the interaction). It goes to the signal `reward` where the key's policy declares it, else it is a rating.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.dialects.counter import Counter, json_response
from app.api.dialects.naming import Signal
from app.api.telemetry.drafts import TargetId, ambiguous, decode
from app.domain.errors import BadRequest
from app.domain.ids import uuid7
from app.domain.telemetry.events import GATEWAY, ROLLOUT
from app.domain.telemetry.signals import ObservationName

SOURCE = "sdk:areal"
LastInference = Callable[[str, Iterable[str]], Awaitable[str | None]]
"""The newest inference of an episode under any of some policies."""


class StartSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Begin an episode. `api_key` is AReaL's way of choosing the session's key; ours are signed, so it is ignored."""

    task_id: Annotated[str, msgspec.Meta(max_length=200)]
    api_key: str | None = None
    rollout: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,60}$")] | None = None
    """The taskset, where the agent is at practice: its turns are labelled, and no live gate, service level or exposure hears of them."""


class SetReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reward an interaction of any session; the last one of `session_id` where none is named."""

    reward: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    interaction_id: TargetId | None = None
    session_id: TargetId | None = None


class EndSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End the episode."""

    session_id: TargetId


_start, _reward, _end = (msgspec.json.Decoder(kind) for kind in (StartSession, SetReward, EndSession))


def router(counter: Counter, last_inference: LastInference) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["dialects"], responses=openapi.ERRORS)

    @made.post("/rl/start_session", openapi_extra=openapi.body(StartSession))
    async def start(request: Request) -> Response:
        """Begin an episode; its key goes into the chat requests."""
        async with counter.body(request) as (caller, raw):
            body: StartSession = decode(_start, raw)
            episode_id = uuid7()
            source = GATEWAY if body.rollout is None else f"{ROLLOUT}{body.rollout}"
            key, ends = counter.access.session_token(episode_id, caller, source=source)
            return json_response({"session_id": episode_id, "api_key": key, "expires_at": ends.isoformat()})

    @made.post("/rl/set_reward", openapi_extra=openapi.body(SetReward))
    async def reward(request: Request) -> Response:
        """Reward an interaction of the episode, or correct its reward."""
        async with counter.body(request) as (caller, raw):
            body: SetReward = decode(_reward, raw)
            if body.interaction_id is None and body.session_id is None:
                raise BadRequest("name the session in session_id, or one answer in interaction_id", param="session_id")
            policies = counter.door.desk.policies if caller.policy is None else (caller.policy,)
            target = body.interaction_id or await last_inference(body.session_id or "", policies)
            named = {"reward" in declared for declared in counter.door.desk.vocabularies(caller.policy)}
            if len(named) > 1:
                raise ambiguous("reward")
            signal = Signal(
                id=f"rl:{target or body.session_id}", key="reward" if True in named else ObservationName.RATING, value=body.reward,
                inference_id=target, episode_id=body.session_id if target is None else None, occurred_at=None, source=SOURCE,
            )  # fmt: skip
            await counter.put(signal, caller)
            return json_response({"message": "success", "interaction_id": target})

    @made.post("/rl/end_session", openapi_extra=openapi.body(EndSession))
    async def end(request: Request) -> Response:
        """End the episode; its turns are labelled when their wait is over, as all are."""
        async with counter.body(request) as (_, raw):
            body: EndSession = decode(_end, raw)
            return json_response({"message": "success", "session_id": body.session_id})

    return made
