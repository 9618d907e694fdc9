"""People for tests: a hasher that is quick because it is weak, somebody of each role, and their tokens."""

from dataclasses import dataclass, field
from datetime import timedelta

from argon2 import PasswordHasher
from sqlalchemy import Engine

from app.access import Passwords
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.domain.people import CREDENTIAL_REST, Person, Role
from app.domain.ports import Clock
from tests.fakes.clock import FrozenClock

PASSWORD = "correct horse battery staple"


def quick_passwords() -> Passwords:
    """The real thing, with as little work as Argon2 allows."""
    return Passwords(PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))


@dataclass
class Town:
    """Who lives in a database."""

    engine: Engine
    clock: Clock = field(default_factory=FrozenClock)

    @property
    def people(self) -> SqlPeople:
        """Where they are kept."""
        return SqlPeople(self.engine, clock=self.clock)

    def person(self, name: str, *roles: Role, policy: str | None = None, by: str = "system:test") -> Person:
        """Somebody with a password, who was added longer ago than credentials have to rest."""
        moved = FrozenClock(self.clock() - CREDENTIAL_REST - timedelta(hours=1))
        book = SqlPeople(self.engine, clock=moved)
        book.add(name, roles=roles or (Role.OPERATOR,), policy=policy, by=by)
        book.accept(book.invite(name, lasts=timedelta(hours=1), by=by), password_hash=quick_passwords().hash(PASSWORD, of=name))
        return self.people.find(name)

    def token(self, person: Person, *, policy: str | None = None) -> str:
        """A token of theirs, made by themselves."""
        return SqlKeys(self.engine, clock=self.clock).create(name="terminal", scopes=(), policy=policy, by=person.actor, of=person)[1]

    def bearer(self, name: str, *roles: Role, policy: str | None = None) -> dict[str, str]:
        """The header of somebody new."""
        return {"authorization": f"Bearer {self.token(self.person(name, *roles, policy=policy))}"}
