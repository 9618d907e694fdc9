"""What waits for a person, and how the loop goes: the inbox page, in a handful of small reads."""

from datetime import datetime, timedelta

from sqlalchemy import Connection, func, select

from app.db.release.alarms import read_alarms
from app.db.release.engine_reads import holds
from app.db.release.releases import read_approvals, read_frozen
from app.db.sight.releases import IN_A_LIST, release_of
from app.db.tables import (
    circuit_breakers,
    counters,
    cycles,
    dead_letters,
    deployment_pointer,
    engine_versions,
    progress,
    releases,
    troubles,
    turn_counts,
)
from app.domain.ids import utc_now
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.release.releases import ENGINE_ALIVE, IN_FLIGHT, Release, ReleaseState, approvers
from app.domain.views.pages import EngineRow, Needs
from app.domain.views.rows import ProgressRow
from app.domain.views.waiting import Scene

SLOTS = 48
SEEN_WITHIN = timedelta(seconds=15)
"""An engine that says nothing for this long lags: it reports every second or two."""
MOST_LETTERS = 1000
IN_VAIN = frozenset({CycleStatus.HELD, CycleStatus.FAILED})


def read_needs(connection: Connection, policy: str) -> Needs:
    """Everything the inbox shows about a policy."""
    flying, slots = _in_flight(connection, policy), _slots(connection, policy)
    broken = connection.execute(select(circuit_breakers).where(circuit_breakers.c.policy == policy)).one_or_none()
    return Needs(
        ready=tuple(release for release in flying if release.state is ReleaseState.READY), in_flight=tuple(flying),
        alarms=tuple(read_alarms(connection, policy, open_only=True)), frozen=None if broken is None else broken.reason,
        unfreeze_votes=() if broken is None else tuple(broken.unfreeze_votes or ()), held=_held(slots),
        engines=_lagging(connection, policy),
        troubles=_troubles(connection), dead_letters=_letters(connection), slots=slots, progress=_progress(connection, policy),
        counters=_counters(connection, policy), turns=_turns(connection, policy),
    )  # fmt: skip


def read_scene(connection: Connection, release: Release) -> Scene | None:
    """What decides what a release waits for; None for one that is over, or serves."""
    if release.state not in IN_FLIGHT:
        return None
    now = utc_now()
    return Scene(
        others=[other for other in _in_flight(connection, release.policy) if other.id != release.id],
        alarms=read_alarms(connection, release.policy), frozen=read_frozen(connection, release.policy), now=now,
        yes=len(approvers(release, read_approvals(connection, release.id))),
        held=holds(connection, release.policy, release.digest, seen_since=now - ENGINE_ALIVE),
    )  # fmt: skip


def _in_flight(connection: Connection, policy: str) -> list[Release]:
    mine = (releases.c.policy == policy) & releases.c.state.in_(sorted(IN_FLIGHT))
    return [release_of(row) for row in connection.execute(select(*IN_A_LIST).where(mine).order_by(releases.c.created_at.desc()).limit(20))]


def _slots(connection: Connection, policy: str) -> tuple[Cycle, ...]:
    rows = connection.execute(select(cycles).where(cycles.c.policy == policy).order_by(cycles.c.slot.desc()).limit(SLOTS))
    return tuple(Cycle(**{**row._mapping, "status": CycleStatus(row.status)}) for row in rows)


def _held(slots: tuple[Cycle, ...]) -> tuple[Cycle, ...]:
    """The newest decided slots that came to nothing, where there are at least two of them in a row."""
    decided = [slot for slot in slots if slot.status is not CycleStatus.RUNNING]
    row = next((n for n, slot in enumerate(decided) if slot.status not in IN_VAIN), len(decided))
    return tuple(decided[:row]) if row >= 2 else ()


def _lagging(connection: Connection, policy: str) -> tuple[EngineRow, ...]:
    """Rows about what is live, of engines that failed it or fell silent."""
    e = engine_versions.c
    live = select(deployment_pointer.c.digest).where(deployment_pointer.c.policy == policy).scalar_subquery()
    late = (e.state != "ready") | (e.seen_at < utc_now() - SEEN_WITHIN)
    rows = connection.execute(select(engine_versions).where(e.policy == policy, e.digest == live, late).order_by(e.engine_id).limit(20))
    return tuple(
        EngineRow(engine_id=row.engine_id, digest=row.digest, state=row.state, detail=row.detail, seen_at=row.seen_at) for row in rows
    )


def _troubles(connection: Connection) -> tuple[tuple[str, str, datetime], ...]:
    rows = connection.execute(select(troubles).order_by(troubles.c.since))
    return tuple((row.name, row.reason, row.since) for row in rows)


def _letters(connection: Connection) -> int:
    some = select(dead_letters.c.id).where(dead_letters.c.replayed_at.is_(None)).limit(MOST_LETTERS).subquery()
    return connection.execute(select(func.count()).select_from(some)).scalar_one()


def _progress(connection: Connection, policy: str) -> tuple[ProgressRow, ...]:
    rows = connection.execute(select(progress).where(progress.c.policy == policy).order_by(progress.c.task))
    return tuple(ProgressRow(task=row.task, done=row.done, total=row.total, detail=row.detail, updated_at=row.updated_at) for row in rows)


def _counters(connection: Connection, policy: str) -> dict[str, int]:
    rows = connection.execute(select(counters.c.name, counters.c.value).where(counters.c.policy.in_([policy, ""])))
    found: dict[str, int] = {}
    for row in rows:
        found[row.name] = found.get(row.name, 0) + row.value
    return found


def _turns(connection: Connection, policy: str) -> tuple[int, int]:
    t = turn_counts.c
    turns, labelled = connection.execute(select(func.sum(t.turns), func.sum(t.labelled)).where(t.policy == policy)).one()
    return int(turns or 0), int(labelled or 0)
