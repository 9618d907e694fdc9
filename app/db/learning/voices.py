"""Whose word decided the outcomes of turns: the observations on them and on their episodes, and who was heard of before."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection, or_, select

from app.db.chunks import chunked, one_of, rows_of
from app.db.ingestion.observations import that_count
from app.db.tables import observations, turns
from app.domain.learning.batches import LabelledTurn, Voice


def read_voices(
    connection: Connection, labelled: Sequence[LabelledTurn], *, policy: str, before: datetime
) -> Mapping[str, Sequence[Voice]]:
    """By inference id; see `CutSession.voices`. What was taken back, came too late, or another policy's key said decided nothing."""
    by_turn, by_episode = _said(connection, labelled, policy)
    raters = {
        turn.inference_id: {actor or turn.actor for actor in by_turn[turn.inference_id] | by_episode[turn.episode_id]} or {turn.actor}
        for turn in labelled
    }
    known = heard_before(connection, {rater for found in raters.values() for rater in found if rater is not None}, before)
    return {
        inference_id: [Voice(rater=rater, newcomer=rater not in known) for rater in sorted(found, key=str)]
        for inference_id, found in raters.items()
    }


def _said(
    connection: Connection, labelled: Sequence[LabelledTurn], policy: str
) -> tuple[defaultdict[str, set[str | None]], defaultdict[str, set[str | None]]]:
    """The actors of what was said of each turn and of each episode."""
    found: list[defaultdict[str, set[str | None]]] = []
    o = observations.c
    counts = that_count() & (o.policy.is_(None) | (o.policy == policy))
    for column, wanted in (
        (o.inference_id, {turn.inference_id for turn in labelled}),
        (o.episode_id, {turn.episode_id for turn in labelled}),
    ):
        said: defaultdict[str, set[str | None]] = defaultdict(set)
        for some in chunked(sorted(wanted)):
            for target, actor in connection.execute(select(column, o.actor).where(one_of(connection, column, some), counts)):
                said[target].add(actor)
        found.append(said)
    return found[0], found[1]


def heard_before(connection: Connection, raters: Collection[str], before: datetime) -> set[str]:
    """Those who asked or said anything before; the database stops at the first row of each."""
    known: set[str] = set()
    for some in chunked(sorted(raters)):
        given = rows_of(connection, some)
        # LIMIT keeps PostgreSQL from reading both tables into hashes: one step down an index for each rater
        asked = select(1).where(turns.c.actor == given.c.value, turns.c.started_at < before).limit(1).scalar_subquery()
        said = select(1).where(observations.c.actor == given.c.value, observations.c.received_at < before).limit(1).scalar_subquery()
        known.update(connection.execute(select(given.c.value).where(or_(asked.is_not(None), said.is_not(None)))).scalars())
    return known
