"""What was decided and what it earned: labelled turns with their assignment, for export to other tools."""

from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import Engine, select

from app.db.engine import reading
from app.db.observations import was_served
from app.db.tables import labels, turns
from app.domain.decisions import Decision

PAGE = 1_000


def read_decisions(engine: Engine, *, policy: str | None, since: datetime | None, until: datetime | None) -> Iterator[Decision]:
    """Labelled turns in order of their end, a page per transaction, so that a long export holds nobody up."""
    t = turns.c
    chosen = (t.inference_id, t.policy, t.version, t.finished_at, t.arm, t.stage, t.probability, t.segment)
    statement = (
        select(*chosen, labels.c.reward, labels.c.exclusion)
        .join(labels, (labels.c.inference_id == t.inference_id) & labels.c.current)
        .where(t.erased_at.is_(None), was_served())
        .order_by(t.finished_at, t.inference_id)
        .limit(PAGE)
    )  # fmt: skip
    if policy is not None:
        statement = statement.where(t.policy == policy)
    if until is not None:
        statement = statement.where(t.finished_at < until)
    position, last = since, ""
    while True:
        page = statement
        if position is not None:
            page = page.where((t.finished_at > position) | ((t.finished_at == position) & (t.inference_id > last)))
        with reading(engine) as connection:
            rows = connection.execute(page).all()
        for row in rows:
            yield Decision(**row._mapping)
        if len(rows) < PAGE:
            return
        position, last = rows[-1].finished_at, rows[-1].inference_id
