"""The producer's bounds and settings, without a broker."""

import threading
from pathlib import Path
from typing import Any

import pytest
from kafka.producer.transaction_manager import TransactionManager, TransactionState

from app.domain.errors import Unavailable
from app.messaging.broker import broker_command
from app.messaging.cluster import Cluster, announce, announced_port
from app.messaging.profiles import consumer_settings, mend_idempotence, network_settings, producer_settings
from app.messaging.semaphore import ByteSemaphore


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


def test_the_idempotent_producer_asks_for_a_new_id_after_it_forgot_the_old_one() -> None:
    mend_idempotence()
    mend_idempotence()
    manager: Any = TransactionManager()
    manager._current_state = TransactionState.READY
    manager.reset_producer_id()
    assert manager._current_state == TransactionState.UNINITIALIZED
