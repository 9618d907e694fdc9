"""Which passwords are taken, and that nobody learns from the time or the answer whether there is one."""

import pytest

from app.access.passwords import LONGEST, SHORTEST
from app.domain.errors import BadRequest
from tests.fakes.people import PASSWORD, quick_passwords


@pytest.mark.parametrize(
    ("password", "words"),
    [
        ("abcdefghijk", "12 to 256 characters"),
        ("a1b2c" * 51 + "de", "12 to 256 characters"),
        ("zoe is the best one", "guessed from the name"),
        ("my name is ZOE indeed", "guessed from the name"),
        ("abcdabcdabcdabcd", "repeats itself"),  # four characters
    ],
)
def test_a_password_that_is_no_good_is_refused_with_the_reason(password: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        quick_passwords().hash(password, of="Zoe")
    assert refused.value.param == "password"


@pytest.mark.parametrize("password", ["abcdefghijkl", "abcdeabcdeabcde", "a1b2c" * 51 + "d"])
def test_the_shortest_the_longest_and_the_plainest_that_are_good_fit_themselves_alone(password: str) -> None:
    passwords = quick_passwords()
    assert SHORTEST <= len(password) <= LONGEST
    stored = passwords.hash(password, of="zoe")
    assert passwords.fits(password, stored)
    assert not passwords.fits(password + "x", stored)
    assert not passwords.fits(password[:-1], stored)


def test_where_there_is_no_password_none_fits() -> None:
    passwords = quick_passwords()
    assert not passwords.fits(PASSWORD, None)
    assert not passwords.fits("a password that nobody has", None), "what is compared instead is nobody's"
    assert passwords.fits(PASSWORD, "no hash at all") is False


def test_two_hashes_at_a_time_are_computed_and_every_one_is_given_back() -> None:
    passwords = quick_passwords()
    for _ in range(5):
        assert not passwords.fits(PASSWORD, "no hash at all")
        assert passwords.fits(PASSWORD, passwords.hash(PASSWORD, of="zoe"))


def test_a_third_who_asks_at_the_same_time_waits() -> None:
    """Each takes 64 MiB."""
    turn = quick_passwords()._turn
    assert [turn.acquire(blocking=False) for _ in range(3)] == [True, True, False]
