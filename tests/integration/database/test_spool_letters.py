"""What a gateway kept on its disk and the database will never take lies among the dead letters of the deployment."""

import time
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine, select, text

from app.db import tables
from app.db.counters import read_counts
from app.db.ingestion.dead_letters import SqlDeadLetters
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.spool import Spool, SpooledInbox
from app.domain.telemetry.events import CloudEvent, EventType, Topic

STRICTER = {
    "sqlite": "CREATE TRIGGER stricter BEFORE INSERT ON inbox WHEN NEW.event_id = 'odd' "
    "BEGIN SELECT RAISE(ABORT, 'CHECK constraint failed: stricter'); END",
    "postgresql": "ALTER TABLE inbox ADD CONSTRAINT stricter CHECK (event_id <> 'odd')",
}
"""A rule of an upgrade, which what was answered before it does not know."""


def test_an_event_that_a_rule_of_an_upgrade_refuses_is_a_dead_letter_and_all_others_are_in_the_inbox(
    engine: Engine, tmp_path: Path
) -> None:
    ids, folder = [f"{number}" for number in range(250)], tmp_path / "spool"
    before = Spool(folder)
    for id_ in (*ids[:100], "odd", *ids[100:]):
        at = datetime(2026, 11, 24, tzinfo=UTC)
        before.put([CloudEvent(id=id_, source="gateway", type=EventType.TURN, time=at, key="e", data=b'{"n":1}')])
    before.close()
    with engine.begin() as connection:
        connection.execute(text(STRICTER[engine.dialect.name]))
    inbox = SqlInbox(engine, free_bytes=lambda: 1 << 40)
    letters = SqlDeadLetters(engine)
    door = SpooledInbox(inbox, Spool(folder), bury=letters.bury, retry_s=0.02)
    ends = time.monotonic() + 30
    while list(folder.iterdir()):
        assert time.monotonic() < ends
        time.sleep(0.02)
    door.close()
    inbox.close()
    with engine.connect() as connection:
        assert list(connection.execute(select(tables.inbox.c.event_id).order_by(tables.inbox.c.seq)).scalars()) == ids
        kept = connection.execute(select(tables.dead_letters.c.source, tables.dead_letters.c.event_id)).one()
        assert read_counts(connection)["", "dead_lettered"] == 1
        assert connection.execute(select(tables.outbox.c.topic)).scalars().all() == [Topic.DEAD_LETTERS]
    assert tuple(kept) == ("gateway", "odd")
    (stored,) = letters.find()
    assert (stored.letter.topic, stored.letter.payload, stored.replayed_at) == ("spool", b'{"n":1}', None)
    assert "the database refuses a record" in stored.letter.reason
    assert "stricter" in stored.letter.reason
