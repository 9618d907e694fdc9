"""What the live gates read: exposures with what came of them, how far behind the stream is, and the decisions on record."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Engine, Float, Row, Select, case, cast, func, select

from app.db.chunks import chunked
from app.db.engine import insert_or_ignore, reading, writing
from app.db.ingestion.observations import of_the_turn_s_policy
from app.db.ingestion.words import COMPLETION, TOOL_CALLS
from app.db.release.alarms import read_alarms
from app.db.release.engine_reads import holds
from app.db.release.pointer import CHAMPION_MOVES
from app.db.tables import (
    deployment_history,
    engine_versions,
    exposures,
    gate_evidence,
    gate_results,
    labels,
    observations,
    releases,
    turn_words,
    turns,
)
from app.domain.errors import NotFound
from app.domain.ports import EngineState
from app.domain.release.alarms import Alarm, AlarmKind
from app.domain.release.gates import GateName
from app.domain.release.sessions import Era, Session
from app.domain.telemetry.events import IMPORTED

CANARY = "canary-%"
MICROSECOND = timedelta(microseconds=1)
"""What moments are kept to."""
_SERVED = (turns.c.inference_id == exposures.c.inference_id) & (turns.c.policy == exposures.c.policy) & ~turns.c.source.startswith(IMPORTED)
"""The turn that came of an exposure. History that somebody tells under its id is no evidence."""


class SqlEvidenceBook:
    """Evidence in one database. Everything is read, nothing is locked; only decisions and their evidence are written."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def canary_sessions(self, release_id: str, *, since: datetime | None = None) -> list[Session]:
        """Sessions of a release's canary, in order of exposure, from `since` on."""
        mine = (exposures.c.release_id == release_id) & exposures.c.stage.like(CANARY)
        return self._sessions(mine if since is None else mine & (exposures.c.occurred_at >= since))

    def sessions_of(self, inference_ids: Collection[str]) -> list[Session]:
        """These sessions as they are now, in order of exposure; those whose person was erased are not among them."""
        found: list[Session] = []
        for chunk in chunked(inference_ids):
            found += self._sessions(exposures.c.inference_id.in_(chunk))
        return sorted(found, key=lambda session: session.exposed_at)

    def era_sessions(self, policy: str, era: Era, *, since: datetime | None = None) -> list[Session]:
        """Sessions of an era's champion and of its holdback's reference, in order of exposure."""
        start = era.since if since is None else max(since, era.since)
        mine = (exposures.c.policy == policy) & (exposures.c.occurred_at >= start)
        mine &= exposures.c.digest.in_([era.champion, era.reference or era.champion]) & (exposures.c.holdback == era.holdback)
        mine &= exposures.c.arm.in_(["champion", "previous"])
        return self._sessions(mine if era.until is None else mine & (exposures.c.occurred_at < era.until))

    def history(
        self, policy: str, digest: str, *, since: datetime, until: datetime | None = None, newest: int = 5000
    ) -> list[Session]:  # fmt: skip
        """The newest sessions of a version before `until`, in order: what it was like before a canary."""
        mine = (exposures.c.policy == policy) & (exposures.c.digest == digest) & (exposures.c.occurred_at >= since)
        mine = mine if until is None else mine & (exposures.c.occurred_at < until)
        with reading(self._engine) as connection:
            edge = select(exposures.c.occurred_at).where(mine).order_by(exposures.c.occurred_at.desc()).offset(newest).limit(1)
            oldest = connection.execute(edge).scalar()
        return self._sessions(mine if oldest is None else mine & (exposures.c.occurred_at > oldest))

    def _sessions(self, mine: ColumnElement[bool]) -> list[Session]:
        with reading(self._engine) as connection:
            return read_sessions(connection, mine)

    def eras(self, policy: str) -> list[Era]:
        """Every stretch of the deployment history, oldest first."""
        table = deployment_history
        with reading(self._engine) as connection:
            rows = connection.execute(select(table).where(table.c.policy == policy).order_by(table.c.generation)).all()
        ends = [*(row.occurred_at for row in rows[1:]), None]
        return [_era(row, until) for row, until in zip(rows, ends, strict=True)]

    def incidents(self, policy: str) -> list[Alarm]:
        """Newest first."""
        with reading(self._engine) as connection:
            return [alarm for alarm in read_alarms(connection, policy) if alarm.kind is AlarmKind.INCIDENT]

    def promoted_at(self, policy: str) -> datetime | None:
        """When the champion became champion."""
        table = deployment_history
        moves = (table.c.policy == policy) & table.c.action.in_(CHAMPION_MOVES)
        with reading(self._engine) as connection:
            return connection.execute(select(func.max(table.c.occurred_at)).where(moves)).scalar()

    def units_in(self, policy: str, *, window: timedelta, since: datetime, now: datetime) -> float:
        """Distinct people a window of this length sees on average, over the time since `since` in which there was traffic.

        Averaged over windows that begin at every moment of that time, its end joined to its beginning (as in the circular block bootstrap:
        Politis & Romano 1992): no clock cuts anybody in two, and nobody is left out of a rest that makes no whole window. A person is in
        those that began at most their length before a turn of theirs: the gaps between the turns, none counted longer than a window.
        """
        mine = (exposures.c.policy == policy) & exposures.c.occurred_at.between(since, now)
        with reading(self._engine) as connection:
            first = connection.execute(select(func.min(exposures.c.occurred_at)).where(mine)).scalar()
            if first is None:
                return 0.0
            lasted, width = max(MICROSECOND, now - first) // MICROSECOND, window // MICROSECOND
            at = cast(exposures.c.occurred_at, BigInteger)
            before = func.lag(at).over(partition_by=exposures.c.actor, order_by=at)
            last = func.max(at).over(partition_by=exposures.c.actor)
            gaps = select((at - func.coalesce(before, last - lasted)).label("gap")).where(mine).subquery()
            covered = func.sum(cast(case((gaps.c.gap < width, gaps.c.gap), else_=width), Float))
            return float(connection.execute(select(covered)).scalar_one() or 0.0) / lasted

    def label_wait_s(self, policy: str) -> float:
        """How long after its end the newest turn's label is due; 0 without any turn."""
        newest = select(turns.c.label_due_at, turns.c.finished_at).where(turns.c.policy == policy).order_by(turns.c.label_due_at.desc())
        with reading(self._engine) as connection:
            row = connection.execute(newest.limit(1)).one_or_none()
        return 0.0 if row is None else (row.label_due_at - row.finished_at).total_seconds()

    def lag_s(self, policy: str, *, now: datetime) -> float:
        """For how long the oldest label is overdue: ingestion or labelling is behind, and so is all evidence."""
        overdue = (turns.c.policy == policy) & turns.c.labelled_at.is_(None)
        with reading(self._engine) as connection:
            due = connection.execute(select(func.min(turns.c.label_due_at)).where(overdue)).scalar()
        return 0.0 if due is None else max(0.0, (now - due).total_seconds())

    def engines_ready(self, policy: str, digest: str, *, seen_since: datetime) -> bool:
        """Whether an engine that is alive holds a version, verified."""
        with reading(self._engine) as connection:
            return holds(connection, policy, digest, seen_since=seen_since)

    def engine_failure(self, policy: str, digest: str, *, seen_since: datetime) -> str | None:
        """What an engine says about a version it cannot load, where no other engine holds it."""
        if self.engines_ready(policy, digest, seen_since=seen_since):
            return None
        e = engine_versions.c
        mine = (e.policy == policy) & (e.digest == digest) & (e.state == EngineState.FAILED.value) & (e.seen_at >= seen_since)
        with reading(self._engine) as connection:
            row = connection.execute(select(e.engine_id, e.detail).where(mine).limit(1)).one_or_none()
        return None if row is None else f"{row.engine_id} cannot load it: {row.detail or 'no reason given'}"

    def decisions(self, release_id: str, *, newest: int = 1000) -> list[dict[str, Any]]:
        """Gate results of a release as recorded, oldest first."""
        table = gate_results
        query = select(table).where(table.c.release_id == release_id).order_by(table.c.id.desc()).limit(newest)
        with reading(self._engine) as connection:
            return [dict(row._mapping) for row in reversed(connection.execute(query).all())]

    def false_alarms(self, policy: str, *, besides: str, gate: GateName = GateName.CANARY, newest: int = 500) -> tuple[int, int]:
        """(alarms, comparisons) of the champion with itself beside this gate's newest verdicts, but for those of `besides`."""
        table = gate_results
        query = select(table.c.release_id, table.c.evidence).join(releases, releases.c.id == table.c.release_id)
        query = (
            query.where(releases.c.policy == policy, releases.c.id != besides, table.c.gate == gate)
            .order_by(table.c.id.desc())
            .limit(newest)
        )
        with reading(self._engine) as connection:
            last: dict[str, dict[str, Any]] = {}
            for row in connection.execute(query):
                last.setdefault(row.release_id, row.evidence.get("live_aa") or {})
        return sum(one.get("alarms", 0) for one in last.values()), sum(one.get("comparisons", 0) for one in last.values())

    def keep(self, release_id: str, digest: str, payload: bytes, *, now: datetime) -> None:
        """Store evidence by content; the same again changes nothing."""
        row = {"hash": digest, "release_id": release_id, "payload": payload, "created_at": now}
        with writing(self._engine) as connection:
            connection.execute(insert_or_ignore(connection, gate_evidence).values(row))

    def kept(self, digest: str) -> bytes:
        """Stored evidence. Raises `NotFound`."""
        with reading(self._engine) as connection:
            found = connection.execute(select(gate_evidence.c.payload).where(gate_evidence.c.hash == digest)).scalar()
        if found is None:
            raise NotFound(f"there is no evidence {digest} on record")
        return found


def read_sessions(connection: Connection, mine: ColumnElement[bool]) -> list[Session]:
    """Exposures that fulfil `mine`, with turn, first label and signals, in order of exposure."""
    joined = (
        exposures.outerjoin(turns, _SERVED)
        .outerjoin(turn_words, turn_words.c.inference_id == turns.c.inference_id)
        .outerjoin(labels, (labels.c.inference_id == turns.c.inference_id) & (labels.c.revision == 1))
    )
    query = select(
        exposures, turns.c.inference_id.label("turn"), turns.c.finish_reason, COMPLETION, turns.c.completion_tokens,
        TOOL_CALLS, turns.c.time_to_first_token_s, turns.c.started_at, turns.c.finished_at, turns.c.prompt_tokens,
        labels.c.reward, labels.c.terms, labels.c.exclusion, labels.c.labelled_at,
    ).select_from(joined).where(mine).order_by(exposures.c.occurred_at, exposures.c.id)  # fmt: skip
    rows = connection.execute(query).all()
    signals = _signals(connection, mine)
    return [_session(row, signals.get(row.inference_id)) for row in rows]


def _signals(connection: Connection, mine: ColumnElement[bool]) -> Mapping[str, Mapping[str, Any]]:
    """Newest value per name, by inference id: of the turn itself, or of its episode where the turn has none of its own."""
    own: dict[str, dict[str, Any]] = defaultdict(dict)
    shared: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in connection.execute(_observed(mine, observations.c.episode_id == exposures.c.episode_id)):
        shared[row.inference][row.name] = row.value
    for row in connection.execute(_observed(mine, observations.c.inference_id == exposures.c.inference_id)):
        own[row.inference][row.name] = row.value
    return {key: {**shared.get(key, {}), **own.get(key, {})} for key in shared.keys() | own.keys()}


def _observed(mine: ColumnElement[bool], match: ColumnElement[bool]) -> Select[Any, Any, Any]:
    known = observations.c.received_at <= turns.c.label_due_at
    standing = observations.c.retracted_at.is_(None) | (observations.c.retracted_at > turns.c.label_due_at)
    joined = exposures.join(turns, _SERVED).join(observations, match)
    picked = select(exposures.c.inference_id.label("inference"), observations.c.name, observations.c.value)
    return (
        picked.select_from(joined)
        .where(mine, known, standing, of_the_turn_s_policy())
        .order_by(observations.c.occurred_at, observations.c.id)
    )


def _session(row: Row[Any], signals: Mapping[str, Any] | None) -> Session:
    return Session(
        inference_id=row.inference_id, actor=row.actor, episode_id=row.episode_id, release_id=row.release_id, stage=row.stage, arm=row.arm,
        probability=row.probability, share=row.share, holdback=row.holdback, digest=row.digest, exposed_at=row.occurred_at,
        served=row.turn is not None, finish_reason=row.finish_reason, completion=row.completion or "",
        completion_tokens=row.completion_tokens or 0, tool_verdicts=tuple(call["verdict"] for call in row.tool_calls or ()),
        time_to_first_token_s=row.time_to_first_token_s, prompt_tokens=row.prompt_tokens or 0,
        total_s=None if row.turn is None else (row.finished_at - row.started_at).total_seconds(),
        labelled=row.labelled_at is not None, reward=row.reward,
        terms=None if row.terms is None else {term["name"]: term["value"] for term in row.terms}, excluded=row.exclusion is not None,
        signals=signals,
    )  # fmt: skip


def _era(row: Row[Any], until: datetime | None) -> Era:
    return Era(
        generation=row.generation, since=row.occurred_at, until=until, champion=row.digest, reference=row.holdback_digest or row.previous,
        holdback=row.holdback, anchor=row.anchor, action=row.action, release_id=row.release_id,
    )  # fmt: skip
