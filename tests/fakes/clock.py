"""A clock that stands still until it is told to move."""

from datetime import UTC, datetime, timedelta


class FrozenClock:
    """The `Clock` port; `advance` moves it."""

    def __init__(self, at: datetime = datetime(2026, 11, 21, 12, tzinfo=UTC)) -> None:
        self.now = at

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock, also backwards."""
        self.now += timedelta(seconds=seconds)
