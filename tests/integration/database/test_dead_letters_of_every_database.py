"""Dead letters hold what a producer wrote as it came, whatever the database takes as text."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, select

from app.db import tables
from app.db.engine import writing
from app.db.ingestion.dead_letters import SqlDeadLetters, bury
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
