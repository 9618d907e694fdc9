"""Rule sets in SQL: every text ever activated, which one is in force per policy, and what people propose."""

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, delete, insert, select, update

from app.db.engine import insert_or_ignore, reading, writing
from app.db.release import audit
from app.db.release.done import begin
from app.db.tables import rule_set_activations, rule_set_proposals, rule_set_replays, rule_sets
from app.domain.access import Order
from app.domain.errors import Refused
from app.domain.learning.rule_sets import Activation, AskedReplay, Proposal, Replay

MIN_PREFIX = 8


def active_rule_set(connection: Connection, policy: str) -> str | None:
    """TOML of the rule set in force for a policy, or None where none was ever activated."""
    newest = (
        select(rule_set_activations.c.digest)
        .where(rule_set_activations.c.policy == policy)
        .order_by(rule_set_activations.c.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    return connection.execute(select(rule_sets.c.toml).where(rule_sets.c.digest == newest)).scalar()


def activate_rule_set(connection: Connection, *, policy: str, digest: str, name: str, toml: str, by: str, now: datetime) -> None:
    """Put a rule set in force from now on; earlier labels keep the digest they were made under. Audited."""
    connection.execute(insert_or_ignore(connection, rule_sets).values(digest=digest, name=name, toml=toml, created_at=now))
    connection.execute(insert(rule_set_activations).values(policy=policy, digest=digest, activated_by=by, activated_at=now))
    audit.append(connection, actor=by, action="rule_set.activate", subject=policy, detail={"digest": digest, "name": name}, now=now)


class SqlRules:
    """The rule set in force per policy."""

    def __init__(self, engine: Engine, default: str) -> None:
        self._engine = engine
        self._default = default

    def active(self, policy: str) -> str:
        """TOML of the rule set in force; the default one where none was ever activated."""
        with reading(self._engine) as connection:
            return active_rule_set(connection, policy) or self._default

    def activate(self, *, policy: str, digest: str, name: str, toml: str, by: str, now: datetime) -> None:
        """Put a rule set in force, in one audited transaction."""
        with writing(self._engine) as connection:
            activate_rule_set(connection, policy=policy, digest=digest, name=name, toml=toml, by=by, now=now)

    def propose(self, proposal: Proposal) -> Proposal:
        """Write it down, once however often it is sent. Raises `Refused` where the same request was another proposal."""
        table = rule_set_proposals
        asked = {name: getattr(proposal, name) for name in ("id", "policy", "toml", "proposed_by", "proposed_at")}
        with writing(self._engine) as connection:
            new = connection.execute(insert_or_ignore(connection, table).values(asked)).rowcount
            known = _proposal(connection.execute(select(table).where(table.c.id == proposal.id)).one())
            if (known.policy, known.toml, known.proposed_by) != (proposal.policy, proposal.toml, proposal.proposed_by):
                raise Refused(f"the request {proposal.id} was another proposal: send this one under a name of its own")
            if new:
                audit.append(
                    connection, actor=known.proposed_by, action="rule_set.propose", subject=known.policy, detail={"proposal": known.id},
                    now=known.proposed_at,
                )  # fmt: skip
        return known

    def proposals(self, policy: str, *, newest: int = 20) -> list[Proposal]:
        """What people proposed, newest first."""
        table = rule_set_proposals
        query = select(table).where(table.c.policy == policy).order_by(table.c.proposed_at.desc(), table.c.id.desc()).limit(newest)
        with reading(self._engine) as connection:
            return [_proposal(row) for row in connection.execute(query)]

    def waiting(self, policy: str) -> list[Proposal]:
        """What was proposed and neither put in force nor refused, oldest first."""
        table = rule_set_proposals
        query = select(table).where(table.c.policy == policy, table.c.settled_at.is_(None)).order_by(table.c.proposed_at, table.c.id)
        with reading(self._engine) as connection:
            return [_proposal(row) for row in connection.execute(query)]

    def accept(self, proposal: Proposal, *, digest: str, name: str, now: datetime) -> bool:
        """Put it in force, in the name of whoever proposed it; False where somebody settled it meanwhile."""
        with writing(self._engine) as connection:
            settled = _settle(connection, proposal, settled_at=now, digest=digest)
            if settled:
                activate_rule_set(
                    connection, policy=proposal.policy, digest=digest, name=name, toml=proposal.toml, by=proposal.proposed_by, now=now
                )  # fmt: skip
            return settled

    def refuse(self, proposal: Proposal, *, why: str, now: datetime) -> bool:
        """Say what is wrong with it; False where somebody settled it meanwhile."""
        with writing(self._engine) as connection:
            settled = _settle(connection, proposal, settled_at=now, refused=why)
            if settled:
                detail = {"proposal": proposal.id, "why": why}
                audit.append(connection, actor="system:label", action="rule_set.refuse", subject=proposal.policy, detail=detail, now=now)
            return settled

    def history(self, policy: str) -> list[Activation]:
        """What was ever in force for a policy, newest first."""
        query = (
            select(rule_sets.c.name, rule_set_activations)
            .join(rule_sets, rule_sets.c.digest == rule_set_activations.c.digest)
            .where(rule_set_activations.c.policy == policy)
            .order_by(rule_set_activations.c.id.desc())
        )
        with reading(self._engine) as connection:
            return [
                Activation(digest=row.digest, name=row.name, activated_by=row.activated_by, activated_at=row.activated_at)
                for row in connection.execute(query)
            ]

    def by_digest(self, prefix: str) -> str | None:
        """TOML of the one rule set whose digest begins so, at least eight digits of it; None where there is none or more than one."""
        if len(prefix) < MIN_PREFIX:
            return None
        with reading(self._engine) as connection:
            found = (
                connection.execute(select(rule_sets.c.toml).where(rule_sets.c.digest.startswith(prefix, autoescape=True))).scalars().all()
            )
        return found[0] if len(found) == 1 else None


def _settle(connection: Connection, proposal: Proposal, **outcome: Any) -> bool:  # noqa: ANN401 - columns
    table = rule_set_proposals
    waiting = (table.c.id == proposal.id) & table.c.settled_at.is_(None)
    return connection.execute(update(table).where(waiting).values(**outcome)).rowcount == 1


def _proposal(row: Row[Any]) -> Proposal:
    return Proposal(**row._mapping)


KEPT_REPLAYS = 50
"""Of each policy; older ones go when somebody asks for another."""


class SqlReplays:
    """Rule sets that people want to see over stored labels."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(self, asked: AskedReplay, order: Order) -> None:
        """Write it down, once. Raises `DoneAlready`, `Refused`."""
        table = rule_set_replays
        row = {name: getattr(asked, name) for name in ("id", "policy", "toml", "asked_by", "asked_at")}
        with writing(self._engine) as connection:
            begin(connection, order, now=asked.asked_at)
            connection.execute(insert(table).values(row))
            mine = select(table.c.id).where(table.c.policy == asked.policy).order_by(table.c.asked_at.desc()).offset(KEPT_REPLAYS)
            old = list(connection.execute(mine.limit(1_000)).scalars())
            connection.execute(delete(table).where(table.c.id.in_(old)))
            audit.append(
                connection, actor=asked.asked_by, action="rule_set.replay", subject=asked.policy, detail={"replay": asked.id},
                now=asked.asked_at,
            )  # fmt: skip

    def waiting(self, policy: str) -> AskedReplay | None:
        """The oldest that waits."""
        table = rule_set_replays
        query = select(table).where(table.c.policy == policy, table.c.settled_at.is_(None)).order_by(table.c.asked_at, table.c.id).limit(1)
        with reading(self._engine) as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _asked(row)

    def settle(self, asked: AskedReplay, *, outcome: Replay | None, refused: str | None, now: datetime) -> bool:
        """What came of it; False where another labeller settled it meanwhile."""
        table, plain = rule_set_replays, None if outcome is None else msgspec.to_builtins(outcome)
        waiting = (table.c.id == asked.id) & table.c.settled_at.is_(None)
        with writing(self._engine) as connection:
            settled = connection.execute(update(table).where(waiting).values(settled_at=now, refused=refused, outcome=plain))
        return settled.rowcount == 1


def read_replay(connection: Connection, replay_id: str) -> AskedReplay | None:
    """By its id."""
    row = connection.execute(select(rule_set_replays).where(rule_set_replays.c.id == replay_id)).one_or_none()
    return None if row is None else _asked(row)


def read_replays(connection: Connection, policy: str, *, newest: int = 10) -> list[AskedReplay]:
    """Newest first, without what came of them."""
    table = rule_set_replays
    columns = [column for column in table.c if column.name != "outcome"]
    query = select(*columns).where(table.c.policy == policy).order_by(table.c.asked_at.desc(), table.c.id.desc()).limit(newest)
    return [AskedReplay(**row._mapping) for row in connection.execute(query)]


def _asked(row: Row[Any]) -> AskedReplay:
    outcome = None if row.outcome is None else msgspec.convert(row.outcome, Replay)
    return AskedReplay(**{**row._mapping, "outcome": outcome})
