"""What processes wait for, as `/health` tells it."""

from datetime import datetime

from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.relay import SqlRelayOffice
from app.db.troubles import SqlTroubles, ingestion_troubles
from app.domain.errors import Unavailable
from app.main import create_app
from tests.fakes.gateway import collaborators
from tests.fakes.served import at, event_of, turn


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> datetime:
        return at(self.seconds)


def told(engine: Engine, clock: Clock) -> list[str]:
    return ingestion_troubles(engine, engine, clock=clock)


def test_what_is_waited_for_is_told_until_it_is_over_or_its_process_ended(engine: Engine) -> None:
    clock = Clock()
    one, two = (SqlTroubles(engine, name=f"ingest {n}", clock=clock, now_s=lambda: clock.seconds) for n in (1, 2))
    one.report("the bucket says 503")
    two.report("the disk is full")
    clock.seconds = 60
    one.report("the bucket says 503")
    assert told(engine, clock) == [
        "ingest 1 waits since 12:00:00: the bucket says 503",
        "ingest 2 waits since 12:00:00: the disk is full",
    ]
    one.report(None)
    assert told(engine, clock) == ["ingest 2 waits since 12:00:00: the disk is full"]
    clock.seconds = 119  # it was killed and said nothing more
    assert len(told(engine, clock)) == 1
    clock.seconds = 121
    assert told(engine, clock) == []


def test_events_that_wait_long_are_told_also_where_nobody_could_write_down_why(engine: Engine) -> None:
    clock = Clock()
    door = SqlInbox(engine, clock=clock, free_bytes=lambda: 1 << 40)
    door.append_blocking([event_of(turn("a")), event_of(turn("b"))])
    door.close()
    clock.seconds = 59
    assert told(engine, clock) == []
    clock.seconds = 61
    assert told(engine, clock) == ["events wait for 61 s to be sent: is `ratchet relay` running?"]
    term = SqlRelayOffice(engine, engine, group="g").take("one", now=clock())
    assert term is not None
    term.mark_inbox([row.seq for row in term.unsent_inbox(10)], now=clock())
    clock.seconds = 200
    assert told(engine, clock) == ["events wait for 139 s to be applied: is `ratchet ingest` running?"]


def test_health_tells_what_ingestion_waits_for_and_the_service_stays_well() -> None:
    async def full() -> None:
        raise Unavailable("the disk is full")

    answer = TestClient(create_app(collaborators(notes={"ingestion": full}))).get("/health")
    assert (answer.status_code, answer.json()) == (200, {"ingestion": "the disk is full"})
