"""Signing in: one answer for whatever was wrong, and locks that grow with each wrong password."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest

from app.access.sign_in import WRONG, Attempt, SignIn
from app.domain.errors import BadRequest
from app.domain.people import Person, Role, SignInRefused
from tests.fakes.clock import FrozenClock
from tests.fakes.people import PASSWORD, quick_passwords

CLOCK, PASSWORDS = FrozenClock(), quick_passwords()
ADA = Person(id="1", name="ada", roles=frozenset({Role.OPERATOR}), policy=None, created_at=CLOCK(), made_by="user:root")


@dataclass(frozen=True)
class Try:
    """One try of Ada's."""

    password_hash: str | None
    locked: bool
    person: Person = ADA


@dataclass
class Book:
    """Ada alone, and what was written about her."""

    stored: str | None = None
    locked: bool = False
    written: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    lock_after: Callable[[int], datetime | None] = lambda _failures: None

    def attempt(self, name: str, *, lock_after: Callable[[int], datetime | None]) -> Attempt | None:
        self.lock_after = lock_after
        return Try(self.stored, self.locked) if name == "ada" else None

    def failed(self, name: str) -> None:
        self.written.append(("failed", name))

    def forgive(self, person: Person) -> None:
        self.written.append(("forgiven", person.name))

    def enter(self, person: Person, *, how: str, instead_of: str | None = None) -> str:
        return f"{person.name} by {how} instead of {instead_of}"

    def leave(self, secret: str) -> None:
        self.written.append(("left", secret))

    def invited(self, secret: str) -> Person:
        if secret != "link":
            raise SignInRefused(WRONG)
        return ADA

    def accept(self, secret: str, *, password_hash: str) -> Person:
        self.stored = password_hash
        return ADA


def desk(*, locked: bool = False, without: bool = False) -> tuple[SignIn, Book]:
    book = Book(stored=None if without else PASSWORDS.hash(PASSWORD, of="ada"), locked=locked)
    return SignIn(book, passwords=PASSWORDS, clock=CLOCK), book


@pytest.mark.parametrize(
    ("failures", "minutes"), [(0, None), (4, None), (5, 1), (6, 2), (7, 4), (8, 8), (9, 15), (10, 15), (15, 15), (16, 15), (5000, 15)]
)
def test_after_five_wrong_ones_an_account_is_locked_for_twice_as_long_each_time(failures: int, minutes: int | None) -> None:
    sign_in, book = desk()
    sign_in.with_password("ada", PASSWORD)
    assert book.lock_after(failures) == (None if minutes is None else CLOCK() + timedelta(minutes=minutes))


@pytest.mark.parametrize("name", ["ada", " Ada ", "ADA"])
def test_the_right_password_is_a_session_or_a_terminal_s_person(name: str) -> None:
    sign_in, book = desk()
    assert sign_in.with_password(name, PASSWORD, instead_of="before") == "ada by password instead of before"
    assert book.written == []
    assert sign_in.person_with(name, PASSWORD) is ADA
    assert book.written == [("forgiven", "ada")]


@pytest.mark.parametrize(
    ("name", "password", "locked", "without", "written"),
    [
        ("ada", "another one", False, False, [("failed", "ada")]), ("ada", "another one", True, False, []),
        ("ada", PASSWORD, True, False, []),
        ("eve", PASSWORD, False, False, []), ("ada", "a password that nobody has", False, True, [("failed", "ada")]),
    ],
)  # fmt: skip
def test_whatever_is_wrong_has_one_answer_and_only_a_try_that_counts_is_written(
    name: str, password: str, locked: bool, without: bool, written: list[tuple[str, ...]]
) -> None:
    for way in (SignIn.with_password, SignIn.person_with):
        sign_in, book = desk(locked=locked, without=without)
        with pytest.raises(SignInRefused) as refused:
            way(sign_in, name, password)
        assert (str(refused.value), book.written) == (WRONG, written)


def test_a_link_sets_the_password_and_is_a_session() -> None:
    sign_in, book = desk(without=True)
    assert sign_in.invited("link") is ADA
    assert sign_in.accept("link", PASSWORD, instead_of="before") == "ada by link instead of before"
    assert PASSWORDS.fits(PASSWORD, book.stored)
    with pytest.raises(SignInRefused):
        sign_in.accept("another", PASSWORD)
    with pytest.raises(BadRequest):
        sign_in.accept("link", "ada and no more than that")
    sign_in.leave("s")
    assert book.written == [("left", "s")]
