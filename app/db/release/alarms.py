"""Alarms in SQL: at most one open alarm of a kind and policy, and all that were ever raised."""

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import Connection, or_, select, update

from app.db.engine import insert_or_ignore
from app.db.tables import alarms, audit, circuit_breakers
from app.domain.release.alarms import Alarm, AlarmKind

SHOWN = 100
END_VOTE = "alarm.end_vote"


def read_alarms(connection: Connection, policy: str, *, open_only: bool = False, release_id: str | None = None) -> list[Alarm]:
    """Newest first, the open ones all, of the others the newest."""
    about = alarms.c.policy == policy if release_id is None else (alarms.c.policy == policy) & (alarms.c.release_id == release_id)
    newest = (alarms.c.raised_at.desc(), alarms.c.id.desc())
    is_open = alarms.c.ended_at.is_(None)
    ended = select(alarms.c.id).where(about, ~is_open).order_by(*newest).limit(SHOWN)
    shown = is_open if open_only else or_(is_open, alarms.c.id.in_(ended))
    rows = connection.execute(select(alarms).where(about, shown).order_by(*newest))
    return [Alarm(**{**row._mapping, "kind": AlarmKind(row.kind)}) for row in rows]


def insert_alarm(connection: Connection, alarm: Alarm) -> bool:
    """False where one of its kind is open already. Votes to unfreeze are about what was known when they were cast: they begin anew."""
    added = connection.execute(insert_or_ignore(connection, alarms).values(asdict(alarm)).returning(alarms.c.id)).all()
    if added:
        frozen = circuit_breakers.c.policy == alarm.policy
        connection.execute(update(circuit_breakers).where(frozen).values(unfreeze_votes=[]))
    return len(added) == 1


def end_alarms(
    connection: Connection, policy: str, *, kinds: Collection[AlarmKind], by: str, reason: str, now: datetime
) -> list[AlarmKind]:
    """End the open alarms of these kinds; returns the kinds that were open."""
    open_ = (alarms.c.policy == policy) & alarms.c.ended_at.is_(None) & alarms.c.kind.in_([kind.value for kind in kinds])
    ended = update(alarms).where(open_).values(ended_at=now, ended_by=by, end_reason=reason).returning(alarms.c.kind)
    return [AlarmKind(kind) for kind in connection.execute(ended).scalars()]


def votes_to_end(connection: Connection, alarm: Alarm) -> list[str]:
    """Who voted to end it by now: votes stand in the audit alone."""
    since = (audit.c.subject == alarm.policy) & (audit.c.action == END_VOTE) & (audit.c.occurred_at >= alarm.raised_at)
    said = connection.execute(select(audit.c.actor, audit.c.detail).where(since))
    return sorted({row.actor for row in said if row.detail["alarm"] == alarm.id})
