"""`ingest=direct` against a real broker: accepted means acknowledged and applied once; a broker that is away is an error, not a silence."""

import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from sqlalchemy import Engine, func, select, update

from app.db.counters import read_counts
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.epochs import SqlEpochs
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import has_backlog
from app.db.ingestion.streams import SqlEffects, SqlPositions
from app.db.tables import inbox, observations, stream_offsets, turns
from app.domain.errors import Unavailable
from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent
from app.domain.telemetry.streams import JoinRules
from app.messaging.cluster import Cluster
from app.messaging.consumer import KafkaSource
from app.messaging.direct import DirectInbox
from app.messaging.options import KafkaConfig
from app.messaging.producer import KafkaSink
from pipelines.ingestion.config import IngestionConfig
from pipelines.ingestion.ingest import Ingest
from tests.broker import Broker, running_broker
from tests.fakes.served import event_of, observation, turn
from tests.fakes.streaming import MemorySegments

GROUP = "ratchet-ingest"
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # kafka-python leaves sockets of failed connections to the collector


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with running_broker(tmp_path) as running:
        yield running


def as_real(broker: Broker, folder: Path) -> Cluster:
    """The embedded broker spoken to as a real cluster of one: idempotent, no epochs."""
    options = KafkaConfig(replication=1, min_insync_replicas=1)
    return Cluster(bootstrap=broker.cluster.servers(), address_file=folder / "none.json", options=options)


def test_what_the_brokers_acknowledged_is_applied_once_and_a_broker_that_is_away_is_an_error(
    broker: Broker, sqlite_url: str, tmp_path: Path
) -> None:
    engine = open_engine(sqlite_url)
    cluster = as_real(broker, tmp_path)
    sink = KafkaSink(cluster, SqlEpochs(engine))
    sink.check_topics()
    door = DirectInbox(sink)
    said = [event_of(turn("a")), *(event_of(observation(f"o{number}", of="a")) for number in range(20))]
    assert set(anyio.run(door.append, said)) == {Receipt.ACCEPTED}
    assert set(anyio.run(door.append, said[:5])) == {Receipt.ACCEPTED}  # a repeat: nobody knows it here, ingestion does

    segments = MemorySegments()
    source = KafkaSource(
        cluster, SqlEpochs(engine), SqlMembership(engine, group=GROUP), group=GROUP, positions=SqlPositions(engine, group=GROUP),
        backlog=lambda: has_backlog(engine),
    )  # fmt: skip
    store = SqlEffects(engine, rules=lambda: JoinRules(policies={}), segments=segments)
    member = Ingest(source=source, store=store, config=IngestionConfig())
    applied = 0
    for _ in range(60):
        applied += member.step()
    assert applied == len(said)
    with reading(engine) as connection:
        counts = [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in (turns, observations, inbox)]
    assert counts == [1, 20, 0]

    broker.kill()
    with pytest.raises(Unavailable):
        anyio.run(door.append, [event_of(observation("lost", of="a"))])
    door.close()
    source.close()
    engine.dispose()


class Direct:
    """A door and a member of ingestion over one cluster, each there for as long as it is needed."""

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self.engine, self.cluster, self.segments = engine, cluster, MemorySegments()

    def say(self, *events: CloudEvent) -> None:
        door = DirectInbox(KafkaSink(self.cluster, SqlEpochs(self.engine)))
        assert set(anyio.run(door.append, events)) == {Receipt.ACCEPTED}
        door.close()

    def apply(self, wanted: int) -> None:
        """By a member that begins where the database says, until so many are new."""
        source = KafkaSource(
            self.cluster, SqlEpochs(self.engine), SqlMembership(self.engine, group=GROUP), group=GROUP,
            positions=SqlPositions(self.engine, group=GROUP), backlog=lambda: False,
        )  # fmt: skip
        store = SqlEffects(
            self.engine, rules=lambda: JoinRules(policies={}), segments=self.segments,
        )  # fmt: skip
        member = Ingest(source=source, store=store, config=IngestionConfig())
        applied, deadline = 0, time.monotonic() + 120
        while applied < wanted and time.monotonic() < deadline:
            applied += member.step()
        source.close()
        assert applied == wanted

    def observations(self) -> int:
        with reading(self.engine) as connection:
            return connection.execute(select(func.count()).select_from(observations)).scalar_one()

    def resets(self) -> int:
        with reading(self.engine) as connection:
            return read_counts(connection).get(("", "offsets_reset"), 0)


@pytest.fixture
def direct(broker: Broker, sqlite_url: str, tmp_path: Path) -> Iterator[Direct]:
    engine = open_engine(sqlite_url)
    yield Direct(engine, as_real(broker, tmp_path))
    engine.dispose()


def opinions(name: str, count: int) -> list[CloudEvent]:
    return [event_of(observation(f"{name}-{n}", of="a")) for n in range(count)]


@pytest.mark.parametrize("fresh", [5, 60], ids=["fewer records than before", "more records than before"])
def test_events_of_a_cluster_that_came_back_empty_are_applied_and_the_reset_is_an_alarm(
    broker: Broker, direct: Direct, caplog: pytest.LogCaptureFixture, fresh: int
) -> None:
    """500 of 500 accepted events once had no effect and left no line in the log: they lay before the offsets of a topic that was gone."""
    direct.say(event_of(turn("a")), *opinions("before", 30))
    direct.apply(31)
    broker.kill()
    broker.start()
    direct.say(*opinions("after", fresh))
    direct.apply(fresh)
    assert "alarm=the topic is not the one that was read" in caplog.text
    assert direct.resets() >= 1
    assert direct.observations() == 30 + fresh


def test_events_before_a_position_beyond_the_end_of_the_same_topic_are_applied_and_the_reset_is_an_alarm(
    direct: Direct, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an election of a broker whose log is shorter: cluster and topic are those that were read, the last records are gone."""
    direct.say(event_of(turn("a")), *opinions("before", 30))
    direct.apply(31)
    with writing(direct.engine) as connection:
        connection.execute(update(stream_offsets).values(next_offset=stream_offsets.c.next_offset + 100))
    direct.say(*opinions("after", 5))
    direct.apply(5)
    assert "event=offsets_reset" in caplog.text
    assert "the topic is not the one" not in caplog.text
    assert direct.resets() >= 1
    assert direct.observations() == 35
