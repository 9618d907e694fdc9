"""Relay, ingestion and labelling over the real broker, in this process. Part of `make bench-ingest`.

A clock runs from the first event that a part has not handled yet to the last; what was handled before (joining, the first records) is
left out of the events as well. Rates are given twice, see `Rate`.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sqlalchemy import Engine, select

from app.db.engine import open_engine, reading
from app.db.ingestion.epochs import SqlEpochs
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import SqlRelayOffice, has_backlog
from app.db.ingestion.streams import SqlEffects, SqlPositions
from app.db.learning.labels import SqlLabels
from app.db.migrate import upgrade
from app.db.tables import labels, observations, turns
from app.domain.ids import utc_now, uuid7
from app.domain.policies import PolicyConfig
from app.domain.telemetry.events import CloudEvent, EventType
from app.domain.telemetry.streams import EventSink, JoinRules
from app.messaging.consumer import KafkaSource
from app.messaging.producer import KafkaSink
from app.telemetry.traces import NOWHERE, Traces
from app.trajectories.segments import ParquetSegments
from pipelines.ingestion.config import IngestionConfig, RelayConfig
from pipelines.ingestion.ingest import Ingest
from pipelines.ingestion.relay import Relay, Term
from pipelines.labelling.config import LabellingConfig
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.bench.common.accounts import Accounts, Rate, settle
from tests.broker import Broker, running_broker
from tests.fakes.served import START, event_of, observation, turn
from tests.fakes.streaming import acting

POLICY = PolicyConfig(model="unused", base_name="bench", base_model="none", label_wait_s=1)
RULES = JoinRules(policies={"composer": POLICY})
GROUP = "ratchet-ingest"
PATIENCE_S = 240.0
"""Without any progress for so long a part is done: what is missing then is lost."""

WriteSegment = Callable[[str, Any], int]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Put around parts of the product by the test that plants losses, doubles and slowness; nothing by default."""

    sink: Callable[[EventSink], EventSink] = lambda sink: sink
    write: Callable[[WriteSegment], WriteSegment] = lambda write: write
    patience_s: float = PATIENCE_S
    traces: Traces = NOWHERE


@dataclass(frozen=True, kw_only=True)
class StreamFigures:
    """What one run brought."""

    relay: Rate
    ingest: Rate
    labels: Rate
    events: int
    ingest_left_out: int
    """Events that were applied before ingestion's clock started."""
    sent_twice: int
    """Records on the broker beyond one per event: delivery is at least once, and nothing disturbs it here."""
    accounts: Accounts
    """Turns and observations by their rows, tokens by every segment there is, labels by what is current."""


def measure_streams(events: int, url: str | None, faults: Faults | None = None) -> StreamFigures:
    """From the inbox over the real broker to rows, segments and labels."""
    faults = faults or Faults()
    with tempfile.TemporaryDirectory() as name, running_broker(Path(name)) as broker:
        folder = Path(name)
        state_url = url or f"sqlite:///{folder}/state.db"
        upgrade(state_url)
        line = Line(open_engine(state_url), folder, broker, faults)
        said = line.accept(events)
        gc.freeze()  # as the processes do when they are ready
        try:
            relay = _timed(lambda: until(line.term.send_inbox, len(said), faults.patience_s))
            first = until(line.member.step, 1, faults.patience_s)
            ingest = _timed(lambda: until(line.member.step, len(said) - first, faults.patience_s))
            labelled = _timed(lambda: label_all(line.engine))
            return StreamFigures(
                relay=relay, ingest=ingest, labels=labelled, events=len(said), ingest_left_out=first, sent_twice=line.records() - len(said),
                accounts=settle(acknowledged=effects_of(said), kept=line.kept()),
            )  # fmt: skip
        finally:
            line.close()


class Line:
    """Inbox, relay and one consumer over one database."""

    def __init__(self, engine: Engine, folder: Path, broker: Broker, faults: Faults) -> None:
        self.engine, self._folder = engine, folder / "segments"
        segments = ParquetSegments(str(self._folder))
        store = SqlEffects(engine, rules=lambda: RULES, segments=acting(segments, write_sized=faults.write(segments.write_sized)))
        sink = faults.sink(KafkaSink(broker.cluster, SqlEpochs(engine)))
        relay = Relay(
            office=SqlRelayOffice(engine, engine, group=GROUP), sink=sink, store=store, config=RelayConfig(), traces=faults.traces
        )
        office = relay.office.take("bench", now=utc_now())
        assert office is not None
        self._sink, self.term = sink, Term(relay=relay, term=office)
        self._source = KafkaSource(
            broker.cluster, SqlEpochs(engine), SqlMembership(engine, group=GROUP), group=GROUP,
            positions=SqlPositions(engine, group=GROUP), backlog=lambda: has_backlog(engine),
        )  # fmt: skip
        self.member = Ingest(source=self._source, store=store, config=IngestionConfig(), traces=faults.traces)

    def accept(self, count: int) -> list[CloudEvent]:
        """Put so many events into the inbox and connect the producer; returns them."""
        said = [event for number in range(0, count, 4) for event in about(number)]
        self.take(said)
        return said

    def take(self, said: list[CloudEvent]) -> None:
        """Put these events into the inbox and connect the producer."""
        door = SqlInbox(self.engine, free_bytes=lambda: 1 << 40)
        for start in range(0, len(said), 1_000):
            door.append_blocking(said[start : start + 1_000])
        door.close()
        self._sink.check_topics()
        self._sink.send([])

    def records(self) -> int:
        """What lies on the broker."""
        return sum(self._source.high_waters().values())

    def kept(self) -> list[str]:
        """Every effect there is, by id, as often as it is there."""
        with reading(self.engine) as connection:
            found = list(connection.execute(select(turns.c.inference_id)).scalars())
            found += connection.execute(select(observations.c.id)).scalars()
            found += [f"label of {id_}" for id_ in connection.execute(select(labels.c.inference_id).where(labels.c.current)).scalars()]
        for file in self._folder.rglob("*.parquet"):
            found += [f"tokens of {id_}" for id_ in pq.read_table(file, columns=["inference_id"])["inference_id"].to_pylist()]
        return found

    def close(self) -> None:
        """Let everything go."""
        self._source.close()
        self._sink.close()
        self.engine.dispose()


def about(number: int) -> list[CloudEvent]:
    """A turn that ended ten minutes ago and three ratings of it, all in time."""
    id_, ended_s = str(uuid7()), (utc_now() - START).total_seconds() - 600
    said = [observation(str(uuid7()), of=id_, value=0.5, occurred=ended_s + second) for second in (5, 10, 15)]
    return [event_of(effect) for effect in (turn(id_, finished=ended_s, actor=f"actor-{number % 999}"), *said)]


def effects_of(said: Iterable[CloudEvent]) -> list[str]:
    """What must be there of these events: a row each, and for a turn its tokens and its label."""
    wanted: list[str] = []
    for event in said:
        id_ = event.id.removeprefix("turn-")
        wanted += [id_, f"tokens of {id_}", f"label of {id_}"] if event.type == EventType.TURN else [id_]
    return wanted


def label_all(engine: Engine, traces: Traces = NOWHERE) -> int:
    """Label what is due; returns how many."""
    rule_set, book, labelled = parse_rule_set(default_toml()), SqlLabels(engine), 0
    limit = LabellingConfig().batch_turns
    while made := label_due(book, policy="composer", config=POLICY, rule_set=rule_set, now=utc_now(), limit=limit, traces=traces):
        labelled += made
    return labelled


def until(step: Callable[[], int], wanted: int, patience_s: float) -> int:
    """Step until so many are done, or nothing has moved for `patience_s`; returns how many were."""
    done, moved_at = 0, time.monotonic()
    while done < wanted and time.monotonic() - moved_at < patience_s:
        made = step()
        done += made
        if made:
            moved_at = time.monotonic()
    return done


def _timed(act: Callable[[], int]) -> Rate:
    """The rate of what `act` says it did, by this process's CPU time and by the wall."""
    cpu, wall = time.process_time(), time.monotonic()
    done = act()
    return Rate(per_cpu_s=done / max(1e-9, time.process_time() - cpu), per_s=done / max(1e-9, time.monotonic() - wall))
