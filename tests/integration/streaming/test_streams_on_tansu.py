"""Inbox → relay → the real broker → ingestion → rows, while the broker is killed, paused and made to jump over records."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaProducer
from sqlalchemy import Engine, func, select

from app.db.engine import open_engine, reading
from app.db.ingestion.epochs import SqlEpochs
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import SqlRelayOffice, has_backlog
from app.db.ingestion.streams import SqlEffects, SqlPositions
from app.db.recovery.checks import SqlRecovery
from app.db.tables import dead_letters, observations, outbox, topic_epochs, turns
from app.domain.errors import Unavailable
from app.domain.ids import utc_now
from app.domain.telemetry.events import Topic
from app.domain.telemetry.streams import PARTITIONS, Ack, JoinRules, OutgoingEvent, Sent
from app.messaging.consumer import KafkaSource
from app.messaging.producer import KafkaSink
from app.messaging.topics import administering
from app.messaging.transmitters import BatchTransmitter
from app.trajectories.segments import ParquetSegments
from pipelines.ingestion.config import IngestionConfig, RelayConfig
from pipelines.ingestion.ingest import Ingest
from pipelines.ingestion.relay import Relay
from tests.broker import Broker, running_broker
from tests.fakes.served import event_of, observation, turn

GROUP = "ratchet-ingest"
FOREVER_S = 100 * 365 * 86_400.0
"""The turns of the fakes ended on one day for ever, and the observations arrive today: none may be too late."""
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # kafka-python leaves sockets of failed connections to the collector


class Attentive(KafkaSink):
    """Counts the sendings that the broker did not answer."""

    unanswered = 0

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """As the sink does."""
        try:
            acks = super().send(events)
        except Unavailable:
            self.unanswered += 1
            raise
        self.unanswered += None in acks
        return acks


class Line:
    """Relay and ingestion in threads, over one database and one broker."""

    def __init__(self, engine: Engine, broker: Broker, folder: Path) -> None:
        self.engine, self.broker = engine, broker
        self.segments = ParquetSegments(str(folder / "segments"))
        self.door = SqlInbox(engine, free_bytes=lambda: 1 << 40)
        self.sinks: list[Attentive] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def store(self) -> SqlEffects:
        return SqlEffects(
            self.engine, rules=lambda: JoinRules(policies={}, lateness_s=FOREVER_S), segments=self.segments,
        )  # fmt: skip

    def source(self) -> KafkaSource:
        return KafkaSource(
            self.broker.cluster, SqlEpochs(self.engine), SqlMembership(self.engine, group=GROUP), group=GROUP,
            positions=SqlPositions(self.engine, group=GROUP), backlog=lambda: has_backlog(self.engine),
        )  # fmt: skip

    def sink(self) -> Attentive:
        self.sinks.append(Attentive(self.broker.cluster, SqlEpochs(self.engine)))
        return self.sinks[-1]

    def start_relay(self) -> None:
        relay = Relay(
            office=SqlRelayOffice(self.engine, self.engine, group=GROUP), sink=self.sink(), store=self.store(),
            config=RelayConfig(reconcile_every_s=0.5, resend_after_s=2.0, stalled_after_s=5.0, housekeeping_every_s=0.5),
        )  # fmt: skip
        self._start(relay.run)

    def start_ingest(self) -> None:
        self._start(Ingest(source=self.source(), store=self.store(), config=IngestionConfig()).run)

    def _start(self, run: Callable[[Callable[[], bool]], None]) -> None:
        thread = threading.Thread(target=run, args=[self._stop.is_set], daemon=True)
        thread.start()
        self._threads.append(thread)

    def accept(self, first: int, count: int) -> None:
        for n in range(first, first + count, 50):
            effects = [e for m in range(n, min(n + 50, first + count)) for e in (observation(f"o{m}", of=f"t{m}"), turn(f"t{m}"))]
            self.door.append_blocking([event_of(effect) for effect in effects])

    def joined(self) -> int:
        with reading(self.engine) as connection:
            statement = select(func.count()).select_from(observations).where(observations.c.status == "joined")
            return connection.execute(statement).scalar_one()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
        for sink in self.sinks:
            sink.close()  # or its thread looks for the broker as long as the tests run
        self.door.close()


def eventually(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture
def line(sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Line]:
    caplog.set_level(logging.CRITICAL, logger="kafka")  # captured records keep its exceptions, and those their sockets
    engine = open_engine(sqlite_url)
    with running_broker(tmp_path) as broker:
        made = Line(engine, broker, tmp_path)
        yield made
        made.close()
    engine.dispose()
    gc.collect()


def test_everything_arrives_once_while_the_broker_is_killed_twice(line: Line) -> None:
    line.start_relay()
    line.start_ingest()
    line.accept(0, 200)
    eventually(lambda: line.joined() == 200)
    line.broker.kill()
    line.accept(200, 200)
    line.broker.start()
    line.accept(400, 100)
    line.broker.kill()  # whatever it holds now is lost, acknowledged or not
    line.broker.start()
    eventually(lambda: line.joined() == 500)
    with reading(line.engine) as connection:
        assert connection.execute(select(func.count()).select_from(turns)).scalar_one() == 500
        assert connection.execute(select(func.max(topic_epochs.c.epoch))).scalar_one() >= 2
        located = connection.execute(select(turns.c.payload_segment, turns.c.inference_id)).all()
    assert len(line.segments.read([(name, id_) for name, id_ in located])) == 500


def test_a_broker_that_is_paused_longer_than_every_timeout_loses_nothing(line: Line) -> None:
    line.start_relay()
    line.start_ingest()
    line.accept(0, 50)
    eventually(lambda: line.joined() == 50)
    line.broker.pause()
    line.accept(50, 50)
    eventually(lambda: line.sinks[0].unanswered > 1)  # the producer gave up and so did the one after it: the idempotent one would hang
    line.broker.resume()
    eventually(lambda: line.joined() == 100)


def test_two_relays_and_two_members_share_the_work(line: Line) -> None:
    for start in (line.start_relay, line.start_relay, line.start_ingest, line.start_ingest):
        start()
    line.accept(0, 300)
    eventually(lambda: line.joined() == 300)


def test_topics_are_created_with_six_partitions_and_made_anew_when_the_broker_made_them_itself(line: Line) -> None:
    sink = line.sink()
    sink.check_topics()
    line.broker.kill()
    line.broker.start()
    producer = KafkaProducer(bootstrap_servers=line.broker.cluster.servers(), enable_idempotence=False)
    producer.send("ratchet.events.1", b"x").get(5)  # made by the broker, with four partitions
    producer.close()
    with administering(line.broker.cluster) as admin:
        assert admin.partitions()["ratchet.events.1"] == 4
    sink.check_topics()
    with administering(line.broker.cluster) as admin:
        assert admin.partitions()["ratchet.events.2"] == PARTITIONS
    assert "ratchet.events.2" in sink.live_topics()


def test_the_broker_is_told_how_far_ingestion_has_read_and_recovery_asks_it(line: Line) -> None:
    line.start_relay()
    line.start_ingest()
    line.accept(0, 60)
    eventually(lambda: line.joined() == 60)

    def told() -> dict[tuple[str, int], int]:
        with administering(line.broker.cluster) as admin:
            return admin.committed(GROUP)

    positions = SqlPositions(line.engine, group=GROUP)
    eventually(lambda: sum(told().values()) == 120)  # a turn and an observation each, and commits are sent without waiting
    assert SqlRecovery(line.engine, line.engine).behind(GROUP, told()) == {}
    place = max(told(), key=lambda place: told()[place])
    assert positions.read()[place].next_offset == told()[place]
    further = told() | {place: told()[place] + 7}
    assert SqlRecovery(line.engine, line.engine).behind(GROUP, further) == {place: 7}, "the database was restored to before"


def test_an_empty_restart_shows_by_offsets_that_go_back(line: Line) -> None:
    sink = line.sink()
    rows = [OutgoingEvent(seq=n, topic=Topic.EVENTS, event=event_of(turn(f"t{n}")), received_at=utc_now()) for n in range(60)]
    assert None not in sink.send(rows)
    line.broker.kill()
    line.broker.start()
    acks = sink.send(rows)
    if None not in acks:  # the topic was found to be gone before anything was sent
        assert {ack.topic for ack in acks if isinstance(ack, Ack)} == {"ratchet.events.2"}
        return
    assert None not in sink.send(rows)
    assert "ratchet.events.2" in sink.live_topics()


class Stuck(BatchTransmitter):
    """As kafka-python's sender after its leader's broker is gone: it looks for that one and sends nothing, though another leads now."""

    closed = False

    def send(self, records: Sequence[tuple[str, OutgoingEvent]]) -> list[Sent]:
        """Nothing comes of it."""
        return [None for _ in records]

    def close(self) -> None:
        """As the other, and it is seen."""
        self.closed = True
        super().close()


def test_a_transmitter_that_could_not_send_is_closed_and_the_next_one_sends(line: Line) -> None:
    """Kept, it was still stuck forty seconds after the partition had a new leader."""
    stuck = Stuck(line.broker.cluster)
    made = iter([lambda _: stuck, BatchTransmitter, BatchTransmitter])
    sink = KafkaSink(line.broker.cluster, SqlEpochs(line.engine), transmit=lambda cluster: next(made)(cluster))
    rows = [OutgoingEvent(seq=n, topic=Topic.EVENTS, event=event_of(turn(f"t{n}")), received_at=utc_now()) for n in range(3)]
    assert sink.send(rows) == [None] * 3
    assert stuck.closed
    assert all(isinstance(ack, Ack) for ack in sink.send(rows))
    assert all(isinstance(ack, Ack) for ack in sink.send(rows)), "one that sends is kept"
    assert len(list(made)) == 1
    sink.close()


def test_rotation_opens_a_new_epoch_and_deletes_the_old_one_when_it_is_applied(line: Line) -> None:
    sink, source = line.sink(), line.source()
    rows = [OutgoingEvent(seq=n, topic=Topic.EVENTS, event=event_of(turn(f"t{n}")), received_at=utc_now()) for n in range(10)]
    sink.send(rows)
    sink.rotate_now(Topic.EVENTS)
    sink.send(rows[:5])
    got = 0
    deadline = time.monotonic() + 200
    while got < 15 and time.monotonic() < deadline:
        got += len(source.poll(0.5))
    assert got == 15

    def reads_epoch_one() -> bool:
        return "ratchet.events.1" in {topic for topic, _ in source.high_waters()}

    sink.rotate(applied_before=utc_now())
    assert reads_epoch_one()

    def let_go() -> bool:
        source.poll(0.1)
        return not reads_epoch_one()

    eventually(let_go)
    sink.rotate(applied_before=utc_now())
    assert sink.live_topics() >= {"ratchet.events.2"}
    assert "ratchet.events.1" not in sink.live_topics()

    def names() -> set[str]:
        with administering(line.broker.cluster) as admin:
            return set(admin.partitions())

    eventually(lambda: "ratchet.events.1" not in names())
    source.close()


def test_a_gap_in_the_offsets_is_read_again(line: Line) -> None:
    sink, source = line.sink(), line.source()
    rows = [
        OutgoingEvent(seq=n, topic=Topic.EVENTS, event=event_of(turn(f"t{n}", episode="same")), received_at=utc_now()) for n in range(20)
    ]
    sink.send(rows)
    seen: list[int] = []
    deadline = time.monotonic() + 200
    while len(seen) < 20 and time.monotonic() < deadline:
        seen += [delivery.offset for delivery in source.poll(0.3)]
    assert seen == list(range(20))
    place = ("ratchet.events.1", partition_of(source))
    sink.send([replace(row, event=event_of(turn(f"u{row.seq}", episode="same"))) for row in rows])
    source.jump(place, 39)  # as the fetcher does when two producers shared the partition
    while len(seen) < 40 and time.monotonic() < deadline:
        seen += [delivery.offset for delivery in source.poll(0.3)]
    assert seen == list(range(40))
    source.close()


def partition_of(source: KafkaSource) -> int:
    """The only partition that anything was sent to."""
    return next(partition for (_, partition), end in source.high_waters().items() if end)


def test_poison_is_buried_with_its_reason_and_sent_to_the_dead_letter_topic(line: Line) -> None:
    line.start_relay()
    line.start_ingest()
    line.accept(0, 1)
    eventually(lambda: line.joined() == 1)
    producer = KafkaProducer(bootstrap_servers=line.broker.cluster.servers(), enable_idempotence=False)
    headers = [("ce_id", b"1"), ("ce_source", b"x"), ("ce_type", b"ratchet.observation.v1")]
    producer.send("ratchet.events.1", b"\xff\x00garbage", headers=headers, partition=1)
    producer.send("ratchet.events.1", b"{}", partition=1)
    producer.send(
        "ratchet.events.1", b"{}", headers=[(name, b"unknown.v9" if name == "ce_type" else v) for name, v in headers], partition=1
    )
    producer.flush(5)
    producer.close()
    line.accept(1, 20)
    eventually(lambda: line.joined() == 21)

    def buried() -> list[str]:
        with reading(line.engine) as connection:
            return list(connection.execute(select(dead_letters.c.reason).order_by(dead_letters.c.offset)).scalars())

    eventually(lambda: len(buried()) == 3)
    assert [word in reason for word, reason in zip(("malformed", "ce_id", "unknown type"), buried(), strict=True)] == [True] * 3

    def sent() -> int:
        with reading(line.engine) as connection:
            statement = select(func.count()).select_from(outbox).where(outbox.c.topic == Topic.DEAD_LETTERS, outbox.c.sent_at.is_not(None))
            return connection.execute(statement).scalar_one()

    eventually(lambda: sent() == 3)


def test_a_broker_that_is_away_costs_no_thread_and_no_file_descriptor(line: Line) -> None:
    line.broker.kill()
    sink, source = line.sink(), line.source()
    SqlEpochs(line.engine).open_next(Topic.EVENTS, lost=False, now=utc_now())
    used: list[tuple[int, int]] = []
    for _ in range(2):
        for connect in (sink.check_topics, lambda: source.poll(0.1)):
            with pytest.raises(Unavailable, match="is it running"):
                connect()
        gc.collect()
        used.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    (threads, descriptors), (threads_after, descriptors_after) = used
    assert threads_after <= threads
    assert descriptors_after < descriptors + 8  # kafka-python alone leaves two threads and eight descriptors a round
