"""`ingest=direct` against a real broker: accepted means acknowledged and applied once; a broker that is away is an error, not a silence."""

import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from sqlalchemy import func, select

from app.db.counters import read_counts
from app.db.engine import open_engine, reading
from app.db.ingestion.epochs import SqlEpochs
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import has_backlog
from app.db.ingestion.streams import SqlEffects, SqlPositions
from app.db.tables import inbox, observations, turns
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
    store = SqlEffects(engine, rules=lambda: JoinRules(policies={}), write_segment=segments.write_sized, erase_from_segment=segments.erase)
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


@pytest.mark.parametrize("fresh", [5, 60], ids=["fewer records than before", "more records than before"])
def test_events_of_a_cluster_that_came_back_empty_are_applied_and_the_reset_is_an_alarm(
    broker: Broker, sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh: int
) -> None:
    """500 of 500 accepted events once had no effect and left no line in the log: they lay before the offsets of a topic that was gone."""
    engine = open_engine(sqlite_url)
    cluster, segments = as_real(broker, tmp_path), MemorySegments()
    store = SqlEffects(engine, rules=lambda: JoinRules(policies={}), write_segment=segments.write_sized, erase_from_segment=segments.erase)

    def say(*events: CloudEvent) -> None:
        door = DirectInbox(KafkaSink(cluster, SqlEpochs(engine)))
        assert set(anyio.run(door.append, events)) == {Receipt.ACCEPTED}
        door.close()

    def apply(wanted: int) -> None:
        source = KafkaSource(
            cluster, SqlEpochs(engine), SqlMembership(engine, group=GROUP), group=GROUP, positions=SqlPositions(engine, group=GROUP),
            backlog=lambda: False,
        )  # fmt: skip
        member = Ingest(source=source, store=store, config=IngestionConfig())
        applied, deadline = 0, time.monotonic() + 120
        while applied < wanted and time.monotonic() < deadline:
            applied += member.step()
        source.close()
        assert applied == wanted

    say(event_of(turn("a")), *(event_of(observation(f"before-{n}", of="a")) for n in range(30)))
    apply(31)
    broker.kill()
    broker.start()
    say(*(event_of(observation(f"after-{n}", of="a")) for n in range(fresh)))
    apply(fresh)
    assert "alarm=the topic is not the one that was read" in caplog.text
    with reading(engine) as connection:
        assert read_counts(connection)["", "offsets_reset"] >= 1
        assert connection.execute(select(func.count()).select_from(observations)).scalar_one() == 30 + fresh
    engine.dispose()
