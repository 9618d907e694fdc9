"""People, and what they get in with: passwords (hashes only), links that are good once, browser sessions (hashes only).

Every change of who may get in stands in the audit chain, and whose hand it was in `credential_acts`: four eyes ask there.
"""

import hashlib
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from app.db.engine import expected_to_answer, reading, writing
from app.db.release import audit
from app.db.release.done import begin
from app.db.tables import api_keys, browser_sessions, credential_acts, invitations, people
from app.domain.access import Order
from app.domain.errors import NotFound, Refused
from app.domain.ids import utc_now, uuid7
from app.domain.people import SESSION_IDLE, SESSION_LASTS, Person, Role, SignInRefused, checked_name
from app.domain.ports import Clock

SEEN_EVERY = timedelta(minutes=1)
"""A session's last use is written down so often: a page view is no write."""
SPENT = "this link is not good, was used already, or its time is over: ask for another"
UNCHANGED: Any = object()


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try to sign in; it counts as wrong until it was right."""

    person: Person
    password_hash: str | None
    locked: bool


class SqlPeople:
    """People of one database."""

    def __init__(self, engine: Engine, *, clock: Clock = utc_now) -> None:
        self._engine = engine
        self._clock = clock

    # --- who there is

    def all(self) -> list[Person]:
        """Everybody there ever was, by name."""
        with expected_to_answer(), reading(self._engine) as connection:
            return [_person(row) for row in connection.execute(select(people).order_by(people.c.name))]

    def ever(self) -> bool:
        """Whether anybody was ever added."""
        with expected_to_answer(), reading(self._engine) as connection:
            return connection.execute(select(people.c.id).limit(1)).one_or_none() is not None

    def find(self, name: str) -> Person:
        """Somebody by name. Raises `NotFound`."""
        with expected_to_answer(), reading(self._engine) as connection:
            return _person(_named(connection, name))

    def add(
        self, name: str, *, roles: Collection[Role], policy: str | None = None, email: str | None = None, os_user: str | None = None,
        by: str, order: Order | None = None,
    ) -> Person:  # fmt: skip
        """Somebody new, who cannot get in yet. Raises `BadRequest`, `Refused`, `DoneAlready`."""
        _require_roles(name, roles)
        row = {
            "id": uuid7(), "name": checked_name(name), "email": None if email is None else email.lower(), "os_user": os_user,
            "policy": policy, "made_by": by,
            "roles": sorted(role.value for role in roles), "created_at": self._clock(),
        }  # fmt: skip
        try:
            with writing(self._engine) as connection:
                begin(connection, order, now=self._clock())
                connection.execute(insert(people).values(row))
                self._note(connection, "person.added", name, by=by, roles=row["roles"], policy=policy)
                person = _person(_named(connection, name))
                if email is not None:
                    self._credential(connection, person, "email", by=by)
                return person
        except IntegrityError as error:
            raise Refused(f"there is somebody called {name}, or with this address, already: `ratchet people list` shows them") from error

    def change(
        self, name: str, *, by: str, roles: Collection[Role] | None = None, policy: Any = UNCHANGED,  # noqa: ANN401 - None is a value
        email: Any = UNCHANGED, os_user: Any = UNCHANGED, disabled: bool | None = None,  # noqa: ANN401 - None is a value
        order: Order | None = None,
    ) -> Person:  # fmt: skip
        """Other roles, another policy or address; disabled, every session and token ends. Raises `NotFound`, `Refused`, `DoneAlready`."""
        email = email.lower() if isinstance(email, str) else email
        values = {k: v for k, v in {"policy": policy, "email": email, "os_user": os_user}.items() if v is not UNCHANGED}
        if roles is not None:
            _require_roles(name, roles)
            values["roles"] = sorted(role.value for role in roles)
        with writing(self._engine) as connection:
            before = _person(_named(connection, name))
            begin(connection, order, now=self._clock())
            if disabled is not None and disabled != (before.disabled_at is not None):
                values["disabled_at"] = self._clock() if disabled else None
            if values:
                try:
                    connection.execute(update(people).where(people.c.id == before.id).values(values))
                except IntegrityError as error:
                    raise Refused(f"somebody has the address {email} already: `ratchet people list` shows everybody") from error
                told = {what: value for what, value in values.items() if what != "disabled_at"}
                self._note(connection, "person.changed", name, by=by, **told, **({} if disabled is None else {"disabled": disabled}))
            if values.get("email") is not None:
                self._credential(connection, before, "email", by=by)
            if disabled:
                self._shut_out(connection, before.id)
            _require_an_admin(connection, before)
            return _person(_named(connection, name))

    # --- links

    def invite(self, name: str, *, lasts: timedelta, by: str, order: Order | None = None) -> str:
        """The secret of a link with which they set a password, once; those before end. Raises `NotFound`, `Refused`, `DoneAlready`."""
        secret, now = secrets.token_urlsafe(32), self._clock()
        with writing(self._engine) as connection:
            person = _person(_named(connection, name))
            begin(connection, order, now=now)
            if person.disabled_at is not None:
                raise Refused(f"{name} is disabled: enable them first")
            open_ = (invitations.c.person_id == person.id) & invitations.c.used_at.is_(None)
            connection.execute(update(invitations).where(open_).values(used_at=now))
            row = {"hash": hashed(secret), "person_id": person.id, "made_by": by, "made_at": now, "expires_at": now + lasts}
            connection.execute(insert(invitations).values(row))
            self._credential(connection, person, "link", by=by)
        return secret

    def invited(self, secret: str) -> Person:
        """Whom a link is for, while it is good. Raises `SignInRefused`."""
        with expected_to_answer(), reading(self._engine) as connection:
            return self._invited(connection, secret)[0]

    def accept(self, secret: str, *, password_hash: str) -> Person:
        """Set the password that the link allows; it is spent, and whoever was in is out. Raises `SignInRefused`."""
        with writing(self._engine) as connection:
            person, made_by = self._invited(connection, secret)
            now = self._clock()
            mine = (invitations.c.hash == hashed(secret)) & invitations.c.used_at.is_(None)
            if connection.execute(update(invitations).where(mine).values(used_at=now)).rowcount != 1:
                raise SignInRefused(SPENT)
            fresh = {"password_hash": password_hash, "failures": 0, "locked_until": None}
            connection.execute(update(people).where(people.c.id == person.id).values(fresh))
            self._shut_out(connection, person.id)
            self._credential(connection, person, "password", by=made_by)
            return person

    def set_password(self, name: str, *, password_hash: str) -> None:
        """By themselves: every other way in ends."""
        with writing(self._engine) as connection:
            person = _person(_named(connection, name))
            connection.execute(update(people).where(people.c.id == person.id).values(password_hash=password_hash))
            self._shut_out(connection, person.id)
            self._credential(connection, person, "password", by=person.actor)

    # --- signing in

    def attempt(self, name: str, *, lock_after: Callable[[int], datetime | None]) -> Attempt | None:
        """Count a try under that name, and lock where it is one too many; None where nobody, or nobody who may get in, has it."""
        with expected_to_answer(), writing(self._engine) as connection:
            query = select(people).where(people.c.name == name, people.c.disabled_at.is_(None))
            row = connection.execute(query.with_for_update()).one_or_none()
            if row is None:
                return None
            locked = row.locked_until is not None and self._clock() < row.locked_until
            if not locked:
                after = {"failures": row.failures + 1, "locked_until": lock_after(row.failures + 1)}
                connection.execute(update(people).where(people.c.id == row.id).values(after))
        return Attempt(person=_person(row), password_hash=row.password_hash, locked=locked)

    def failed(self, name: str) -> None:
        """Write down that the password was wrong, and whether the account is locked now."""
        with writing(self._engine) as connection:
            row = _named(connection, name)
            until = None if row.locked_until is None else row.locked_until.isoformat()
            self._note(connection, "person.sign_in_failed", name, by="system:access", failures=row.failures, locked_until=until)

    def forgive(self, person: Person) -> None:
        """A right password forgives the wrong ones before it."""
        with writing(self._engine) as connection:
            connection.execute(update(people).where(people.c.id == person.id).values(failures=0, locked_until=None))

    def enter(self, person: Person, *, how: str, instead_of: str | None = None) -> str:
        """The secret of a new browser session; the one before it in this browser ends. A right password forgives the wrong ones."""
        secret, now = secrets.token_urlsafe(32), self._clock()
        with writing(self._engine) as connection:
            if instead_of is not None:
                self._end(connection, browser_sessions.c.hash == hashed(instead_of))
            row = {"hash": hashed(secret), "person_id": person.id, "created_at": now, "seen_at": now, "expires_at": now + SESSION_LASTS}
            connection.execute(insert(browser_sessions).values(row))
            connection.execute(update(people).where(people.c.id == person.id).values(failures=0, locked_until=None))
            self._note(connection, "person.signed_in", person.name, by=person.actor, how=how)
        return secret

    def of_session(self, secret: str) -> Person | None:
        """Who is signed in with this, as they are now; None for a session that has ended."""
        now, mine = self._clock(), browser_sessions.c.hash == hashed(secret)
        joined = select(people, browser_sessions.c.seen_at).join(browser_sessions, browser_sessions.c.person_id == people.c.id)
        good = (mine, browser_sessions.c.ended_at.is_(None), browser_sessions.c.expires_at > now, people.c.disabled_at.is_(None))
        with expected_to_answer(), reading(self._engine) as connection:
            row = connection.execute(joined.where(*good, browser_sessions.c.seen_at > now - SESSION_IDLE)).one_or_none()
        if row is None:
            return None
        if now - row.seen_at > SEEN_EVERY:
            with writing(self._engine) as connection:
                connection.execute(update(browser_sessions).where(mine).values(seen_at=now))
        return _person(row)

    def of_account(self, subject: str, email: str | None) -> Person | None:
        """Whose account at a provider this is; the first time whose verified address: from then on the account counts alone."""
        active = people.c.disabled_at.is_(None)
        with expected_to_answer(), writing(self._engine) as connection:
            row = connection.execute(select(people).where(people.c.subject == subject)).one_or_none()
            if row is None and email is not None:
                row = connection.execute(select(people).where(people.c.email == email, people.c.subject.is_(None), active)).one_or_none()
                if row is not None:
                    connection.execute(update(people).where(people.c.id == row.id).values(subject=subject))
                    self._note(connection, "person.account_bound", row.name, by=f"user:{row.name}", account=subject)
        return None if row is None or row.disabled_at is not None else _person(row)

    def leave(self, secret: str) -> None:
        """End a browser session."""
        with writing(self._engine) as connection:
            self._end(connection, browser_sessions.c.hash == hashed(secret))

    def sign_out(self, name: str, *, by: str, order: Order | None = None) -> Person:
        """End every session and token of somebody; they may sign in again. Raises `NotFound`, `DoneAlready`."""
        with writing(self._engine) as connection:
            person = _person(_named(connection, name))
            begin(connection, order, now=self._clock())
            self._shut_out(connection, person.id)
            self._note(connection, "person.signed_out", name, by=by)
            return person

    def of_token(self, key_id: str) -> Person | None:
        """Whom a personal token speaks for, as they are now; None for one that is revoked or whose person is disabled."""
        query = select(people).join(api_keys, api_keys.c.person_id == people.c.id)
        good = (api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None), people.c.disabled_at.is_(None))
        with expected_to_answer(), reading(self._engine) as connection:
            row = connection.execute(query.where(*good)).one_or_none()
        return None if row is None else _person(row)

    # --- inside a transaction

    def _invited(self, connection: Connection, secret: str) -> tuple[Person, str]:
        query = select(people, invitations.c.made_by.label("inviter")).join(invitations, invitations.c.person_id == people.c.id)
        good = (invitations.c.hash == hashed(secret), invitations.c.used_at.is_(None), invitations.c.expires_at > self._clock())
        row = connection.execute(query.where(*good, people.c.disabled_at.is_(None))).one_or_none()
        if row is None:
            raise SignInRefused(SPENT)
        return _person(row), row.inviter

    def _shut_out(self, connection: Connection, person_id: str) -> None:
        """End every session and token."""
        self._end(connection, browser_sessions.c.person_id == person_id)
        tokens = (api_keys.c.person_id == person_id) & api_keys.c.revoked_at.is_(None)
        connection.execute(update(api_keys).where(tokens).values(revoked_at=self._clock()))

    def _end(self, connection: Connection, which: Any) -> None:  # noqa: ANN401 - a condition on browser_sessions
        connection.execute(update(browser_sessions).where(which, browser_sessions.c.ended_at.is_(None)).values(ended_at=self._clock()))

    def _credential(self, connection: Connection, person: Person, what: str, *, by: str) -> None:
        note_credential(connection, person.actor, what, by=by, now=self._clock())
        self._note(connection, f"person.{what}_made", person.name, by=by)

    def _note(self, connection: Connection, action: str, subject: str, *, by: str, **detail: Any) -> None:  # noqa: ANN401 - JSON
        audit.append(connection, actor=by, action=action, subject=subject, detail=detail, now=self._clock())


def note_credential(connection: Connection, actor: str, what: str, *, by: str, now: datetime) -> None:
    """Whose hand made a credential of whom."""
    connection.execute(insert(credential_acts).values(person=actor, made_by=by, what=what, at=now))


def hands_of(connection: Connection, actor: str, *, since: datetime) -> frozenset[str]:
    """Who made or reset a credential of this person since then, besides the person."""
    recent = (credential_acts.c.person == actor) & (credential_acts.c.at > since) & (credential_acts.c.made_by != actor)
    return frozenset(connection.execute(select(credential_acts.c.made_by).where(recent)).scalars())


def names_of(connection: Connection, actor: str) -> frozenset[str]:
    """Every name that the same person signs with: as a person, and as a user of the machine."""
    name = actor.removeprefix("user:")
    same = select(people.c.name, people.c.os_user).where((people.c.name == name) | (people.c.os_user == name))
    found = {f"user:{known}" for row in connection.execute(same) for known in row if known is not None}
    return frozenset(found | {actor})


def hashed(secret: str) -> str:
    """SHA-256 of a secret of 256 random bits, which needs no slow hash."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _named(connection: Connection, name: str) -> Row[Any]:
    row = connection.execute(select(people).where(people.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"nobody is called {name!r}: `ratchet people list` shows everybody")
    return row


def _require_roles(name: str, roles: Collection[Role]) -> None:
    if not roles:
        raise Refused(f"{name} needs a role: one of {', '.join(Role)}")


def _require_an_admin(connection: Connection, before: Person) -> None:
    """Refuse a change after which nobody could undo it."""
    if Role.ADMIN not in before.roles or before.disabled_at is not None or before.policy is not None:
        return
    active = connection.execute(select(people.c.roles).where(people.c.disabled_at.is_(None), people.c.policy.is_(None))).scalars()
    if not any(Role.ADMIN in roles for roles in active):
        raise Refused(f"{before.name} is the last admin of all policies: give another person that role first")


def _person(row: Row[Any]) -> Person:
    return Person(
        id=row.id, name=row.name, roles=frozenset(Role(role) for role in row.roles), policy=row.policy, email=row.email,
        os_user=row.os_user, has_password=row.password_hash is not None, subject=row.subject, created_at=row.created_at,
        made_by=row.made_by, disabled_at=row.disabled_at,
    )  # fmt: skip
