"""Labels in SQL: due turns with their observations, and the current label of each turn."""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Engine, Row, func, insert, literal, select, text, update

from app.db import locks
from app.db.chunks import one_of
from app.db.engine import reading
from app.db.ingestion.observations import that_count
from app.db.ingestion.turn_counts import count_labelled
from app.db.ingestion.words import COMPLETION, TOOL_CALLS, WITH_WORDS
from app.db.learning.readings import ask_people
from app.db.learning.rollups import COLUMNS, add_up
from app.db.outbox import OutboxEvent, enqueue
from app.db.tables import POOL, POOL_SQLITE, batch_items, labels, observations, turns
from app.domain.learning.rewards import DueTurn, Label, TurnFacts
from app.domain.telemetry.events import Observation, Topic
from app.domain.telemetry.signals import ObservationName
from app.domain.telemetry.turns import FinishReason, ToolCall

LABEL_EVENT = "ratchet.label.v1"
"""Type of the records on `ratchet.labels`: a `Label` with its breakdown."""


FACTS = (
    turns.c.inference_id, turns.c.episode_id, turns.c.policy, turns.c.version, turns.c.kind, turns.c.source, turns.c.started_at,
    turns.c.finished_at, turns.c.labelled_at, turns.c.actor, turns.c.segment, turns.c.finish_reason, turns.c.train_consent,
    turns.c.has_logprobs, turns.c.prompt_tokens, turns.c.completion_tokens, TOOL_CALLS, turns.c.time_to_first_token_s,
    COMPLETION, turns.c.tags, turns.c.erased_at,
)  # fmt: skip
"""The columns that labelling looks at, of `WITH_WORDS`, in the order of `facts_of`."""
_OBSERVATION = (
    observations.c.id, observations.c.policy, observations.c.inference_id, observations.c.episode_id, observations.c.name,
    observations.c.value, observations.c.occurred_at, observations.c.source, observations.c.actor, observations.c.tags,
)  # fmt: skip


def lot_of(unit: str) -> int:
    """60 bits of a hash: an episode's place among those that batches are drawn from. (MD5, because PostgreSQL has it for the migration.)"""
    return int(hashlib.md5(unit.encode(), usedforsecurity=False).hexdigest()[:15], 16)


class SqlLabels:
    """The `LabelBook` port on SQL. Several may label at the same time: a turn that another one is writing is left to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read: dict[str, int] = {}
        """What `turns.evidence` was when the observations were read."""
        self._success: dict[str, float] = {}
        """What the gold signal said then."""

    def due(self, policy: str, *, now: datetime, limit: int) -> list[DueTurn]:
        """Turns whose wait is over and that have no label, and turns marked for another one, oldest first."""
        mine = select(*FACTS, turns.c.evidence).select_from(WITH_WORDS).where(turns.c.policy == policy)
        waited = mine.where(turns.c.labelled_at.is_(None), turns.c.label_due_at <= now).order_by(turns.c.label_due_at)
        with reading(self._engine) as connection:
            found = list(connection.execute(waited.limit(limit)))
            if len(found) < limit:
                marked = mine.where(turns.c.needs_relabel, turns.c.labelled_at.is_not(None)).order_by(turns.c.inference_id)
                found += connection.execute(marked.limit(limit - len(found)))
            self._read = {row.inference_id: row.evidence for row in found}
            observed = observations_of(connection, found)
            self._success = {key: said for key, seen in observed.items() if (said := _success(seen)) is not None}
            revisions = _revisions(connection, [row.inference_id for row in found if row.labelled_at is not None])
        return [
            DueTurn(facts=facts_of(row), observations=observed[row.inference_id], revision=revisions.get(row.inference_id, 0))
            for row in found
        ]

    def write(self, made: Sequence[Label], *, now: datetime) -> None:
        """Make these the current labels, in one transaction; a turn that went into a batch meanwhile keeps the label it has.

        A turn about which something new became known since it was read stays due: its label would be stale. One whose label retention took
        gets no other: the sums that the first one left behind know it already, and nobody could take it out of them.
        """
        locks.settled(self._engine, lambda connection: self._write(connection, made, now))

    def _write(self, connection: Connection, made: Sequence[Label], now: datetime) -> None:
        turns_ = self._open(connection, [label.inference_id for label in made])
        again = {id_ for id_, turn in turns_.items() if turn.labelled_at is not None}
        retired = _retire(connection, sorted(again - _batched(connection, again)))
        kept = again - {row.inference_id for row in retired}
        fresh = [label for label in made if label.inference_id in turns_ and label.inference_id not in kept]
        if fresh:
            rows = [_row(label, turns_[label.inference_id], self._success.get(label.inference_id)) for label in fresh]
            connection.execute(insert(labels), rows)
            add_up(connection, rows, taken_back=retired)
            ask_people(connection, fresh)
            enqueue(connection, [_event(label) for label in fresh], now=now)
        labelled = {"needs_relabel": False, "labelled_at": func.coalesce(turns.c.labelled_at, literal(now, turns.c.labelled_at.type))}
        connection.execute(update(turns).where(one_of(connection, turns.c.inference_id, turns_)).values(labelled))
        count_labelled(connection, [(row.policy, row.version) for row in turns_.values() if row.labelled_at is None])

    def _open(self, connection: Connection, ids: Sequence[str]) -> dict[str, Row[*tuple[Any, ...]]]:
        """Turns that still want a label and about which nothing new became known since `due` read them, locked to the end.

        One that is locked is being written by another labeller, or something new is being joined to it: it stays due.
        """
        asked = turns.c.labelled_at.is_(None) | turns.c.needs_relabel
        wanted = select(
            turns.c.policy,
            turns.c.version,
            turns.c.labelled_at,
            turns.c.inference_id,
            turns.c.evidence,
            turns.c.finished_at,
            turns.c.episode_id,
        )
        mine = wanted.where(one_of(connection, turns.c.inference_id, ids), asked).order_by(turns.c.inference_id)
        rows = connection.execute(mine.with_for_update(skip_locked=True))
        return {row.inference_id: row for row in rows if row.evidence == self._read.get(row.inference_id, row.evidence)}


def _batched(connection: Connection, ids: Collection[str]) -> set[str]:
    """Those that are in a batch."""
    if not ids:
        return set()
    return set(connection.execute(select(batch_items.c.inference_id).where(one_of(connection, batch_items.c.inference_id, ids))).scalars())


def _retire(connection: Connection, ids: Sequence[str]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Their labels are not the current ones any more; what those were."""
    if not ids:
        return ()
    mine = one_of(connection, labels.c.inference_id, ids) & labels.c.current
    return connection.execute(update(labels).where(mine).values(current=False).returning(*COLUMNS)).all()


def _success(seen: Sequence[Observation]) -> float | None:
    """The newest word of the gold signal; None where it said nothing."""
    said = [o.value for o in seen if o.name == ObservationName.TASK_SUCCESS and isinstance(o.value, int | float)]
    return float(said[-1]) if said else None


def observations_of(connection: Connection, found: Sequence[Row[*tuple[Any, ...]]]) -> dict[str, tuple[Observation, ...]]:
    """Joined, not retracted observations of the turns and of their episodes, by inference id, in order of occurrence.

    What another policy's key said about an episode is about its own turns of it.
    """
    by_turn = _observed(connection, observations.c.inference_id, {row.inference_id for row in found})
    by_episode = _observed(connection, observations.c.episode_id, {row.episode_id for row in found})
    return {
        row.inference_id: tuple(
            observation
            for observation in _in_order(by_turn.get(row.inference_id, ()), by_episode.get(row.episode_id, ()))
            if observation.policy in (None, row.policy)
        )
        for row in found
    }


def _observed(connection: Connection, about: Column[Any], ids: Collection[str]) -> dict[str, list[Observation]]:
    """By id, in order of occurrence."""
    query = (
        select(about, *_OBSERVATION)
        .where(one_of(connection, about, ids), that_count())
        .order_by(observations.c.occurred_at, observations.c.id)
    )
    found: dict[str, list[Observation]] = defaultdict(list)
    for key, id_, policy, inference_id, episode_id, name, value, occurred_at, source, actor, tags in connection.execute(query):
        observation = Observation(
            id=id_, policy=policy, inference_id=inference_id, episode_id=episode_id, name=name, value=value, occurred_at=occurred_at,
            source=source, actor=actor, tags=tags,
        )  # fmt: skip
        found[key].append(observation)
    return found


def _in_order(one: Sequence[Observation], other: Sequence[Observation]) -> tuple[Observation, ...]:
    if not one or not other:
        return (*one, *other)
    return tuple(sorted((*one, *other), key=lambda o: (o.occurred_at, o.id)))


def _revisions(connection: Connection, ids: Sequence[str]) -> dict[str, int]:
    if not ids:
        return {}
    query = select(labels.c.inference_id, labels.c.revision).where(one_of(connection, labels.c.inference_id, ids), labels.c.current)
    return {row.inference_id: row.revision for row in connection.execute(query)}


def facts_of(row: Row[*tuple[Any, ...]]) -> TurnFacts:
    """What terms look at, from a row that begins with `FACTS`."""
    (
        inference_id, episode_id, policy, version, kind, source, started_at, finished_at, _, actor, segment, finish_reason, train_consent,
        has_logprobs, prompt_tokens, completion_tokens, tool_calls, time_to_first_token_s, completion, tags, erased_at, *_,
    ) = row  # fmt: skip
    return TurnFacts(
        inference_id=inference_id, episode_id=episode_id, policy=policy, version=version, kind=kind, source=source, started_at=started_at,
        finished_at=finished_at, actor=actor, segment=segment, finish_reason=FinishReason(finish_reason), train_consent=train_consent,
        has_logprobs=has_logprobs, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens,
        tool_calls=msgspec.convert(tool_calls, tuple[ToolCall, ...]), time_to_first_token_s=time_to_first_token_s, completion=completion,
        tags=tags, erased=erased_at is not None,
    )  # fmt: skip


def _row(label: Label, turn: Row[*tuple[Any, ...]], success: float | None) -> dict[str, Any]:
    return {
        "inference_id": label.inference_id, "revision": label.revision, "current": True, "policy": label.policy, "version": label.version,
        "reward": label.reward, "terms": label.terms, "rule_set": label.rule_set,
        "exclusion": label.exclusion.value if label.exclusion else None, "segment": label.segment, "actor": label.actor,
        "held_out": label.held_out, "finished_at": turn.finished_at, "labelled_at": label.labelled_at, "lot": lot_of(turn.episode_id),
        "success": success,
    }  # fmt: skip


def _event(label: Label) -> OutboxEvent:
    """The label on `ratchet.labels`, keyed by its turn, so that an erasure's tombstone finds it."""
    return OutboxEvent(topic=Topic.LABELS, type=LABEL_EVENT, key=label.inference_id, payload=msgspec.json.encode(label))


def count_trainable(connection: Connection, policy: str, version: str, *, at_most: int = 100_000) -> int:
    """Current labels of a version that a batch could take: eligible, not held out, in no batch yet. Counted no further than `at_most`."""
    pool = text(POOL_SQLITE if connection.dialect.name == "sqlite" else POOL)
    mine = (labels.c.policy == policy) & (labels.c.version == version) & labels.c.exclusion.is_(None)
    found = select(labels.c.inference_id).where(pool, mine).limit(at_most).subquery()
    return connection.execute(select(func.count()).select_from(found)).scalar_one()
