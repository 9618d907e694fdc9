"""The producer's bounds and settings, without a broker."""

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import (
    InvalidRecordError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotLeaderForPartitionError,
    RecordListTooLargeError,
)
from kafka.producer.transaction_manager import TransactionManager, TransactionState
from kafka.protocol.producer import ProduceRequest

from app.domain.errors import Unavailable
from app.domain.telemetry.events import CloudEvent, Topic
from app.domain.telemetry.streams import Ack, OutgoingEvent, Sent, Unsendable
from app.messaging.broker import broker_command
from app.messaging.cluster import Cluster, announce, announced_port
from app.messaging.profiles import consumer_settings, mend_idempotence, network_settings, producer_settings
from app.messaging.semaphore import ByteSemaphore
from app.messaging.transmitters import WAIT_S, BatchTransmitter, _outcome


def test_bytes_in_flight_are_bounded_and_waiting_ends_when_room_is_made() -> None:
    semaphore = ByteSemaphore(100)
    assert semaphore.acquire(80, timeout_s=0)
    assert not semaphore.acquire(30, timeout_s=0.01)
    threading.Timer(0.05, semaphore.release, [80]).start()
    assert semaphore.acquire(30, timeout_s=5)
    assert semaphore.held == 30


def test_one_record_larger_than_the_bound_passes_alone() -> None:
    semaphore = ByteSemaphore(10)
    assert semaphore.acquire(50, timeout_s=0)
    assert not semaphore.acquire(1, timeout_s=0)


def test_bytes_up_to_the_bound_are_in_flight_and_one_more_waits() -> None:
    semaphore = ByteSemaphore(100)
    assert semaphore.acquire(60, timeout_s=0)
    assert semaphore.acquire(40, timeout_s=0)
    assert not semaphore.acquire(1, timeout_s=0)
    semaphore.release(1)
    assert semaphore.acquire(1, timeout_s=0)
    assert semaphore.held == 100
    semaphore.release(100)
    assert semaphore.held == 0
    with pytest.raises(AssertionError, match="more bytes released"):
        semaphore.release(1)


def test_who_waits_for_room_is_woken_by_it_and_not_by_the_end_of_its_patience() -> None:
    semaphore = ByteSemaphore(10)
    semaphore.acquire(10, timeout_s=0)
    threading.Timer(0.02, semaphore.release, [10]).start()
    began = time.monotonic()
    assert semaphore.acquire(10, timeout_s=60)
    assert time.monotonic() - began < 30


def cluster(tmp_path: Path, bootstrap: str | None = None) -> Cluster:
    return Cluster(bootstrap=bootstrap, address_file=tmp_path / "broker.json")


def test_the_embedded_brokers_address_is_read_at_every_connection(tmp_path: Path) -> None:
    embedded = cluster(tmp_path)
    with pytest.raises(Unavailable, match="ratchet broker"):
        embedded.servers()
    announce(tmp_path / "broker.json", 19092)
    assert embedded.servers() == "127.0.0.1:19092"
    announce(tmp_path / "broker.json", 20000)
    assert (embedded.servers(), announced_port(tmp_path / "broker.json")) == ("127.0.0.1:20000", 20000)


def test_the_broker_listens_on_loopback_only() -> None:
    command = broker_command(1234)
    assert command[command.index("--listener-url") + 1] == command[command.index("--advertised-listener-url") + 1] == "tcp://127.0.0.1:1234"


def test_the_profiles_are_those_that_were_measured(tmp_path: Path) -> None:
    announce(tmp_path / "broker.json", 19092)
    embedded, real = network_settings(cluster(tmp_path)), producer_settings(cluster(tmp_path, "kafka:9092"))
    assert embedded["max_in_flight_requests_per_connection"] == 1
    assert (real["enable_idempotence"], real["acks"]) == (True, "all")
    consumer = consumer_settings(cluster(tmp_path))
    assert (consumer["fetch_max_wait_ms"], consumer["enable_auto_commit"], consumer["auto_offset_reset"]) == (200, False, "earliest")


def test_a_record_has_its_word_before_anybody_gives_it_up(tmp_path: Path) -> None:
    """A delivery ends after some tries and after the time that a batch was filled; nobody waits for a broker longer than for a delivery."""
    real, consumer = producer_settings(cluster(tmp_path, "kafka:9092")), consumer_settings(cluster(tmp_path, "kafka:9092"))
    announce(tmp_path / "broker.json", 19092)
    embedded = network_settings(cluster(tmp_path))
    assert real["delivery_timeout_ms"] >= 2 * real["request_timeout_ms"] + real["linger_ms"]
    for patience in (real["max_block_ms"], real["bootstrap_timeout_ms"], real["request_timeout_ms"], embedded["request_timeout_ms"]):
        assert patience == embedded["bootstrap_timeout_ms"] == consumer["bootstrap_timeout_ms"]
    assert real["delivery_timeout_ms"] < WAIT_S * 1000
    for settings in (real, consumer):
        assert (settings["allow_auto_create_topics"], settings["metrics_enabled"]) == (False, False)
        assert settings["reconnect_backoff_max_ms"] <= 1_000
    assert consumer["auto_offset_reset"] == "none", "a reset is ours to notice"
    assert real["batch_size"] <= real["max_request_size"]
    assert "fetch_max_wait_ms" not in consumer
    assert consumer["metadata_max_age_ms"] == 5_000, "how late a topic that was made anew is noticed"
    assert consumer_settings(cluster(tmp_path))["receive_message_max_bytes"] == 2**30


def test_the_idempotent_producer_asks_for_a_new_id_after_it_forgot_the_old_one() -> None:
    mend_idempotence()
    mend_idempotence()
    manager: Any = TransactionManager()
    manager._current_state = TransactionState.READY
    manager.reset_producer_id()
    assert manager._current_state == TransactionState.UNINITIALIZED


class PickyNode:
    """Refuses every batch above a size as a whole, as a Kafka broker does (error code 10)."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.next = 0

    def call(self, request: ProduceRequest) -> Any:
        return SimpleNamespace(responses=[SimpleNamespace(name=t.name, partition_responses=self._answers(t)) for t in request.topic_data])

    def _answers(self, topic: Any) -> Sequence[Any]:
        return [self._answer(part) for part in topic.partition_data]

    def _answer(self, part: Any) -> Any:
        large = len(part.records) > self.largest
        self.next += not large
        return SimpleNamespace(index=part.index, error_code=10 if large else 0, base_offset=-1 if large else self.next - 1)

    def close(self) -> None: ...


def test_of_a_batch_that_is_refused_only_the_record_that_is_too_large_is_given_up(tmp_path: Path) -> None:
    now = datetime(2026, 11, 21, tzinfo=UTC)
    random = b"".join(n.to_bytes(4, "big") for n in range(2_000))
    rows = [CloudEvent(id=str(n), source="api", type="t", time=now, key="one-key", data=random if n == 2 else b"{}") for n in range(4)]
    sender = BatchTransmitter(cluster(tmp_path), network=PickyNode(largest=4_000))
    sent = sender.send([("ratchet.events.1", OutgoingEvent(seq=0, topic=Topic.EVENTS, event=row, received_at=now)) for row in rows])
    assert [type(outcome) for outcome in sent] == [Ack, Ack, Unsendable, Ack]


class Told:
    """A record's future as kafka-python has it: what came of it, or the error."""

    def __init__(self, said: object) -> None:
        self.said = said

    def get(self, *, timeout: float) -> object:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def outcome(said: object) -> Sent:
    row = CloudEvent(id="1", source="api", type="t", time=datetime(2026, 11, 21, tzinfo=UTC), key="k", data=b"12345")
    outgoing = OutgoingEvent(seq=0, topic=Topic.EVENTS, event=row, received_at=row.time)
    return _outcome(Told(said), outgoing, time.monotonic())


def test_only_what_no_repetition_changes_is_given_up_and_everything_else_is_sent_again() -> None:
    assert outcome(SimpleNamespace(topic="t", partition=3, offset=9)) == Ack(topic="t", partition=3, offset=9)
    assert outcome(KafkaTimeoutError("late")) is None
    assert outcome(NotLeaderForPartitionError("moved")) is None
    for never in (MessageSizeTooLargeError, RecordListTooLargeError, InvalidRecordError):
        assert outcome(never("x")) == Unsendable(reason=f"the broker does not take a record of 5 bytes ({never.__name__})")
