"""Releases in SQL: every act is one transaction of state row, history row, audit entry and outbox row (`app.release.ledger`)."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, delete, insert, select, update

from app.db.access.people import hands_of, names_of
from app.db.engine import insert_or_ignore, reading, upsert, writing
from app.db.outbox import OutboxEvent, enqueue
from app.db.release import audit, holdouts, pins, webhooks
from app.db.release import pointer as pointers
from app.db.release.alarms import END_VOTE, end_alarms, insert_alarm, read_alarms, votes_to_end
from app.db.release.done import once
from app.db.release.pairs import insert_vote, read_pair, read_scored, read_votes
from app.db.tables import (
    approvals,
    circuit_breakers,
    deployment_history,
    gate_results,
    quarantine,
    release_history,
    releases,
)
from app.domain.errors import NotFound, Refused, StaleGeneration, Unavailable
from app.domain.ids import utc_now, uuid7
from app.domain.people import CREDENTIAL_REST, is_person
from app.domain.release.alarms import UNTIL, Alarm, AlarmKind
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.holdouts import Holdout
from app.domain.release.pairs import BlindPair, BlindVote
from app.domain.release.releases import MOVES, Approval, Pin, Pointer, Release, ReleaseState
from app.domain.telemetry.events import Topic

Clock = Callable[[], datetime]
UNCHANGED: Mapping[str, Any] = MappingProxyType({})


class SqlReleaseLedger:
    """The ledger of releases of one database."""

    def __init__(self, engine: Engine, *, clock: Clock = utc_now) -> None:
        self._engine = engine
        self._clock = clock

    @contextmanager
    def transaction(self, policy: str) -> Iterator["SqlReleaseTransaction"]:
        """One act. The policy's pointer row is locked first, so that acts on one policy follow each other."""
        with writing(self._engine) as connection:
            locked = pointers.read_pointer(connection, policy, lock=True)
            yield SqlReleaseTransaction(connection, policy=policy, pointer=locked, now=self._clock())

    def find(self, release_id: str) -> Release:
        """A release by id. Raises `NotFound`."""
        with reading(self._engine) as connection:
            return read_release(connection, release_id)

    def alarms(self, policy: str) -> list[Alarm]:
        """Alarms of a policy, newest first."""
        with reading(self._engine) as connection:
            return read_alarms(connection, policy)

    def list(self, *, policy: str | None = None, states: Collection[ReleaseState] = (), limit: int = 100) -> list[Release]:
        """Releases, newest first."""
        with reading(self._engine) as connection:
            return _list(connection, policy=policy, states=states, limit=limit)

    def pointer(self, policy: str) -> Pointer:
        """What is live. Raises `Unavailable` when nothing was deployed yet."""
        with reading(self._engine) as connection:
            found = pointers.read_pointer(connection, policy)
        if found is None:
            raise Unavailable(f"nothing is deployed for {policy} yet: start `ratchet loop`, which deploys the base version")
        return found

    def recorded(self, release_id: str) -> dict[GateName, GateResult]:
        """The newest answer of each gate about a release."""
        with reading(self._engine) as connection:
            return _results(connection, release_id)


class SqlReleaseTransaction:
    """Implements `app.release.ledger.ReleaseTransaction` on one open transaction."""

    def __init__(self, connection: Connection, *, policy: str, pointer: Pointer | None, now: datetime) -> None:
        self._connection = connection
        self._pointer = pointer
        self.policy = policy
        self.now = now

    # --- releases

    def release(self, release_id: str) -> Release:
        return read_release(self._connection, release_id, lock=True)

    def releases(self, *, states: Collection[ReleaseState] = (), digest: str | None = None) -> list[Release]:
        return _list(self._connection, policy=self.policy, states=states, digest=digest, limit=1000)

    def insert(self, release: Release) -> Release:
        self._connection.execute(insert(releases).values(_values(release)))
        self._trace(None, release, action="release.opened", actor=release.initiator or "", reason=release.reason or "")
        return release

    def move(self, release: Release, to: ReleaseState, *, actor: str, reason: str, changes: Mapping[str, Any] = UNCHANGED) -> Release:
        if to not in MOVES[release.state]:
            raise Refused(f"release {release.id} is {release.state}: it cannot become {to}")
        return self._write(release, f"release.{to.lower()}", actor=actor, reason=reason, changes={**changes, "state": to})

    def amend(self, release: Release, action: str, *, actor: str, reason: str, changes: Mapping[str, Any] = UNCHANGED) -> Release:
        return self._write(release, action, actor=actor, reason=reason, changes=changes)

    def _write(self, release: Release, action: str, *, actor: str, reason: str, changes: Mapping[str, Any] = UNCHANGED) -> Release:
        after = replace(release, generation=release.generation + 1, changed_at=self.now, reason=reason, **changes)
        held = (releases.c.id == release.id) & (releases.c.generation == release.generation)
        if self._connection.execute(update(releases).where(held).values(_values(after))).rowcount != 1:
            raise StaleGeneration(f"release {release.id} is no longer at generation {release.generation}: read it again and decide afresh")
        self._trace(release.state, after, action=action, actor=actor, reason=reason)
        return after

    def _trace(self, before: ReleaseState | None, after: Release, *, action: str, actor: str, reason: str) -> None:
        """The history row, the audit entry, the outbox row and the webhook deliveries of one transition."""
        self._connection.execute(
            insert(release_history).values(
                release_id=after.id, generation=after.generation, from_state=before, to_state=after.state, stage=after.stage,
                reason=reason, actor=actor, occurred_at=self.now,
            )
        )  # fmt: skip
        detail = {
            "policy": after.policy, "digest": after.digest, "version_name": after.version_name, "from": before, "to": after.state,
            "generation": after.generation, "stage": after.stage, "reason": reason, "evidence_digest": after.evidence_digest,
        }  # fmt: skip
        self.note(actor=actor, action=action, subject=after.id, detail=detail)

    # --- what is live

    def pointer(self) -> Pointer | None:
        return self._pointer

    def swap(self, pointer: Pointer, *, expected: int | None, action: str, actor: str, reason: str | None) -> None:
        pointers.swap_pointer(self._connection, pointer, expected=expected, action=action, actor=actor, reason=reason)
        self._pointer = pointer
        detail = {
            "policy": self.policy, "generation": pointer.generation, "digest": pointer.digest, "previous": pointer.previous,
            "anchor": pointer.anchor, "holdback": pointer.holdback, "holdback_digest": pointer.holdback_digest, "reason": reason,
        }  # fmt: skip
        self.note(actor=actor, action=f"deployment.{action}", subject=self.policy, detail=detail)

    def champion_moved_since(self, generation: int) -> bool:
        return pointers.champion_moved_since(self._connection, self.policy, generation)

    def good_versions(self, *, besides: frozenset[str]) -> list[str]:
        return pointers.good_versions(self._connection, self.policy, besides=besides)

    def rolled_back_automatically(self) -> bool:
        table = deployment_history
        moves = select(table.c.action, table.c.actor).where(table.c.policy == self.policy, table.c.action.in_(pointers.CHAMPION_MOVES))
        newest = self._connection.execute(moves.order_by(table.c.generation.desc()).limit(1)).one_or_none()
        return newest is not None and newest.action == "rollback" and not is_person(newest.actor)

    def quarantine(self, release: Release, *, actor: str, reason: str) -> None:
        if pointers.bar(self._connection, release, reason=reason, now=self.now):
            detail = {"release_id": release.id, "reason": reason}
            self.note(actor=actor, action="version.quarantined", subject=release.digest, detail=detail)

    def is_quarantined(self, digest: str) -> bool:
        return digest in pointers.quarantined(self._connection, self.policy)

    def vote_to_lift(self, digest: str, voter: str, *, reason: str) -> list[str]:
        held = (quarantine.c.policy == self.policy) & (quarantine.c.digest == digest)
        votes = self._connection.execute(select(quarantine.c.lift_votes).where(held).with_for_update()).scalar_one()
        voters: list[str] = sorted({*(votes or []), voter})
        self._connection.execute(update(quarantine).where(held).values(lift_votes=voters))
        self.note(actor=voter, action="version.lift_vote", subject=digest, detail={"voters": voters, "reason": reason})
        return voters

    def lift(self, digest: str, *, actor: str, reason: str) -> None:
        self._connection.execute(delete(quarantine).where(quarantine.c.policy == self.policy, quarantine.c.digest == digest))
        served = (deployment_history.c.policy == self.policy) & (deployment_history.c.digest == digest)
        self._connection.execute(update(deployment_history).where(served).values(good=True))
        self.note(actor=actor, action="version.quarantine_lifted", subject=digest, detail={"digest": digest, "reason": reason})

    def knows(self, digest: str) -> bool:
        return pins.knows(self._connection, self.policy, digest)

    def pins(self) -> dict[str, Pin]:
        return pins.read_pins(self._connection, self.policy)

    def pin(self, digest: str, *, actor: str, reason: str) -> None:
        pins.insert_pin(self._connection, self.policy, digest, actor=actor, reason=reason, now=self.now)
        self.note(actor=actor, action="version.pinned", subject=digest, detail={"digest": digest, "reason": reason})

    def unpin(self, digest: str, *, actor: str, reason: str) -> None:
        pins.delete_pin(self._connection, self.policy, digest)
        self.note(actor=actor, action="version.unpinned", subject=digest, detail={"digest": digest, "reason": reason})

    def holdout(self) -> Holdout | None:
        return holdouts.read_open(self._connection, self.policy)

    def begin_holdout(self, holdout: Holdout, *, actor: str, reason: str) -> None:
        holdouts.insert_holdout(self._connection, holdout)
        detail = {"digest": holdout.digest, "share": holdout.share, "ends_at": holdout.ends_at.isoformat(), "reason": reason}
        self.note(actor=actor, action="holdout.began", subject=holdout.id, detail=detail)

    def end_holdout(self, holdout: Holdout, *, actor: str, reason: str) -> None:
        holdouts.close_holdout(self._connection, holdout.id, reason=reason, now=self.now)
        self.note(actor=actor, action="holdout.ended", subject=holdout.id, detail={"digest": holdout.digest, "reason": reason})

    def rollbacks_within(self, window: timedelta, *, automatic: bool = False) -> int:
        table = deployment_history
        recent = (table.c.policy == self.policy) & (table.c.action == "rollback") & (table.c.occurred_at > self.now - window)
        actors = self._connection.execute(select(table.c.actor).where(recent)).scalars()
        return sum(not (automatic and is_person(actor)) for actor in actors)

    # --- gates and people

    def add_result(self, release_id: str, result: GateResult, *, action: str | None = None) -> None:
        self._connection.execute(
            insert(gate_results).values(
                release_id=release_id, gate=result.gate, digest=result.digest, verdict=result.verdict, action=action, reason=result.reason,
                evidence=result.evidence, config_hash=result.config_hash, evidence_hash=result.evidence_hash, decided_at=result.decided_at,
            )
        )  # fmt: skip
        detail = {
            "gate": result.gate, "verdict": result.verdict, "action": action, "reason": result.reason, "config_hash": result.config_hash,
            "evidence_hash": result.evidence_hash, "digest": result.digest,
        }  # fmt: skip
        self.note(actor="system:gates", action="gate.decided", subject=release_id, detail=detail)

    def results(self, release_id: str) -> dict[GateName, GateResult]:
        return _results(self._connection, release_id)

    def approvals(self, release_id: str) -> list[Approval]:
        return read_approvals(self._connection, release_id)

    def pair(self, pair_id: str) -> BlindPair:
        return read_pair(self._connection, pair_id)

    def count_pairs(self, release_id: str) -> int:
        return len(read_scored(self._connection, release_id))

    def votes(self, release_id: str) -> list[BlindVote]:
        return read_votes(self._connection, release_id)

    def add_vote(self, pair: BlindPair, vote: BlindVote) -> None:
        insert_vote(self._connection, pair, vote)

    def add_approval(self, approval: Approval) -> None:
        row = {column.name: getattr(approval, column.name) for column in approvals.c if column.name != "voided_at"}
        key, rest = ("release_id", "approver", "evidence_digest"), ("approved", "reason", "decided_at", "voided_at")
        self._connection.execute(upsert(self._connection, approvals, key=key, update=rest).values(**row, voided_at=None))
        action = "release.approval" if approval.approved else "release.rejection"
        detail = {"policy": self.policy, "evidence_digest": approval.evidence_digest, "reason": approval.reason}
        self.note(actor=approval.approver, action=action, subject=approval.release_id, detail=detail)

    def void_approvals(self, release_id: str, *, actor: str, reason: str) -> int:
        open_ = (approvals.c.release_id == release_id) & approvals.c.voided_at.is_(None)
        voided = self._connection.execute(update(approvals).where(open_).values(voided_at=self.now)).rowcount
        if voided:
            self.note(actor=actor, action="release.approvals_voided", subject=release_id, detail={"reason": reason, "count": voided})
        return voided

    # --- circuit breaker

    def frozen(self) -> str | None:
        return read_frozen(self._connection, self.policy)

    def freeze(self, *, actor: str, reason: str) -> None:
        row = {"policy": self.policy, "reason": reason, "frozen_at": self.now, "unfreeze_votes": []}
        self._connection.execute(insert_or_ignore(self._connection, circuit_breakers).values(row))
        self.note(actor=actor, action="promotions.frozen", subject=self.policy, detail={"policy": self.policy, "reason": reason})

    def vote_to_unfreeze(self, voter: str) -> list[str]:
        held = circuit_breakers.c.policy == self.policy
        votes = self._connection.execute(select(circuit_breakers.c.unfreeze_votes).where(held).with_for_update()).scalar_one()
        voters = sorted({*votes, voter})
        self._connection.execute(update(circuit_breakers).where(held).values(unfreeze_votes=voters))
        self.note(actor=voter, action="promotions.unfreeze_vote", subject=self.policy, detail={"voters": voters})
        return voters

    def unfreeze(self, *, actor: str) -> None:
        self._connection.execute(delete(circuit_breakers).where(circuit_breakers.c.policy == self.policy))
        self.note(actor=actor, action="promotions.unfrozen", subject=self.policy, detail={"policy": self.policy})

    def vote_to_end(self, alarm: Alarm, voter: str) -> list[str]:
        voters = sorted({*votes_to_end(self._connection, alarm), voter})
        self.note(actor=voter, action=END_VOTE, subject=self.policy, detail={"alarm": alarm.id, "voters": voters})
        return voters

    def alarms(self, *, open_only: bool = False) -> list[Alarm]:
        return read_alarms(self._connection, self.policy, open_only=open_only)

    def raise_alarm(self, kind: AlarmKind, *, release_id: str | None, reason: str, actor: str) -> bool:
        alarm = Alarm(
            id=uuid7(), policy=self.policy, kind=kind, release_id=release_id, reason=reason, raised_at=self.now, raised_by=actor,
            generation=0 if self._pointer is None else self._pointer.generation, until=UNTIL[kind],
        )  # fmt: skip
        if not insert_alarm(self._connection, alarm):
            return False
        detail = {"alarm": alarm.id, "kind": kind.value, "release_id": release_id, "reason": reason, "until": alarm.until}
        self.note(actor=actor, action="alarm.raised", subject=self.policy, detail=detail)
        return True

    def end_alarms(self, kinds: Collection[AlarmKind], *, actor: str, reason: str) -> list[AlarmKind]:
        ended = end_alarms(self._connection, self.policy, kinds=kinds, by=actor, reason=reason, now=self.now)
        for kind in ended:
            self.note(actor=actor, action="alarm.ended", subject=self.policy, detail={"kind": kind.value, "reason": reason})
        return ended

    # --- who and whether

    def names_of(self, actor: str) -> frozenset[str]:
        return names_of(self._connection, actor)

    def hands_of(self, actor: str) -> frozenset[str]:
        return hands_of(self._connection, actor, since=self.now - CREDENTIAL_REST)

    def once(self, request_id: str, *, actor: str, act: str, subject: str) -> None:
        once(self._connection, request_id, actor=actor, act=act, subject=subject, now=self.now)

    def moves_since(self, generation: int) -> list[str]:
        return pointers.moves_since(self._connection, self.policy, generation)

    def note(self, *, actor: str, action: str, subject: str, detail: dict[str, Any]) -> None:
        """Audit and announce; the announcement carries the entry's number and hash out of reach of whoever owns the database."""
        entry = audit.append(self._connection, actor=actor, action=action, subject=subject, detail=detail, now=self.now)
        data = {"subject": subject, "policy": self.policy, "actor": actor, **detail, "audit": {"seq": entry.seq, "hash": entry.hash}}
        body = msgspec.json.encode({"type": action, "timestamp": self.now, "data": data})
        key = str(detail.get("digest") or subject)
        event = OutboxEvent(topic=Topic.RELEASES, key=key, type=f"ratchet.{action}.v1", payload=body, event_id=uuid7())
        enqueue(self._connection, [event], now=self.now)
        assert event.event_id is not None
        webhooks.schedule(
            self._connection, policy=self.policy, event=action, event_id=event.event_id, now=self.now, about=key, actor=actor, detail=detail
        )  # fmt: skip


def read_release(connection: Connection, release_id: str, *, lock: bool = False) -> Release:
    """A release by id. Raises `NotFound`."""
    query = select(releases).where(releases.c.id == release_id)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise NotFound(f"there is no release {release_id}: `ratchet release list` shows those there are")
    return _release(row)


def read_approvals(connection: Connection, release_id: str) -> list[Approval]:
    """Approvals and rejections that were not voided."""
    query = select(approvals).where(approvals.c.release_id == release_id, approvals.c.voided_at.is_(None))
    rows = connection.execute(query.order_by(approvals.c.decided_at)).all()
    return [Approval(**{name: value for name, value in row._mapping.items() if name != "voided_at"}) for row in rows]


def read_frozen(connection: Connection, policy: str) -> str | None:
    """Why promotions of a policy are frozen."""
    return connection.execute(select(circuit_breakers.c.reason).where(circuit_breakers.c.policy == policy)).scalar()


def _list(
    connection: Connection, *, policy: str | None, states: Collection[ReleaseState], limit: int, digest: str | None = None
) -> list[Release]:
    query = select(releases)
    if policy is not None:
        query = query.where(releases.c.policy == policy)
    if states:
        query = query.where(releases.c.state.in_([state.value for state in states]))
    if digest is not None:
        query = query.where(releases.c.digest == digest)
    rows = connection.execute(query.order_by(releases.c.created_at.desc(), releases.c.id.desc()).limit(limit))
    return [_release(row) for row in rows]


def _results(connection: Connection, release_id: str) -> dict[GateName, GateResult]:
    rows = connection.execute(select(gate_results).where(gate_results.c.release_id == release_id).order_by(gate_results.c.id))
    return {GateName(row.gate): result_of(row) for row in rows}


def result_of(row: Row[Any]) -> GateResult:
    """A gate's answer from its row."""
    return GateResult(
        gate=GateName(row.gate), digest=row.digest, verdict=Verdict(row.verdict), reason=row.reason, evidence=row.evidence,
        config_hash=row.config_hash, evidence_hash=row.evidence_hash, decided_at=row.decided_at,
    )  # fmt: skip


def _release(row: Row[Any]) -> Release:
    return Release(**{**row._mapping, "state": ReleaseState(row.state)})


def _values(release: Release) -> dict[str, Any]:
    return {column.name: getattr(release, column.name) for column in releases.c}
