"""Releases over HTTP: look, approve, reject, abort, roll back; the anchor, the circuit breaker, the audit chain and webhooks.

Who acts is the key's name (`user:<name>`). Without any key, which only a loopback address may be, the caller says who it is: header
`X-Ratchet-User` or `approver` in the body; what nobody signs is done by `user:anonymous`, who may stop things and approve nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from app.api import openapi
from app.api.access import ANONYMOUS, Caller, requires
from app.api.errors import HttpError
from app.api.intake import read_json
from app.domain.access import Scope
from app.domain.errors import BadRequest, NotFound, Refused
from app.domain.ids import utc_now
from app.domain.releases import AuditEntry, Pointer, Release, ReleaseState
from app.release.webhooks import check_url, new_secret

NOBODY = "user:anonymous"
MOST_BYTES = 64 * 1024
"""Of a body: names and a reason."""
T = TypeVar("T")
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=150)]
Reader = Annotated[Caller, Depends(requires(Scope.READ))]
Operator = Annotated[Caller, Depends(requires(Scope.RELEASE))]
Admin = Annotated[Caller, Depends(requires(Scope.ADMIN))]
PolicyQuery = Annotated[str | None, Query(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=1000)]


class ApproveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A yes to exactly this evidence."""

    evidence_digest: Text
    """`evidence_digest` of the release as it was shown to the approver."""
    reason: Text | None = None
    approver: Name | None = None
    """Who approves, where no API key says so."""


class ActBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and who where no API key says so."""

    reason: Text
    approver: Name | None = None


class WebhookBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of release events."""

    url: Text
    policy: Name | None = None
    events: tuple[Name, ...] = ()
    """Prefixes of event types, such as `release.champion`; all where empty."""


class ReleaseBook(Protocol):
    """Releases to list."""

    def list(self, *, policy: str | None = None, states: Any = (), limit: int = 100) -> list[Release]: ...  # noqa: ANN401 - a collection
    def find(self, release_id: str) -> Release: ...


class Views(Protocol):
    """What is shown about them."""

    def release(self, release_id: str) -> dict[str, Any]: ...
    def policies(self) -> list[str]: ...
    def deployment(self, policy: str) -> dict[str, Any]: ...
    def audit(self, *, subject: str | None = None, policy: str | None = None, newest: int = 100) -> list[AuditEntry]: ...
    def verify(self, *, seen: tuple[int, str] | None = None) -> Any: ...  # noqa: ANN401 - plain data for the answer


class Desk(Protocol):
    """What people may do."""

    def approve(self, release_id: str, *, approver: str, evidence: str, reason: str | None = None) -> Release: ...
    def reject(self, release_id: str, *, approver: str, reason: str) -> Release: ...
    def abort(self, release_id: str, *, actor: str, reason: str, quarantine: bool = False) -> Release: ...
    def roll_back(self, release_id: str, *, actor: str, reason: str, to: str | None = None) -> Release: ...
    def renew_anchor(self, policy: str, *, actor: str, reason: str = ...) -> Pointer: ...
    def unfreeze(self, policy: str, *, actor: str) -> bool: ...
    def lift(self, policy: str, digest: str, *, actor: str, reason: str) -> bool: ...


class Webhooks(Protocol):
    """Receivers."""

    def add(self, *, policy: str | None, url: str, secret: str, events: Any, now: Any) -> Any: ...  # noqa: ANN401 - `app.db.webhooks`
    def all(self) -> list[Any]: ...
    def find(self, webhook_id: str) -> Any: ...  # noqa: ANN401 - `app.db.webhooks.Webhook`
    def set_secrets(self, webhook_id: str, secrets: list[str]) -> Any: ...  # noqa: ANN401 - `app.db.webhooks.Webhook`
    def disable(self, webhook_id: str, *, now: Any) -> Any: ...  # noqa: ANN401 - `app.db.webhooks.Webhook`
    def deliveries(self, webhook_id: str, *, limit: int = 100) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class ReleaseRoom:
    """What these endpoints need."""

    desk: Desk
    releases: ReleaseBook
    views: Views
    webhooks: Webhooks
    allow_loopback: bool
    """Whether webhooks may go to this machine: on a loopback deployment only."""


def router(room: ReleaseRoom) -> APIRouter:
    """The endpoints."""
    made = APIRouter(tags=["releases"], responses=openapi.ERRORS)
    _reading(made, room)
    _acting(made, room)
    _governing(made, room)
    _webhooks(made, room)
    return made


def _reading(made: APIRouter, room: ReleaseRoom) -> None:
    @made.get("/v1/releases")
    async def releases(caller: Reader, policy: PolicyQuery = None, state: PolicyQuery = None, limit: Limit = 50) -> Response:
        """Releases, newest first."""
        states = () if state is None else (_state(state),)
        wanted = _visible(policy, caller)
        found = await asyncio.to_thread(lambda: room.releases.list(policy=wanted, states=states, limit=limit))
        return _json({"data": [_plain(release) for release in found]})

    @made.get("/v1/releases/{release_id}")
    async def release(caller: Reader, release_id: str) -> Response:
        """One release: its way, every gate's newest answer with its numbers, the approvals that stand, the alarms about it."""
        await _require_visible(room, release_id, caller)
        return _json(await asyncio.to_thread(room.views.release, release_id))

    @made.get("/v1/policies/{policy}/deployment")
    async def deployment(caller: Reader, policy: str) -> Response:
        """What is live, what was, what is quarantined, whether promotions are frozen, and every alarm with its end."""
        _require_policy(policy, caller)
        return _json(await asyncio.to_thread(room.views.deployment, policy))

    @made.get("/v1/audit")
    async def audit(caller: Reader, subject: PolicyQuery = None, limit: Limit = 100) -> Response:
        """The newest entries of the audit chain; a key for one policy reads those about it."""
        entries = await asyncio.to_thread(lambda: room.views.audit(subject=subject, policy=caller.policy, newest=limit))
        return _json({"data": [dict(vars(entry)) for entry in entries]})

    @made.get("/v1/audit/verify")
    async def verify(_caller: Reader) -> Response:
        """Recompute the audit chain; `problem` is null for an intact one."""
        return _json(dict(vars(await asyncio.to_thread(room.views.verify))))


def _acting(made: APIRouter, room: ReleaseRoom) -> None:
    @made.post("/v1/releases/{release_id}/approve", openapi_extra=openapi.body(ApproveBody), responses={409: {}})
    async def approve(caller: Operator, release_id: str, request: Request) -> Response:
        """Say yes to a release that is READY, bound to the evidence that was looked at."""
        body = await _read(request, ApproveBody)
        who = _person(request, caller, body.approver)
        await _require_visible(room, release_id, caller)
        return await _done(lambda: room.desk.approve(release_id, approver=who, evidence=body.evidence_digest, reason=body.reason))

    @made.post("/v1/releases/{release_id}/reject", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def reject(caller: Operator, release_id: str, request: Request) -> Response:
        """Say no, with a reason."""
        body = await _read(request, ActBody)
        who = _person(request, caller, body.approver)
        await _require_visible(room, release_id, caller)
        return await _done(lambda: room.desk.reject(release_id, approver=who, reason=body.reason))

    @made.post("/v1/releases/{release_id}/abort", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def abort(caller: Operator, release_id: str, request: Request) -> Response:
        """Stop a release that is not live yet."""
        body = await _read(request, ActBody)
        who = _anybody(request, caller, body.approver)
        await _require_visible(room, release_id, caller)
        return await _done(lambda: room.desk.abort(release_id, actor=who, reason=body.reason))

    @made.post("/v1/releases/{release_id}/rollback", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def rollback(caller: Operator, release_id: str, request: Request) -> Response:
        """Take a version back, whatever its state, and quarantine it."""
        body = await _read(request, ActBody)
        who = _anybody(request, caller, body.approver)
        await _require_visible(room, release_id, caller)
        return await _done(lambda: room.desk.roll_back(release_id, actor=who, reason=body.reason))


def _governing(made: APIRouter, room: ReleaseRoom) -> None:
    @made.post("/v1/policies/{policy}/anchor", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def anchor(caller: Operator, policy: str, request: Request) -> Response:
        """Make the champion the anchor that later versions are held against."""
        body = await _read(request, ActBody)
        who = _person(request, caller, body.approver)
        _require_policy(policy, caller)
        pointer = await asyncio.to_thread(lambda: room.desk.renew_anchor(policy, actor=who, reason=body.reason))
        return _json(dict(vars(pointer)))

    @made.post("/v1/policies/{policy}/unfreeze", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def unfreeze(caller: Operator, policy: str, request: Request) -> Response:
        """One of the two votes that free promotions again."""
        body = await _read(request, ActBody)
        who = _person(request, caller, body.approver)
        _require_policy(policy, caller)
        return _json({"free": await asyncio.to_thread(lambda: room.desk.unfreeze(policy, actor=who))})

    @made.post("/v1/policies/{policy}/quarantine/{digest}/lift", openapi_extra=openapi.body(ActBody), responses={409: {}})
    async def lift(caller: Operator, policy: str, digest: str, request: Request) -> Response:
        """One of the two votes that lift a version's quarantine; it may serve again, and rollbacks may go to it."""
        body = await _read(request, ActBody)
        who = _person(request, caller, body.approver)
        _require_policy(policy, caller)
        return _json({"lifted": await asyncio.to_thread(lambda: room.desk.lift(policy, digest, actor=who, reason=body.reason))})


def _webhooks(made: APIRouter, room: ReleaseRoom) -> None:
    @made.get("/v1/webhooks")
    async def webhooks(caller: Admin) -> Response:
        """Receivers of release events, without their secrets."""
        found = await asyncio.to_thread(room.webhooks.all)
        return _json({"data": [_receiver(hook) for hook in found if caller.policy in (None, hook.policy)]})

    @made.post("/v1/webhooks", openapi_extra=openapi.body(WebhookBody), status_code=201)
    async def register(caller: Admin, request: Request) -> Response:
        """Register a receiver; its secret is shown in this answer only."""
        body, secret = await _read(request, WebhookBody), new_secret()
        policy = _visible(body.policy, caller)

        def add() -> Any:  # noqa: ANN401 - `app.db.webhooks.Webhook`
            check_url(body.url, allow_loopback=room.allow_loopback)
            return room.webhooks.add(policy=policy, url=body.url, secret=secret, events=body.events, now=utc_now())

        return _json({**_receiver(await asyncio.to_thread(add)), "secret": secret}, 201)

    @made.post("/v1/webhooks/{webhook_id}/rotate")
    async def rotate(caller: Admin, webhook_id: str) -> Response:
        """A new secret; the one before it keeps signing until the next rotation."""
        secret = new_secret()

        def renew() -> Any:  # noqa: ANN401 - `app.db.webhooks.Webhook`
            hook = _hook(room, webhook_id, caller)
            return room.webhooks.set_secrets(webhook_id, [secret, *hook.secrets[:1]])

        return _json({**_receiver(await asyncio.to_thread(renew)), "secret": secret})

    @made.delete("/v1/webhooks/{webhook_id}")
    async def disable(caller: Admin, webhook_id: str) -> Response:
        """Stop deliveries to a receiver."""

        def stop() -> Any:  # noqa: ANN401 - `app.db.webhooks.Webhook`
            _hook(room, webhook_id, caller)
            return room.webhooks.disable(webhook_id, now=utc_now())

        return _json(_receiver(await asyncio.to_thread(stop)))

    @made.get("/v1/webhooks/{webhook_id}/deliveries")
    async def deliveries(caller: Admin, webhook_id: str, limit: Limit = 100) -> Response:
        """What became of the newest deliveries."""

        def read() -> list[dict[str, Any]]:
            _hook(room, webhook_id, caller)
            return room.webhooks.deliveries(webhook_id, limit=limit)

        return _json({"data": await asyncio.to_thread(read)})


def _hook(room: ReleaseRoom, webhook_id: str, caller: Caller) -> Any:  # noqa: ANN401 - `app.db.webhooks.Webhook`
    """A receiver that the caller's key sees. Raises `NotFound`."""
    hook = room.webhooks.find(webhook_id)
    if caller.policy not in (None, hook.policy):
        raise NotFound(f"there is no webhook {webhook_id}: list them first")
    return hook


async def _done(act: Callable[[], Release]) -> Response:
    return _json(_plain(await asyncio.to_thread(act)))


async def _read(request: Request, kind: type[T]) -> T:
    body = await read_json(request, most=MOST_BYTES)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body: {error}") from error


def _person(request: Request, caller: Caller, said: str | None) -> str:
    """Who says yes or no. Raises `Refused` where nobody is named."""
    who = _anybody(request, caller, said)
    if who == NOBODY:
        raise Refused("nobody is named: send the header X-Ratchet-User, or use an API key, whose name is the person")
    return who


def _anybody(request: Request, caller: Caller, said: str | None) -> str:
    if caller is not ANONYMOUS:
        who = caller.person or caller.name
        if said is not None and f"user:{said.removeprefix('user:')}" != who:
            raise HttpError(403, f"this key belongs to {who}, not to {said}", code="wrong_person", param="approver")
        return who
    named = said or request.headers.get("x-ratchet-user", "").strip()
    return f"user:{named.removeprefix('user:')[:150]}" if named else NOBODY


def _state(text: str) -> ReleaseState:
    try:
        return ReleaseState(text.upper())
    except ValueError as error:
        known = ", ".join(state.value for state in ReleaseState)
        raise BadRequest(f"there is no state {text!r}: use one of {known}", param="state") from error


def _visible(policy: str | None, caller: Caller) -> str | None:
    """The policy to read: a key that is good for one policy sees that one only."""
    if caller.policy is not None and policy not in (None, caller.policy):
        raise HttpError(403, f"this key is for the policy {caller.policy!r} only", code="wrong_policy", param="policy")
    return caller.policy or policy


def _require_policy(policy: str, caller: Caller) -> None:
    _visible(policy, caller)


async def _require_visible(room: ReleaseRoom, release_id: str, caller: Caller) -> None:
    found = await asyncio.to_thread(room.releases.find, release_id)
    if caller.policy not in (None, found.policy):
        raise NotFound(f"there is no release {release_id}: `ratchet release list` shows those there are")


def _plain(release: Release) -> dict[str, Any]:
    return {name: value for name, value in vars(release).items() if name != "config"}


def _receiver(hook: Any) -> dict[str, Any]:  # noqa: ANN401 - `app.db.webhooks.Webhook`
    return {name: value for name, value in vars(hook).items() if name != "secrets"}


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
