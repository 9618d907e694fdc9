"""What operators and probes ask: health, status, metrics, models, runs, versions, labels."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from app.api.asking import Limit
from app.api.dialects import langsmith
from app.api.dialects.counter import json_response
from app.api.entry.access import Caller, requires
from app.api.metrics import Metrics
from app.domain.access import Scope
from app.domain.errors import RatchetError, UnknownPolicy
from app.domain.people import Action
from app.domain.policies import PolicyConfig
from app.domain.ports import Clock, Reads, Routes
from app.domain.release.licences import licences, obligations_of

Check = Callable[[], Awaitable[None]]
"""Raises a `RatchetError` where the dependency is not well."""
CHECK_S = 2.0
PolicyName = Annotated[str | None, Query(max_length=200)]
Reader = Annotated[Caller, Depends(requires(Action.LOOK))]
Asking = Annotated[Caller, Depends(requires(Scope.INGEST))]


def probes(*, checks: Mapping[str, Check], metrics: Metrics, notes: Mapping[str, Check] | None = None) -> APIRouter:
    """Health, status and metrics. Health and status need no key: a probe has none, and they tell no secrets.

    `notes` are told like checks, and do not make the service unwell: it answers while ingestion waits for a bucket.
    """
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses={503: {"description": "A dependency is not well."}})
    async def health() -> Response:
        """Whether every dependency is well; 503 where one is not. `ingestion` says what keeps accepted events from being applied,
        `control_plane` since when the database was not heard of, and what is served meanwhile."""
        asked = {**checks, **(notes or {})}
        results = await asyncio.gather(*(_outcome(check) for check in asked.values()))
        body = dict(zip(asked, results, strict=True))
        return json_response(body, 200 if all(body[name] == "ok" for name in checks) else 503)

    @router.get("/status")
    async def status() -> Response:
        """Whether this process lives."""
        return json_response({"status": "ok"})

    @router.get("/metrics", responses={401: {}, 403: {}})
    async def scrape(caller: Reader) -> Response:
        """Prometheus' text format; a key for one policy reads the series of that policy."""
        text = await asyncio.to_thread(metrics.text, caller.policy)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/pressure", responses={401: {}, 403: {}})
    async def pressure(caller: Asking, policy: PolicyName = None) -> Response:
        """How long people wait for a first token at this replica just now: practice makes room by it."""
        return json_response(metrics.waits.read(caller.policy or policy))

    @router.get("/info", tags=["dialects"])
    async def info() -> Response:
        """What LangSmith's client asks first."""
        return json_response(langsmith.info())

    return router


def views(*, reads: Reads, routes: Routes, policies: Mapping[str, PolicyConfig], clock: Clock) -> APIRouter:
    """Models, runs, versions and labels."""
    router = APIRouter(tags=["operations"], responses={401: {}, 403: {}, 503: {}})

    @router.get("/v1/models")
    @router.get("/openai/v1/models", include_in_schema=False)
    async def models(caller: Annotated[Caller, Depends(requires(Scope.SAMPLE))]) -> Response:
        """The policies as OpenAI's list of models, each with the digest that is live."""
        names = [name for name in sorted(policies) if caller.policy in (None, name)]
        return json_response({"object": "list", "data": [await asyncio.to_thread(_model, name, routes, clock) for name in names]})

    @router.get("/v1/models/{name}", responses={404: {}})
    @router.get("/openai/v1/models/{name}", include_in_schema=False)
    async def model(caller: Annotated[Caller, Depends(requires(Scope.SAMPLE))], name: str) -> Response:
        """One policy as OpenAI's model."""
        _require(name, policies, caller)
        return json_response(await asyncio.to_thread(_model, name, routes, clock))

    @router.get("/v1/runs")
    async def runs(_caller: Reader, policy: PolicyName = None, limit: Limit = 50) -> Response:
        """Training runs, newest first."""
        return json_response({"data": await asyncio.to_thread(reads.runs, _visible(policy, _caller), limit)})

    @router.get("/v1/versions")
    async def versions(_caller: Reader, policy: PolicyName = None, limit: Limit = 50) -> Response:
        """Versions, newest first."""
        return json_response({"data": await asyncio.to_thread(reads.versions, _visible(policy, _caller), limit)})

    @router.get("/v1/labels/report", responses={404: {}})
    async def report(_caller: Reader, policy: Annotated[str, Query(max_length=200)]) -> Response:
        """Turns served, labels, exclusions by reason, rewards per version and segment."""
        _require(policy, policies, _caller)
        return json_response(await asyncio.to_thread(reads.labels_report, policy))

    @router.get("/v1/policies/{policy}/attribution", responses={404: {}})
    async def attribution(_caller: Reader, policy: str) -> Response:
        """What the base model's licence asks a product to show, and what it asks besides."""
        _require(policy, policies, _caller)
        return json_response(_attribution(policies[policy]))

    return router


def _attribution(policy: PolicyConfig) -> dict[str, Any]:
    licence = licences().get(policy.licence)
    answer = obligations_of(licence, base_model=policy.base_model, facts=policy.deployment) if licence else None
    return {
        "base_model": policy.base_model, "licence": policy.licence, "known": licence is not None,
        "texts": list(answer.texts) if answer else [], "unmet": [o.does for o in answer.unmet] if answer else [],
        "undecided": list(answer.undecided) if answer else [],
    }  # fmt: skip


def _require(policy: str, policies: Mapping[str, PolicyConfig], caller: Caller) -> None:
    """Raise `UnknownPolicy` for what the caller's key does not see, whether or not there is such a policy."""
    mine = [name for name in sorted(policies) if caller.policy in (None, name)]
    if policy not in mine:
        raise UnknownPolicy(f"no policy is named {policy!r} (declared: {', '.join(mine) or 'none'})")


def _visible(policy: str | None, caller: Caller) -> str | None:
    """A key for one policy sees that policy only."""
    if caller.policy is not None and policy not in (None, caller.policy):
        raise UnknownPolicy(f"this key is for the policy {caller.policy!r} only")
    return policy or caller.policy


def _model(name: str, routes: Routes, clock: Clock) -> dict[str, Any]:
    model: dict[str, Any] = {"id": name, "object": "model", "created": int(clock().timestamp()), "owned_by": "ratchet"}
    try:
        pointer = routes.route(name).pointer
    except RatchetError:
        return model | {"version": None}
    return model | {"created": int(pointer.changed_at.timestamp()), "version": pointer.digest}


async def _outcome(check: Check) -> str:
    try:
        async with asyncio.timeout(CHECK_S):
            await check()
    except TimeoutError:
        return f"no answer within {CHECK_S:g} s"
    except RatchetError as error:
        return str(error)
    return "ok"
