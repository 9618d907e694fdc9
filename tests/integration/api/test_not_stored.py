"""`store: false` from the chat to the last file: nothing that was said is in the inbox, in the tables, in segments or in their logs."""

from pathlib import Path

from sqlalchemy import select
from starlette.testclient import TestClient

from app.db.engine import open_engine, reading
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.relay import SqlRelayOffice
from app.db.ingestion.streams import SqlEffects
from app.db.ingestion.words import COMPLETION, WITH_WORDS
from app.db.tables import turns
from app.domain.ids import utc_now
from app.domain.telemetry.decoding import sort_out
from app.domain.telemetry.streams import Delivery, EffectBatch, JoinRules
from app.main import create_app
from app.trajectories.segments import ParquetSegments
from tests.fakes.gateway import collaborators

SECRET, KEPT = b"canary-that-nobody-keeps", b"canary-that-may-be-kept"


def test_of_a_chat_that_is_not_to_be_stored_no_byte_is_anywhere(sqlite_url: str, tmp_path: Path) -> None:
    engine, segments = open_engine(sqlite_url), ParquetSegments(str(tmp_path / "segments"))
    inbox = SqlInbox(engine, free_bytes=lambda: 1 << 40)
    client = TestClient(create_app(collaborators(inbox=inbox)))
    for text, store in ((SECRET, False), (KEPT, True)):
        body = {"model": "composer", "messages": [{"role": "user", "content": text.decode()}], "user": "alice", "store": store}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    inbox.close()
    term = SqlRelayOffice(engine, engine, group="g").take("one", now=utc_now())
    assert term is not None
    rows = term.unsent_inbox(100)
    deliveries = [
        Delivery(topic="inbox", partition=0, offset=row.seq, headers={}, value=row.event.data, event=row.event, received_at=row.received_at)
        for row in rows
    ]
    events, dead = sort_out(deliveries)
    assert dead == []
    store = SqlEffects(
        engine, rules=lambda: JoinRules(policies={}), segments=segments
    )  # fmt: skip
    store.apply(EffectBatch(events=tuple(events)), now=utc_now())
    with reading(engine) as connection:
        served = connection.execute(select(COMPLETION, turns.c.completion_tokens).select_from(WITH_WORDS)).all()
    assert sorted(row.completion_tokens for row in served) == [5, 5]  # that both were served is known
    empty, said = sorted(len(row.completion) for row in served)
    assert empty == 0 < said
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET not in everything
    assert KEPT in everything  # the inbox has the other one: what is looked for would be found
    words = [segments.read([(name, id_) for id_ in segments.turns(name)]) for name in segments.names()]
    assert SECRET.decode() not in str(words)
    assert KEPT.decode() in str(words)
    engine.dispose()
