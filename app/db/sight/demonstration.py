"""What the demo's terminal reads (`app.domain.views.operations.Operations`): whole lists, for a deployment that is hours old."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Row, func, select

from app.db.engine import reading
from app.db.ingestion.observations import of_the_turn_s_policy, was_served
from app.db.release.pointer import read_pointer
from app.db.sight.releases import read_gates, read_releases
from app.db.tables import (
    cycles,
    exposures,
    inbox,
    labels,
    observations,
    progress,
    turns,
    versions,
)
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.release.releases import Pointer, Release
from app.domain.telemetry.signals import ObservationName
from app.domain.views.measures import measure
from app.domain.views.operations import Exposed, LabelRow, VersionRow
from app.domain.views.rows import GateRow, ProgressRow


class SqlOperations:
    """The `Operations` port on SQL."""

    def __init__(self, state: Engine, inbox: Engine) -> None:
        self._state = state
        self._inbox = inbox

    def pointer(self, policy: str) -> Pointer | None:
        """What is live."""
        with reading(self._state) as connection:
            return read_pointer(connection, policy)

    def releases(self, policy: str, *, limit: int = 50) -> list[Release]:
        """Newest first."""
        with reading(self._state) as connection:
            return list(read_releases(connection, policy, after=None, limit=limit).rows)

    def gates(self, release_id: str) -> list[GateRow]:
        """The newest answer of each gate."""
        with reading(self._state) as connection:
            return read_gates(connection, release_id)

    def versions(self, policy: str, labels: Sequence[LabelRow] | None = None) -> list[VersionRow]:
        """Oldest first, with the measures of what they served: over `labels` where the caller has read them already."""
        by_version: dict[str, list[LabelRow]] = defaultdict(list)
        for label in self.labels(policy) if labels is None else labels:
            by_version[label.version].append(label)
        query = select(versions).where(versions.c.policy == policy).order_by(versions.c.created_at)
        return [_version_row(row, by_version[row.digest]) for row in self._rows(query)]

    def labels(self, policy: str, *, limit: int = 20_000) -> list[LabelRow]:
        """Current labels, newest first."""
        said = (observations.c.inference_id == labels.c.inference_id) & (observations.c.name == ObservationName.TASK_SUCCESS)
        succeeded = said & observations.c.retracted_at.is_(None) & of_the_turn_s_policy()
        query = (
            select(labels, turns.c.arm, turns.c.completion_tokens, observations.c.value.label("task_success"))
            .join(turns, turns.c.inference_id == labels.c.inference_id)
            .outerjoin(observations, succeeded)
            .where(labels.c.policy == policy, labels.c.current, was_served())
            .order_by(labels.c.labelled_at.desc())
            .limit(limit)
        )
        return [_label_row(row) for row in self._rows(query)]

    def cycles(self, policy: str, *, limit: int = 50) -> list[Cycle]:
        """Newest slot first."""
        query = select(cycles).where(cycles.c.policy == policy).order_by(cycles.c.slot.desc()).limit(limit)
        return [Cycle(**{**row._mapping, "status": CycleStatus(row.status)}) for row in self._rows(query)]

    def progress(self, policy: str) -> list[ProgressRow]:
        """How far long work is."""
        return [_picked(ProgressRow, row) for row in self._rows(select(progress).where(progress.c.policy == policy))]

    def exposed(self, digest: str) -> Exposed:
        """Who was served by the version."""
        query = select(
            func.count().label("requests"),
            func.count(exposures.c.actor.distinct()).label("people"),
            func.min(exposures.c.occurred_at).label("first_at"),
            func.max(exposures.c.occurred_at).label("last_at"),
        ).where(exposures.c.digest == digest)
        found = self._rows(query)[0]
        units, people = self._meanwhile(digest, found.first_at, found.last_at)
        return Exposed(
            requests=found.requests, people=found.people, first_at=found.first_at, last_at=found.last_at, units=units,
            people_meanwhile=people,
        )  # fmt: skip

    def _meanwhile(self, digest: str, first_at: datetime | None, last_at: datetime | None) -> tuple[int, int]:
        """Units of the canaries that a version was in, and people of its policy, between two moments."""
        mine = select(exposures.c.policy, exposures.c.release_id).where(exposures.c.digest == digest)
        policies, releases = ({row[i] for row in self._rows(mine.distinct())} for i in (0, 1))
        during = exposures.c.occurred_at.between(first_at, last_at) & exposures.c.policy.in_(policies)
        drawn = select(exposures.c.actor, exposures.c.stage).where(during, exposures.c.release_id.in_(releases - {None})).distinct()
        people = select(func.count(exposures.c.actor.distinct())).where(during)
        units = self._rows(select(func.count()).select_from(drawn.subquery()))[0][0]
        return int(units), int(self._rows(people)[0][0])

    def accepted_events(self) -> int:
        """Events the door has accepted since the beginning."""
        with reading(self._inbox) as connection:
            return connection.execute(select(func.max(inbox.c.seq))).scalar_one() or 0

    def waiting_turns(self, policy: str) -> int:
        """Turns whose wait is not over yet."""
        query = select(func.count()).select_from(turns).where(turns.c.policy == policy, turns.c.labelled_at.is_(None))
        return int(self._rows(query)[0][0])

    def _rows(self, query: Any) -> Sequence[Row[Any]]:  # noqa: ANN401 - any select
        with reading(self._state) as connection:
            return connection.execute(query).all()


def _picked(kind: Any, row: Row[Any]) -> Any:  # noqa: ANN401 - a dataclass and its instance
    """The dataclass from the columns that are its fields."""
    return kind(**{name: row._mapping[name] for name in kind.__dataclass_fields__})


def _label_row(row: Row[Any]) -> LabelRow:
    terms = {term["name"]: term for term in row.terms}
    persistence, follow_up = terms.get("edit_persistence", {}), terms.get("follow_up", {})
    segment = dict(pair.split("=", 1) for pair in row.segment.split(",") if "=" in pair)
    return LabelRow(
        version=row.version, segment=row.segment, tier=segment.get("tier", ""), reward=row.reward, exclusion=row.exclusion,
        persistence=persistence.get("detail", {}).get("survival"), follow_up=follow_up.get("value"),
        success=None if row.task_success is None else float(row.task_success), tokens=row.completion_tokens,
        finished_at=row.finished_at, arm=row.arm,
    )  # fmt: skip


def _version_row(row: Row[Any], served: Sequence[LabelRow]) -> VersionRow:
    spoken = [label.follow_up for label in served if label.follow_up is not None]
    return VersionRow(
        digest=row.digest, name=row.name, kind=row.kind, parent=row.parent, step=row.step, created_at=row.created_at, turns=len(served),
        persistence=measure([label.persistence for label in served if label.persistence is not None], low=0, high=1),
        dissatisfied=measure([float(value < 0) for value in spoken], low=0, high=1),
        success=measure([label.success for label in served if label.success is not None], low=0, high=1),
        reward=measure([label.reward for label in served]),
    )  # fmt: skip
