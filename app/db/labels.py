"""Labels in SQL: due turns with their observations, and the current label of each turn."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, exists, func, insert, or_, select, update

from app.db.engine import reading, writing
from app.db.outbox import OutboxEvent, enqueue
from app.db.tables import batch_items, labels, observations, turns
from app.domain.events import Observation, Topic
from app.domain.rewards import DueTurn, Label, TurnFacts
from app.domain.turns import FinishReason, ToolCall

LABEL_EVENT = "ratchet.label.v1"
"""Type of the records on `ratchet.labels`: a `Label` with its breakdown."""


class SqlLabels:
    """The `LabelBook` port on SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read: dict[str, int] = {}
        """What `turns.evidence` was when the observations were read."""

    def due(self, policy: str, *, now: datetime, limit: int) -> list[DueTurn]:
        """Turns whose wait is over and that have no label, and turns marked for another one, oldest first."""
        waited = (turns.c.labelled_at.is_(None)) & (turns.c.label_due_at <= now)
        query = (
            select(turns).where(turns.c.policy == policy, or_(waited, turns.c.needs_relabel)).order_by(turns.c.label_due_at).limit(limit)
        )
        with reading(self._engine) as connection:
            found = connection.execute(query).all()
            self._read = {row.inference_id: row.evidence for row in found}
            observed = observations_of(connection, found)
            revisions = _revisions(connection, found)
        return [
            DueTurn(facts=facts_of(row), observations=observed[row.inference_id], revision=revisions.get(row.inference_id, 0))
            for row in found
        ]

    def write(self, made: Sequence[Label], *, now: datetime) -> None:
        """Make these the current labels, in one transaction; a turn that went into a batch meanwhile keeps the label it has.

        A turn about which something new became known since it was read stays due: its label would be stale.
        """
        with writing(self._engine) as connection:
            ids = self._unchanged(connection, [label.inference_id for label in made])
            used = set(connection.execute(select(batch_items.c.inference_id).where(batch_items.c.inference_id.in_(ids))).scalars())
            finished = dict(
                connection.execute(select(turns.c.inference_id, turns.c.finished_at).where(turns.c.inference_id.in_(ids))).all()
            )  # type: ignore[arg-type]
            fresh = [
                label for label in made if label.inference_id in ids and label.inference_id not in used and label.inference_id in finished
            ]
            fresh_ids = [label.inference_id for label in fresh]
            connection.execute(update(labels).where(labels.c.inference_id.in_(fresh_ids), labels.c.current).values(current=False))
            if fresh:
                connection.execute(insert(labels), [_row(label, finished[label.inference_id]) for label in fresh])
                enqueue(connection, [_event(label) for label in fresh], now=now)
            connection.execute(update(turns).where(turns.c.inference_id.in_(ids)).values(needs_relabel=False))
            unlabelled = turns.c.inference_id.in_(ids) & turns.c.labelled_at.is_(None)
            connection.execute(update(turns).where(unlabelled).values(labelled_at=now))

    def _unchanged(self, connection: Connection, ids: Sequence[str]) -> set[str]:
        """The turns about which nothing new became known since `due` read them, locked until the transaction ends."""
        locked = select(turns.c.inference_id, turns.c.evidence).where(turns.c.inference_id.in_(ids)).order_by(turns.c.inference_id)
        rows = connection.execute(locked.with_for_update()).all()
        return {row.inference_id for row in rows if row.evidence == self._read.get(row.inference_id, row.evidence)}


def observations_of(connection: Connection, found: Sequence[Row[Any]]) -> dict[str, tuple[Observation, ...]]:
    """Joined, not retracted observations of the turns and of their episodes, by inference id, in order of occurrence."""
    ids = [row.inference_id for row in found]
    episodes = {row.episode_id for row in found}
    about = or_(observations.c.inference_id.in_(ids), observations.c.episode_id.in_(episodes))
    in_time = observations.c.status == "joined"
    query = (
        select(observations)
        .where(about, in_time, observations.c.retracted_at.is_(None))
        .order_by(observations.c.occurred_at, observations.c.id)
    )
    by_turn: dict[str, list[Observation]] = defaultdict(list)
    by_episode: dict[str, list[Observation]] = defaultdict(list)
    for row in connection.execute(query):
        observation = _observation(row)
        (by_turn[row.inference_id] if row.inference_id else by_episode[row.episode_id]).append(observation)
    return {
        row.inference_id: tuple(sorted(by_turn[row.inference_id] + by_episode[row.episode_id], key=lambda o: (o.occurred_at, o.id)))
        for row in found
    }


def _revisions(connection: Connection, found: Sequence[Row[Any]]) -> dict[str, int]:
    query = select(labels.c.inference_id, labels.c.revision).where(
        labels.c.inference_id.in_([r.inference_id for r in found]), labels.c.current
    )
    return {row.inference_id: row.revision for row in connection.execute(query)}


def _observation(row: Row[Any]) -> Observation:
    return Observation(
        id=row.id, policy=row.policy, inference_id=row.inference_id, episode_id=row.episode_id, name=row.name, value=row.value,
        occurred_at=row.occurred_at, source=row.source, actor=row.actor, tags=row.tags,
    )  # fmt: skip


def facts_of(row: Row[Any]) -> TurnFacts:
    """What terms look at, from a row of turns."""
    return TurnFacts(
        inference_id=row.inference_id, episode_id=row.episode_id, policy=row.policy, version=row.version, kind=row.kind, source=row.source,
        started_at=row.started_at, finished_at=row.finished_at, actor=row.actor, segment=row.segment,
        finish_reason=FinishReason(row.finish_reason), train_consent=row.train_consent, has_logprobs=row.has_logprobs,
        prompt_tokens=row.prompt_tokens, completion_tokens=row.completion_tokens,
        tool_calls=tuple(msgspec.convert(row.tool_calls, list[ToolCall])), time_to_first_token_s=row.time_to_first_token_s,
        completion=row.completion, tags=row.tags, erased=row.erased_at is not None,
    )  # fmt: skip


def _row(label: Label, finished_at: datetime) -> dict[str, Any]:
    return {
        "inference_id": label.inference_id, "revision": label.revision, "current": True, "policy": label.policy, "version": label.version,
        "reward": label.reward, "terms": msgspec.to_builtins(label.terms), "rule_set": label.rule_set,
        "exclusion": label.exclusion.value if label.exclusion else None, "segment": label.segment, "actor": label.actor,
        "held_out": label.held_out, "finished_at": finished_at, "labelled_at": label.labelled_at,
    }  # fmt: skip


def _event(label: Label) -> OutboxEvent:
    """The label on `ratchet.labels`, keyed by its turn, so that an erasure's tombstone finds it."""
    return OutboxEvent(topic=Topic.LABELS, type=LABEL_EVENT, key=label.inference_id, payload=msgspec.json.encode(label))


def count_trainable(connection: Connection, policy: str, version: str) -> int:
    """Current labels of a version that a batch could take: eligible, not held out, in no batch yet."""
    free = ~exists().where(batch_items.c.inference_id == labels.c.inference_id)
    mine = (labels.c.policy == policy) & (labels.c.version == version) & labels.c.current
    usable = labels.c.exclusion.is_(None) & ~labels.c.held_out & free
    return connection.execute(select(func.count()).select_from(labels).where(mine, usable)).scalar_one()
