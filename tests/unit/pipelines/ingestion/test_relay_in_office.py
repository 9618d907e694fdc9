"""A relay in office, beside its sending: it waits, keeps house, sweeps and renews."""

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import cast

import msgspec
import pytest
from sqlalchemy import Engine, select

from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.relay import SqlRelayOffice
from app.db.ingestion.streams import SqlEffects
from app.db.tables import dead_letters
from app.domain.errors import Unavailable
from app.domain.telemetry.events import CloudEvent, EventType
from app.domain.telemetry.streams import JoinRules, RelayTerm
from pipelines.ingestion.config import RelayConfig
from pipelines.ingestion.relay import Heartbeat, Relay, Term
from tests.fakes.served import at, observation, turn
from tests.fakes.streaming import MemorySegments
from tests.unit.pipelines.ingestion.test_relay import Stage


@pytest.fixture
def stage(sqlite_engine: Engine) -> Iterator[Stage]:
    segments = MemorySegments()
    store = SqlEffects(sqlite_engine, rules=lambda: JoinRules(policies={}), segments=segments)
    made = Stage(engine=sqlite_engine, door=SqlInbox(sqlite_engine, free_bytes=lambda: 1 << 40), store=store)
    yield made
    made.door.close()


def test_a_relay_in_office_waits_for_its_broker_keeps_house_and_sweeps_when_it_is_time(stage: Stage) -> None:
    """Everything beside sending, as `serve` does it: a broker that is down costs a pause, and nothing of it is forgotten afterwards."""
    stage.accept("a")
    stage.broker.down = True
    swept, paused, sent, rounds = list[datetime](), list[float](), list[int](), iter(range(4))

    def pause(seconds: float) -> None:
        paused.append(seconds)
        stage.broker.down = False

    def sweep(now: datetime) -> int:
        swept.append(now)
        return 2

    relay = Relay(
        office=SqlRelayOffice(stage.engine, stage.engine, group="g"), sink=stage.broker, store=stage.store, clock=stage.now, pause=pause,
        config=RelayConfig(sweep_every_s=0.0, reconcile_every_s=0.0, idle_s=0.07), owner="one", sweep=sweep, sent=sent.append,
    )  # fmt: skip
    term = relay.office.take("one", now=stage.now())
    assert term is not None
    Term(relay=relay, term=term).serve(lambda: next(rounds, None) is None, lambda: None)
    assert paused == [0.3, 0.07, 0.07], "the broker, then nothing to do"
    assert sent == [1, 0, 0]
    assert len(swept) == 3
    assert len(stage.broker.rotations) == 1, "the house is kept at the first chance, and not again for half a minute"


YEAR_1, YEAR_9999 = "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"
"""In UTC they are no times that a datetime can say."""


@pytest.mark.parametrize("largest", [1 << 40, 1], ids=["through the broker", "from the inbox"])
def test_what_an_older_door_took_with_an_impossible_time_is_buried_and_the_others_are_applied(stage: Stage, largest: int) -> None:
    """An `occurred_at` of year 1 once made the relay apply, fail and begin again, with everything behind it waiting."""
    said = [msgspec.to_builtins(observation(f"o{n}", of="a")) | {"occurred_at": moment} for n, moment in enumerate((YEAR_1, YEAR_9999))]
    said.append(msgspec.to_builtins(turn("old")) | {"finished_at": YEAR_9999})
    kinds = (EventType.OBSERVATION, EventType.OBSERVATION, EventType.TURN)
    stage.door.append_blocking(
        [CloudEvent(id=f"e{n}", source="api", type=kinds[n], time=at(0), key="a", data=msgspec.json.encode(x)) for n, x in enumerate(said)]
    )
    stage.accept("a", "b")
    stage.broker.largest = largest
    term = stage.take_office()
    term.send_inbox()
    stage.ingest()
    stage.seconds = 20
    assert [term.reconcile(), term.send_inbox(), stage.unconfirmed()] == [0, 0, 0]
    assert stage.applied() == {"a", "b"}
    with stage.engine.connect() as connection:
        buried = connection.execute(select(dead_letters.c.reason, dead_letters.c.attempts).order_by(dead_letters.c.offset)).all()
    assert [reason.partition(" ")[0] for reason, _ in buried] == ["occurred_at", "occurred_at", "finished_at"]
    assert [attempts for _, attempts in buried] == [1, 1, 1]


def test_a_renewal_that_fails_is_tried_again_and_costs_no_office(caplog: pytest.LogCaptureFixture) -> None:
    class Busy:
        renewed = threading.Semaphore(0)

        def renew(self, *, now: datetime) -> None:
            self.renewed.release()
            raise OSError("database is locked")

    term = Busy()
    with Heartbeat(cast(RelayTerm, term), lambda: at(0), every_s=0.01) as heartbeat:
        assert all(term.renewed.acquire(timeout=60) for _ in range(3))
        heartbeat.check()
    assert "event=renewal_failed error=OSError('database is locked')" in caplog.text


def test_the_topics_are_looked_after_before_anything_is_sent_and_again_only_where_that_failed(stage: Stage) -> None:
    """So that ingestion finds something to join, also where nobody has said anything yet."""
    looks, rounds = list[bool](), iter(range(5))

    def look() -> None:
        looks.append(bool(stage.broker.sent))
        if len(looks) == 1:
            raise Unavailable("the broker does not answer: is it running?")

    stage.broker.check_topics = look  # type: ignore[method-assign] - a broker that starts slowly
    stage.accept("a")
    stage.take_office().serve(lambda: next(rounds, None) is None, lambda: None)
    assert looks == [False, False]
    assert [out.event.id for out in stage.broker.sent] == ["turn-a"]


def test_a_batch_is_known_by_the_moment_it_was_marked_with_though_the_clock_goes_on(stage: Stage) -> None:
    ticks = iter(range(1_000))
    term = stage.take_office(clock=lambda: stage.now() + timedelta(milliseconds=next(ticks)))
    stage.accept("a")
    term.send_inbox()
    stage.ingest()
    stage.accept("b")
    term.send_inbox()
    stage.seconds = 7
    assert term.reconcile() == 0
