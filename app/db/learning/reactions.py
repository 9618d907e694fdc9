"""What people did with the turns of a batch, read when it is learned from: what was taken back or erased by then is not there."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, select

from app.db.chunks import chunked, one_of
from app.db.ingestion.words import WITH_WORDS
from app.db.learning.labels import FACTS, facts_of, observations_of
from app.db.learning.voices import heard_before
from app.db.tables import turns
from app.domain.learning.corrections import Reaction
from app.domain.learning.rewards import DueTurn


def read_reactions(connection: Connection, inference_ids: Sequence[str], *, before: datetime) -> list[Reaction]:
    """Of the turns that are not erased, in the order of their ids; who was not heard of `before` is a newcomer."""
    found: list[DueTurn] = []
    for some in chunked(sorted(inference_ids)):
        found += _turns(connection, one_of(connection, turns.c.inference_id, some))
    retries = _retries(connection, found)
    said = {turn.facts.inference_id: [turn, *retries[turn.facts.inference_id]] for turn in found}
    actors = {o.actor for group in said.values() for turn in group for o in turn.observations} | {turn.facts.actor for turn in found}
    named = {actor for actor in actors if actor is not None}
    newcomers = frozenset(named - heard_before(connection, named, before))
    return [
        Reaction(turn=turn, retries=tuple(retries[turn.facts.inference_id]), newcomers=newcomers)
        for turn in sorted(found, key=lambda turn: turn.facts.inference_id)
    ]


def _turns(connection: Connection, wanted: ColumnElement[bool]) -> list[DueTurn]:
    rows = list(connection.execute(select(*FACTS).select_from(WITH_WORDS).where(wanted, turns.c.erased_at.is_(None))))
    observed = observations_of(connection, rows)
    return [DueTurn(facts=facts_of(row), observations=observed[row.inference_id], revision=0) for row in rows]


def _retries(connection: Connection, found: Sequence[DueTurn]) -> defaultdict[str, list[DueTurn]]:
    """Later answers of the same episode to prompts as long as the turn's."""
    asked_again = {turn.facts.episode_id for turn in found if any(o.name == "regenerate" and o.value for o in turn.observations)}
    siblings: defaultdict[str, list[DueTurn]] = defaultdict(list)
    for some in chunked(sorted(asked_again)):
        for turn in _turns(connection, one_of(connection, turns.c.episode_id, some)):
            siblings[turn.facts.episode_id].append(turn)
    later: defaultdict[str, list[DueTurn]] = defaultdict(list)
    for turn in found:
        mine = turn.facts
        same = [s for s in siblings[mine.episode_id] if s.facts.policy == mine.policy and s.facts.prompt_tokens == mine.prompt_tokens]
        after = [s for s in same if s.facts.started_at >= mine.finished_at and s.facts.kind == mine.kind]
        later[mine.inference_id] = sorted(after, key=lambda s: (s.facts.started_at, s.facts.inference_id))
    return later
