"""What was decided and what it earned: labelled turns with their assignment, for export to other tools."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Engine, Row, select

from app.db.engine import reading
from app.db.ingestion.observations import was_served
from app.db.tables import labels, turns
from app.domain.learning.decisions import Decision, ExportedTurn
from app.domain.release.holdouts import HELD

PAGE = 1_000
_DECISION: tuple[ColumnElement[Any], ...] = (
    turns.c.inference_id, turns.c.policy, turns.c.version, turns.c.finished_at, turns.c.arm, turns.c.stage, turns.c.probability,
    turns.c.segment, labels.c.reward, labels.c.exclusion,
)  # fmt: skip
_EXPORTED = (
    *_DECISION, turns.c.payload_segment, turns.c.finish_reason, turns.c.train_consent, labels.c.held_out, labels.c.terms,
    labels.c.rule_set, labels.c.labelled_at,
)  # fmt: skip


def read_decisions(engine: Engine, *, policy: str | None, since: datetime | None, until: datetime | None) -> Iterator[Decision]:
    """Labelled turns in order of their end, but for those of people whom the long-term holdout keeps out of every choice."""
    for page in _pages(engine, _DECISION, policy=policy, since=since, until=until, where=turns.c.arm != HELD):
        yield from (Decision(**row._mapping) for row in page)


def read_exported(
    engine: Engine, *, policy: str | None, since: datetime | None, until: datetime | None
) -> Iterator[list[ExportedTurn]]:  # fmt: skip
    """Pages of labelled turns whose tokens are in a segment, in order of their end."""
    for page in _pages(engine, _EXPORTED, policy=policy, since=since, until=until, where=turns.c.payload_segment.is_not(None)):
        yield [ExportedTurn(**row._mapping) for row in page]


def _pages(
    engine: Engine, columns: Sequence[ColumnElement[Any]], *, policy: str | None, since: datetime | None, until: datetime | None,
    where: ColumnElement[bool] | None = None,
) -> Iterator[Sequence[Row[Any]]]:  # fmt: skip
    """A page per transaction, so that a long export holds nobody up."""
    t = turns.c
    statement = (
        select(*columns)
        .join(labels, (labels.c.inference_id == t.inference_id) & labels.c.current)
        .where(t.erased_at.is_(None), was_served())
        .order_by(t.finished_at, t.inference_id)
        .limit(PAGE)
    )
    for condition in (where, None if policy is None else t.policy == policy, None if until is None else t.finished_at < until):
        statement = statement if condition is None else statement.where(condition)
    position, last = since, ""
    while True:
        page = statement
        if position is not None:
            page = page.where((t.finished_at > position) | ((t.finished_at == position) & (t.inference_id > last)))
        with reading(engine) as connection:
            rows = connection.execute(page).all()
        yield rows
        if len(rows) < PAGE:
            return
        position, last = rows[-1].finished_at, rows[-1].inference_id
