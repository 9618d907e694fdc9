"""Dead letters hold what a producer wrote as it came, whatever the database takes as text."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, select

from app.db import tables
from app.db.engine import writing
from app.db.ingestion.dead_letters import SqlDeadLetters, bury
from app.domain.telemetry.events import CloudEvent, EventType, envelope
from app.domain.telemetry.streams import DeadLetter

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize("name", ["ce_id", "ce_source", "ce_type", "other"])
def test_a_header_with_a_nul_is_kept_among_the_dead_letters_of_every_database(engine: Engine, name: str) -> None:
    with writing(engine) as connection:
        headers = {"ce_id": "i", "ce_source": "s", "ce_type": "t"} | {name: "bad\x00"}
        bury(connection, [DeadLetter(topic="t", partition=0, offset=0, headers=headers, payload=b"p", reason="r")], now=NOON)
        types = connection.execute(select(tables.outbox.c.type)).scalars().all()
    (kept,) = SqlDeadLetters(engine).find()
    assert kept.letter.headers[name] == "bad\x00", "as it came, so that a replay finds the envelope as broken as it was"
    assert types == ["bad\ufffd" if name == "ce_type" else "t"]


def test_a_letter_of_a_topic_that_was_made_anew_takes_no_other_s_place(engine: Engine) -> None:
    first = DeadLetter(topic="t", partition=0, offset=5, headers={"ce_id": "i"}, payload=b"first", reason="no JSON")
    second = replace(first, payload=b"second", reason="no such policy")
    third = replace(second, headers={"ce_id": "j"}, reason="no time")
    for letter in (first, first, second, second, third, replace(first, offset=6)):
        with writing(engine) as connection:
            bury(connection, [letter], now=NOON)
    found = SqlDeadLetters(engine).find()
    assert [one.letter.topic for one in found] == [f"t~{found[0].id}", f"t~{found[1].id}", "t", "t"]
    assert [(one.letter.offset, one.letter.payload, one.letter.reason, one.attempts) for one in found] == [
        (5, b"first", "no JSON", 2), (5, b"second", "no such policy", 2), (5, b"second", "no time", 1), (6, b"first", "no JSON", 1),
    ]  # fmt: skip


def test_an_event_that_is_put_aside_twice_is_one_letter_whenever_it_was_received(engine: Engine) -> None:
    event = CloudEvent(id="i", source="gateway", type=EventType.TURN, time=NOON, key="e", data=b"{}")
    for second in (0, 1):
        headers = envelope(event, NOON + timedelta(seconds=second))
        SqlDeadLetters(engine).bury([DeadLetter(topic="t", partition=0, offset=5, headers=headers, payload=b"{}", reason="no")], now=NOON)
    (found,) = SqlDeadLetters(engine).find()
    assert (found.letter.topic, found.attempts) == ("t", 2)
