"""Which versions' weights and optimizer states something still needs; everything else may be removed from where they are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine, select

from app.db.engine import expected_to_answer, reading
from app.db.release.holdouts import open_holdouts
from app.db.release.pins import read_pins
from app.db.release.pointer import CANDIDATES, good_versions, quarantined
from app.db.tables import batches, cycles, deployment_pointer, engine_versions, releases, training_runs, versions
from app.domain.ids import utc_now
from app.domain.learning.cycles import CycleStatus
from app.domain.ports import Clock, EngineState
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import KEPT_CHAMPIONS, RunStatus, VersionKind

HELD_WITHIN = timedelta(hours=1)
"""An engine that reported a version this lately may still have it in use."""


class SqlNeededWeights:
    """Reads them from the state database; `newest` versions of each policy, and as many former champions, are kept whatever happens."""

    def __init__(self, engine: Engine, *, newest: int = KEPT_CHAMPIONS, clock: Clock = utc_now) -> None:
        self._engine = engine
        self._newest = newest
        self._clock = clock

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with expected_to_answer("nothing is removed"), reading(self._engine) as connection:
            yield connection

    def known(self) -> set[str]:
        """Digests of all versions of this deployment."""
        with self._reading() as connection:
            return set(connection.execute(select(versions.c.digest)).scalars())

    def needed(self) -> set[str]:
        """Digests of a pointer, a holdback, a holdout, an anchor, an engine, a candidate, running work or a pin, or for a rollback."""
        with self._reading() as connection:
            found = _in_play(connection) | _in_work(connection) | set(read_pins(connection))
            found |= _held(connection, since=self._clock() - HELD_WITHIN)
            for policy in connection.execute(select(versions.c.policy).distinct()).scalars().all():
                found |= self._recent(connection, policy)
        return {digest for digest in found if digest}

    def states(self, policy: str, *, rollbacks: int) -> set[str]:
        """Digests whose masters and optimizer state have to stay: what `policy` serves, compares with or may release, what people pinned,
        and where its next `rollbacks` go, as many as programs make before people are called. States are six times as large as weights, so
        other former champions keep their weights alone."""
        with self._reading() as connection:
            found = _in_play(connection) | set(read_pins(connection, policy))
            found |= set(good_versions(connection, policy)[: 1 + rollbacks])
        return {digest for digest in found if digest}

    def _recent(self, connection: Connection, policy: str) -> set[str]:
        table = versions
        of_policy = select(table.c.digest).where(table.c.policy == policy)
        newest = of_policy.order_by(table.c.created_at.desc()).limit(self._newest)
        bases = of_policy.where(table.c.kind == VersionKind.BASE.value)
        served = good_versions(connection, policy, besides=quarantined(connection, policy))[: self._newest]
        return {*connection.execute(newest).scalars(), *connection.execute(bases).scalars(), *served}


def _in_play(connection: Connection) -> set[str | None]:
    """What serves, is compared with, or may be released."""
    return _pointed_at(connection) | _on_their_way(connection) | {holdout.digest for holdout in open_holdouts(connection)}


def _pointed_at(connection: Connection) -> set[str | None]:
    table = deployment_pointer
    rows = connection.execute(select(table.c.digest, table.c.previous, table.c.anchor, table.c.holdback_digest)).all()
    return {digest for row in rows for digest in row}


def _on_their_way(connection: Connection) -> set[str | None]:
    """Candidates and what they are compared with."""
    states = (ReleaseState.TRAINED, *CANDIDATES)
    rows = connection.execute(select(releases.c.digest, releases.c.champion_digest).where(releases.c.state.in_(states))).all()
    return {digest for row in rows for digest in row}


def _in_work(connection: Connection) -> set[str | None]:
    """Parents, candidates, champions and anchors of runs and cycles that are not over."""
    runs = select(training_runs.c.parent, training_runs.c.candidate).where(training_runs.c.status == RunStatus.RUNNING.value)
    running = select(cycles.c.batch_id).where(cycles.c.status == CycleStatus.RUNNING.value)
    cut = select(batches.c.champion, batches.c.anchor).where(batches.c.id.in_(running))
    made = select(training_runs.c.parent, training_runs.c.candidate).where(training_runs.c.batch_id.in_(running))
    return {digest for query in (runs, cut, made) for row in connection.execute(query) for digest in row}


def _held(connection: Connection, *, since: datetime) -> set[str | None]:
    table = engine_versions
    alive = (table.c.state != EngineState.DROPPED.value) & (table.c.seen_at >= since)
    return set(connection.execute(select(table.c.digest).where(alive)).scalars())
