"""Turns, what was said about them, their labels and exposures, when they are old and nothing needs them.

A turn goes after its tokens (`payload_segment` is empty), labelled and not asked for anew, and with its whole episode or not at all: what
stays is never half a chain. With it go its labels and all that was said about it. Its reward stays in the batch that took it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, exists, func, select

from app.db import locks
from app.db.chunks import one_of, pair_of
from app.db.ingestion.observations import ORPHAN, UNMATCHED, forget_retractions
from app.db.ingestion.words import forget_words
from app.db.learning.readings import forget_readings
from app.db.tables import batch_items, blind_pairs, exposures, labels, observations, releases, retractions, turns
from app.db.upkeep.needs import Needs
from app.domain.release.releases import IN_FLIGHT


def retire_turns(
    connection: Connection, needed: Needs, *, before: datetime, limit: int, after: datetime | None = None
) -> tuple[int, datetime | None]:
    """Delete old turns with everything about them; returns how many, and the moment up to which was looked (None: there are no more)."""
    t = turns.c
    old = select(t.labelled_at).where(t.labelled_at < before).order_by(t.labelled_at)
    old = old if after is None else old.where(t.labelled_at > after)
    moments = connection.execute(old.limit(limit)).scalars().all()
    if not moments or moments[-1] is None:
        return 0, None
    until = moments[-1]  # whole moments: what was labelled together is looked at together
    window = (t.labelled_at <= until) if after is None else (t.labelled_at > after) & (t.labelled_at <= until)
    found = connection.execute(select(t.inference_id, t.episode_id, t.policy).where(window)).all()
    for policy in sorted({row.policy for row in found}):
        locks.hold(connection, locks.batches_of(policy))
    gone = _whole_episodes(connection, {row.episode_id for row in found}, needed, before)
    if gone:
        _delete(connection, gone)
    return len(gone), until


def _whole_episodes(connection: Connection, episodes: set[str], needed: Needs, before: datetime) -> list[Row[*tuple[Any, ...]]]:
    """The turns, locked, of those episodes of which nothing is young or needed."""
    t = turns.c
    columns = (t.inference_id, t.episode_id, t.policy, t.finished_at, t.labelled_at, t.needs_relabel, t.payload_segment)
    mine = select(*columns).where(one_of(connection, t.episode_id, episodes)).order_by(t.inference_id)
    rows = connection.execute(mine.with_for_update()).all()
    at_work = _at_work(connection, [row.inference_id for row in rows], needed)
    kept = {
        row.episode_id
        for row in rows
        if row.labelled_at is None or row.labelled_at >= before or row.needs_relabel or row.payload_segment is not None
        or row.inference_id in at_work or needed.keeps(row.policy, row.finished_at)
    }  # fmt: skip
    return [row for row in rows if row.episode_id not in kept]


def _at_work(connection: Connection, ids: Sequence[str], needed: Needs) -> set[str]:
    """Those of the turns that a batch at work holds."""
    if not needed.batches:
        return set()
    mine = one_of(connection, batch_items.c.inference_id, ids) & one_of(connection, batch_items.c.batch_id, sorted(needed.batches))
    return set(connection.execute(select(batch_items.c.inference_id).where(mine)).scalars())


def _delete(connection: Connection, gone: Sequence[Row[*tuple[Any, ...]]]) -> None:
    ids, episodes = sorted({row.inference_id for row in gone}), sorted({row.episode_id for row in gone})
    o = observations.c
    for column, values in ((o.inference_id, ids), (o.episode_id, episodes)):
        about = one_of(connection, column, values)
        said = [(row.source, row.id) for row in connection.execute(select(o.source, o.id).where(about, o.retracted_at.is_not(None)))]
        forget_retractions(connection, said)
        connection.execute(delete(observations).where(about))
    connection.execute(delete(labels).where(one_of(connection, labels.c.inference_id, ids)))
    forget_readings(connection, ids)
    forget_words(connection, ids)
    connection.execute(delete(turns).where(one_of(connection, turns.c.inference_id, ids)))


def retire_strays(connection: Connection, *, before: datetime, limit: int) -> int:
    """Delete old observations about turns that never came, with what took them back; returns how many."""
    o = observations.c
    known = exists().where(turns.c.inference_id == o.inference_id) | exists().where(turns.c.episode_id == o.episode_id)
    old = select(o.source, o.id).where(o.status == ORPHAN, o.received_at < before, ~known).order_by(o.received_at).limit(limit)
    pairs = [(row.source, row.id) for row in connection.execute(old)]
    forget_retractions(connection, pairs)
    return connection.execute(delete(observations).where(pair_of(connection, (o.source, o.id), pairs))).rowcount if pairs else 0


def retire_waiting(connection: Connection, *, before: datetime, limit: int) -> int:
    """Delete old retractions of observations that never came; returns how many."""
    r = retractions.c
    old = select(r.source, r.observation_id).where(UNMATCHED, r.received_at < before).order_by(r.received_at).limit(limit)
    return forget_retractions(connection, [(row.source, row.observation_id) for row in connection.execute(old)])


def retire_labels(
    connection: Connection, policy: str, needed: Needs, *, before: datetime, limit: int, after: datetime | None = None
) -> tuple[int, datetime | None]:
    """Delete old labels that no batch took, and those they replaced; returns how many turns lost theirs, and up to when was looked."""
    edge = min(before, needed.since.get(policy, before))
    c = labels.c
    mine = (c.policy == policy) & c.current & (c.labelled_at < edge)
    mine = mine if after is None else mine & (c.labelled_at > after)
    moments = connection.execute(select(c.labelled_at).where(mine).order_by(c.labelled_at).limit(limit)).scalars().all()
    if not moments:
        return 0, None
    taken = exists().where(batch_items.c.inference_id == c.inference_id)
    untaken = select(c.inference_id).where(mine, c.labelled_at <= moments[-1], c.batch_id.is_(None), ~taken)
    ids = list(connection.execute(untaken).scalars())
    if ids:
        connection.execute(delete(labels).where(one_of(connection, c.inference_id, ids)))
        forget_readings(connection, ids)
    return len(ids), moments[-1]


def retire_exposures(connection: Connection, policy: str, needed: Needs, *, before: datetime, limit: int) -> int:
    """Delete old exposures; returns how many."""
    edge = min(before, needed.since.get(policy, before))
    mine = (exposures.c.policy == policy) & (exposures.c.occurred_at < edge)
    ids = list(connection.execute(select(exposures.c.id).where(mine).order_by(exposures.c.occurred_at).limit(limit)).scalars())
    if ids:
        connection.execute(delete(exposures).where(one_of(connection, exposures.c.id, ids)))
    return len(ids)


def retire_pairs(connection: Connection, *, before: datetime, limit: int) -> int:
    """Delete the questions and answers of old blind pairs whose release is over; returns how many. The votes stay: they hold no words."""
    c = blind_pairs.c
    at_work = select(releases.c.id).where(releases.c.state.in_([state.value for state in IN_FLIGHT]))
    old = select(c.id).where(c.kept_at < before, c.release_id.not_in(at_work)).order_by(c.kept_at).limit(limit)
    ids = list(connection.execute(old).scalars())
    return connection.execute(delete(blind_pairs).where(one_of(connection, c.id, ids))).rowcount if ids else 0


def oldest(connection: Connection) -> dict[str, datetime | None]:
    """When the oldest of each was labelled, shown or received."""
    return {
        "turns": connection.execute(select(func.min(turns.c.labelled_at))).scalar(),
        "observations": connection.execute(select(func.min(observations.c.received_at)).where(observations.c.status == ORPHAN)).scalar(),
        "exposures": connection.execute(select(func.min(exposures.c.occurred_at))).scalar(),
        "labels": connection.execute(select(func.min(labels.c.labelled_at)).where(labels.c.current)).scalar(),
    }
