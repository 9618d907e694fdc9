"""How records become requests and answers become fates, over connections that only count and answer."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import InvalidRecordError, KafkaConnectionError, KafkaTimeoutError, MessageSizeTooLargeError
from kafka.protocol.producer import ProduceRequest
from kafka.record.memory_records import MemoryRecords

from app.domain.telemetry.events import CloudEvent, Topic
from app.domain.telemetry.streams import Ack, OutgoingEvent, Unsendable
from app.messaging.cluster import Cluster
from app.messaging.record_batch import partition_of
from app.messaging.transmitters import BatchTransmitter, IdempotentTransmitter, _outcome, _requests

NOW = datetime(2026, 11, 21, tzinfo=UTC)
REAL = Cluster(bootstrap="127.0.0.1:9", address_file=Path("none"))
MIB = 1024 * 1024


def row(name: str = "1", data: bytes = b"{}", *, key: str = "k") -> OutgoingEvent:
    event = CloudEvent(id=name, source="api", type="t", time=NOW, key=key, data=data)
    return OutgoingEvent(seq=0, topic=Topic.EVENTS, event=event, received_at=NOW)


class Node:
    """Takes every batch but those with an id in `codes`, which it refuses with that code; hangs up at the request number `hangs_up_at`."""

    def __init__(self, *, codes: dict[str, int] | None = None, hangs_up_at: int | None = None) -> None:
        self.codes = codes or {}
        self.hangs_up_at = hangs_up_at
        self.requests: list[list[str]] = []
        self.seen: list[ProduceRequest] = []
        self.next: Counter[tuple[str, int]] = Counter()
        self.closed = False
        self.stamps_ms: list[int] = []

    def call(self, request: ProduceRequest) -> Any:
        self.seen.append(request)
        self.requests.append([])
        if len(self.requests) == self.hangs_up_at:
            raise KafkaConnectionError("gone")
        return SimpleNamespace(
            responses=[
                SimpleNamespace(name=topic.name, partition_responses=[self._answer(topic.name, part) for part in topic.partition_data])
                for topic in request.topic_data
            ]
        )

    def _answer(self, topic: str, part: Any) -> Any:
        batch = MemoryRecords(part.records).next_batch()
        assert batch is not None
        self.stamps_ms.append(batch.first_timestamp)
        ids = [dict(record.headers)["ce_id"].decode() for record in batch]
        self.requests[-1] += ids
        code = next((self.codes[name] for name in ids if name in self.codes), 0)
        base = self.next[topic, part.index]
        self.next[topic, part.index] += 0 if code else len(ids)
        return SimpleNamespace(index=part.index, error_code=code, base_offset=-1 if code else base)

    def close(self) -> None:
        self.closed = True


def sender(node: Node) -> BatchTransmitter:
    return BatchTransmitter(REAL, network=node)


def of(*rows: OutgoingEvent, topic: str = "e.1") -> list[tuple[str, OutgoingEvent]]:
    return [(topic, one) for one in rows]


@pytest.mark.parametrize(
    ("sizes", "requests"),
    [
        ([4 * MIB, 4 * MIB], [[0, 1]]),
        ([4 * MIB, 4 * MIB + 1], [[0], [1]]),
        ([8 * MIB, 1, 8 * MIB - 1, 1], [[0], [1, 2], [3]]),
        ([9 * MIB, 1], [[0], [1]]),
        ([9 * MIB, 9 * MIB], [[0], [1]]),
        ([1], [[0]]),
    ],
)
def test_a_request_holds_at_most_eight_mebibytes_or_one_record(sizes: Sequence[int], requests: list[list[int]]) -> None:
    whole = bytes(9 * MIB)
    assert [list(found) for found in _requests(of(*(row(data=whole[:size]) for size in sizes)))] == requests


def test_each_record_hears_of_its_own_place_in_its_own_partition() -> None:
    keys = [next(f"key-{n}" for n in range(100) if partition_of(f"key-{n}".encode()) == wanted) for wanted in (0, 5, 0, 5, 0)]
    node = Node()
    records = [("e.1" if n < 4 else "l.1", row(str(n), key=key)) for n, key in enumerate(keys)]
    assert sender(node).send(records) == [
        Ack(topic="e.1", partition=0, offset=0), Ack(topic="e.1", partition=5, offset=0), Ack(topic="e.1", partition=0, offset=1),
        Ack(topic="e.1", partition=5, offset=1), Ack(topic="l.1", partition=0, offset=0),
    ]  # fmt: skip
    assert all(abs(stamp / 1_000 - time.time()) < 600 for stamp in node.stamps_ms), "in milliseconds"
    assert sender(node).send(records[:1]) == [Ack(topic="e.1", partition=0, offset=2)]
    assert [request.acks for request in node.seen] == [-1, -1], "every replica that is in step says so"
    assert [request.transactional_id for request in node.seen] == [None, None]


def test_after_a_request_that_fails_the_rest_is_not_tried_and_what_was_acknowledged_stays_so() -> None:
    node = Node(hangs_up_at=2)
    sent = sender(node).send(of(*(row(str(n), bytes(5 * MIB)) for n in range(3))))
    assert [type(outcome) for outcome in sent] == [Ack, type(None), type(None)]
    assert len(node.requests) == 2


def test_a_batch_that_is_refused_for_what_it_holds_is_asked_about_record_by_record_in_order() -> None:
    node = Node(codes={"1": MessageSizeTooLargeError.errno})
    sent = sender(node).send(of(*(row(str(n), b"12345") for n in range(3))))
    assert node.requests == [["0", "1", "2"], ["0"], ["1"], ["2"]]
    refused = Unsendable(reason="the broker does not take a record of 5 bytes (MessageSizeTooLargeError)")
    assert sent == [Ack(topic="e.1", partition=0, offset=0) if partition_of(b"k") == 0 else sent[0], refused, sent[2]]
    assert [outcome.offset for outcome in sent if isinstance(outcome, Ack)] == [0, 1]


@pytest.mark.parametrize(("code", "asked"), [(6, 1), (7, 1), (InvalidRecordError.errno, 3)])
def test_what_a_repetition_may_change_is_not_asked_about_again_here(code: int, asked: int) -> None:
    node = Node(codes={"0": code})
    sent = sender(node).send(of(row("0"), row("1")))
    assert len(node.requests) == asked
    assert (sent == [None, None]) is (asked == 1)


def test_closing_closes_the_connection() -> None:
    node = Node()
    sender(node).close()
    assert node.closed


class Future:
    """A record's future: what came of it, and how long it was waited for."""

    def __init__(self, said: object) -> None:
        self.said, self.waited_s = said, list[float]()
        self.told: list[Callable[[object], None]] = []

    def add_both(self, tell: Callable[[object], None]) -> None:
        self.told.append(tell)

    def get(self, *, timeout: float) -> object:
        self.waited_s.append(timeout)
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


class Producer:
    """kafka-python's: gives a future for each record, or refuses it at once."""

    def __init__(self, *said: object) -> None:
        self.said = list(said)
        self.futures: list[Future] = []
        self.sent: list[dict[str, Any]] = []
        self.flushed: list[float] = []
        self.closed: list[float] = []
        self.fails: Exception | None = None

    def send(self, name: str, **record: Any) -> Future:
        said = self.said.pop(0)
        if isinstance(said, tuple):
            raise said[0]
        self.sent.append({"topic": name, **record})
        self.futures.append(Future(said))
        return self.futures[-1]

    def flush(self, *, timeout: float) -> None:
        self.flushed.append(timeout)
        if self.fails is not None:
            raise self.fails

    def close(self, *, timeout: float) -> None:
        self.closed.append(timeout)
        if self.fails is not None:
            raise self.fails


def placed(offset: int) -> SimpleNamespace:
    return SimpleNamespace(topic="e", partition=1, offset=offset)


def test_the_idempotent_producer_gets_key_value_and_headers_and_is_waited_for() -> None:
    producer = Producer(placed(7), placed(8))
    sent = IdempotentTransmitter(REAL, producer=producer).send(of(row("a", b"data"), row("b", b""), topic="e"))
    assert sent == [Ack(topic="e", partition=1, offset=7), Ack(topic="e", partition=1, offset=8)]
    assert [(one["topic"], one["key"], one["value"], dict(one["headers"])["ce_id"]) for one in producer.sent] == [
        ("e", b"k", b"data", b"a"), ("e", b"k", None, b"b"),
    ]  # fmt: skip
    assert len(producer.flushed) == 1
    assert 10.0 < producer.flushed[0] <= 12.0, "above the producer's own ten seconds for a delivery"
    assert all(0.0 < future.waited_s[0] <= producer.flushed[0] for future in producer.futures)


def test_a_flush_that_is_late_decides_nothing_each_record_does() -> None:
    producer = Producer(placed(7), KafkaTimeoutError("late"))
    producer.fails = KafkaTimeoutError("flush")
    transmitter = IdempotentTransmitter(REAL, producer=producer)
    assert transmitter.send(of(row("a"), row("b"), topic="e")) == [Ack(topic="e", partition=1, offset=7), None]
    transmitter.close()
    assert producer.closed == [pytest.approx(0.2, abs=0.2)]


def test_a_record_that_the_producer_refuses_at_once_is_given_up_only_where_no_repetition_helps() -> None:
    errors = (MessageSizeTooLargeError("x"), KafkaTimeoutError("x"), ValueError("x"), AssertionError("x"))
    producer = Producer(*((error,) for error in errors), placed(1))
    transmitter = IdempotentTransmitter(REAL, producer=producer)
    refused = Unsendable(reason="the broker does not take a record of 3 bytes (MessageSizeTooLargeError)")
    sent = transmitter.send(of(*(row(str(n), b"123") for n in range(5)), topic="e"))
    assert sent == [refused, None, None, None, Ack(topic="e", partition=1, offset=1)]
    assert transmitter._semaphore.held == 4, "key and data of the one that is under way"
    producer.futures[0].told[0](None)
    assert transmitter._semaphore.held == 0


def test_a_future_is_waited_for_until_the_deadline_and_asked_once_more_after_it() -> None:
    for deadline, least, most in ((-5.0, 0.0, 0.0), (50.0, 30.0, 50.0)):
        future = Future(placed(1))
        assert _outcome(future, row(), time.monotonic() + deadline) == Ack(topic="e", partition=1, offset=1)
        assert least <= future.waited_s[0] <= most
    assert _outcome(None, row(), 0.0) is None
