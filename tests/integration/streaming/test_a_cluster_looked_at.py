"""What is asked of a cluster before anything is sent: are its topics there and as the table says; and why it does not answer."""

import gc
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.errors import KafkaConnectionError

from app.db.engine import open_engine
from app.db.ingestion.epochs import SqlEpochs
from app.domain.errors import Unavailable
from app.domain.telemetry.events import Topic
from app.messaging.cluster import Cluster
from app.messaging.connecting import unanswered
from app.messaging.options import KafkaConfig
from app.messaging.producer import KafkaSink
from app.messaging.topics import administering, topic_faults
from tests.broker import running_broker

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # kafka-python leaves sockets of failed connections to the collector


@pytest.fixture(autouse=True)
def collected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL, logger="kafka")
    yield
    gc.collect()


def real(address: str, **options: Any) -> Cluster:
    table: dict[str, Any] = {"replication": 1, "min_insync_replicas": 1} | options
    return Cluster(bootstrap=address, address_file=Path("none"), options=KafkaConfig(**table), password="secret")


def test_topics_that_are_missing_or_smaller_than_the_table_are_named_before_anything_is_sent(tmp_path: Path, sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    with running_broker(tmp_path) as broker:
        assert topic_faults(broker.cluster) == [], "the embedded broker's are made by whoever comes first"
        named = real(broker.cluster.servers(), partitions=8)
        assert topic_faults(named) == [f"topic {topic} is not there: `ratchet relay` makes it" for topic in Topic]
        sink = KafkaSink(named, SqlEpochs(engine))
        sink.check_topics()
        sink.close()
        assert not any("is not there" in sentence for sentence in topic_faults(named))
        larger = topic_faults(real(broker.cluster.servers(), partitions=12))
        assert all(any(str(topic) in sentence and "12" in sentence for sentence in larger) for topic in Topic)
    engine.dispose()
    with pytest.raises(Unavailable, match="the broker does not answer"), administering(broker.cluster):
        raise AssertionError("nobody is there")


class Closing:
    """Listens, and either waits for who connects to speak or hangs up at once."""

    def __init__(self, *, hangs_up: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._hangs_up, self._held = hangs_up, list[socket.socket]()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self.listener.accept()
            except OSError:
                return
            if self._hangs_up:
                taken.close()
            else:
                self._held.append(taken)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # who waits for the next one holds the port beyond its close
        self._thread.join()
        self.listener.close()
        for taken in self._held:
            taken.close()


@pytest.mark.parametrize(
    ("options", "hangs_up", "said"),
    [
        ({}, False, "it is there: does security in [kafka] say what it asks for?"),
        ({"security": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "username": "ada"}, False, "it is there and does not let us in"),
        ({"security": "SSL"}, True, "check security"),
    ],
    ids=["another protocol", "a wrong password", "TLS to a server without"],
)
def test_a_cluster_that_is_there_and_does_not_answer_is_asked_why(options: dict[str, Any], hangs_up: bool, said: str) -> None:
    server = Closing(hangs_up=hangs_up)
    try:
        assert said in str(unanswered(real(server.address, **options), KafkaConnectionError("Unable to bootstrap")))
    finally:
        server.close()


def test_a_cluster_that_is_not_there_is_told_from_one_that_refuses() -> None:
    free = Closing(hangs_up=True)
    free.close()
    assert "is it running? (" in str(unanswered(real(free.address), KafkaConnectionError("Unable to bootstrap")))
