"""What the sink makes of topics and answers: epochs opened, rotated and given up, a broker that went back, a cluster held to its table."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kafka.errors import KafkaConnectionError
from sqlalchemy import Engine

from app.db.ingestion.epochs import SqlEpochs
from app.domain.errors import BadConfig, Unavailable
from app.domain.telemetry.events import CloudEvent, Topic
from app.domain.telemetry.streams import Ack, OutgoingEvent, Sent
from app.messaging.cluster import Cluster
from app.messaging.options import KafkaConfig
from app.messaging.producer import KafkaSink
from tests.fakes.clock import FrozenClock

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
MIB = 1024 * 1024
EVENTS = "ratchet.events"


def outgoing(data: bytes = b"{}", *, key: str = "k", topic: str = Topic.EVENTS) -> OutgoingEvent:
    event = CloudEvent(id="1", source="api", type="t", time=NOW, key=key, data=data)
    return OutgoingEvent(seq=0, topic=topic, event=event, received_at=NOW)


class Broker:
    """Its topics, as the admin client shows them, and its connection, which answers with offsets that count up."""

    def __init__(self) -> None:
        self.topics: dict[str, int] = {}
        self.created: list[str] = []
        self.deleted: list[str] = []
        self.differs: dict[str, str] = {}
        self.compared: list[str] = []
        self.next = 0
        self.silent = False
        self.sent: list[str] = []
        self.closed = 0
        self.connected = 0
        self.refuses = False

    @contextmanager
    def administering(self, _: Cluster) -> Iterator["Broker"]:
        yield self

    def partitions(self) -> dict[str, int]:
        return dict(self.topics)

    def create(self, name: str) -> None:
        self.created.append(name)
        self.topics[name] = 6

    def delete(self, name: str) -> None:
        self.deleted.append(name)

    def mismatches(self, name: str) -> list[str]:
        self.compared.append(name)
        return [self.differs[name]] if name in self.differs else []

    def transmit(self, _: Cluster) -> "Broker":
        if self.refuses:
            raise KafkaConnectionError("Unable to bootstrap")
        self.connected += 1
        return self

    def send(self, records: Sequence[tuple[str, OutgoingEvent]]) -> list[Sent]:
        self.sent += [name for name, _ in records]
        acks: list[Sent] = [Ack(topic=name, partition=0, offset=self.next + n) for n, (name, _) in enumerate(records)]
        self.next += len(records)
        return [*acks[:-1], None] if self.silent else acks

    def close(self) -> None:
        self.closed += 1


class Room:
    """A sink, its broker, and the epochs in a real database."""

    def __init__(self, engine: Engine, *, bootstrap: str | None = None) -> None:
        self.clock = FrozenClock(NOW)
        self.broker = Broker()
        self.epochs = SqlEpochs(engine)
        self.cluster = Cluster(bootstrap=bootstrap, address_file=Path("none"), options=KafkaConfig())
        self.sink = self.another()

    def another(self) -> KafkaSink:
        return KafkaSink(
            self.cluster, self.epochs, clock=self.clock, transmit=self.broker.transmit,
            administer=self.broker.administering,  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.fixture
def room(sqlite_engine: Engine) -> Room:
    return Room(sqlite_engine)


@pytest.fixture
def real(sqlite_engine: Engine) -> Room:
    return Room(sqlite_engine, bootstrap="kafka:9092")


def test_the_first_send_makes_every_topic_and_the_next_one_none(room: Room) -> None:
    first = room.sink.send([outgoing(), outgoing(topic=Topic.LABELS)])
    assert first == [Ack(topic=f"{EVENTS}.1", partition=0, offset=0), Ack(topic=f"{Topic.LABELS}.1", partition=0, offset=1)]
    assert sorted(room.broker.created) == sorted(f"{topic}.1" for topic in Topic)
    room.sink.send([outgoing()])
    assert (room.broker.connected, len(room.broker.created)) == (1, len(Topic))
    assert room.sink.live_topics() == {f"{topic}.1" for topic in Topic}


def test_a_later_process_writes_on_where_the_earlier_one_wrote(room: Room) -> None:
    room.sink.check_topics()
    later = room.another()
    later.send([outgoing()])
    assert room.broker.sent == [f"{EVENTS}.1"]
    assert len(room.broker.created) == len(Topic)


@pytest.mark.parametrize("made", [None, 4])
def test_a_topic_that_the_broker_lost_or_made_itself_is_opened_anew_and_the_old_one_is_read_no_more(room: Room, made: int | None) -> None:
    room.sink.check_topics()
    del room.broker.topics[f"{EVENTS}.1"]
    if made is not None:
        room.broker.topics[f"{EVENTS}.1"] = made
    room.sink.check_topics()
    assert room.epochs.readable(EVENTS) == [2]
    assert room.sink.live_topics() == {f"{topic}.{2 if topic == EVENTS else 1}" for topic in Topic}


def test_after_a_failure_the_connection_is_thrown_away_and_made_anew(room: Room) -> None:
    room.broker.silent = True
    assert room.sink.send([outgoing(), outgoing()]) == [Ack(topic=f"{EVENTS}.1", partition=0, offset=0), None]
    assert (room.broker.connected, room.broker.closed) == (1, 1)
    room.broker.silent = False
    assert None not in room.sink.send([outgoing()])
    assert (room.broker.connected, room.broker.closed) == (2, 1)
    room.sink.close()
    room.sink.close()
    assert room.broker.closed == 2


def test_a_broker_to_which_no_connection_is_made_is_unavailable(room: Room) -> None:
    room.broker.refuses = True
    with pytest.raises(Unavailable, match="does not answer"):
        room.sink.send([outgoing()])


@pytest.mark.parametrize(("at", "counts"), [(2, True), (3, True), (1, False), (0, False)])
def test_an_offset_that_was_given_before_means_an_empty_restart_and_nothing_of_the_batch_counts(
    room: Room, at: int, *, counts: bool
) -> None:
    assert room.sink.send([outgoing(), outgoing()])[-1] == Ack(topic=f"{EVENTS}.1", partition=0, offset=1)
    room.broker.next = at
    sent = room.sink.send([outgoing(), outgoing()])
    assert (None not in sent) is counts
    assert sent == [None, None] or counts
    assert room.broker.closed == (0 if counts else 1)
    room.broker.next = 0
    assert (None in room.sink.send([outgoing()])) is counts, "what it went back to counts from then on"


def test_on_a_real_cluster_an_offset_that_goes_back_is_no_restart(real: Room) -> None:
    real.sink.send([outgoing(), outgoing()])
    real.broker.next = 0
    assert None not in real.sink.send([outgoing()])


def rotated(room: Room, *, applied_before: datetime = NOW) -> list[int]:
    room.sink.rotate(applied_before=applied_before)
    return room.epochs.readable(EVENTS)


def test_a_topic_is_rotated_above_256_mebibytes_of_keys_and_data(room: Room) -> None:
    sixteen = outgoing(bytes(16 * MIB - 1), key="k")
    room.sink.send([sixteen] * 16)
    assert rotated(room) == [1]
    room.sink.send([outgoing(b"", key="k")])
    assert rotated(room) == [1, 2]
    assert rotated(room) == [1, 2], "the new one is empty"
    room.sink.send([outgoing()])
    assert room.broker.sent[-1] == f"{EVENTS}.2"


def test_a_topic_is_rotated_above_50_000_batches_six_a_send(room: Room) -> None:
    for _ in range(8_333):
        room.sink.send([outgoing(b"", key="")])
    assert rotated(room) == [1]
    room.sink.send([outgoing(b"", key="")])
    assert rotated(room) == [1, 2]
    assert rotated(room) == [1, 2]
    assert room.epochs.readable(Topic.LABELS) == [1], "the others are counted by themselves"


def test_a_topic_with_anything_in_it_is_rotated_when_it_is_more_than_an_hour_old(room: Room) -> None:
    room.sink.check_topics()
    room.clock.advance(7_200)
    assert rotated(room) == [1], "it is empty"
    room.sink.send([outgoing(b"", key="k")])
    assert rotated(room) == [1, 2]
    room.sink.send([outgoing(b"", key="k")])
    room.clock.advance(3_600)
    assert rotated(room) == [1, 2]
    room.clock.advance(0.001)
    assert rotated(room) == [1, 2, 3]


def test_the_age_of_a_topic_that_an_earlier_process_made_is_counted_from_the_start_of_this_one(room: Room) -> None:
    room.sink.check_topics()
    room.clock.advance(7_200)
    room.sink = room.another()
    room.sink.send([outgoing()])
    assert rotated(room) == [1]
    room.clock.advance(3_601)
    assert rotated(room) == [1, 2]


def test_a_closed_epoch_goes_when_it_was_closed_before_what_is_applied_readers_first_and_the_topic_at_the_next_call(room: Room) -> None:
    room.sink.check_topics()
    room.sink.rotate_now(EVENTS)
    assert rotated(room, applied_before=NOW) == [1, 2]
    assert rotated(room, applied_before=NOW + timedelta(microseconds=1)) == [2]
    assert room.broker.deleted == []
    rotated(room)
    assert room.broker.deleted == [f"{EVENTS}.1"]
    rotated(room)
    assert room.broker.deleted == [f"{EVENTS}.1"]


def test_nothing_is_rotated_before_the_topics_were_looked_at_nor_on_a_real_cluster(room: Room, real: Room) -> None:
    room.sink.check_topics()
    room.sink.rotate_now(EVENTS)
    fresh = room.another()
    fresh.rotate(applied_before=NOW + timedelta(days=1))
    assert room.epochs.readable(EVENTS) == [1, 2]
    real.sink.send([outgoing()])
    real.sink.rotate(applied_before=NOW + timedelta(days=1))
    assert real.epochs.readable(EVENTS) == [1, 2]


def test_a_real_cluster_s_topics_are_made_where_they_are_missing_and_compared_once_a_process(real: Room) -> None:
    real.broker.topics[EVENTS] = 6
    real.sink.check_topics()
    assert sorted(real.broker.created) == sorted(topic for topic in Topic if topic != EVENTS)
    assert sorted(real.broker.compared) == sorted(Topic)
    real.sink.check_topics()
    assert len(real.broker.compared) == len(Topic)
    assert real.sink.live_topics() == frozenset(Topic)
    assert real.epochs.readable(EVENTS) == []
    real.sink.send([outgoing(), outgoing(topic=Topic.LABELS)])
    assert real.broker.sent == [EVENTS, Topic.LABELS]


def test_a_real_cluster_s_topic_that_differs_is_told_until_it_is_mended(real: Room) -> None:
    real.broker.differs = {EVENTS: "one", Topic.LABELS: "two"}
    for _ in range(2):
        with pytest.raises(BadConfig, match="one; two"):
            real.sink.check_topics()
    real.broker.differs = {}
    real.sink.check_topics()
    real.broker.topics[EVENTS] = 4
    real.broker.differs = {EVENTS: "4 partitions"}
    with pytest.raises(BadConfig, match="4 partitions"):
        real.sink.check_topics()
