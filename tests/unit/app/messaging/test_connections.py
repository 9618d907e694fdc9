"""Clients that come and go: each is closed, also where it could not be made; and what is asked of a broker once one is connected."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import KafkaConfigurationError, KafkaConnectionError
from kafka.structs import TopicPartition

from app.domain.errors import Unavailable
from app.domain.telemetry.events import Topic
from app.messaging.cluster import Cluster, announced_port
from app.messaging.connecting import connect, unanswered
from app.messaging.options import KafkaConfig
from app.messaging.search import records_with
from app.messaging.topics import administering, topic_faults
from app.messaging.transmitters import _Network

REAL = Cluster(bootstrap="127.0.0.1:9", address_file=Path("none"), options=KafkaConfig(partitions=12), known_for=timedelta(days=1))
EVENTS, LABELS = [topic.value for topic in Topic][:2]


class Refusing:
    """A client that opens its network and then finds no broker."""

    made: Any = None

    def __init__(self, *, error: Exception, kafka_client: Any, **_: object) -> None:
        Refusing.made = kafka_client(client_id="x")
        self.closed, self._really = 0, Refusing.made.close
        Refusing.made.close = self.close
        raise error

    def close(self) -> None:
        self.closed += 1
        self._really()


def test_a_client_that_cannot_be_made_leaves_no_network_behind() -> None:
    for error in (KafkaConnectionError("no broker"), KafkaConfigurationError("no such setting")):
        with pytest.raises(type(error)):
            connect(Refusing, {"error": error})
        assert Refusing.made.close.__self__.closed == 1


class Client:
    """kafka-python's connection, as far as one node of it is spoken to."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.did = settings, list[Any]()
        self._net = SimpleNamespace(start=lambda: self.did.append("started"))
        self._manager = SimpleNamespace(
            bootstrap=lambda timeout_ms: self.did.append(("bootstrapped", timeout_ms)), run=self.run, get_connection=self.get_connection
        )
        self.cluster = SimpleNamespace(brokers=lambda: [SimpleNamespace(node_id=7), SimpleNamespace(node_id=8)])

    def run(self, work: Any, request: object) -> Any:
        return asyncio.run(work(request))

    async def get_connection(self, node: int, *, timeout_ms: int) -> Any:
        self.did.append(("connected", node, timeout_ms))
        return SimpleNamespace(send_request=self.send_request)

    async def send_request(self, request: object, *, request_timeout_ms: int) -> object:
        self.did.append(("sent", request, request_timeout_ms))
        return "answer"

    def close(self) -> None:
        self.did.append("closed")


def test_a_request_goes_to_the_only_node_within_four_seconds_and_the_connection_is_closed() -> None:
    network = _Network(kafka_client=Client, bootstrap_timeout_ms=5, client_id="c")
    client: Client = network._client
    assert (client.settings, client.did) == ({"client_id": "c"}, ["started", ("bootstrapped", 5)])
    request: Any = "request"
    assert network.call(request) == "answer"
    assert client.did[2:] == [("connected", 7, 4_000), ("sent", "request", 4_000)]
    network.close()
    assert client.did[-1] == "closed"


class Reader:
    """A consumer of what lies in `lies`, by partition: a poll brings one record of each; `stuck` ones never come to their end."""

    def __init__(self, lies: dict[tuple[str, int], Sequence[tuple[bytes | None, bytes | None]]], *, stuck: bool = False) -> None:
        self.lies = {TopicPartition(*place): list(records) for place, records in lies.items()}
        self.ends = {place: len(records) + stuck for place, records in self.lies.items()}
        self.read = dict.fromkeys(self.lies, 0)
        self.settings: dict[str, Any] = {}
        self.began: list[TopicPartition] = []
        self.polls, self.now_s, self.closed = 0, 0.0, 0
        self.error: Exception | None = None

    def __call__(self, **settings: Any) -> "Reader":
        self.settings = settings
        return self

    def topics(self) -> set[str]:
        if self.error is not None:
            raise self.error
        return {place.topic for place in self.lies}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return {place.partition for place in self.lies if place.topic == topic} or None

    def assign(self, places: list[TopicPartition]) -> None:
        self.read = dict.fromkeys(places, 0)

    def seek_to_beginning(self, *places: TopicPartition) -> None:
        self.began = list(places)

    def poll(self, *, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        assert timeout_ms <= 500
        self.polls += 1
        self.now_s += 10.0
        found: dict[TopicPartition, list[Any]] = {}
        for place, at in self.read.items():
            for key, value in self.lies[place][at : at + 1]:
                found[place] = [SimpleNamespace(topic=place.topic, key=key, value=value)]
                self.read[place] += 1
        return found

    def highwater(self, place: TopicPartition) -> int | None:
        return self.ends[place] if self.polls else None

    def position(self, place: TopicPartition) -> int:
        return self.read[place]

    def close(self) -> None:
        self.closed += 1


def search(reader: Reader) -> dict[str, int]:
    return records_with(REAL, b"alice", client=reader, monotonic=lambda: reader.now_s)


def test_every_record_of_our_topics_is_looked_into_and_the_request_to_forget_somebody_is_none_of_theirs() -> None:
    reader = Reader({
        (EVENTS, 0): [(b"k", b"of alice"), (b"k", b"of bob"), (b"k", b"alice")], (EVENTS, 1): [(None, b"alice"), (b"k", None)],
        (LABELS, 0): [(b"alice", b"alice")], ("other", 0): [(b"k", b"alice")],
    })  # fmt: skip
    assert search(reader) == {EVENTS: 3, LABELS: 0}
    assert {place.topic for place in reader.began} == {EVENTS, LABELS}
    assert (reader.settings["group_id"], reader.settings["client_id"], reader.closed) == (None, "ratchet-verify", 1)


def test_where_we_have_no_topic_nothing_is_read() -> None:
    reader = Reader({("other", 0): [(b"k", b"alice")]})
    assert (search(reader), reader.polls, reader.closed) == ({}, 0, 1)


def test_a_partition_that_brings_nothing_for_more_than_twenty_seconds_proves_nothing() -> None:
    reader = Reader({(EVENTS, 0): [(b"k", b"x")], (EVENTS, 1): []}, stuck=True)
    with pytest.raises(Unavailable, match="2 partitions bring nothing and are not at their end"):
        search(reader)
    assert (reader.polls, reader.closed) == (4, 1), "one brings a record after 10 s; then 10 s, 20 s and at last 30 s of silence"


def test_a_broker_that_goes_away_while_it_is_searched_is_unavailable_and_left() -> None:
    reader = Reader({(EVENTS, 0): []})
    reader.error = KafkaConnectionError("gone")
    with pytest.raises(Unavailable, match=r"the broker does not answer \(KafkaConnectionError: .*gone\): topics cannot be looked into"):
        search(reader)
    assert reader.closed == 1


class Admin:
    """An admin client: topics by name with their number of partitions."""

    def __init__(self, topics: dict[str, int], *, broken: Sequence[str] = (), error: Exception | None = None) -> None:
        self.topics, self.broken, self.error = topics, broken, error
        self.settings: dict[str, Any] = {}
        self.deleted: list[tuple[Any, ...]] = []
        self.closed = 0

    def __call__(self, **settings: Any) -> "Admin":
        self.settings = settings
        return self

    def describe_topics(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        partition = {"replica_nodes": [1, 2, 3]}
        return [
            {"name": name, "partitions": [partition] * count, "error_code": 3 if name in self.broken else 0}
            for name, count in self.topics.items()
            if names is None or name in names
        ]

    def describe_configs(self, resources: Sequence[Any], *, config_filter: str) -> dict[str, Any]:
        assert config_filter == "all"
        return {
            "topic": {resource.name: {"retention.ms": {"value": "-1"}, "min.insync.replicas": {"value": None}} for resource in resources}
        }

    def list_group_offsets(self, groups: list[str]) -> dict[str, Any]:
        told = {TopicPartition(EVENTS, n): SimpleNamespace(offset=offset) for n, offset in enumerate((-1, 0, 5))}
        return {groups[0]: told}

    def delete_topics(self, names: list[str], **how: object) -> None:
        self.deleted.append((names, how))

    def close(self) -> None:
        self.closed += 1


def test_an_admin_client_asks_for_four_seconds_and_is_closed() -> None:
    made = Admin({"a": 3, "b": 4, "c": 0}, broken=["b"])
    with administering(REAL, client=made) as admin:
        assert admin.partitions() == {"a": 3, "c": 0}
        assert admin.committed("g") == {(EVENTS, 1): 0, (EVENTS, 2): 5}, "a partition that nobody read is left out"
        admin.delete("a")
        assert made.closed == 0
    assert made.deleted == [(["a"], {"timeout_ms": 4_000, "raise_errors": False})]
    asked = {name: value for name, value in made.settings.items() if name != "kafka_client"}
    assert asked == {
        "bootstrap_servers": "127.0.0.1:9", "client_id": "ratchet-admin", "request_timeout_ms": 4_000, "bootstrap_timeout_ms": 4_000,
    }  # fmt: skip
    assert made.closed == 1


def test_a_cluster_that_does_not_answer_is_unavailable_and_a_mistake_of_ours_is_not() -> None:
    away = Admin({}, error=KafkaConnectionError("gone"))
    embedded = Cluster(bootstrap=None, address_file=Path("none"))
    with pytest.raises(Unavailable, match="is it running"):
        raise unanswered(embedded, KafkaConnectionError("gone"))
    wrong = Admin({}, error=KafkaConfigurationError("no such setting"))
    with pytest.raises(KafkaConfigurationError), administering(REAL, client=wrong) as admin:
        admin.partitions()
    assert (away.closed, wrong.closed) == (0, 1)


def test_topics_that_are_missing_or_differ_are_named_one_by_one() -> None:
    some = Admin({topic.value: 12 for topic in Topic if topic.value != LABELS})
    told = topic_faults(REAL, client=some)
    assert told[0] == f"topic {LABELS} is not there: `ratchet relay` makes it"
    assert [sentence for sentence in told if "keeps records for ever" in sentence] == [told[1]]
    assert EVENTS in told[1]
    fewer = topic_faults(REAL, client=Admin({topic.value: 11 for topic in Topic}))
    assert sum("has 11 partitions, [kafka] asks for 12: add partitions" in sentence for sentence in fewer) == len(Topic)


def test_of_the_embedded_broker_nothing_is_asked_but_that_it_answers(tmp_path: Path) -> None:
    file = tmp_path / "broker.json"
    file.write_text('{"address": "127.0.0.1:19092"}')
    assert topic_faults(Cluster(bootstrap=None, address_file=file), client=Admin({})) == []


@pytest.mark.parametrize("said", ["", "{}", '{"address": "127.0.0.1:x"}', "[1"])
def test_an_address_that_makes_no_sense_is_no_port(tmp_path: Path, said: str) -> None:
    file = tmp_path / "broker.json"
    file.write_text(said)
    assert announced_port(file) is None
    if "address" not in said:
        with pytest.raises(Unavailable, match="run `ratchet broker`"):
            Cluster(bootstrap=None, address_file=file).servers()


def test_a_cluster_is_embedded_where_no_address_is_named_and_has_its_own_number_of_partitions() -> None:
    embedded = Cluster(bootstrap=None, address_file=Path("none"), options=KafkaConfig(partitions=12))
    assert (embedded.embedded, embedded.partitions) == (True, 6)
    assert (REAL.embedded, REAL.partitions, REAL.servers()) == (False, 12, "127.0.0.1:9")
