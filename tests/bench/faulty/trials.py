"""Faults that do not come by chance: each is told to one relay and one ingest over a real broker, and must cost nothing but itself.

oversize       turns that no broker takes                       applied from the inbox, the others through the broker
version skew   events of a newer version, and of an unknown type    the first applied, the second buried once
offset reset   a cluster that comes back empty                  what is accepted afterwards is applied
election       a leader without the last records that were read     noticed, counted, read again; what took their places is applied
bad times      years 1 and 9999 that an older door let in       buried, the others applied
disk full      segments that take nothing for a while           waited for and said, then applied
fsync          a door whose disk fails from one moment on       acknowledges nothing any more; what it acknowledged is there and applied
clock          relay and ingest whose clock jumps by hours      everything applied once
"""

import ctypes
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from sqlalchemy import func, insert, select, update

from app.db.counters import read_counts
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.epochs import SqlEpochs
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import SqlRelayOffice, has_backlog
from app.db.ingestion.streams import SqlEffects, SqlPositions
from app.db.migrate import upgrade
from app.db.tables import dead_letters, inbox, stream_offsets, turns
from app.domain.ids import utc_now
from app.domain.ports import Clock
from app.domain.telemetry.events import CloudEvent, payload_hash
from app.domain.telemetry.streams import JoinRules, OutgoingEvent, Sent, Unsendable
from app.messaging.cluster import Cluster
from app.messaging.consumer import KafkaSource
from app.messaging.options import KafkaConfig
from app.messaging.producer import KafkaSink
from app.trajectories.segments import ParquetSegments
from pipelines.ingestion.config import IngestionConfig, RelayConfig
from pipelines.ingestion.ingest import Ingest
from pipelines.ingestion.relay import Relay, Term
from tests.bench.faulty import disk
from tests.broker import Broker, running_broker
from tests.fakes.served import event_of, turn

GROUP = "ratchet-ingest"
PATIENCE_S = 60.0
BROKER_BYTES = 1_048_588
"""What a Kafka broker takes by default; the embedded one has no bound."""
HEALTHY = 40


class NarrowSink(KafkaSink):
    """Refuses what a Kafka broker with default limits refuses."""

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """Send the others."""
        fits = [event for event in events if len(event.event.data) <= BROKER_BYTES]
        sent = iter(super().send(fits) if fits else [])
        too_large = Unsendable(reason="MessageSizeTooLargeError")
        return [next(sent) if len(event.event.data) <= BROKER_BYTES else too_large for event in events]


@dataclass(kw_only=True)
class Trial:
    """One deployment in one process, moved on by hand."""

    folder: Path
    broker: Broker
    cluster: Cluster
    said: list[str | None] = field(default_factory=list[str | None])
    on_wait: Callable[[], object] = lambda: None
    """Called whenever ingestion waits."""
    clock: Clock = utc_now

    def __post_init__(self) -> None:
        """Open everything."""
        url = f"sqlite:///{self.folder}/ratchet.db"
        upgrade(url)
        self.engine = open_engine(url)
        self.segments = ParquetSegments(str(self.folder / "segments"))
        self.door = SqlInbox(self.engine, free_bytes=lambda: 1 << 40)
        store = SqlEffects(
            self.engine, rules=lambda: JoinRules(policies={}), segments=self.segments, holds=self.segments.holds,
        )  # fmt: skip
        relay = Relay(
            office=SqlRelayOffice(self.engine, self.engine, group=GROUP), sink=NarrowSink(self.cluster, SqlEpochs(self.engine)),
            store=store, config=RelayConfig(resend_after_s=2.0, stalled_after_s=4.0), clock=self.clock,
        )  # fmt: skip
        term = relay.office.take("trial", now=utc_now())
        assert term is not None
        self.term = Term(relay=relay, term=term)
        source = KafkaSource(
            self.cluster, SqlEpochs(self.engine), SqlMembership(self.engine, group=GROUP), group=GROUP,
            positions=SqlPositions(self.engine, group=GROUP), backlog=lambda: has_backlog(self.engine),
        )  # fmt: skip
        self.ingest = Ingest(
            source=source, store=store, config=IngestionConfig(), report=self.said.append, pause=self._wait, clock=self.clock
        )

    def _wait(self, seconds: float) -> None:
        self.on_wait()
        time.sleep(min(seconds, 0.2))

    def accept(self, *events: CloudEvent) -> None:
        """Through the door."""
        self.door.append_blocking(list(events))

    def until(self, done: Callable[[], bool]) -> bool:
        """Relay, ingest and reconcile until it is so; False where it never is."""
        deadline = time.monotonic() + PATIENCE_S
        while not done() and time.monotonic() < deadline:
            self.term.send_inbox()
            self.ingest.step(stopping=lambda: time.monotonic() > deadline)
            self.term.reconcile()
        return done()

    def applied(self) -> int:
        """Turns that are there."""
        with reading(self.engine) as connection:
            return connection.execute(select(func.count()).select_from(turns)).scalar_one()

    def buried(self) -> int:
        """Times that something was buried."""
        with reading(self.engine) as connection:
            return connection.execute(select(func.coalesce(func.sum(dead_letters.c.attempts), 0))).scalar_one()

    def count(self, name: str) -> int:
        """A counter."""
        with reading(self.engine) as connection:
            return read_counts(connection).get(("", name), 0)

    def close(self) -> None:
        """Let go of everything."""
        self.ingest.source.close()
        self.term.relay.sink.close()
        self.door.close()
        self.engine.dispose()


def healthy(first: int = 0) -> list[CloudEvent]:
    """Turns with nothing wrong."""
    return [event_of(turn(f"t{n}")) for n in range(first, first + HEALTHY)]


def oversize(trial: Trial) -> bool:
    """Four turns of 5 MB among the others: more than the relay reads at once."""
    trial.accept(*(event_of(turn(f"large{n}", completion="x" * 5_000_000)) for n in range(4)), *healthy())
    return trial.until(lambda: trial.applied() == HEALTHY + 4) and trial.buried() == 0


def version_skew(trial: Trial) -> bool:
    """A newer version's turns with a field more, and a type that is not known here."""
    newer = [msgspec.structs.replace(event, data=event.data[:-1] + b',"of_a_version_to_come":{"a":1}}') for event in healthy()]
    trial.accept(*newer, msgspec.structs.replace(event_of(turn("odd")), type="ratchet.turn.v9"))
    if not trial.until(lambda: trial.applied() == HEALTHY and trial.buried() == 1):
        return False
    ended = time.monotonic()
    trial.until(lambda: time.monotonic() - ended > 3.0)  # the reconciler looks twice and sends nothing again
    return trial.buried() == 1


def offset_reset(trial: Trial) -> bool:
    """The cluster is killed and comes back with nothing."""
    trial.accept(*healthy())
    first = trial.until(lambda: trial.applied() == HEALTHY)
    trial.ingest.source.close()  # the embedded broker makes a topic for whoever asks, with partitions of its own number
    trial.term.relay.sink.close()
    trial.broker.kill()
    trial.broker.start()
    trial.term.relay.sink.check_topics()
    trial.accept(*healthy(HEALTHY))
    done = first and trial.until(lambda: trial.applied() == 2 * HEALTHY)
    return done and trial.count("offsets_reset") > 0 and trial.count("applied_from_inbox") == 0


def unclean_election(trial: Trial) -> bool:
    """Another broker leads, with a shorter log. Here positions go ahead of the broker's: no cluster of several runs on this machine."""
    beyond, inside = 100, 3
    trial.accept(*healthy())
    done = trial.until(lambda: trial.applied() == HEALTHY)
    for turn_, ahead in enumerate((beyond, inside), start=1):
        trial.ingest.source.close()
        with writing(trial.engine) as connection:
            connection.execute(update(stream_offsets).values(next_offset=stream_offsets.c.next_offset + ahead))
        trial.accept(*healthy(turn_ * HEALTHY))
        trial.term.send_inbox()  # these take the places of what was lost: with three of them nobody can tell
        wanted = (turn_ + 1) * HEALTHY
        done = done and trial.until(lambda wanted=wanted: trial.applied() == wanted)
    return done and trial.count("offsets_reset") > 0 and trial.buried() == 0


def bad_times(trial: Trial) -> bool:
    """Rows as an older door accepted them."""
    first, last = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
    bad = [event_of(turn("first", started_at=first, finished_at=first)), event_of(turn("last", finished_at=last))]
    with writing(trial.engine) as connection:
        for event in bad:
            row = {
                "source": event.source, "event_id": event.id, "type": event.type, "key": event.key, "time": event.time,
                "payload": event.data, "payload_hash": payload_hash(event), "received_at": utc_now(),
            }  # fmt: skip
            connection.execute(insert(inbox), row)
    trial.accept(*healthy())
    return trial.until(lambda: trial.applied() == HEALTHY and trial.buried() == 2)


def disk_full(trial: Trial) -> bool:
    """Segments on a disk of four megabytes that something else has filled; where none can be mounted, a file stands in their way."""
    folder = trial.folder / "segments"
    with small_disk(folder) as fill:
        release = fill()
        trial.accept(*healthy())
        waits = iter(range(3))
        trial.on_wait = lambda: next(waits, None) is None and release()
        done = trial.until(lambda: trial.applied() == HEALTHY)
    return done and any(trial.said)


def fsync_error(trial: Trial) -> bool:
    """A door in a process of its own; what it acknowledged before its disk failed is there after its end, and nothing after that was."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.bench.faulty.disk", str(trial.folder / "ratchet.db")], capture_output=True, text=True, check=False
    )
    answers = dict(line.split()[::-1] for line in child.stdout.splitlines())
    acknowledged = {id_ for id_, answer in answers.items() if answer == "acknowledged"}
    refused = sorted(answers.keys() - acknowledged)
    if len(acknowledged) != disk.GOOD or len(refused) != disk.BAD:
        print(child.stderr, file=sys.stderr)
        return False
    with reading(trial.engine) as connection:
        kept = set(connection.execute(select(inbox.c.event_id)).scalars())
    if not {f"turn-{id_}" for id_ in acknowledged} <= kept:
        return False
    trial.accept(*(event_of(turn(id_)) for id_ in refused))  # a client that was refused sends again
    return trial.until(lambda: trial.applied() == len(answers)) and trial.buried() == 0


def clock_jumps(trial: Trial) -> bool:
    """Every look at the clock may be an hour off, back or forth: see `jumping`."""
    trial.accept(*healthy())
    first = trial.until(lambda: trial.applied() == HEALTHY)
    trial.accept(*healthy(HEALTHY))
    return first and trial.until(lambda: trial.applied() == 2 * HEALTHY) and trial.buried() == 0


def jumping() -> Clock:
    """A clock that is set forth and back by up to an hour, again and again; the same each time it is made."""
    draw = random.Random(7)
    return lambda: utc_now() + timedelta(seconds=draw.choice([0, 0, 3_600, -3_600, 600, -5]))


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], Callable[[], object]]]:
    """Gives what fills the disk, which gives what frees it again."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=4m") == 0

    def fill() -> Callable[[], object]:
        if not mounted:
            folder.rename(folder.with_suffix(".away"))
            folder.write_text("in the way")
            return lambda: (folder.unlink(missing_ok=True), folder.with_suffix(".away").rename(folder))
        balloon = folder / "balloon"
        with balloon.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        return lambda: balloon.unlink(missing_ok=True)

    try:
        yield fill
    finally:
        if mounted:
            libc.umount2(str(folder).encode(), 2)


TRIALS: dict[str, Callable[[Trial], bool]] = {
    "oversize": oversize, "version_skew": version_skew, "offset_reset": offset_reset,
    "unclean_election": unclean_election, "bad_times": bad_times, "disk_full": disk_full,
    "fsync_error": fsync_error, "clock_jumps": clock_jumps,
}  # fmt: skip


def run_trials() -> dict[str, bool]:
    """Which of them cost nothing but themselves."""
    return {name: _run(trial) for name, trial in TRIALS.items()}


def _run(trial: Callable[[Trial], bool]) -> bool:
    with tempfile.TemporaryDirectory(prefix="ratchet-trial-") as name, running_broker(Path(name)) as broker:
        real = Cluster(
            bootstrap=broker.cluster.servers(),
            address_file=Path(name) / "none.json",
            options=KafkaConfig(replication=1, min_insync_replicas=1),
        )
        cluster = real if trial in (offset_reset, unclean_election) else broker.cluster
        told = Trial(folder=Path(name), broker=broker, cluster=cluster, clock=jumping() if trial is clock_jumps else utc_now)
        try:
            return trial(told)
        finally:
            told.close()
