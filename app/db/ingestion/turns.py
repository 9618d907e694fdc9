"""Turns: the index of what was served; the tokens themselves lie in segments, the words beside the rows."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, case, exists, select, true, update

from app.db.chunks import chunked, one_of
from app.db.engine import insert_or_ignore, reading
from app.db.ingestion import words
from app.db.tables import batch_items, turns
from app.domain.learning.rewards import segment_key
from app.domain.telemetry.events import is_imported
from app.domain.telemetry.streams import JoinRules
from app.domain.telemetry.traceparent import TRACEPARENT
from app.domain.telemetry.turns import TurnServed


def traces_of(engine: Engine, inference_ids: Sequence[str]) -> list[str]:
    """The trace contexts of those of these turns that are traced."""
    with reading(engine) as connection:
        found = connection.execute(select(turns.c.tags).where(one_of(connection, turns.c.inference_id, inference_ids))).scalars()
        return [tags[TRACEPARENT] for tags in found if TRACEPARENT in tags]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRef:
    """What the join needs to know about a turn."""

    inference_id: str
    episode_id: str
    policy: str
    label_due_at: datetime
    labelled_at: datetime | None
    erased_at: datetime | None
    imported: bool
    """History, told long after it happened."""


def insert_turns(connection: Connection, served: Sequence[TurnServed], *, rules: JoinRules, erased: Mapping[str, datetime]) -> set[str]:
    """Insert turns, due `label_wait` after their end; turns of people who were erased become empty shells, so that counts add up.

    Returns the ids of those that were new.
    """
    if not served:
        return set()
    apart = words.stand_apart(connection)
    rows = [
        _row(turn, rules, erased.get(turn.inference_id), words.NONE if apart else words.words_of(turn))
        for turn in sorted(served, key=lambda turn: turn.inference_id)
    ]
    statement = insert_or_ignore(connection, turns).returning(turns.c.inference_id)
    inserted = {row.inference_id for row in connection.execute(statement, rows)}
    if apart:
        words.put_apart(connection, [turn for turn in served if turn.inference_id in inserted - erased.keys()])
    return inserted


def _row(turn: TurnServed, rules: JoinRules, erased_at: datetime | None, said: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "inference_id": turn.inference_id, "episode_id": turn.episode_id, "policy": turn.policy, "version": turn.version,
        "kind": turn.kind, "source": turn.source, "started_at": turn.started_at, "finished_at": turn.finished_at,
        "label_due_at": turn.finished_at + rules.label_wait(turn.policy), "actor": turn.actor, "segment": segment_key(turn.segment),
        "finish_reason": str(turn.finish_reason), "train_consent": turn.consent.train, "has_logprobs": _has_logprobs(turn),
        "prompt_tokens": turn.usage.prompt_tokens, "completion_tokens": turn.usage.completion_tokens,
        "time_to_first_token_s": turn.time_to_first_token_s,
        "release_id": turn.assignment.release_id, "stage": turn.assignment.stage, "arm": turn.assignment.arm,
        "probability": turn.assignment.probability, "tags": turn.tags, "payload_segment": None, "erased_at": erased_at, **said,
    }  # fmt: skip
    return row if erased_at is None else row | SHELL


def _has_logprobs(turn: TurnServed) -> bool:
    return turn.payload.has_logprobs if turn.payload else turn.logprobs is not None


SHELL: dict[str, Any] = {"actor": None, "tags": {}, "segment": "", "payload_segment": None, **words.NONE}
"""What is left of a turn after its person was erased: that it was served, by which version, and when."""


def point_to_segment(connection: Connection, name: str, inference_ids: Sequence[str]) -> None:
    """Say where the tokens of these turns lie."""
    for some in chunked(inference_ids, 5_000):
        connection.execute(update(turns).where(one_of(connection, turns.c.inference_id, some)).values(payload_segment=name))


def lock_turns(connection: Connection, inference_ids: Collection[str], episode_ids: Collection[str]) -> None:
    """Lock known turns in the one order, all that a transaction will touch: see `app.db.locks`. SQLite has one writer."""
    if connection.dialect.name == "sqlite" or not (inference_ids or episode_ids):
        return
    touched = one_of(connection, turns.c.inference_id, inference_ids) | one_of(connection, turns.c.episode_id, episode_ids)
    connection.execute(select(turns.c.inference_id).where(touched).order_by(turns.c.inference_id).with_for_update()).all()


def turns_by_id(connection: Connection, inference_ids: Iterable[str]) -> dict[str, TurnRef]:
    """Known turns by id, locked against a labeller that reads their observations at this moment (PostgreSQL)."""
    ids = set(inference_ids)
    return {ref.inference_id: ref for ref in _refs(connection, one_of(connection, turns.c.inference_id, ids))} if ids else {}


def turns_by_episode(connection: Connection, episode_ids: Iterable[str]) -> dict[str, list[TurnRef]]:
    """Known turns by episode, locked like those of `turns_by_id`."""
    ids = set(episode_ids)
    found: dict[str, list[TurnRef]] = {}
    for ref in _refs(connection, one_of(connection, turns.c.episode_id, ids)) if ids else ():
        found.setdefault(ref.episode_id, []).append(ref)
    return found


_REF = (
    turns.c.inference_id,
    turns.c.episode_id,
    turns.c.policy,
    turns.c.label_due_at,
    turns.c.labelled_at,
    turns.c.erased_at,
    turns.c.source,
)


def _refs(connection: Connection, condition: ColumnElement[bool]) -> Iterable[TurnRef]:
    statement = select(*_REF).where(condition).order_by(turns.c.inference_id).with_for_update()
    return [_ref(row) for row in connection.execute(statement)]


def _ref(row: Any) -> TurnRef:  # noqa: ANN401 - a row of `_REF`
    return TurnRef(
        inference_id=row.inference_id, episode_id=row.episode_id, policy=row.policy, label_due_at=row.label_due_at,
        labelled_at=row.labelled_at, erased_at=row.erased_at, imported=is_imported(row.source),
    )  # fmt: skip


def note_evidence(connection: Connection, inference_ids: Iterable[str]) -> None:
    """Something new is known about these turns: labels computed before are stale, and labelled turns in no batch are asked for again.

    `evidence` counts up for every turn, labelled or not: a labeller that read its observations a moment ago sees at its write that
    they were not all.
    """
    batched = exists().where(batch_items.c.inference_id == turns.c.inference_id)
    ask = case((turns.c.labelled_at.is_not(None) & ~batched, true()), else_=turns.c.needs_relabel)
    changed = {"evidence": turns.c.evidence + 1, "needs_relabel": ask}
    if ids := set(inference_ids):
        connection.execute(update(turns).where(one_of(connection, turns.c.inference_id, ids)).values(changed))
