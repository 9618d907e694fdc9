"""Ids are UUIDs of version 7: the moment in front, chance behind."""

import re
import time
import uuid
from datetime import timedelta

import pytest

from app.domain.errors import BadRequest
from app.domain.ids import checked_pseudonym, hash_actor, utc_now, uuid7


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


def test_a_person_is_known_by_32_hex_digits_that_only_the_salt_leads_to() -> None:
    found = hash_actor("ada", salt="salt")
    assert re.fullmatch("[0-9a-f]{32}", found)
    assert found == hash_actor("ada", salt="salt")
    assert found not in {hash_actor("ada", salt="pepper"), hash_actor("salt", salt="ada"), hash_actor("adas", salt="alt")}
    # HMAC-SHA256 of RFC 4231, test case 2: key "Jefe", 5bdcc146bf60754e6a042426089575c7 5a003f089d2739839dec58b964ec3843
    assert hash_actor("what do ya want for nothing?", salt="Jefe") == "5bdcc146bf60754e6a042426089575c7"


def test_a_pseudonym_that_no_hash_made_is_refused_because_it_would_be_found_in_everybodys_words() -> None:
    whole = "0123456789abcdef" * 2
    assert checked_pseudonym(whole) == whole
    for wrong in (whole[:31], whole + "0", whole.upper(), "g" * 32, ""):
        with pytest.raises(BadRequest, match="is no pseudonym") as refused:
            checked_pseudonym(wrong)
        assert refused.value.param == "pseudonym"
    with pytest.raises(BadRequest) as refused:
        checked_pseudonym("x" * 41)
    assert str(refused.value).startswith(f"'{'x' * 40}' is no pseudonym"), "as much of it as somebody can read"


def test_now_is_now_and_in_utc() -> None:
    before = time.time()
    now = utc_now()
    assert before - 0.001 <= now.timestamp() <= time.time() + 0.001
    assert now.utcoffset() == timedelta()
