"""`GET /v1/engines`: what each engine holds, how far it and its region are behind the pointer, and how it is doing at this moment."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from app.api.entry.access import Caller, requires
from app.domain.access import Scope
from app.domain.errors import UnknownPolicy
from app.domain.ids import utc_now
from app.domain.ports import Clock, GatewayEngines, Reads
from app.domain.release.regions import regions_of
from app.domain.telemetry.serving import EngineSight


def router(*, reads: Reads, engines: GatewayEngines, clock: Clock = utc_now) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["operations"], responses={401: {}, 403: {}, 503: {}})

    @routes.get("/v1/engines", responses={404: {}})
    async def read_engines(
        caller: Annotated[Caller, Depends(requires(Scope.READ))], policy: Annotated[str | None, Query(max_length=200)] = None
    ) -> Response:
        """Engines by address: their region and their versions by policy with the lag behind the pointer (from the ledger), and queue, last
        swap, acceptance of speculated tokens and health (asked now). `regions`: of each policy and region how many engines report, and how
        far behind the one is that is least behind."""
        if caller.policy is not None and policy not in (None, caller.policy):
            raise UnknownPolicy(f"this key is for the policy {caller.policy!r} only")
        wanted = policy or caller.policy
        reported, sights = await asyncio.gather(asyncio.to_thread(reads.engines, wanted), engines.sights())
        listed = _listed(reported, {sight.address: sight for sight in sights}, all_of_them=wanted is None)
        regions = regions_of(reported, now=clock())
        return Response(msgspec.json.encode({"data": listed, "regions": regions}), media_type="application/json")

    return routes


def _listed(reported: list[dict[str, Any]], sights: Mapping[str, EngineSight], *, all_of_them: bool) -> list[dict[str, Any]]:
    """One entry per address, in their order; engines that reported nothing of these policies are left out where some were asked for."""
    by_address: dict[str, list[dict[str, Any]]] = {address: [] for address in sights} if all_of_them else {}
    for entry in reported:
        by_address.setdefault(str(entry["address"]), []).append(entry)
    return [
        {
            "address": address,
            **({"answers": None} if (sight := sights.get(_bare(address))) is None else _without_address(sight)),
            "region": entries[0]["region"] if entries else None,
            "reports": any(entry["reports"] for entry in entries),
            "policies": [{"policy": entry["policy"], "lag": entry["lag"], "versions": _dated(entry["versions"])} for entry in entries],
        }
        for address, entries in sorted(by_address.items())
    ]


def _bare(address: str) -> str:
    return address.removeprefix("vllm+").removeprefix("sglang+")


def _without_address(sight: EngineSight) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.to_builtins(sight)
    return {name: value for name, value in said.items() if name != "address"}


def _dated(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value.isoformat() if isinstance(value, datetime) else value for name, value in entry.items()} for entry in versions]
