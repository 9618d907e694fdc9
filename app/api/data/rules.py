"""What turns are paid for, over HTTP: a rule set is proposed here, and put in force by the labeller that reads it.

Only a labeller knows the terms that a rule set names, so it decides whether the rule set can be scored by: what it refuses is told with
the reason, and what was in force before stays so.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.asking import Limit, Name, declared_policy, read_body, signer, visible_policy
from app.api.dialects.counter import json_response
from app.api.entry.access import Caller, requires
from app.domain.ids import uuid7
from app.domain.learning.rule_sets import MOST_CHARS, Activation, Proposal
from app.domain.people import Action
from app.domain.ports import Clock

Viewer = Annotated[Caller, Depends(requires(Action.LOOK))]
Changer = Annotated[Caller, Depends(requires(Action.CHANGE_RULES))]


class RulesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule set to put in force."""

    toml: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_CHARS)]
    request_id: Name | None = None
    """A name of the caller's own: sent again, it is the same proposal."""


class RuleBook(Protocol):
    """Where rule sets are kept."""

    def propose(self, proposal: Proposal) -> Proposal: ...
    def proposals(self, policy: str, *, newest: int = 20) -> list[Proposal]: ...
    def history(self, policy: str) -> list[Activation]: ...


@dataclass(frozen=True, kw_only=True)
class RuleRoom:
    """What these endpoints need."""

    rules: RuleBook
    policies: Collection[str]
    clock: Clock


def router(room: RuleRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(prefix="/v1/policies/{policy}/rules", tags=["data"], responses=openapi.ERRORS)

    @made.get("")
    async def rules(caller: Viewer, policy: str, limit: Limit = 20) -> Response:
        """What was ever in force and what was proposed, newest first."""
        declared_policy(visible_policy(policy, caller), room.policies)

        def read() -> dict[str, Any]:
            history, proposals = room.rules.history(policy), room.rules.proposals(policy, newest=limit)
            return {"history": [dict(vars(entry)) for entry in history[:limit]], "proposals": [_told(one) for one in proposals]}

        return json_response(await asyncio.to_thread(read))

    @made.post("", openapi_extra=openapi.body(RulesBody), status_code=202)
    async def propose(caller: Changer, policy: str, request: Request) -> Response:
        """Propose a rule set; the labeller puts it in force or says what is wrong with it, within seconds. Labels that exist stay."""
        body, who = await read_body(request, RulesBody), signer(request, caller)
        declared_policy(visible_policy(policy, caller), room.policies)
        asked = Proposal(id=body.request_id or uuid7(), policy=policy, toml=body.toml, proposed_by=who, proposed_at=room.clock())
        return json_response(_told(await asyncio.to_thread(lambda: room.rules.propose(asked))), 202)

    return made


def _told(proposal: Proposal) -> dict[str, Any]:
    return {name: value for name, value in vars(proposal).items() if name != "toml"} | {"state": proposal.state}
