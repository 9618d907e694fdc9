"""Readings of the loop for `/metrics`: every query is bounded by policies, versions or an index, because it runs at every scrape."""

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, func, select

from app.db.clock import DatabaseClock
from app.db.engine import expected_to_answer, reading
from app.db.ingestion.relay import LEASE
from app.db.operations.facts import BACKUP, DRILL, read_fact
from app.db.operations.server import server_state
from app.db.reads import SqlReads
from app.db.release.engine_reads import read_engines
from app.db.release.engines import SEEN_WITHIN
from app.db.tables import (
    alarms,
    audit_head,
    circuit_breakers,
    cycles,
    deployment_pointer,
    engine_versions,
    leases,
    progress,
    release_history,
    releases,
    training_runs,
    webhook_deliveries,
)
from app.domain.learning.cycles import CycleStatus
from app.domain.ports import Clock, EngineState
from app.domain.readings import Reading
from app.domain.release.regions import regions_of
from app.domain.release.releases import ReleaseState

FRESH = timedelta(minutes=5)
"""Progress that has not moved for longer says nothing about the present."""
LIVE_EVIDENCE = timedelta(minutes=2)
LOOKED_AT = 50
"""Newest cycles among which those in a row are counted."""
RUN_METRICS = {
    "mismatch": "ratchet_run_mismatch", "effective_share": "ratchet_run_effective_share",
    "anchor_budget_used": "ratchet_run_anchor_budget_used",
}  # fmt: skip
BACKLOG = {"inbox_oldest_unapplied_s": "ratchet_inbox_oldest_unapplied_seconds"}
"""Where the metric is called otherwise than the reading."""


class SqlReadings:
    """The `Readings` port."""

    def __init__(self, state: Engine, inbox: Engine, *, clock: Clock | None = None) -> None:
        self._state = state
        self._clock = clock or DatabaseClock(state)
        self._reads = SqlReads(state, inbox, clock=self._clock)

    def readings(self) -> list[Reading]:
        """Every sample. Raises `Unavailable`."""
        with expected_to_answer():
            now = self._clock()
            found = list(self._streams())
            with reading(self._state) as connection:
                for part in (_server, _cycles, _runs, _releases, _live, _engines, _chores):
                    found += part(connection, now)
        return found

    def _streams(self) -> Iterator[Reading]:
        for policy, name, value in self._reads.counters():
            yield _reading("ratchet_ledger_total", value, policy=policy, name=name)
        for policy, version, count, labelled in self._reads.turns_per_version():
            yield _reading("ratchet_turns", count, policy=policy, version=version)
            yield _reading("ratchet_turns_labelled", labelled, policy=policy, version=version)
        for name, value in self._reads.backlog().items():
            yield _reading(BACKLOG.get(name, f"ratchet_{name}"), value)


def _reading(metric: str, value: float, **labels: str) -> Reading:
    return Reading(metric=metric, value=float(value), labels=labels)


def _server(connection: Connection, now: datetime) -> Iterator[Reading]:
    state = server_state(connection)
    if state is not None:
        yield _reading("ratchet_database_synchronous", state.synchronous)
        yield _reading("ratchet_database_timeline", state.timeline)


def _cycles(connection: Connection, now: datetime) -> Iterator[Reading]:
    c = cycles.c
    for policy, status, count in connection.execute(select(c.policy, c.status, func.count()).group_by(c.policy, c.status)):
        yield _reading("ratchet_cycles_total", count, policy=policy, status=status)
    for (policy,) in connection.execute(select(deployment_pointer.c.policy)):
        ended = select(c.status).where(c.policy == policy, c.status.in_((CycleStatus.DONE, CycleStatus.HELD, CycleStatus.FAILED)))
        statuses = list(connection.execute(ended.order_by(c.slot.desc()).limit(LOOKED_AT)).scalars())
        in_a_row = next((place for place, status in enumerate(statuses) if status == CycleStatus.DONE), len(statuses))
        yield _reading("ratchet_cycles_held_in_a_row", in_a_row, policy=policy)
    done = select(c.policy, func.max(c.finished_at)).where(c.status == CycleStatus.DONE, c.finished_at.is_not(None)).group_by(c.policy)
    for policy, at in connection.execute(done):
        yield _reading("ratchet_cycle_last_done_timestamp_seconds", at.timestamp(), policy=policy)
    for policy, at in connection.execute(
        select(c.policy, func.min(c.started_at)).where(c.status == CycleStatus.RUNNING).group_by(c.policy)
    ):
        yield _reading("ratchet_cycle_running_seconds", (now - at).total_seconds(), policy=policy)


def _runs(connection: Connection, now: datetime) -> Iterator[Reading]:
    r = training_runs.c
    newest = select(r.policy, func.max(r.started_at).label("at")).where(r.finished_at.is_not(None)).group_by(r.policy).subquery()
    rows = select(r.policy, r.metrics, r.started_at, r.finished_at).join(
        newest, (r.policy == newest.c.policy) & (r.started_at == newest.c.at)
    )
    for row in connection.execute(rows):
        yield _reading("ratchet_run_seconds", (row.finished_at - row.started_at).total_seconds(), policy=row.policy)
        for key, metric in RUN_METRICS.items():
            if (value := row.metrics.get(key)) is not None:
                yield _reading(metric, value, policy=row.policy)


def _releases(connection: Connection, now: datetime) -> Iterator[Reading]:
    r, h = releases.c, release_history.c
    for policy, state, count in connection.execute(select(r.policy, r.state, func.count()).group_by(r.policy, r.state)):
        yield _reading("ratchet_releases", count, policy=policy, state=state)
    back = select(r.policy, func.count()).join(release_history, h.release_id == r.id).where(h.to_state == ReleaseState.ROLLED_BACK.value)
    gone: dict[str, int] = {row[0]: row[1] for row in connection.execute(back.group_by(r.policy))}
    for policy, generation, at in connection.execute(
        select(deployment_pointer.c.policy, deployment_pointer.c.generation, deployment_pointer.c.changed_at)
    ):
        yield _reading("ratchet_rollbacks_total", gone.get(policy, 0), policy=policy)
        yield _reading("ratchet_pointer_generation", generation, policy=policy)
        yield _reading("ratchet_pointer_changed_timestamp_seconds", at.timestamp(), policy=policy)
    waits = select(r.policy, func.min(r.approval_expires_at)).where(r.state == ReleaseState.READY.value, r.approval_expires_at.is_not(None))
    for policy, at in connection.execute(waits.group_by(r.policy)):
        yield _reading("ratchet_approval_expires_seconds", (at - now).total_seconds(), policy=policy)


def _live(connection: Connection, now: datetime) -> Iterator[Reading]:
    p = progress.c
    for row in connection.execute(select(progress).where(p.updated_at >= now - FRESH)):
        if row.total > 0:
            yield _reading("ratchet_progress_ratio", min(1.0, row.done / row.total), policy=row.policy, task=row.task)
        log_e: Any = row.detail.get("log_e")
        if row.task in ("canary", "holdback") and log_e is not None and row.updated_at >= now - LIVE_EVIDENCE:
            yield _reading("ratchet_harm_e_value", math.exp(min(float(log_e), 700.0)), policy=row.policy, subject=row.task)
    a = alarms.c
    for policy, kind, count in connection.execute(
        select(a.policy, a.kind, func.count()).where(a.ended_at.is_(None)).group_by(a.policy, a.kind)
    ):
        yield _reading("ratchet_alarms_open", count, policy=policy, kind=kind)
    frozen = set(connection.execute(select(circuit_breakers.c.policy)).scalars())
    for policy in connection.execute(select(deployment_pointer.c.policy)).scalars():
        yield _reading("ratchet_promotions_frozen", policy in frozen, policy=policy)


def _engines(connection: Connection, now: datetime) -> Iterator[Reading]:
    e, p = engine_versions.c, deployment_pointer.c
    alive = (e.state == EngineState.READY.value) & (e.seen_at >= now - SEEN_WITHIN)
    rows = connection.execute(select(e.policy, e.digest, e.detail).where(alive)).all()
    for policy, digest in connection.execute(select(p.policy, p.digest)):
        holding = [row for row in rows if row.policy == policy and row.digest == digest]
        yield _reading("ratchet_engines_holding_champion", len(holding), policy=policy)
        yield _reading("ratchet_engines_mismatched", sum(row.detail is not None for row in holding), policy=policy)
    yield from _regions(connection, now)


def _regions(connection: Connection, now: datetime) -> Iterator[Reading]:
    for region in regions_of(read_engines(connection, None, now=now), now=now):
        where = {"policy": region["policy"], "region": region["region"]}
        yield _reading("ratchet_region_engines", region["engines"], **where)
        if region["champions"] is not None:
            yield _reading("ratchet_region_lag_champions", region["champions"], **where)
        if region["seconds"] is not None:
            yield _reading("ratchet_region_lag_seconds", 0.0 if region["champions"] == 0 else region["seconds"], **where)


def _chores(connection: Connection, now: datetime) -> Iterator[Reading]:
    held = select(func.count()).where(leases.c.name == LEASE, leases.c.expires_at > now)
    yield _reading("ratchet_relay_in_office", connection.execute(held).scalar_one())
    yield _reading("ratchet_audit_rows_total", connection.execute(select(func.coalesce(func.max(audit_head.c.seq), 0))).scalar_one())
    d = webhook_deliveries.c
    waiting = select(func.count()).where(d.delivered_at.is_(None), d.next_attempt_at.is_not(None))
    yield _reading("ratchet_webhooks_undelivered", connection.execute(waiting).scalar_one())
    for metric, name in (("ratchet_backup_age_seconds", BACKUP), ("ratchet_drill_age_seconds", DRILL)):
        if (fact := read_fact(connection, name)) is not None:
            yield _reading(metric, (now - fact.at).total_seconds())
