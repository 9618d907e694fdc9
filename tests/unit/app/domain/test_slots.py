"""Slots are counted from the epoch."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

from app.domain.learning.cycles import slot_of

FIVE_HOURS = 18_000


def test_a_clock_set_back_an_hour_for_winter_makes_no_slot_twice_and_skips_none() -> None:
    """Cron fires twice, or not at all, in the night of the change (25 October 2026 in Berlin)."""
    berlin = ZoneInfo("Europe/Berlin")
    start = datetime(2026, 10, 24, 12, tzinfo=UTC)
    ticks = [(start + timedelta(minutes=n)).astimezone(berlin) for n in range(48 * 60)]
    slots = sorted({slot_of(tick, FIVE_HOURS) for tick in ticks})
    assert {later - earlier for earlier, later in pairwise(slots)} == {FIVE_HOURS}
    half_past_two = datetime(2026, 10, 25, 2, 30, tzinfo=berlin)  # happens twice, an hour apart
    again = half_past_two.replace(fold=1)
    assert again.timestamp() - half_past_two.timestamp() == 3600
    assert slot_of(again, 3600) - slot_of(half_past_two, 3600) == 3600
