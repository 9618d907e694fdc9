"""One relay's term, hour by hour: what it asks for, when it is due, how long it waits, and what it says."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from app.domain.telemetry.events import Topic, envelope
from app.domain.telemetry.streams import OutgoingEvent, RelayTerm, Sent, TopicPartition
from app.telemetry.traces import NOWHERE, Traces
from pipelines.ingestion.config import RelayConfig
from pipelines.ingestion.relay import Relay, Term
from tests.fakes.served import at, event_of, observation, turn
from tests.fakes.streaming import MemoryBroker, PickyStore
from tests.unit.app.telemetry.test_traces import TAKEN, Kept

CONFIG = msgspec.structs.replace(
    RelayConfig(), batch=7, idle_s=0.25, reconcile_every_s=1000.0, housekeeping_every_s=2000.0, sweep_every_s=3000.0
)
NOW = at(60)


def row(seq: int, *, topic: Topic = Topic.EVENTS, rounds: int = 0, relayed: float | None = None) -> OutgoingEvent:
    return OutgoingEvent(
        seq=seq, topic=topic, event=event_of(observation(f"o{seq}", of="t")), received_at=at(seq), rounds=rounds,
        relayed_at=None if relayed is None else at(relayed),
    )  # fmt: skip


class Book:
    """An inbox and an outbox of these rows; remembers everything that it was asked and told."""

    def __init__(self, inbox: Sequence[OutgoingEvent] = (), outbox: Sequence[OutgoingEvent] = ()) -> None:
        self.inbox, self.outbox = [*inbox], [*outbox]
        self.missing: list[OutgoingEvent] = []
        self.trims: list[int] = []
        self.told: list[tuple[Any, ...]] = []

    def unsent_inbox(self, limit: int) -> list[OutgoingEvent]:
        self.told.append(("inbox", limit))
        return self.inbox

    def unsent_outbox(self, limit: int) -> list[OutgoingEvent]:
        self.told.append(("outbox", limit))
        return self.outbox

    def mark_inbox(self, seqs: Sequence[int], *, now: datetime) -> None:
        self.told.append(("sent from the inbox", [*seqs], now))
        self.inbox = [row for row in self.inbox if row.seq not in seqs]

    def mark_outbox(self, seqs: Sequence[int], *, now: datetime) -> None:
        self.told.append(("sent from the outbox", [*seqs], now))
        self.outbox = [row for row in self.outbox if row.seq not in seqs]

    def confirm_applied(self, *, relayed_before: datetime, limit: int, now: datetime) -> list[OutgoingEvent]:
        self.told.append(("confirm", relayed_before, limit, now))
        return self.missing

    def send_again(self, seqs: Sequence[int]) -> None:
        self.told.append(("again", [*seqs]))

    def applied_directly(self, seqs: Sequence[int], *, now: datetime) -> None:
        self.told.append(("applied directly", [*seqs], now))
        self.inbox = [row for row in self.inbox if row.seq not in seqs]

    def applied_before(self, *, now: datetime) -> datetime:
        return now - timedelta(seconds=9)

    def consumed(self) -> Mapping[TopicPartition, int]:
        return {}

    def trim(self, *, applied_before: datetime) -> int:
        self.told.append(("trim", applied_before))
        return self.trims.pop(0) if self.trims else 0

    def renew(self, *, now: datetime) -> None: ...
    def leave(self, *, now: datetime) -> None:
        self.told.append(("left", now))


class Broker(MemoryBroker):
    """Counts how often its topics were looked at, and how many rows came together."""

    looks, closed = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.together: list[int] = []

    def check_topics(self) -> None:
        super().check_topics()
        self.looks += 1

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        self.together.append(len(events))
        return super().send(events)

    def close(self) -> None:
        self.closed += 1


class Office:
    """Is free at the given tries, and then the end of the test."""

    def __init__(self, *free: RelayTerm | None) -> None:
        self.free = [*free]

    def take(self, owner: str, *, now: datetime) -> RelayTerm | None:
        return self.free.pop(0)


def in_office(
    book: Book, *, store: PickyStore | None = None, traces: Traces = NOWHERE, keep: timedelta | None = timedelta(days=7), **more: Any
) -> tuple[Term, Broker]:
    sink, defaults = Broker(), dict[str, Any](pause=pytest.fail)
    relay = Relay(
        office=Office(), sink=sink, store=store or PickyStore(), config=CONFIG, clock=lambda: NOW, keep_payloads=keep, traces=traces,
        **defaults | more,
    )  # fmt: skip
    return Term(relay=relay, term=book), sink


def rounds(term: Term, count: int) -> None:
    left = iter(range(count))
    term.serve(lambda: next(left, None) is None, lambda: None)


def test_an_office_that_is_taken_is_asked_for_again_after_half_a_second_and_left_with_its_broker_let_go() -> None:
    book, sink, pauses = Book(), Broker(), list[float]()
    office = Office(None, None, book)
    Relay(office=office, sink=sink, store=PickyStore(), config=CONFIG, clock=lambda: NOW, pause=pauses.append).run(
        lambda: not office.free and bool(book.told)
    )
    assert pauses[:2] == [0.5, 0.5]
    assert (book.told[-1], sink.closed) == (("left", NOW), 1)


def test_a_round_asks_for_a_batch_of_each_sends_it_and_says_how_much_that_was() -> None:
    book, sent = Book([row(1), row(2)], [row(3, topic=Topic.LABELS)]), list[int]()
    term, sink = in_office(book, sent=sent.append)
    rounds(term, 1)
    assert [told for told in book.told if told[0] in ("inbox", "outbox")] == [("inbox", 7), ("outbox", 7)]
    assert [told[1:] for told in book.told if told[0].startswith("sent")] == [([1, 2], NOW), ([3], NOW)]
    assert (sent, sink.looks, sink.together) == ([3], 1, [2, 1])
    assert [ends for _, ends in term.journey.batches] == [{("ratchet.events.1", 0): 2}], "of the inbox alone: it is what is confirmed"


@pytest.mark.parametrize("whose", ["inbox", "outbox"])
def test_a_round_without_an_acknowledgement_waits_longer_each_time_whichever_of_the_two_is_stuck(whose: str) -> None:
    stuck, pauses, sent = row(1), list[float](), list[int]()
    term, sink = in_office(Book([stuck]) if whose == "inbox" else Book([], [stuck]), pause=pauses.append, sent=sent.append)
    sink.dropping = {"o1"}
    rounds(term, 4)
    assert pauses == pytest.approx([0.3, 0.6, 1.2, 2.4])
    assert sent == [0] * 4


def test_after_three_barren_rounds_five_rows_are_sent_by_themselves_each_at_a_broker_that_answers() -> None:
    term, sink = in_office(Book([row(seq) for seq in range(1, 8)]), pause=lambda _: None)
    sink.dropping = {f"o{seq}" for seq in range(8)}
    rounds(term, 4)
    assert sink.together == [7, 7, 7, 1, 1, 1, 1, 1]
    assert sink.looks == 1 + 5
    assert [seq for _, seq in term.setbacks["inbox"].failures] == [1, 2, 3, 4, 5], "what was not tried is not held against it"


def test_an_outbox_row_that_cannot_be_sent_is_said_buried_with_all_that_it_was_and_off_the_list(caplog: pytest.LogCaptureFixture) -> None:
    label, copy, store = row(4, topic=Topic.LABELS), row(5, topic=Topic.DEAD_LETTERS), PickyStore()
    book = Book([], [label, copy])
    term, sink = in_office(book, store=store)
    sink.largest = 1
    assert term.send_outbox() == 2
    (batch,) = store.batches
    (letter,) = batch.dead
    assert (letter.topic, letter.partition, letter.offset, letter.payload) == ("outbox", 0, 4, label.event.data)
    assert letter.headers == envelope(label.event, label.received_at)
    assert letter.reason == f"the broker does not take a record of {len(label.event.data)} bytes"
    assert book.told[-1] == ("sent from the outbox", [4, 5], NOW)
    assert f"event=outbox_not_sendable count=2 reason={letter.reason}" in caplog.text


def test_copies_of_dead_letters_alone_are_in_their_table_already() -> None:
    book, store = Book([], [row(5, topic=Topic.DEAD_LETTERS)]), PickyStore()
    term, sink = in_office(book, store=store)
    sink.largest = 1
    assert (term.send_outbox(), store.batches) == (1, [])


def test_what_is_applied_from_the_inbox_is_an_alarm_with_the_reason_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    book, store = Book([row(1), row(2)]), PickyStore()
    term, sink = in_office(book, store=store)
    sink.largest = 1
    assert term.send_inbox() == 2
    assert (store.applied, store.batches[-1].next_offsets) == (["o1", "o2"], {})
    assert [(event.delivery.topic, event.delivery.offset, event.delivery.received_at) for event in store.batches[-1].events] == [
        ("inbox", seq, at(seq)) for seq in (1, 2)
    ]
    assert book.told[-1] == ("applied directly", [1, 2], NOW)
    assert "event=applied_from_inbox count=2 alarm=the broker does not take a record of" in caplog.text


def test_what_did_not_arrive_goes_again_three_times_and_then_straight_in(caplog: pytest.LogCaptureFixture) -> None:
    book, store = Book(), PickyStore()
    book.missing = [row(seq, rounds=seq, relayed=1) for seq in range(5)]
    term, sink = in_office(book, store=store)
    assert term.reconcile() == 5
    assert book.told == [("confirm", NOW - timedelta(seconds=6), 20_000, NOW), ("again", [0, 1, 2]), ("applied directly", [3, 4], NOW)]
    assert (store.applied, sink.looks) == (["o3", "o4"], 1)
    assert f"event=sent_again count=3 oldest={at(0).isoformat()}" in caplog.text
    assert "event=applied_from_inbox count=2 alarm=events did not reach ingestion through the broker" in caplog.text


def test_where_everything_arrived_nobody_asks_the_broker_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    term, sink = in_office(Book())
    assert (term.reconcile(), sink.looks, caplog.messages) == (0, 0, [])


def test_what_lay_in_a_topic_that_was_lost_is_under_way_no_more() -> None:
    book = Book([row(1)])
    term, sink = in_office(book)
    term.send_inbox()
    sink.lose_everything()
    term.reconcile()
    assert len(term.journey.batches) == 1, "nothing is missing: nobody looked"
    book.missing = [row(1, relayed=60)]
    term.reconcile()
    assert not term.journey.batches


def due(term: Term, *, reconciled: float = 0, kept_house: float = 0, swept: float = 0) -> None:
    """So many seconds ago."""
    now = time.monotonic()
    term.reconciled_at, term.kept_house_at, term.swept_at = now - reconciled, now - kept_house, now - swept


@pytest.mark.parametrize("late", [False, True], ids=["not yet", "now"])
def test_each_duty_has_its_own_hour_and_begins_it_anew(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    swept, book = list[datetime](), Book()

    def sweep(now: datetime) -> int:
        swept.append(now)
        return 3

    term, sink = in_office(book, sweep=sweep, pause=lambda _: None)
    seconds = {"reconciled": 1000, "kept_house": 2000, "swept": 3000}
    due(term, **{name: every + (1 if late else -100) for name, every in seconds.items()})
    rounds(term, 2)
    assert [told[0] for told in book.told if told[0] in ("confirm", "trim")] == (["confirm", "trim"] if late else [])
    assert (sink.rotations, swept) == (([NOW - timedelta(seconds=9)], [NOW]) if late else ([], []))
    assert caplog.messages == (["event=claims_swept count=3 reason=their events were never committed"] if late else [])


def test_a_sweep_that_finds_nothing_says_nothing_and_a_new_term_sweeps_nothing_for_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    found = list[datetime]()
    term, _ = in_office(Book(), sweep=lambda now: found.append(now) or 0, pause=lambda _: None)
    rounds(term, 1)
    assert found == []
    due(term, swept=3001)
    rounds(term, 1)
    assert (found, caplog.messages) == ([NOW], [])


def test_bodies_are_trimmed_without_a_pause_until_none_is_old_and_kept_where_nobody_wants_them_gone() -> None:
    pauses, book = list[float](), Book()
    book.trims = [5000, 1, 0]
    term, _ = in_office(book, pause=pauses.append)
    rounds(term, 5)
    assert [told[1] for told in book.told if told[0] == "trim"] == [NOW - timedelta(days=7)] * 3
    assert pauses == [0.25] * 3, "two rounds trimmed something, and waited for nothing"
    ever = Book()
    rounds(in_office(ever, keep=None, pause=lambda _: None)[0], 2)
    assert "trim" not in {told[0] for told in ever.told}


def test_a_traced_turn_s_span_lasts_from_its_commit_to_the_broker_s_word_and_only_turns_have_one() -> None:
    kept = Kept()
    traced = msgspec.structs.replace(event_of(turn("t", tags={"traceparent": TAKEN})), id="turn-t")
    said = event_of(observation("o", of="t", tags={"traceparent": TAKEN}))
    rows = [OutgoingEvent(seq=n, topic=Topic.EVENTS, event=event, received_at=at(50)) for n, event in enumerate((said, traced, traced))]
    term, sink = in_office(Book(rows), traces=kept.traces)
    sink.epoch = 4
    term.send_inbox()
    assert len(kept.spans) == 2
    span = kept.spans[0]
    assert (span.name, span.kind.name) == ("publish ratchet.events", "PRODUCER")
    assert (span.end_time or 0) - (span.start_time or 0) == 10_000_000_000
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka", "messaging.destination.name": "ratchet.events.4", "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 1, "ratchet.inference_id": "turn-t",
    }  # fmt: skip
