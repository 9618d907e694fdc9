"""Versions that people pinned, in SQL."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from app.db.tables import pinned_versions, versions
from app.domain.release.releases import Pin

P = pinned_versions.c


def read_pins(connection: Connection, policy: str | None = None, *, digests: Collection[str] | None = None) -> dict[str, Pin]:
    """By digest: of one policy or of all, of these versions or of all."""
    query = select(pinned_versions).order_by(P.pinned_at)
    if policy is not None:
        query = query.where(P.policy == policy)
    if digests is not None:
        query = query.where(P.digest.in_(digests))
    return {row.digest: Pin(**row._mapping) for row in connection.execute(query)}


def knows(connection: Connection, policy: str, digest: str) -> bool:
    """Whether there is such a version of the policy."""
    return connection.execute(select(versions.c.digest).where(versions.c.policy == policy, versions.c.digest == digest)).first() is not None


def insert_pin(connection: Connection, policy: str, digest: str, *, actor: str, reason: str, now: datetime) -> None:
    """Pin it from now on."""
    row = {"policy": policy, "digest": digest, "reason": reason, "pinned_by": actor, "pinned_at": now}
    connection.execute(insert(pinned_versions).values(row))


def delete_pin(connection: Connection, policy: str, digest: str) -> None:
    """Nobody pins it any more."""
    connection.execute(delete(pinned_versions).where(P.policy == policy, P.digest == digest))
