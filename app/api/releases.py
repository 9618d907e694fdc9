"""Releases over HTTP: look, approve, reject, abort, roll back; the anchor, the circuit breaker and the audit chain.

Who acts is the person whose token or session it is (`user:<name>`); a program's key stops and rolls back as `service:<name>` and decides
nothing. On an open loopback deployment the caller says who it is, which proves nothing: header `X-Ratchet-User` or `approver` in the body.
So nobody there is one of two people, and what nobody signs is done by `user:anonymous`, who may stop things and approve nothing.

An act may name what it rests on: the pointer's generation and the evidence as they were shown, and a `request_id` of its own, which makes
asking again after a lost answer safe: the answer then says `already`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.asking import NOBODY, Limit, Name, Text, read_body, signer, visible_policy
from app.api.dialects.counter import json_response
from app.api.entry.access import ANONYMOUS, Caller, requires
from app.domain.errors import BadRequest, DoneAlready, NotFound, Refused
from app.domain.people import Action
from app.domain.release.by_people import BY_PEOPLE, BY_TRAFFIC
from app.domain.release.releases import AuditEntry, Release, ReleaseState
from app.release.acts import Desk
from app.release.basis import Basis

Reader = Annotated[Caller, Depends(requires(Action.LOOK))]
Auditor = Annotated[Caller, Depends(requires(Action.READ_AUDIT))]
Generation = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
PolicyQuery = Annotated[str | None, Query(max_length=200)]


class ApproveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A yes to exactly this evidence."""

    evidence_digest: Text
    """`evidence_digest` of the release as it was shown to the approver."""
    reason: Text | None = None
    approver: Name | None = None
    """Who approves, where nothing else says so."""
    pointer_generation: Generation | None = None
    request_id: Name | None = None


class ActBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and on what; who where nothing else says so."""

    reason: Text
    approver: Name | None = None
    evidence_digest: Text | None = None
    """Of the release as it was shown; refused where it is another by now."""
    pointer_generation: Generation | None = None
    """`generation` of the policy's pointer as it was shown; refused, with what happened since, where it moved on."""
    request_id: Name | None = None
    """A name of the caller's own for this request: sent again, it is done already."""


class RollBackBody(ActBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same, and where to."""

    to: Text | None = None
    """Digest of the version that takes over; the newest good one where nothing is said."""


class ReleaseBook(Protocol):
    """Releases to list."""

    def list(self, *, policy: str | None = None, states: Any = (), limit: int = 100) -> list[Release]: ...  # noqa: ANN401 - a collection
    def find(self, release_id: str) -> Release: ...


class Views(Protocol):
    """What is shown about them."""

    def release(self, release_id: str) -> dict[str, Any]: ...
    def policies(self) -> list[str]: ...
    def slots(self, *, policy: str | None, limit: int) -> list[dict[str, Any]]: ...
    def deployment(self, policy: str) -> dict[str, Any]: ...
    def audit(self, *, subject: str | None = None, policy: str | None = None, newest: int = 100) -> list[AuditEntry]: ...
    def verify(self, *, seen: tuple[int, str] | None = None) -> Any: ...  # noqa: ANN401 - plain data for the answer


@dataclass(frozen=True, kw_only=True)
class ReleaseRoom:
    """What these endpoints need."""

    desk: Desk
    releases: ReleaseBook
    views: Views


def router(room: ReleaseRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["releases"], responses=openapi.ERRORS)
    _reading(made, room)
    _acting(made, room)
    _governing(made, room)
    return made


def _reading(made: APIRouter, room: ReleaseRoom) -> None:
    @made.get("/v1/policies")
    async def policies(caller: Reader) -> Response:
        """Policies with a deployment."""
        found = await asyncio.to_thread(room.views.policies)
        return json_response({"data": [name for name in found if caller.policy in (None, name)]})

    @made.get("/v1/slots")
    async def slots(caller: Reader, policy: PolicyQuery = None, limit: Limit = 48) -> Response:
        """The newest slots of the loop, newest first, and what became of each."""
        wanted = visible_policy(policy, caller)
        return json_response({"data": await asyncio.to_thread(lambda: room.views.slots(policy=wanted, limit=limit))})

    @made.get("/v1/releases")
    async def releases(caller: Reader, policy: PolicyQuery = None, state: PolicyQuery = None, limit: Limit = 50) -> Response:
        """Releases, newest first."""
        states = () if state is None else (_state(state),)
        wanted = visible_policy(policy, caller)
        found = await asyncio.to_thread(lambda: room.releases.list(policy=wanted, states=states, limit=limit))
        return json_response({"data": [_plain(release) for release in found]})

    @made.get("/v1/releases/{release_id}")
    async def release(caller: Reader, release_id: str) -> Response:
        """One release: its way, every gate's newest answer with its numbers, the approvals that stand, the alarms about it."""
        await _visible_release(room, release_id, caller)
        return json_response(await asyncio.to_thread(room.views.release, release_id))

    @made.get("/v1/policies/{policy}/deployment")
    async def deployment(caller: Reader, policy: str) -> Response:
        """What is live, what was, what is quarantined, whether promotions are frozen, and every alarm with its end."""
        visible_policy(policy, caller)
        return json_response(await asyncio.to_thread(room.views.deployment, policy))

    @made.get("/v1/audit")
    async def audit(caller: Auditor, subject: PolicyQuery = None, limit: Limit = 100) -> Response:
        """The newest entries of the audit chain; a key for one policy reads those about it."""
        entries = await asyncio.to_thread(lambda: room.views.audit(subject=subject, policy=caller.policy, newest=limit))
        return json_response({"data": [dict(vars(entry)) for entry in entries]})

    @made.get("/v1/audit/verify")
    async def verify(_caller: Auditor) -> Response:
        """Recompute the audit chain; `problem` is null for an intact one."""
        return json_response(dict(vars(await asyncio.to_thread(room.views.verify))))


def _acting(made: APIRouter, room: ReleaseRoom) -> None:
    @made.post("/v1/releases/{release_id}/approve", openapi_extra=openapi.body(ApproveBody), responses={409: {}})
    async def approve(caller: Annotated[Caller, Depends(requires(Action.APPROVE))], release_id: str, request: Request) -> Response:
        """Say yes to a release that is READY, bound to the evidence that was looked at."""
        body = await read_body(request, ApproveBody)
        who = _person(request, caller, body.approver)
        found = await _visible_release(room, release_id, caller)
        desk = room.desk.on(_basis(body, caller, who, Action.APPROVE, release_id))
        return await _done(room, found, lambda: desk.approve(release_id, approver=who, evidence=body.evidence_digest, reason=body.reason))

    @made.post("/v1/releases/{release_id}/reject", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def reject(caller: Annotated[Caller, Depends(requires(Action.REJECT))], release_id: str, request: Request) -> Response:
        """Say no, with a reason."""
        body = await read_body(request, ActBody)
        who = _person(request, caller, body.approver)
        found = await _visible_release(room, release_id, caller)
        desk = room.desk.on(_basis(body, caller, who, Action.REJECT, release_id))
        return await _done(room, found, lambda: desk.reject(release_id, approver=who, reason=body.reason))

    @made.post("/v1/releases/{release_id}/abort", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def abort(caller: Annotated[Caller, Depends(requires(Action.ABORT))], release_id: str, request: Request) -> Response:
        """Stop a release that is not live yet."""
        body = await read_body(request, ActBody)
        who = signer(request, caller, body.approver)
        found = await _visible_release(room, release_id, caller)
        desk = room.desk.on(_basis(body, caller, who, Action.ABORT, release_id))
        return await _done(room, found, lambda: desk.abort(release_id, actor=who, reason=body.reason))

    @made.post("/v1/releases/{release_id}/rollback", openapi_extra=openapi.body(RollBackBody), responses={409: {}})
    async def rollback(caller: Annotated[Caller, Depends(requires(Action.ROLL_BACK))], release_id: str, request: Request) -> Response:
        """Take a version back, whatever its state, and quarantine it."""
        body = await read_body(request, RollBackBody)
        who = signer(request, caller, body.approver)
        found = await _visible_release(room, release_id, caller)
        desk = room.desk.on(_basis(body, caller, who, Action.ROLL_BACK, release_id))
        return await _done(room, found, lambda: desk.roll_back(release_id, actor=who, reason=body.reason, to=body.to))


def _governing(made: APIRouter, room: ReleaseRoom) -> None:
    @made.post("/v1/policies/{policy}/anchor", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def anchor(caller: Annotated[Caller, Depends(requires(Action.RENEW_ANCHOR))], policy: str, request: Request) -> Response:
        """Make the champion the anchor that later versions are held against."""
        body = await read_body(request, ActBody)
        who = _person(request, caller, body.approver)
        visible_policy(policy, caller)
        desk = room.desk.on(_basis(body, caller, who, Action.RENEW_ANCHOR, policy))
        return await _told(lambda: dict(vars(desk.renew_anchor(policy, actor=who, reason=body.reason))))

    @made.post("/v1/policies/{policy}/unfreeze", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def unfreeze(caller: Annotated[Caller, Depends(requires(Action.UNFREEZE))], policy: str, request: Request) -> Response:
        """One of the two votes that free promotions again, and end an open incident."""
        body = await read_body(request, ActBody)
        who = signer(request, caller, body.approver)
        visible_policy(policy, caller)
        desk = room.desk.on(_basis(body, caller, who, Action.UNFREEZE, policy))
        return await _told(lambda: {"free": desk.unfreeze(policy, actor=who)})

    @made.post("/v1/policies/{policy}/quarantine/{digest}/lift", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def lift(caller: Annotated[Caller, Depends(requires(Action.LIFT))], policy: str, digest: str, request: Request) -> Response:
        """One of the two votes that lift a version's quarantine; it may serve again, and rollbacks may go to it."""
        body = await read_body(request, ActBody)
        who = signer(request, caller, body.approver)
        visible_policy(policy, caller)
        desk = room.desk.on(_basis(body, caller, who, Action.LIFT, policy))
        return await _told(lambda: {"lifted": desk.lift(policy, digest, actor=who, reason=body.reason)})

    @made.post("/v1/policies/{policy}/versions/{digest}/pin", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def pin(caller: Annotated[Caller, Depends(requires(Action.PIN))], policy: str, digest: str, request: Request) -> Response:
        """Keep a version's weights until it is unpinned: requests may name it and rollbacks may go to it. No engine holds it for that."""
        body = await read_body(request, ActBody)
        who = signer(request, caller, body.approver)
        visible_policy(policy, caller)
        desk = room.desk.on(_basis(body, caller, who, "pin", openapi.path_id(digest)))
        return await _told(lambda: {"pinned": desk.pin(policy, digest, actor=who, reason=body.reason) is None})

    @made.post("/v1/policies/{policy}/versions/{digest}/unpin", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def unpin(caller: Annotated[Caller, Depends(requires(Action.PIN))], policy: str, digest: str, request: Request) -> Response:
        """From now on its weights stay only while something else needs them."""
        body = await read_body(request, ActBody)
        who = signer(request, caller, body.approver)
        visible_policy(policy, caller)
        desk = room.desk.on(_basis(body, caller, who, "unpin", openapi.path_id(digest)))
        return await _told(lambda: {"pinned": desk.unpin(policy, digest, actor=who, reason=body.reason) is not None})


def _basis(body: ApproveBody | ActBody, caller: Caller, who: str, act: str, subject: str) -> Basis:
    """What the act rests on. A release's evidence is looked at for acts on a release; approving looks at it by itself."""
    evidence = body.evidence_digest if act in (Action.REJECT, Action.ABORT, Action.ROLL_BACK) else None
    return Basis(
        actor=who, proven=caller is not ANONYMOUS, act=act, subject=subject, generation=body.pointer_generation, evidence=evidence,
        request_id=body.request_id,
    )  # fmt: skip


async def _done(room: ReleaseRoom, found: Release, act: Callable[[], Release]) -> Response:
    """The release after the act; where the same request was carried out before, as it is now, with `already`."""
    try:
        return json_response(_plain(await asyncio.to_thread(act)))
    except DoneAlready as error:
        now = await asyncio.to_thread(room.releases.find, found.id)
        return json_response({**_plain(now), "already": str(error)})


async def _told(act: Callable[[], dict[str, Any]]) -> Response:
    try:
        return json_response(await asyncio.to_thread(act))
    except DoneAlready as error:
        return json_response({"already": str(error)})


def _person(request: Request, caller: Caller, said: str | None) -> str:
    """Who says yes or no. Raises `Refused` where nobody is named."""
    who = signer(request, caller, said)
    if who == NOBODY:
        raise Refused("nobody is named: send the header X-Ratchet-User, or a token of your own (`ratchet login`)")
    return who


def _state(text: str) -> ReleaseState:
    try:
        return ReleaseState(text.upper())
    except ValueError as error:
        known = ", ".join(state.value for state in ReleaseState)
        raise BadRequest(f"there is no state {text!r}: use one of {known}", param="state") from error


async def _visible_release(room: ReleaseRoom, release_id: str, caller: Caller) -> Release:
    found = await asyncio.to_thread(room.releases.find, release_id)
    if caller.policy not in (None, found.policy):
        raise NotFound(f"there is no release {release_id}: `ratchet release list` shows those there are")
    return found


def _plain(release: Release) -> dict[str, Any]:
    plain = {name: value for name, value in vars(release).items() if name != "config"}
    return plain | {"judged_by": BY_TRAFFIC if release.config.get("by_people") is None else BY_PEOPLE}
