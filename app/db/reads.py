"""What operators and dashboards read over HTTP (`app.domain.ports.Reads`), and which events the door has accepted (`Ledger`)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Engine, Row, Table, case, func, or_, select, true

from app.db.counters import read_counts
from app.db.engine import expected_to_answer, reading
from app.db.ingestion.relay import inbox_metrics
from app.db.ingestion.segment_rows import files_owing
from app.db.ingestion.streams import stream_lag
from app.db.ingestion.turn_counts import read_turn_counts
from app.db.release.engine_reads import read_engines
from app.db.tables import applied_events, dead_letters, inbox, labels, observations, training_runs, turns, versions
from app.domain.ids import utc_now
from app.domain.ports import Clock
from app.domain.telemetry.events import RETRACTED, EventType, Heard, Observation


class SqlReads:
    """The Reads and Ledger ports over the state and the inbox databases."""

    def __init__(self, state: Engine, inbox_engine: Engine, *, clock: Clock = utc_now) -> None:
        self._state = state
        self._inbox = inbox_engine
        self._clock = clock

    def ping(self) -> None:
        """Raise `Unavailable` when one of the databases does not answer."""
        for engine in (self._state, self._inbox):
            with _reading(engine) as connection:
                connection.execute(select(1)).one()

    def counters(self) -> list[tuple[str, str, int]]:
        """(policy, name, value); the inbox keeps its own where it has a database of its own."""
        merged: dict[tuple[str, str], int] = {}
        for engine in {str(engine.url): engine for engine in (self._state, self._inbox)}.values():
            with _reading(engine) as connection:
                for key, value in read_counts(connection).items():
                    merged[key] = merged.get(key, 0) + value
        return [(policy, name, value) for (policy, name), value in sorted(merged.items())]

    def engines(self, policy: str | None) -> list[dict[str, Any]]:
        """What each engine holds, and how far it is behind."""
        with _reading(self._state) as connection:
            return read_engines(connection, policy, now=self._clock())

    def turns_per_version(self) -> list[tuple[str, str, int, int]]:
        """(policy, version, turns, labelled)."""
        with _reading(self._state) as connection:
            return read_turn_counts(connection)

    def backlog(self) -> dict[str, float]:
        """How far behind the loop is; ages in seconds."""
        now = self._clock()
        with _reading(self._inbox) as connection:
            door = inbox_metrics(connection, now=now)
        with _reading(self._state) as connection:
            lag = stream_lag(connection)
            due = connection.execute(select(func.count()).where(turns.c.labelled_at.is_(None), turns.c.label_due_at <= now)).scalar_one()
            dead = connection.execute(select(func.count()).where(dead_letters.c.replayed_at.is_(None))).scalar_one()
            owing = files_owing(connection)
            parked = connection.execute(select(func.count()).where(observations.c.status == "parked")).scalar_one()
        return {
            "inbox_unsent": door["inbox_unsent"],
            "inbox_unapplied": door["inbox_unapplied"],
            "inbox_oldest_unapplied_s": max(door["inbox_unsent_age_s"], door["inbox_unapplied_age_s"]),
            "stream_lag": lag,
            "labels_due": due,
            "dead_letters": dead,
            "observations_parked": parked,
            "files_owing": owing,
        }

    def runs(self, policy: str | None, limit: int) -> list[dict[str, Any]]:
        """Training runs, newest first."""
        return self._newest(training_runs, policy, training_runs.c.started_at, limit)

    def versions(self, policy: str | None, limit: int) -> list[dict[str, Any]]:
        """Versions, newest first."""
        return self._newest(versions, policy, versions.c.created_at, limit)

    def labels_report(self, policy: str) -> dict[str, Any]:
        """Turns served, labels and exclusions of a policy, and the mean reward per version and segment."""
        current = (labels.c.policy == policy) & labels.c.current
        kept = func.avg(case((labels.c.exclusion.is_(None), labels.c.reward)))
        with _reading(self._state) as connection:
            counted = read_turn_counts(connection, policy)
            excluded = connection.execute(select(labels.c.exclusion, func.count()).where(current).group_by(labels.c.exclusion)).all()
            groups = {
                name: [
                    {name: row[0], "labels": int(row[1]), "mean_reward": row[2]}
                    for row in connection.execute(select(column, func.count(), kept).where(current).group_by(column).order_by(column))
                ]
                for name, column in (("version", labels.c.version), ("segment", labels.c.segment))
            }
        return {
            "policy": policy,
            "turns": sum(row[2] for row in counted),
            "labelled": sum(row[3] for row in counted),
            "eligible": sum(int(count) for reason, count in excluded if reason is None),
            "exclusions": {reason: int(count) for reason, count in sorted(excluded, key=str) if reason is not None},
            "per_version": groups["version"],
            "per_segment": groups["segment"],
        }

    def seen(self, source: str, ids: Sequence[str]) -> set[str]:
        """Those of the ids that were accepted under this source, whether they wait in the inbox or were applied long ago."""
        found: set[str] = set()
        for engine, table in ((self._inbox, inbox), (self._state, applied_events)):
            with _reading(engine) as connection:
                query = select(table.c.event_id).where(table.c.source == source, table.c.event_id.in_(list(ids)))
                found |= set(connection.execute(query).scalars())
        return found

    def observation(self, source: str, observation_id: str) -> Observation | None:
        """The accepted observation of this identity, from the inbox or, when it left that, from the applied ones."""
        waiting = select(inbox.c.payload).where(
            inbox.c.source == source, inbox.c.event_id == observation_id, inbox.c.type == EventType.OBSERVATION.value
        )
        with _reading(self._inbox) as connection:
            payload = connection.execute(waiting).scalar_one_or_none()
        if payload:  # what was applied long ago is empty here
            return msgspec.json.decode(payload, type=Observation)
        columns = [observations.c[name] for name in Observation.__struct_fields__]
        query = select(*columns).where(observations.c.source == source, observations.c.id == observation_id)
        with _reading(self._state) as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Observation(**{name: getattr(row, name) for name in Observation.__struct_fields__})

    def about(
        self, *, inference_ids: Sequence[str] = (), episode_ids: Sequence[str] = (), policy: str | None, most: int = 10_000
    ) -> list[Heard]:
        """What was accepted about these turns and episodes, oldest first: applied, or still in the inbox."""
        o = observations.c
        named = or_(o.inference_id.in_(list(inference_ids)), o.episode_id.in_(list(episode_ids)))
        newest = select(observations).where(named, _of_policy(o.policy, policy)).order_by(o.occurred_at.desc(), o.id.desc()).limit(most)
        with _reading(self._state) as connection:
            applied = [_heard(row) for row in connection.execute(newest)]
        known = {(heard.observation.source, heard.observation.id) for heard in applied}
        waiting = self._waiting([*inference_ids, *episode_ids], most=most)
        fresh = [o for o in waiting if (o.source, o.id) not in known and policy in (None, o.policy)]
        found = applied + [Heard(observation=o, status="accepted", retracted=False) for o in fresh]
        found = sorted(found, key=_when)[-most:]
        gone = self._taken_back(found)
        return [replace(h, retracted=h.retracted or (h.observation.source, h.observation.id) in gone) for h in found]

    def _waiting(self, targets: Sequence[str], *, most: int) -> list[Observation]:
        """Observations about these targets that were not applied yet, the newest; a target is the event's key."""
        i, found = inbox.c, list[Observation]()
        mine = (i.type == EventType.OBSERVATION.value) & i.key.in_(list(targets))
        with _reading(self._inbox) as connection:
            for not_applied in (i.relayed_at.is_(None), i.relayed_at.is_not(None) & i.applied_at.is_(None)):  # each has its partial index
                payloads = connection.execute(select(i.payload).where(not_applied, mine).order_by(i.seq.desc()).limit(most)).scalars()
                found += [msgspec.json.decode(payload, type=Observation) for payload in payloads if payload]
        return found

    def _taken_back(self, found: Sequence[Heard]) -> set[tuple[str, str]]:
        """Those of them whose retraction was accepted, applied or not."""
        by_source: dict[str, list[str]] = defaultdict(list)
        for heard in found:
            by_source[heard.observation.source].append(heard.observation.id)
        return {
            (source, id_.removesuffix(RETRACTED))
            for source, ids in by_source.items()
            for id_ in self.seen(source, [id_ + RETRACTED for id_ in ids])
        }

    def _newest(self, table: Table, policy: str | None, order: Any, limit: int) -> list[dict[str, Any]]:  # noqa: ANN401 - a column
        query = select(table).order_by(order.desc()).limit(limit)
        if policy is not None:
            query = query.where(table.c.policy == policy)
        with _reading(self._state) as connection:
            return [{key: _plain(value) for key, value in row._mapping.items()} for row in connection.execute(query)]


def _when(heard: Heard) -> tuple[datetime, str]:
    return heard.observation.occurred_at, heard.observation.id


def _heard(row: Row[Any]) -> Heard:
    observation = Observation(**{name: getattr(row, name) for name in Observation.__struct_fields__})
    return Heard(observation=observation, status=row.status, retracted=row.retracted_at is not None)


def _of_policy(column: ColumnElement[Any], policy: str | None) -> ColumnElement[bool]:
    return true() if policy is None else column == policy


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else value


@contextmanager
def _reading(engine: Engine) -> Iterator[Connection]:
    with expected_to_answer(), reading(engine) as connection:
        yield connection
