"""Log lines carry the ids that a person asks for, as text and as JSON."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from app.logging import REQUEST, _Json, _Line


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("ratchet.watch", logging.WARNING, "watch.py", 1, message, args, None)


@pytest.fixture
def request_id() -> Iterator[str]:
    token = REQUEST.set("0192-a")
    yield "0192-a"
    REQUEST.reset(token)


def test_pairs_become_fields() -> None:
    said = json.loads(_Json("watch").format(record("rolled_back policy=%s release=%s reason=%s", "composer", "r1", "harm e=20 of 10")))
    assert (said["process"], said["level"], said["policy"], said["release"]) == ("watch", "WARNING", "composer", "r1")
    assert said["message"] == "rolled_back policy=composer release=r1 reason=harm e=20 of 10"


def test_what_a_message_says_never_passes_for_what_we_say() -> None:
    said = json.loads(_Json("api").format(record("bug level=NONE process=other")))
    assert (said["level"], said["process"]) == ("WARNING", "api")


@pytest.mark.usefixtures("request_id")
def test_a_line_within_a_request_carries_its_id() -> None:
    assert _Line("api").format(record("bug path=/x")).endswith("bug path=/x request=0192-a")
    assert json.loads(_Json("api").format(record("bug path=/x")))["request"] == "0192-a"


def test_what_went_wrong_is_a_field_of_the_same_line() -> None:
    try:
        raise ZeroDivisionError("by nought")
    except ZeroDivisionError:
        broken = record("tick failed policy=%s", "composer")
        broken.exc_info = sys.exc_info()
    line = _Json("loop").format(broken)
    assert "\n" not in line
    assert json.loads(line)["traceback"].endswith("ZeroDivisionError: by nought")


def test_a_line_outside_of_one_carries_none() -> None:
    assert "request=" not in _Line("api").format(record("ready"))
