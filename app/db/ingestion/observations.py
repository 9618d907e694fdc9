"""Observations and retractions: joined to their turns, parked until those come, or ledgered as late or orphaned.

The status of an observation is a function of when it was received and which turns are known, never of the order of arrival:

    no turn known            → parked, and `orphan` when lateness has passed since it was received
    received ≤ due + lateness → joined      (due: of its turn, or the latest of its episode's turns)
    received later           → late

An observation that names a policy, or whose key does, is about turns of that policy alone: others are unknown to it, so it stays parked and
ends as an orphan, counted as `foreign`.

History (an observation and turns from `import:` sources) is received long after everything: there the moment at which it occurred decides.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, case, delete, exists, select, text, update

from app.db.chunks import one_of, pair_of
from app.db.engine import insert_or_ignore, inserting
from app.db.ingestion.turns import TurnRef, turns_by_episode, turns_by_id
from app.db.tables import observations, retractions, turns
from app.domain.telemetry.events import ROLLOUT, Observation, Retraction, is_imported
from app.domain.telemetry.streams import AppliedEvent, JoinRules

UNMATCHED = text("NOT retractions.matched")
"""In the index's own words: SQLite finds it by no others."""
JOINED, PARKED, LATE, ORPHAN = "joined", "parked", "late", "orphan"


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What came of a set of observations."""

    changed_turns: set[str] = field(default_factory=set[str])
    """Turns about which something new is known in time."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def merge(self, other: "Joined") -> None:
        """Add another answer to this one."""
        self.changed_turns.update(other.changed_turns)
        self.counts.update(other.counts)


class Targets:
    """Known turns that observations speak about."""

    def __init__(self, connection: Connection, targets: Iterable[tuple[str | None, str | None]]) -> None:
        pairs = list(targets)
        self._turns = turns_by_id(connection, {turn for turn, _ in pairs if turn is not None})
        self._episodes = turns_by_episode(connection, {episode for _, episode in pairs if episode is not None})

    def of(self, inference_id: str | None, episode_id: str | None, policy: str | None) -> list[TurnRef]:
        """The turn, or every turn of the episode, of that policy where one is named; empty where none is known."""
        return [ref for ref in self._all(inference_id, episode_id) if policy in (None, ref.policy)]

    def are_foreign(self, inference_id: str | None, episode_id: str | None, policy: str | None) -> bool:
        """Whether the turns that are known are all of other policies."""
        found = self._all(inference_id, episode_id)
        return bool(found) and all(policy not in (None, ref.policy) for ref in found)

    def _all(self, inference_id: str | None, episode_id: str | None) -> list[TurnRef]:
        if inference_id is not None:
            ref = self._turns.get(inference_id)
            return [] if ref is None else [ref]
        return self._episodes.get(episode_id or "", [])


def that_count() -> ColumnElement[bool]:
    """Of rows of `observations`: they came in time, to a turn that is known, and were not taken back."""
    return (observations.c.status == JOINED) & observations.c.retracted_at.is_(None)


def of_the_turn_s_policy() -> ColumnElement[bool]:
    """Joins observations to `turns`: those of another policy's key say nothing about a turn, whatever id they name."""
    return observations.c.policy.is_(None) | (observations.c.policy == turns.c.policy)


def was_served() -> ColumnElement[bool]:
    """Of rows of `turns`: somebody was served. Agents at practice say nothing about a version."""
    return ~turns.c.source.startswith(ROLLOUT)


def status_of(source: str, occurred_at: datetime, received_at: datetime, known: Sequence[TurnRef], rules: JoinRules) -> str:
    """Joined, parked or late; see the top of this file."""
    if not known:
        return PARKED
    is_history = is_imported(source) and all(ref.imported for ref in known)
    last = max(known, key=lambda ref: ref.label_due_at)
    return JOINED if (occurred_at if is_history else received_at) <= last.label_due_at + rules.lateness(last.policy) else LATE


def insert_observations(connection: Connection, events: Sequence[tuple[AppliedEvent, Observation]], *, rules: JoinRules) -> Joined:
    """Insert observations with the status they have now; those about erased turns are dropped and counted."""
    joined = Joined()
    if not events:
        return joined
    targets = Targets(connection, ((o.inference_id, o.episode_id) for _, o in events))
    taken_back = _retracted(connection, [(o.source, o.id) for _, o in events])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for event, observation in events:
        target = (observation.inference_id, observation.episode_id, observation.policy)
        known = targets.of(*target)
        policy = observation.policy or (known[0].policy if known else None)
        if targets.are_foreign(*target):
            joined.counts[policy or "", "foreign"] += 1
        if known and all(ref.erased_at is not None for ref in known):
            joined.counts[policy or "", "erased"] += 1
            continue
        status = status_of(observation.source, observation.occurred_at, event.received_at, known, rules)
        row = _row(event, observation, _stored_policy(observation, known), status, taken_back.get((observation.source, observation.id)))
        rows.setdefault((observation.source, observation.id), row)
        _note(joined, status, known, policy)
    if rows:
        connection.execute(insert_or_ignore(connection, observations), [rows[identity] for identity in sorted(rows)])
        _match(connection, [identity for identity in rows if identity in taken_back])
    return joined


def _stored_policy(said: Observation | Row[Any], known: Sequence[TurnRef]) -> str | None:
    """What it said, else its turn's; an episode's turns may be of several policies, so one that names none stays with all of them."""
    return said.policy or (known[0].policy if known and said.inference_id is not None else None)


def _row(event: AppliedEvent, observation: Observation, policy: str | None, status: str, retracted_at: datetime | None) -> dict[str, Any]:
    return {
        "source": observation.source, "id": observation.id, "policy": policy, "inference_id": observation.inference_id,
        "episode_id": observation.episode_id, "name": observation.name, "value": observation.value,
        "occurred_at": observation.occurred_at, "received_at": event.received_at, "actor": observation.actor,
        "tags": observation.tags, "status": status, "retracted_at": retracted_at,
    }  # fmt: skip


def _note(joined: Joined, status: str, known: Sequence[TurnRef], policy: str | None) -> None:
    if status == JOINED:
        joined.changed_turns.update(ref.inference_id for ref in known)
        if any(ref.labelled_at is not None for ref in known):
            joined.counts[policy or "", "correcting"] += 1
    else:
        joined.counts[policy or "", "early" if status == PARKED else LATE] += 1


def join_waiting(connection: Connection, inference_ids: Sequence[str], episode_ids: Sequence[str], *, rules: JoinRules) -> Joined:
    """Look again at observations that waited for turns which are known now."""
    joined = Joined()
    waiting = _waiting(connection, one_of(connection, observations.c.inference_id, set(inference_ids)))
    waiting += _waiting(connection, one_of(connection, observations.c.episode_id, set(episode_ids)))
    if not waiting:
        return joined
    targets = Targets(connection, ((row.inference_id, row.episode_id) for row in waiting))
    changes: list[dict[str, Any]] = []
    for row in waiting:
        known = targets.of(row.inference_id, row.episode_id, row.policy)
        status = status_of(row.source, row.occurred_at, row.received_at, known, rules)
        if status == row.status or not known:
            continue
        policy = row.policy or known[0].policy
        stored = _stored_policy(row, known)
        changes.append({"b_source": row.source, "b_id": row.id, "b_status": status, "b_policy": stored})
        if status == JOINED:
            joined.changed_turns.update(ref.inference_id for ref in known)
        else:
            joined.counts[policy, LATE] += 1
    _change_status(connection, changes)
    return joined


def _waiting(connection: Connection, condition: ColumnElement[bool]) -> list[Any]:
    o = observations.c
    statement = select(o.source, o.id, o.policy, o.inference_id, o.episode_id, o.occurred_at, o.received_at, o.status)
    return list(connection.execute(statement.where(condition, o.status.in_((PARKED, ORPHAN, LATE)))))


def _change_status(connection: Connection, changes: Sequence[Mapping[str, Any]]) -> None:
    if not changes:
        return
    statement = update(observations).where(observations.c.source == bindparam("b_source"), observations.c.id == bindparam("b_id"))
    in_order = sorted(changes, key=lambda change: (change["b_source"], change["b_id"]))
    connection.execute(statement.values(status=bindparam("b_status"), policy=bindparam("b_policy")), in_order)


def settle_crossed(connection: Connection, *, rules: JoinRules, limit: int = 10_000) -> Joined:
    """Bring together what two transactions wrote at the same time without seeing each other (PostgreSQL, several members).

    One inserted a turn while the other parked its observation; or one an observation while the other kept its retraction for later.
    """
    o, r = observations.c, retractions.c
    parked = select(o.inference_id, o.episode_id).where(o.status == PARKED).limit(limit)
    turn_known = exists().where(turns.c.inference_id == o.inference_id, of_the_turn_s_policy())
    episode_known = exists().where(turns.c.episode_id == o.episode_id, of_the_turn_s_policy())
    of_turns = list(connection.execute(parked.where(turn_known)))
    of_episodes = list(connection.execute(parked.where(episode_known)))
    joined = join_waiting(connection, [row.inference_id for row in of_turns], [row.episode_id for row in of_episodes], rules=rules)
    crossed = select(r.source, r.observation_id, r.occurred_at).join(observations, (o.source == r.source) & (o.id == r.observation_id))
    taken_back = {(row.source, row.observation_id): row.occurred_at for row in connection.execute(crossed.where(UNMATCHED).limit(limit))}
    if taken_back:
        _mark_retracted(connection, taken_back, joined)
    return joined


def expire_parked(connection: Connection, *, rules: JoinRules, now: datetime, limit: int = 10_000) -> Counter[tuple[str, str]]:
    """Ledger parked observations as orphans once lateness has passed; returns the counts per policy."""
    o = observations.c
    shortest = min([rules.lateness(policy) for policy in rules.policies] + [rules.lateness(None)])
    statement = select(o.source, o.id, o.policy, o.received_at).where(o.status == PARKED, o.received_at < now - shortest).limit(limit)
    due = [row for row in connection.execute(statement) if row.received_at < now - rules.lateness(row.policy)]
    _change_status(connection, [{"b_source": row.source, "b_id": row.id, "b_status": ORPHAN, "b_policy": row.policy} for row in due])
    return Counter((row.policy or "", "orphaned") for row in due)


# --- retractions ------------------------------------------------------------------------------------------------------------


def apply_retractions(connection: Connection, taken_back: Sequence[tuple[AppliedEvent, Retraction]]) -> Joined:
    """Take observations back, those that are not here yet included: since the earliest moment that was said, received at the latest."""
    joined = Joined()
    if not taken_back:
        return joined
    first: dict[tuple[str, str], datetime] = {}
    last: dict[tuple[str, str], datetime] = {}
    for event, retraction in taken_back:
        identity = (retraction.source, retraction.observation_id)
        first[identity] = min(retraction.occurred_at, first.get(identity, retraction.occurred_at))
        last[identity] = max(event.received_at, last.get(identity, event.received_at))
    rows = [{"source": s, "observation_id": i, "occurred_at": first[s, i], "received_at": last[s, i]} for s, i in sorted(first)]
    statement, r = inserting(connection, retractions), retractions.c
    said = statement.excluded
    merged = {
        "occurred_at": case((said.occurred_at < r.occurred_at, said.occurred_at), else_=r.occurred_at),
        "received_at": case((said.received_at > r.received_at, said.received_at), else_=r.received_at),
    }
    connection.execute(statement.on_conflict_do_update(index_elements=["source", "observation_id"], set_=merged), rows)
    _mark_retracted(connection, first, joined)
    return joined


def forget_retractions(connection: Connection, of: Sequence[tuple[str, str]]) -> int:
    """Delete what takes these observations (source, id) back; returns how many."""
    mine = pair_of(connection, (retractions.c.source, retractions.c.observation_id), of)
    return connection.execute(delete(retractions).where(mine)).rowcount if of else 0


def _mark_retracted(connection: Connection, first: Mapping[tuple[str, str], datetime], joined: Joined) -> None:
    found = connection.execute(_identified(connection, sorted(first))).all()
    earlier = [row for row in found if row.retracted_at is None or first[row.source, row.id] < row.retracted_at]
    if earlier:
        changes = [{"b_source": row.source, "b_id": row.id, "b_at": first[row.source, row.id]} for row in earlier]
        where = (observations.c.source == bindparam("b_source"), observations.c.id == bindparam("b_id"))
        connection.execute(update(observations).where(*where).values(retracted_at=bindparam("b_at")), changes)
    _match(connection, [(row.source, row.id) for row in found])
    targets = Targets(connection, ((row.inference_id, row.episode_id) for row in earlier))
    for row in earlier:
        joined.changed_turns.update(ref.inference_id for ref in targets.of(row.inference_id, row.episode_id, row.policy))
        if row.retracted_at is None:
            joined.counts[row.policy or "", "retracted"] += 1


def _match(connection: Connection, identities: Sequence[tuple[str, str]]) -> None:
    """The retractions of these observations have done their work."""
    if identities:
        known = pair_of(connection, (retractions.c.source, retractions.c.observation_id), identities)
        connection.execute(update(retractions).where(known).values(matched=True))


def targets_of(connection: Connection, identities: Sequence[tuple[str, str]]) -> list[tuple[str | None, str | None]]:
    """What these observations are about, of those that are known: (turn, episode)."""
    if not identities:
        return []
    return [(row.inference_id, row.episode_id) for row in connection.execute(_identified(connection, identities))]


def _identified(connection: Connection, identities: Sequence[tuple[str, str]]) -> Any:  # noqa: ANN401 - a select of six columns
    o = observations.c
    wanted = select(o.source, o.id, o.policy, o.inference_id, o.episode_id, o.retracted_at)
    return wanted.where(pair_of(connection, (o.source, o.id), identities))


def _retracted(connection: Connection, identities: Sequence[tuple[str, str]]) -> dict[tuple[str, str], datetime]:
    r = retractions.c
    known = select(r.source, r.observation_id, r.occurred_at).where(pair_of(connection, (r.source, r.observation_id), identities))
    return {(row.source, row.observation_id): row.occurred_at for row in connection.execute(known)}
