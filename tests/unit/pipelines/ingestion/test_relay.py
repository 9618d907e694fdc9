"""The relay over a real inbox (SQLite) and a broker in memory: nothing lost, whoever dies when."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import cast

import msgspec
import pytest
from sqlalchemy import Engine, select

from app.db.engine import open_engine, writing
from app.db.ingestion.dead_letters import SqlDeadLetters
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.relay import SqlRelayOffice, inbox_metrics
from app.db.ingestion.streams import SqlEffects
from app.db.outbox import OutboxEvent, enqueue
from app.db.tables import counters, dead_letters, inbox, turns
from app.domain.errors import LeaseLost, Unavailable
from app.domain.ports import Clock
from app.domain.telemetry.dead_letters import replay_one
from app.domain.telemetry.decoding import sort_out
from app.domain.telemetry.events import EventType, Topic, envelope
from app.domain.telemetry.streams import EffectBatch, JoinRules, RelayTerm
from pipelines.ingestion.config import RelayConfig
from pipelines.ingestion.relay import Heartbeat, Relay, Term
from tests.fakes.served import at, delivery_of, event_of, turn
from tests.fakes.streaming import MemoryBroker, MemorySegments


@dataclass
class Stage:
    """Everything around a relay, on one database, with a clock that is moved by hand."""

    engine: Engine
    door: SqlInbox
    store: SqlEffects
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    seconds: float = 0
    consumed: int = 0

    def now(self) -> datetime:
        return at(self.seconds)

    def accept(self, *ids: str) -> None:
        self.door.append_blocking([event_of(turn(id_)) for id_ in ids])

    def take_office(self, owner: str = "one", clock: Clock | None = None) -> Term:
        relay = Relay(
            office=SqlRelayOffice(self.engine, self.engine, group="ratchet-ingest"), sink=self.broker, store=self.store,
            config=RelayConfig(), clock=clock or self.now, pause=lambda _: None, owner=owner,
        )  # fmt: skip
        term: RelayTerm | None = relay.office.take(owner, now=self.now())
        assert term is not None
        return Term(relay=relay, term=term)

    def ingest(self) -> None:
        """Apply what lies in the broker and was not read yet."""
        topic = f"ratchet.events.{self.broker.epoch}"
        fresh = self.broker.sent[self.consumed :]
        events, dead = sort_out([delivery_of(out.event, offset=self.consumed + n, topic=topic) for n, out in enumerate(fresh)])
        self.consumed = len(self.broker.sent)
        self.store.apply(EffectBatch(events=tuple(events), dead=tuple(dead), next_offsets={(topic, 0): self.consumed}), now=self.now())

    def applied(self) -> set[str]:
        with self.engine.connect() as connection:
            return set(connection.execute(select(turns.c.inference_id)).scalars())

    def count(self, name: str) -> int:
        with self.engine.connect() as connection:
            return connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar() or 0

    def unconfirmed(self) -> int:
        with self.engine.connect() as connection:
            return len(connection.execute(select(inbox.c.seq).where(inbox.c.applied_at.is_(None))).all())


@pytest.fixture
def stage(sqlite_url: str) -> Iterator[Stage]:
    engine = open_engine(sqlite_url)
    segments = MemorySegments()
    store = SqlEffects(engine, rules=lambda: JoinRules(policies={}), segments=segments)
    made = Stage(engine=engine, door=SqlInbox(engine, free_bytes=lambda: 1 << 40), store=store)
    yield made
    made.door.close()
    engine.dispose()


def test_rows_are_sent_once_in_order_and_confirmed_when_applied(stage: Stage) -> None:
    stage.accept("a", "b", "c")
    term = stage.take_office()
    assert [term.send_inbox(), term.send_inbox()] == [3, 0]
    assert [out.event.id for out in stage.broker.sent] == ["turn-a", "turn-b", "turn-c"]
    stage.ingest()
    stage.seconds = 10
    assert term.reconcile() == 0
    assert stage.unconfirmed() == 0


def test_what_the_broker_did_not_acknowledge_is_sent_again(stage: Stage) -> None:
    stage.accept("a", "b", "c")
    term = stage.take_office()
    stage.broker.dropping = {"turn-b"}
    assert term.send_inbox() == 2
    stage.broker.dropping = set()
    assert term.send_inbox() == 1
    stage.ingest()
    assert stage.applied() == {"a", "b", "c"}


def test_a_relay_killed_between_ack_and_mark_costs_a_repetition_and_no_effect(stage: Stage) -> None:
    stage.accept("a")
    term = stage.take_office()
    stage.broker.send(term.term.unsent_inbox(10))  # acknowledged, then killed before the mark
    stage.seconds = 5
    assert stage.take_office("two").send_inbox() == 1
    stage.ingest()
    assert len(stage.broker.sent) == 2
    assert stage.applied() == {"a"}
    assert stage.count("redelivered") == 1


def test_an_empty_restart_of_the_broker_loses_nothing(stage: Stage) -> None:
    stage.accept("a", "b")
    term = stage.take_office()
    term.send_inbox()
    stage.broker.lose_everything()
    stage.seconds = 7
    assert term.reconcile() == 2
    term.send_inbox()
    stage.ingest()
    assert stage.applied() == {"a", "b"}
    assert stage.count("sent_again") == 2


def test_a_record_that_the_consumer_jumped_over_is_sent_again_at_once(stage: Stage) -> None:
    stage.accept("a", "b")
    term = stage.take_office()
    term.send_inbox()
    stage.consumed = 1  # the consumer never saw the first record
    stage.ingest()
    stage.seconds = 7
    assert term.reconcile() == 1
    term.send_inbox()
    stage.ingest()
    assert stage.applied() == {"a", "b"}


def test_what_ingestion_has_not_reached_yet_is_not_sent_again(stage: Stage) -> None:
    term = stage.take_office()
    stage.accept("a")
    term.send_inbox()
    stage.ingest()
    term.reconcile()
    stage.accept("b")
    term.send_inbox()
    stage.seconds = 7
    assert term.reconcile() == 0
    assert stage.count("sent_again") == 0


def test_after_three_rounds_an_event_is_applied_from_the_inbox_with_an_alarm(stage: Stage) -> None:
    stage.accept("a")
    term = stage.take_office()
    for round_ in range(4):
        term.send_inbox()
        stage.broker.sent.clear()  # swallowed on the way, every time
        stage.seconds = 20 * (round_ + 1)
        term.reconcile()
    assert stage.applied() == {"a"}
    assert (stage.count("sent_again"), stage.count("applied_from_inbox")) == (3, 1)
    stage.seconds = 100
    assert term.reconcile() == 0


def test_a_relay_whose_lease_was_stolen_while_it_was_paused_marks_nothing_more(stage: Stage) -> None:
    stage.accept("a")
    first = stage.take_office("one")
    stage.seconds = 30
    second = stage.take_office("two")
    with pytest.raises(LeaseLost):
        first.send_inbox()
    assert second.send_inbox() == 1
    stage.ingest()
    assert stage.applied() == {"a"}


class WatchedTerm:
    """A term that only counts its renewals; `lost` makes the next one say so."""

    def __init__(self) -> None:
        self.renewed = threading.Semaphore(0)
        self.lost = False

    def renew(self, *, now: datetime) -> None:
        self.renewed.release()
        if self.lost:
            raise LeaseLost("the lease 'relay' was taken over")


def test_the_heartbeat_renews_the_office_while_the_relay_waits_for_its_broker_and_tells_of_its_loss() -> None:
    term = WatchedTerm()
    with Heartbeat(cast(RelayTerm, term), lambda: at(0), every_s=0.01) as heartbeat:
        assert all(term.renewed.acquire(timeout=60) for _ in range(3))
        heartbeat.check()
        term.lost = True
        assert term.renewed.acquire(timeout=60)
        heartbeat.join(60)
        with pytest.raises(LeaseLost):
            heartbeat.check()


def test_a_relay_that_lost_its_office_lets_go_of_the_broker_and_applies_for_it_again(stage: Stage) -> None:
    """Run as the process runs it: the office is taken from it in the middle of a term, and it does not act on."""
    stage.accept("a")
    terms, closed, stop = list[bool](), list[bool](), list[bool]()
    office = SqlRelayOffice(stage.engine, stage.engine, group="g")

    class Office:
        def take(self, owner: str, *, now: datetime) -> RelayTerm | None:
            term = office.take(owner, now=now)
            terms.append(term is not None)
            return term

    def lose_it_then_stop(_: float) -> None:
        if len(terms) == 1:
            stage.seconds += 30
            assert office.take("another", now=stage.now()) is not None
            stage.accept("b")
        else:
            stop.append(True)

    stage.broker.close = lambda: closed.append(True)
    Relay(
        office=Office(), sink=stage.broker, store=stage.store, config=RelayConfig(), clock=stage.now, pause=lose_it_then_stop, owner="one"
    ).run(lambda: bool(stop))
    assert (terms[:2], closed) == ([True, False], [True])
    with stage.engine.connect() as connection:
        sent = connection.execute(select(inbox.c.event_id).where(inbox.c.relayed_at.is_not(None))).scalars().all()
    assert sent == ["turn-a"]


def test_what_ingestion_buried_is_not_sent_again(stage: Stage) -> None:
    """A consumer of another version once buried a record five times: at each sending again, and at the end from the inbox."""
    stage.door.append_blocking([msgspec.structs.replace(event_of(turn("odd")), type="ratchet.hologram.v1")])
    stage.accept("a")
    term = stage.take_office()
    term.send_inbox()
    stage.ingest()
    stage.seconds = 60
    assert [term.reconcile(), term.send_inbox()] == [0, 0]
    assert stage.unconfirmed() == 0
    with stage.engine.connect() as connection:
        assert connection.execute(select(dead_letters.c.attempts)).scalars().all() == [1]


def test_a_dead_letter_from_the_inbox_keeps_its_headers_and_is_replayed_once_its_cause_is_mended(stage: Stage) -> None:
    odd = msgspec.structs.replace(event_of(turn("odd")), type="ratchet.hologram.v1")
    stage.door.append_blocking([odd])
    stage.broker.largest = 1
    term = stage.take_office()
    term.send_inbox()
    (stored,) = SqlDeadLetters(stage.engine).find()
    assert stored.letter.headers == envelope(odd, received_at(stage))
    mended = {**stored.letter.headers, "ce_type": EventType.TURN}
    replay_one(replace(stored, letter=replace(stored.letter, headers=mended)), stage.store, now=at(5))
    assert stage.applied() == {"odd"}
    assert SqlDeadLetters(stage.engine).find() == []


def received_at(stage: Stage) -> datetime:
    with stage.engine.connect() as connection:
        return connection.execute(select(inbox.c.received_at)).scalar_one()


def test_while_one_relay_is_in_office_no_other_takes_it(stage: Stage) -> None:
    office = SqlRelayOffice(stage.engine, stage.engine, group="g")
    term = office.take("one", now=at(0))
    assert term is not None
    assert office.take("two", now=at(3)) is None
    term.leave(now=at(3))
    assert office.take("two", now=at(3)) is not None


def test_a_broker_that_is_down_leaves_everything_in_the_inbox(stage: Stage) -> None:
    stage.accept("a")
    stage.broker.down = True
    with pytest.raises(Unavailable):
        stage.take_office().send_inbox()
    with stage.engine.connect() as connection:
        assert inbox_metrics(connection, now=at(0))["inbox_unsent"] == 1


def test_a_turn_larger_than_the_broker_takes_is_applied_from_the_inbox_and_what_follows_it_is_sent(stage: Stage) -> None:
    """Four of them once filled the relay's read of 16 MB, and nothing behind them ever moved."""
    large = [turn(f"large-{n}", completion="x" * 5_000_000) for n in range(5)]
    stage.door.append_blocking([event_of(effect) for effect in large])
    stage.accept("after")
    stage.broker.largest = 1_000_000
    term = stage.take_office()
    for _ in range(3):
        term.send_inbox()
    stage.ingest()
    assert stage.applied() == {"after", *(f"large-{n}" for n in range(5))}
    assert stage.count("applied_from_inbox") == 5
    stage.seconds = 20
    assert term.reconcile() == 0
    assert stage.unconfirmed() == 0


def test_a_row_that_spoils_every_send_is_found_applied_from_the_inbox_and_the_others_are_sent(stage: Stage) -> None:
    stage.accept("a", "spoiler", "b")
    stage.broker.spoiling = {"turn-spoiler"}
    term = stage.take_office()
    for _ in range(12):
        term.send_inbox()
    assert [out.event.id for out in stage.broker.sent] == ["turn-a", "turn-b"]
    stage.ingest()
    assert stage.applied() == {"a", "spoiler", "b"}
    assert stage.count("applied_from_inbox") == 1


def test_while_the_broker_does_not_answer_nothing_counts_as_never_sendable(stage: Stage) -> None:
    stage.accept("a", "b")
    stage.broker.spoiling = {"turn-a"}
    term = stage.take_office()
    for _ in range(3):
        term.send_inbox()
    stage.broker.down = True
    for _ in range(10):
        with pytest.raises(Unavailable):
            term.send_inbox()
    assert stage.count("applied_from_inbox") == 0


def test_an_outbox_row_that_is_never_taken_is_buried_and_the_others_are_sent(stage: Stage) -> None:
    rows = [
        OutboxEvent(topic=topic, type="ratchet.label.v1", key=key, payload=payload)
        for topic, key, payload in (
            (Topic.LABELS, "large", b"x" * 5_000),
            (Topic.DEAD_LETTERS, "copy", b"x" * 5_000),
            (Topic.LABELS, "b", b"{}"),
        )
    ]
    with writing(stage.engine) as connection:
        enqueue(connection, rows, now=at(0))
    stage.broker.largest = 1_000
    term = stage.take_office()
    for _ in range(4):
        term.send_outbox()
    assert [out.event.key for out in stage.broker.sent] == ["b"]
    assert term.send_outbox() == 0
    with stage.engine.connect() as connection:
        buried = connection.execute(select(dead_letters.c.topic, dead_letters.c.reason)).all()
    assert [(row.topic, "5000 bytes" in row.reason) for row in buried] == [("outbox", True)]


def test_the_outbox_follows_in_order(stage: Stage) -> None:
    with writing(stage.engine) as connection:
        enqueue(
            connection,
            [OutboxEvent(topic=Topic.LABELS, type="ratchet.label.v1", key=f"k{n}", payload=b"{}") for n in range(3)],
            now=at(0),
        )
    term = stage.take_office()
    assert [term.send_outbox(), term.send_outbox()] == [3, 0]
    assert [(out.topic, out.event.key) for out in stage.broker.sent] == [(Topic.LABELS, f"k{n}") for n in range(3)]


def test_payloads_of_applied_rows_are_trimmed_and_their_identities_stay_for_ever(stage: Stage) -> None:
    stage.accept("a")
    term = stage.take_office()
    term.send_inbox()
    stage.ingest()
    stage.seconds = 10
    term.reconcile()
    assert term.term.trim(applied_before=at(5)) == 0
    assert term.term.trim(applied_before=at(5) + timedelta(days=8)) == 1
    stage.accept("a")  # a duplicate still, although the payload is gone
    assert stage.count("door_duplicate") == 1
    assert term.send_inbox() == 0


def test_tombstones_of_an_erased_event_are_sent_with_an_empty_value(stage: Stage) -> None:
    with writing(stage.engine) as connection:
        enqueue(connection, [OutboxEvent(topic=Topic.EVENTS, type=EventType.ERASURE, key="k", payload=b"")], now=at(0))
    stage.take_office().send_outbox()
    assert stage.broker.sent[0].event.data == b""
