"""Rule sets in SQL: every text ever activated, and which one is in force per policy."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Engine, insert, select

from app.db.engine import insert_or_ignore, reading, writing
from app.db.release import audit
from app.db.tables import rule_set_activations, rule_sets

MIN_PREFIX = 8


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A rule set put in force."""

    digest: str
    name: str
    activated_by: str
    activated_at: datetime


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
