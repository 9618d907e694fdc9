"""What the engines hold, for people: each report of the ledger beside what the deployment points at."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select

from app.db.release.engines import SEEN_WITHIN
from app.db.release.pointer import CHAMPION_MOVES, read_pointer, versions_by_role
from app.db.tables import deployment_history, engine_versions
from app.domain.ports import EngineState
from app.domain.release.releases import Pointer


def holds(connection: Connection, policy: str, digest: str, *, seen_since: datetime) -> bool:
    """Whether an engine that was heard of since then holds a version, verified."""
    e = engine_versions.c
    mine = (e.policy == policy) & (e.digest == digest) & (e.state == EngineState.READY.value) & (e.seen_at >= seen_since)
    return connection.execute(select(e.engine_id).where(mine).limit(1)).first() is not None


def read_engines(connection: Connection, policy: str | None, *, now: datetime) -> list[dict[str, Any]]:
    """One entry per engine and policy, as JSON: what it holds, and how far it is behind the policy's pointer."""
    table = engine_versions
    query = select(table).order_by(table.c.engine_id, table.c.policy, table.c.changed_at.desc())
    rows = connection.execute(query if policy is None else query.where(table.c.policy == policy)).all()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        entry = found.setdefault((row.engine_id, row.policy), {
            "engine": row.engine_id, "address": row.address, "region": row.region, "policy": row.policy, "reports": False, "versions": [],
        })  # fmt: skip
        entry["reports"] = entry["reports"] or now - row.seen_at <= SEEN_WITHIN
        entry["versions"].append({
            "digest": row.digest, "state": row.state, "detail": row.detail, "since": row.changed_at, "seen_at": row.seen_at,
        })  # fmt: skip
    for name in {policy for _, policy in found}:
        pointer, roles = read_pointer(connection, name), _role_of(versions_by_role(connection, name))
        for entry in (entry for (_, policy), entry in found.items() if policy == name):
            for version in entry["versions"]:
                version["role"] = roles.get(version["digest"])
            entry["lag"] = None if pointer is None else _lag(connection, pointer, entry["versions"], now=now)
    return list(found.values())


def _role_of(roles: dict[str, list[str]]) -> dict[str, str]:
    return {digest: role for role in reversed(roles) for digest in roles[role]}


def _lag(connection: Connection, pointer: Pointer, versions: list[dict[str, Any]], *, now: datetime) -> dict[str, Any]:
    """`champions`: how many champions there were since the newest that it holds (0: it holds the present one; None: it holds none).
    `seconds`: for how long it did not hold the present champion, or has not held it so far."""
    ready = {version["digest"]: version["since"] for version in versions if version["state"] == EngineState.READY.value}
    if pointer.digest in ready:
        return {"champions": 0, "seconds": max(0.0, (ready[pointer.digest] - pointer.changed_at).total_seconds())}
    table = deployment_history
    moves = (table.c.policy == pointer.policy) & table.c.action.in_(CHAMPION_MOVES)
    held = connection.execute(select(func.max(table.c.generation)).where(moves, table.c.digest.in_(list(ready)))).scalar()
    behind = None
    if held is not None:
        behind = connection.execute(select(func.count()).where(moves, table.c.generation > held)).scalar_one()
    return {"champions": behind, "seconds": max(0.0, (now - pointer.changed_at).total_seconds())}
