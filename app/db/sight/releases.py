"""Releases and versions as pages show them."""

from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, func, select

from app.db.chunks import one_of
from app.db.release.releases import read_approvals, result_of
from app.db.sight.paging import page_by_key, page_by_number
from app.db.tables import deployment_history, exposures, gate_results, quarantine, release_history, releases, training_runs, turns, versions
from app.domain.ids import utc_now
from app.domain.release.gates import GateName, GateResult
from app.domain.release.releases import Approval, Release, ReleaseState
from app.domain.views.pages import Barred, Moved, Page, Run, Served, VersionInfo
from app.domain.views.rows import GateRow, Reach, StepRow

IN_A_LIST = [column for column in releases.c if column.name != "config"]
OPEN_EPISODE = timedelta(minutes=30)


def read_releases(connection: Connection, policy: str, *, after: str | None, limit: int) -> Page[Release]:
    """Newest first."""
    r = releases.c
    query = select(*IN_A_LIST).where(r.policy == policy)
    return page_by_key(connection, query, r.created_at, r.id, after=after, limit=limit, made=release_of)


def release_of(row: Row[Any]) -> Release:
    """With its configuration where the row has it."""
    return Release(**{**row._mapping, "state": ReleaseState(row.state)})


def read_release(connection: Connection, release_id: str) -> Release | None:
    """By its key, however many came after it."""
    row = connection.execute(select(releases).where(releases.c.id == release_id)).one_or_none()
    return None if row is None else release_of(row)


def read_gates(connection: Connection, release_id: str) -> list[GateRow]:
    """The newest answer of each gate."""
    newest = select(func.max(gate_results.c.id)).where(gate_results.c.release_id == release_id).group_by(gate_results.c.gate)
    rows = connection.execute(select(gate_results).where(gate_results.c.id.in_(newest)).order_by(gate_results.c.id))
    return [_gate(row) for row in rows]


def read_decisions(connection: Connection, release_id: str, newest: int) -> list[GateRow]:
    """Live decisions, oldest first."""
    g = gate_results.c
    query = select(gate_results).where(g.release_id == release_id, g.gate == GateName.CANARY).order_by(g.id.desc()).limit(newest)
    return [_gate(row) for row in reversed(connection.execute(query).all())]


def read_results(connection: Connection, release_id: str) -> Iterator[tuple[GateRow, GateResult]]:
    """Every answer of every gate, in the order in which they came."""
    rows = connection.execute(select(gate_results).where(gate_results.c.release_id == release_id).order_by(gate_results.c.id))
    for row in rows:
        yield _gate(row), result_of(row)


def _gate(row: Row[Any]) -> GateRow:
    return GateRow(
        gate=row.gate, verdict=row.verdict, action=row.action, reason=row.reason, decided_at=row.decided_at, evidence=row.evidence
    )


def read_steps(connection: Connection, release_id: str) -> list[StepRow]:
    """The release's way so far, oldest move first."""
    h = release_history.c
    rows = connection.execute(select(release_history).where(h.release_id == release_id).order_by(h.generation))
    return [
        StepRow(
            from_state=row.from_state, to_state=row.to_state, stage=row.stage, reason=row.reason, actor=row.actor,
            occurred_at=row.occurred_at,
        )
        for row in rows
    ]  # fmt: skip


def read_words(connection: Connection, release_id: str) -> list[Approval]:
    """Approvals that stand."""
    return read_approvals(connection, release_id)


def read_served(connection: Connection, release_id: str) -> list[Served]:
    """Requests and people per stage and arm of a canary."""
    e = exposures.c
    counted = (func.count().label("requests"), func.count(e.actor.distinct()).label("people"))
    query = select(e.stage, e.arm, e.digest, *counted).where(e.release_id == release_id).group_by(e.stage, e.arm, e.digest)
    return [Served(**row._mapping) for row in connection.execute(query.order_by(e.stage, e.arm))]


def read_run(connection: Connection, policy: str, digest: str) -> Run | None:
    """The run that made a version."""
    made = select(versions.c.run_id).where(versions.c.policy == policy, versions.c.digest == digest).scalar_subquery()
    row = connection.execute(select(training_runs).where(training_runs.c.id == made)).one_or_none()
    return None if row is None else Run(id=row.id, status=row.status, message=row.message, metrics=row.metrics)


def read_reach(connection: Connection, policy: str, digest: str) -> Reach:
    """Whom a version served within a day, and which conversations are open on it."""
    e, now = exposures.c, utc_now()
    mine = (e.policy == policy) & (e.digest == digest)
    people = select(func.count(e.actor.distinct())).where(mine, e.occurred_at >= now - timedelta(days=1))
    episodes = select(func.count(e.episode_id.distinct())).where(mine, e.occurred_at >= now - OPEN_EPISODE)
    return Reach(people=connection.execute(people).scalar_one(), episodes=connection.execute(episodes).scalar_one())


def read_versions(connection: Connection, policy: str, *, after: str | None, limit: int) -> Page[VersionInfo]:
    """Newest first."""
    v = versions.c
    query = select(versions).where(v.policy == policy)
    return page_by_key(connection, query, v.created_at, v.digest, after=after, limit=limit, made=_version)


def read_version(connection: Connection, policy: str, digest: str) -> VersionInfo | None:
    """By its digest."""
    row = connection.execute(select(versions).where(versions.c.policy == policy, versions.c.digest == digest)).one_or_none()
    return None if row is None else _version(row)


def _version(row: Row[Any]) -> VersionInfo:
    return VersionInfo(
        digest=row.digest, name=row.name, kind=row.kind, parent=row.parent, step=row.step, created_at=row.created_at, licence=row.licence,
        base_model=row.base_model,
    )  # fmt: skip


def read_names(connection: Connection, policy: str, digests: Collection[str]) -> dict[str, str]:
    """Names of versions."""
    wanted = sorted(set(digests))
    if not wanted:
        return {}
    query = select(versions.c.digest, versions.c.name).where(versions.c.policy == policy, one_of(connection, versions.c.digest, wanted))
    return {row.digest: row.name for row in connection.execute(query)}


def read_moves(connection: Connection, policy: str, *, after: str | None, limit: int) -> Page[Moved]:
    """The pointer's moves, newest first."""
    h = deployment_history.c
    query = select(*(h[name] for name in Moved.__dataclass_fields__)).where(h.policy == policy)
    return page_by_number(connection, query, h.generation, after=after, limit=limit, made=lambda row: Moved(**row._mapping))


def read_barred(connection: Connection, policy: str) -> list[Barred]:
    """What is quarantined, newest first."""
    q = quarantine.c
    rows = connection.execute(select(quarantine).where(q.policy == policy).order_by(q.since.desc()))
    return [Barred(digest=row.digest, reason=row.reason, since=row.since, votes=tuple(row.lift_votes or ())) for row in rows]


def find_version(connection: Connection, policy: str, wanted: str) -> str | None:
    """The digest of the version with this name, or whose digest begins so."""
    v = versions.c
    called = (v.name == wanted) | (v.digest.startswith(wanted, autoescape=True) if len(wanted) >= 6 else v.digest == wanted)
    return connection.execute(select(v.digest).where(v.policy == policy, called).limit(1)).scalar()


def find_path(connection: Connection, policy: str, wanted: str) -> str | None:
    """The path below /console of the release, version or turn with this id, name, or beginning of a digest."""
    if connection.execute(select(releases.c.id).where(releases.c.id == wanted, releases.c.policy == policy)).first():
        return f"/releases/{wanted}"
    found = find_version(connection, policy, wanted)
    if found is not None:
        newest = select(releases.c.id).where(releases.c.policy == policy, releases.c.digest == found).order_by(releases.c.created_at.desc())
        release = connection.execute(newest.limit(1)).scalar()
        return f"/versions/{found}" if release is None else f"/releases/{release}"
    turn = connection.execute(select(turns.c.inference_id).where(turns.c.inference_id == wanted, turns.c.policy == policy)).scalar()
    return None if turn is None else f"/labels/{turn}"
