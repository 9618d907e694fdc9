"""Labels one by one, with everything that was known of a turn; rule sets; what batches left out."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, func, select

from app.db.ingestion.words import COMPLETION, WITH_WORDS
from app.db.sight.paging import page_by_key
from app.db.tables import batch_items, batches, labels, observations, rule_set_activations, rule_sets, turns
from app.domain.views.pages import CutRow, Inspected, LabelLine, Page, RuleSetInfo

SHOWN = 20_000
"""Characters of an answer on a page; a line of a megabyte stays in the database."""
LINE = (
    labels.c.inference_id, labels.c.revision, labels.c.version, labels.c.segment, labels.c.reward, labels.c.exclusion, labels.c.terms,
    labels.c.labelled_at, labels.c.batch_id,
)  # fmt: skip


def read_labels(
    connection: Connection, policy: str, *, after: str | None, limit: int, exclusion: str | None, version: str | None
) -> Page[LabelLine]:
    """Current ones, newest first."""
    label = labels.c
    query = select(*LINE).where(label.policy == policy, label.current)
    if exclusion is not None:
        query = query.where(label.exclusion == exclusion)
    if version is not None:
        query = query.where(label.version == version)
    return page_by_key(connection, query, label.labelled_at, label.inference_id, after=after, limit=limit, made=_line)


def _line(row: Row[*tuple[Any, ...]]) -> LabelLine:
    return LabelLine(**{**row._mapping, "terms": tuple(row.terms)})


def read_inspected(connection: Connection, inference_id: str) -> Inspected | None:
    """A turn, every revision of its label and what was observed of it and of its episode."""
    found = select(turns, COMPLETION.label("words")).select_from(WITH_WORDS).where(turns.c.inference_id == inference_id)
    turn = connection.execute(found).one_or_none()
    if turn is None:
        return None
    revisions = connection.execute(select(*LINE).where(labels.c.inference_id == inference_id).order_by(labels.c.revision.desc()))
    return Inspected(
        inference_id=turn.inference_id, episode_id=turn.episode_id, version=turn.version, policy=turn.policy, arm=turn.arm,
        segment=turn.segment, started_at=turn.started_at, finished_at=turn.finished_at, finish_reason=turn.finish_reason,
        completion=turn.words[:SHOWN], erased_at=turn.erased_at, revisions=tuple(_line(row) for row in revisions),
        observed=tuple(_observed(connection, turn)),
    )  # fmt: skip


def _observed(connection: Connection, turn: Row[Any]) -> list[Mapping[str, Any]]:
    o = observations.c
    wanted = (o.name, o.value, o.occurred_at, o.received_at, o.status, o.retracted_at, o.source)
    mine = (o.inference_id == turn.inference_id) | (o.episode_id == turn.episode_id)
    about = mine & (o.policy.is_(None) | (o.policy == turn.policy))
    rows = connection.execute(select(*wanted).where(about).order_by(o.occurred_at, o.id).limit(200))
    return [dict(row._mapping) for row in rows]


def read_rule_sets(connection: Connection, policy: str) -> list[RuleSetInfo]:
    """What was ever in force, newest first."""
    a = rule_set_activations.c
    query = select(a.digest, rule_sets.c.name, a.activated_by, a.activated_at, rule_sets.c.toml)
    query = query.join(rule_sets, rule_sets.c.digest == a.digest).where(a.policy == policy).order_by(a.id.desc()).limit(100)
    return [RuleSetInfo(**row._mapping) for row in connection.execute(query)]


def read_cuts(connection: Connection, policy: str, newest: int) -> list[CutRow]:
    """The newest batches, newest first."""
    b = batches.c
    rows = connection.execute(select(batches).where(b.policy == policy).order_by(b.slot.desc()).limit(newest)).all()
    counted = select(batch_items.c.batch_id, func.count()).where(batch_items.c.batch_id.in_([row.id for row in rows]))
    items: dict[str, int] = {row[0]: row[1] for row in connection.execute(counted.group_by(batch_items.c.batch_id))}
    return [CutRow(id=row.id, slot=row.slot, created_at=row.created_at, items=items.get(row.id, 0), left_out=row.left_out) for row in rows]
