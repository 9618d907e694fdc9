"""How long somebody who has no time asks others to wait."""

import pytest

from app.domain.errors import asked_to_wait_s


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("7", 7.0), ("0.5", 0.5), (None, 2.0), ("", 2.0), ("-1", 2.0), ("inf", 2.0), ("9" * 400, 2.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 2.0)],
)
def test_seconds_are_taken_and_whatever_else_stands_there_is_the_default(said: str | None, seconds: float) -> None:
    assert asked_to_wait_s(said, default=2.0) == seconds
