"""Signing in with a password, and setting one with a link. Wrong name, wrong password, no password, locked: one answer, after one time.

After five wrong passwords an account is locked for a minute, and for twice as long after each further one, up to a quarter of an hour.
Whoever knows a name can keep its owner from signing in that way; sessions and tokens that there are go on, and a provider's account does.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

from app.access.passwords import Passwords
from app.domain.people import Person, SignInRefused

FREE_TRIES = 5
FIRST_LOCK, LONGEST_LOCK = timedelta(minutes=1), timedelta(minutes=15)
WRONG = "name or password is wrong, or there were too many wrong ones: wait some minutes, or ask an admin for a new link"


class Attempt(Protocol):
    """One try to sign in, counted before the password is looked at: tries side by side are no more than tries after each other."""

    @property
    def person(self) -> Person: ...
    @property
    def password_hash(self) -> str | None: ...
    @property
    def locked(self) -> bool: ...


class PeopleBook(Protocol):
    """Where people are kept."""

    def attempt(self, name: str, *, lock_after: Callable[[int], datetime | None]) -> Attempt | None: ...
    def failed(self, name: str) -> None: ...
    def forgive(self, person: Person) -> None: ...
    def enter(self, person: Person, *, how: str, instead_of: str | None = None) -> str: ...
    def leave(self, secret: str) -> None: ...
    def invited(self, secret: str) -> Person: ...
    def accept(self, secret: str, *, password_hash: str) -> Person: ...


class SignIn:
    """The desk of the entrance."""

    def __init__(self, book: PeopleBook, *, passwords: Passwords, clock: Callable[[], datetime]) -> None:
        self._book = book
        self._passwords = passwords
        self._clock = clock

    def with_password(self, name: str, password: str, *, instead_of: str | None = None) -> str:
        """The secret of a new session; the one that this browser had ends. Raises `SignInRefused`."""
        return self._book.enter(self._checked(name, password), how="password", instead_of=instead_of)

    def person_with(self, name: str, password: str) -> Person:
        """Whose name and password these are, for a terminal, which is given a token. Raises `SignInRefused`."""
        person = self._checked(name, password)
        self._book.forgive(person)
        return person

    def _checked(self, name: str, password: str) -> Person:
        attempt = self._book.attempt(name.strip().lower(), lock_after=self._lock_after)
        locked = attempt is not None and attempt.locked
        fits = self._passwords.fits(password, None if attempt is None or locked else attempt.password_hash)
        if attempt is not None and not locked and fits:
            return attempt.person
        if attempt is not None and not locked:
            self._book.failed(attempt.person.name)
        raise SignInRefused(WRONG)

    def invited(self, link: str) -> Person:
        """Whom a link is for. Raises `SignInRefused`."""
        return self._book.invited(link)

    def accept(self, link: str, password: str, *, instead_of: str | None = None) -> str:
        """Set the password that a link allows, and sign in. Raises `SignInRefused`, `BadRequest`."""
        person = self._book.invited(link)
        person = self._book.accept(link, password_hash=self._passwords.hash(password, of=person.name))
        return self._book.enter(person, how="link", instead_of=instead_of)

    def leave(self, session: str) -> None:
        """End a session."""
        self._book.leave(session)

    def _lock_after(self, failures: int) -> datetime | None:
        """Until when an account is locked with its so many-th wrong password."""
        if failures < FREE_TRIES:
            return None
        return self._clock() + min(LONGEST_LOCK, FIRST_LOCK * 2 ** min(failures - FREE_TRIES, 10))
