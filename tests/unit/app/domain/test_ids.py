"""Ids are UUIDs of version 7: the moment in front, chance behind."""

import time
import uuid

from app.domain.ids import uuid7


def test_an_id_is_a_uuid_of_version_7_that_begins_with_its_moment() -> None:
    before = time.time_ns() // 1_000_000
    made = [uuid.UUID(uuid7()) for _ in range(200)]
    after = time.time_ns() // 1_000_000
    assert {(one.version, one.variant) for one in made} == {(7, uuid.RFC_4122)}
    moments = [one.int >> 80 for one in made]
    assert before <= moments[0] <= moments[-1] <= after
    assert moments == sorted(moments)


def test_all_other_bits_of_an_id_are_drawn() -> None:
    """RFC 9562, section 5.7: 12 bits behind the version, 62 behind the variant. That one is alike in all of 200 ids: odds of 2^-199."""
    made = [uuid.UUID(uuid7()).int for _ in range(200)]
    drawn = 0
    for one in made:
        drawn |= one ^ made[0]
    assert drawn & ((1 << 80) - 1) == 0xFFF << 64 | ((1 << 62) - 1)
