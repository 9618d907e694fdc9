"""How far each region is behind, from what its engines report."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

REMEMBERED = timedelta(days=7)
"""A region of which nothing was heard for so long has been given up; until then it is told with no engine."""


def regions_of(engines: Iterable[Mapping[str, Any]], *, now: datetime) -> list[dict[str, Any]]:
    """One entry per policy and region, of the ledger's entries per engine and policy (`read_engines`).

    A region is as far behind as that engine of it which is least behind: gateways ask that one. Where none of it was heard of in the last
    seconds, as far as its engines were by their last words. `champions` and `seconds` are those of that engine's lag; None where nothing
    was deployed.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for engine in engines:
        if now - _heard_at(engine) <= REMEMBERED:
            found.setdefault((engine["policy"], engine["region"]), []).append(engine)
    return [_summed(policy, region, entries) for (policy, region), entries in sorted(found.items())]


def _summed(policy: str, region: str, entries: list[Mapping[str, Any]]) -> dict[str, Any]:
    reporting = [entry for entry in entries if entry["reports"]]
    lags = [entry["lag"] for entry in reporting or entries if entry["lag"] is not None]
    newest = min(lags, key=_behind, default={"champions": None, "seconds": None})
    heard_at = max(map(_heard_at, entries))
    return {
        "policy": policy, "region": region, "engines": len(reporting), "champions": newest["champions"],
        "seconds": newest["seconds"], "heard_at": heard_at.isoformat(),
    }  # fmt: skip


def _behind(lag: Mapping[str, Any]) -> tuple[bool, int, float]:
    return lag["champions"] is None, lag["champions"] or 0, lag["seconds"]


def _heard_at(engine: Mapping[str, Any]) -> datetime:
    return max(version["seen_at"] for version in engine["versions"])
