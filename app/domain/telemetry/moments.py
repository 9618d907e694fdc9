"""Times that come from outside: bounded before anything computes with them.

A year 1 with an offset, or a year 9999 with a wait added to it, lies outside what a datetime can say. Such a time is a fault of the
data: refused at the door, a dead letter behind it.
"""

from datetime import UTC, datetime, timedelta

EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
"""No answer of a language model is older; what says so has a broken clock."""
LATEST = datetime(2200, 1, 1, tzinfo=UTC)
AHEAD = timedelta(days=1)
"""Clocks may be wrong by minutes, zones by hours; what lies further ahead would win over every later correction."""


def check_moments(*, received_at: datetime, **moments: datetime) -> None:
    """Raises ValueError, naming the field, for a time without a zone, before `EARLIEST`, or more than `AHEAD` after it was received."""
    for name, moment in moments.items():
        if moment.tzinfo is None:
            raise ValueError(f"{name} is {moment.isoformat()}, which has no timezone")
        if moment < EARLIEST:
            raise ValueError(f"{name} is {moment.isoformat()}, before {EARLIEST:%Y}: check the sender's clock")
        if moment - received_at > AHEAD:
            raise ValueError(f"{name} is {moment.isoformat()}, which lies in the future: check the sender's clock")
