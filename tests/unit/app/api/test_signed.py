"""Signed tokens: read where we wrote them for the same purpose and their time is not over, and nowhere else."""

from datetime import UTC, datetime, timedelta

import pytest

from app.api.entry.signed import Ending, Signed

NOW = datetime(2026, 11, 24, tzinfo=UTC)


class Said(Ending, frozen=True, kw_only=True):
    """A token of the test."""

    who: str


def signed(*secrets: str, purpose: str = "test") -> Signed[Said]:
    return Signed(prefix="tt_", purpose=purpose, kind=Said, secrets=lambda: secrets)


def content(seconds: float = 10.0, who: str = "ada") -> Said:
    return Said(who=who, expires=(NOW + timedelta(seconds=seconds)).timestamp())


@pytest.mark.parametrize("who", ["", "a", "ad", "ada", "Zoë"])  # bodies of every length modulo four, of which the padding is left out
def test_a_token_is_read_as_it_was_written(who: str) -> None:
    token = signed("s").write(content(who=who))
    assert token.startswith("tt_")
    assert "=" not in token
    assert signed("s").read(token, now=NOW) == content(who=who)
    assert len(token.partition(".")[2]) == 64


def test_its_time_is_over_at_the_moment_it_names() -> None:
    token = signed("s").write(content(10.0))
    assert signed("s").read(token, now=NOW + timedelta(seconds=9.9)) is not None
    assert signed("s").read(token, now=NOW + timedelta(seconds=10)) is None


def test_the_newest_secret_signs_and_all_are_honoured() -> None:
    token = signed("new", "old").write(content())
    assert signed("new").read(token, now=NOW) is not None
    assert signed("old").read(token, now=NOW) is None
    assert signed("newer", "new").read(token, now=NOW) is not None


@pytest.mark.parametrize("token", ["", "tt_", "tt_.", "tt_e30.", "tt_e30." + "0" * 64, "tt_e30.é"])
def test_what_we_did_not_sign_says_nothing(token: str) -> None:
    assert signed("s").read(token, now=NOW) is None


def test_a_token_of_another_purpose_or_shape_says_nothing() -> None:
    assert signed("s").read(signed("s", purpose="other").write(content()), now=NOW) is None
    alien = Signed(prefix="tt_", purpose="test", kind=Ending, secrets=lambda: ("s",)).write(Ending(expires=content().expires))
    assert signed("s").read(alien, now=NOW) is None
