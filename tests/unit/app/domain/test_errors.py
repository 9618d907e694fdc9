"""What an error carries on its way to whoever can act on it."""

import pickle

import pytest

from app.domain.errors import (
    AlreadyRunning,
    BadConfig,
    BadRequest,
    DamagedState,
    Held,
    NotFound,
    Overloaded,
    RatchetError,
    Unavailable,
    asked_to_wait_s,
)

SAID = "the store is full: free some space"


@pytest.mark.parametrize(
    "error",
    [
        BadRequest(SAID), BadConfig(SAID), AlreadyRunning(SAID), NotFound(SAID), Unavailable(SAID), DamagedState(SAID, "runs/1"),
        Overloaded(SAID, retry_after_s=2.0), Held("not_finite", SAID),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whoever_reads_an_error_is_told_its_sentence_and_a_command_ends_with_2(error: RatchetError) -> None:
    assert str(error) == SAID
    assert error.exit_code == 2


def test_a_bad_request_names_no_field_and_no_code_of_its_own_where_none_is_known() -> None:
    assert (BadRequest(SAID).param, BadRequest(SAID).code) == (None, "invalid_request")
    named = BadRequest(SAID, param="value", code="not_finite")
    assert (named.param, named.code) == ("value", "not_finite")


def test_a_damaged_state_still_says_its_place_when_it_comes_from_another_machine() -> None:
    came = pickle.loads(pickle.dumps(DamagedState(SAID, "s3://bucket/runs/1")))
    assert (type(came), str(came), came.place) == (DamagedState, SAID, "s3://bucket/runs/1")


def test_what_a_limit_and_a_held_run_carry_is_kept_beside_the_sentence() -> None:
    assert Overloaded(SAID, retry_after_s=2.5).retry_after_s == 2.5
    assert Held("low_ess", SAID).reason == "low_ess"


def test_who_says_nothing_of_how_long_is_waited_for_a_second() -> None:
    assert asked_to_wait_s(None) == 1.0
    assert asked_to_wait_s("later") == 1.0
    assert asked_to_wait_s("99999.5") == 99_999.5
    assert asked_to_wait_s("100000") == 1.0
