"""Times from outside: refused by the name of their field where a clock must be wrong."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from app.domain.telemetry.moments import check_moments

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)
DAY, SECOND = timedelta(days=1), timedelta(seconds=1)


@pytest.mark.parametrize("moment", [NOW, NOW + DAY, datetime(2000, 1, 1, tzinfo=UTC), NOW.astimezone(timezone(timedelta(hours=14)))])
def test_a_time_that_may_be_is_taken(moment: datetime) -> None:
    check_moments(received_at=NOW, occurred_at=moment)


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (NOW + DAY + SECOND, "occurred_at is 2026-11-25T12:00:01.* lies in the future"),
        (datetime(2000, 1, 1, tzinfo=UTC) - SECOND, "occurred_at is 1999.* before 2000"),
        (datetime(2026, 11, 24, 12), "occurred_at is .* has no timezone"),  # noqa: DTZ001 - that is what is refused
    ],
)
def test_another_one_is_refused_by_its_name(moment: datetime, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_moments(received_at=NOW, started_at=NOW, occurred_at=moment)
