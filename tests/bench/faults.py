"""Fault injection: telemetry and labels while every process is killed and paused. `make bench-faults` (`ARGS=--quick` within 55 s)

1. Real processes (api, broker, four relays, ingests and labels, in the quick run two, two and one; SQLite, in the full run PostgreSQL
   as well) are killed with SIGKILL or paused past their timeouts, one after the other; connections to the api, the broker and
   PostgreSQL are cut, stall, crawl and lose answers to requests that arrived; the databases are locked; the broker comes back empty.
   Meanwhile clients post a story with 20 % repetitions, reordering and early feedback.
2. The labels must be byte for byte those of a run without faults; nothing may be lost or doubled.
3. Faults that do not come by chance, one by one: oversize turns, version skew, a cluster that comes back empty, bad times, a full disk,
   fsync errors, clocks that jump.
4. The eight bugs, planted in the product's own code, must be caught, and the control (HTTP as well, without an inbox) must lose events.

Ends with {"events", "kills", "pauses", "wires", "locks", "lost", "duplicated", "labels_differ", "applied_p99_s", "trials_sound", …}; exit
code 1 when a bound is broken. Every run prints its seed; `--seed` repeats it.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kafka import KafkaConsumer

from app.db.engine import open_engine
from app.db.migrate import upgrade
from app.domain.ids import utc_now
from app.trajectories.segments import ParquetSegments
from tests.bench.faulty.checks import applied_p99_s, differences, duplicated, fault_free_labels, label_lines, lost, settled
from tests.bench.faulty.locks import Lock
from tests.bench.faulty.story import make_story, utc
from tests.bench.faulty.trials import run_trials
from tests.bench.faulty.unsafe_door import post, unsafe_door
from tests.bench.faulty.wire import Wire
from tests.bench.faulty.world import World, environment, tell
from tests.bench.planted_bugs import Found, caught, hunt
from tests.broker import free_port, running_broker
from tests.killable_postgres import KillablePostgres

FINAL_PHASE_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run found."""

    database: str
    events: int
    kills: Counter[str]
    lost: int
    duplicated: int
    labels: int
    labels_differ: int
    applied_p99_s: float
    drain_s: float


def run(
    *, events: int, per_s: float, kill_every_s: float, pause_s: float, lock_s: float, seed: int, database: str, replicas: int = 2
) -> Result:  # fmt: skip
    """One story told to one deployment under torment."""
    database_port, database_front = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="ratchet-faults-") as name, _database(database, database_port) as (url, postgres):
        folder = Path(name)
        through = None if url is None else f"postgresql+psycopg://postgres@127.0.0.1:{database_front}/postgres"
        variables = environment(folder, port=free_port(), database_url=through)
        for target in {url or f"sqlite:///{folder}/{file}.db" for file in ("ratchet", "inbox")}:
            upgrade(target)
        story = make_story(events, seed=seed, now=utc(utc_now()))
        api_front, broker_front, broker_port = free_port(), free_port(), free_port()
        world = World(folder=folder, api_port=api_front, environment=variables, replicas=replicas)
        wires = {
            "wire:api": Wire(port=api_front, to=int(variables["RATCHET_PORT"])), "wire:broker": Wire(port=broker_front, to=broker_port),
        }  # fmt: skip
        if url is not None:
            wires["wire:postgres"] = Wire(port=database_front, to=database_port)
        locks = {
            f"lock:{table}": Lock(url or f"sqlite:///{folder}/{file}.db", table=table, seconds=lock_s)
            for table, file in (("inbox", "inbox"), ("turns", "ratchet"))
        }
        world.servers |= {**wires, **locks}
        if postgres is not None:
            world.servers["postgres"] = postgres
        world.start(broker_port=broker_port, broker_front=broker_front)
        over = threading.Event()
        tormentor = world.torment(period_s=kill_every_s, seed=seed, until=over, longest_pause_s=pause_s)
        tell(world, story.told, clients=2, per_s=per_s)
        over.set()
        tormentor.join()
        for lock in locks.values():
            lock.close()
        engine = open_engine(url or f"sqlite:///{folder}/ratchet.db")
        door = open_engine(url or f"sqlite:///{folder}/inbox.db")
        ended = time.monotonic()
        while not settled(engine, story) and time.monotonic() - ended < FINAL_PHASE_S:
            time.sleep(0.5)
        drain_s = time.monotonic() - ended
        world.stop()
        for wire in wires.values():
            wire.close()
        labels = label_lines(engine)
        result = Result(
            database=database, events=len(story.told), kills=world.kills, lost=len(lost(engine, story)),
            duplicated=duplicated(engine, ParquetSegments(str(folder / "segments")), story), labels=len(labels),
            labels_differ=differences(labels, fault_free_labels(story, folder)), applied_p99_s=applied_p99_s(door, engine), drain_s=drain_s,
        )  # fmt: skip
        if keep := os.environ.get("KEEP_FAULTS"):
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        engine.dispose()
        door.dispose()
        return result


@contextmanager
def _database(kind: str, port: int) -> Iterator[tuple[str | None, KillablePostgres | None]]:
    if kind == "sqlite":
        yield None, None
        return
    with KillablePostgres(port=port) as postgres:
        yield postgres.url, postgres


def control(events: int = 2_000) -> int:
    """The known-broken design: HTTP → kafka-python → broker in memory, no inbox. Returns how many acknowledged events were lost."""
    with tempfile.TemporaryDirectory() as name, running_broker(Path(name)) as broker:
        with unsafe_door(broker.cluster.servers(), topic="telemetry") as port:
            acknowledged: set[str] = set()
            for start in range(0, events, 50):
                acknowledged |= post(port, [f"x{number}" for number in range(start, start + 50)])
        broker.kill()  # after the acknowledgement, before anybody read
        broker.start()
        consumer = KafkaConsumer(
            "telemetry", bootstrap_servers=broker.cluster.servers(), auto_offset_reset="earliest", consumer_timeout_ms=3_000
        )
        seen = {record.value.decode() for record in consumer}
        consumer.close()
        return len(acknowledged - seen)


def main() -> int:
    """Run, print what was found, and answer the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a short run within 55 s")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--events", type=int)
    parser.add_argument("--database", choices=["sqlite", "postgres", "both"])
    options = parser.parse_args()
    events = options.events or (9_000 if options.quick else 100_000)
    databases = {"both": ["sqlite", "postgres"], None: ["sqlite"] if options.quick else ["sqlite", "postgres"]}.get(
        options.database, [options.database]
    )
    shares = {"sqlite": 1.0, "postgres": 0.25 if len(databases) > 1 else 1.0}
    results = [_told(int(events * shares[database]), database, options.quick, options.seed) for database in databases]
    trials = run_trials()
    for name, sound in trials.items():
        print(f"# trial {name}: {'nothing lost' if sound else 'NOT SOUND'}", flush=True)
    return _report(results, trials, _caught(), control())


def _told(events: int, database: str, quick: bool, seed: int) -> Result:
    print(f"# {database}: {events} events, seed {seed}", flush=True)
    result = run(
        events=events, per_s=400 if quick else 800, kill_every_s=0.8 if quick else 2.0, pause_s=2.0 if quick else 14.0,
        lock_s=1.0 if quick else 5.0, seed=seed, database=database, replicas=2 if quick else 4,
    )  # fmt: skip
    print(f"#   {result}", flush=True)
    return result


def _caught() -> Found:
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.db"
        upgrade(f"sqlite:///{template}")
        found = hunt(template)
    for name, (sound, broken) in found.items():
        print(f"# planted bug {name}: without it {dict(sound) or 'clean'}, with it {dict(broken) or 'NOT CAUGHT'}", flush=True)
    return found


def _report(results: list[Result], trials: dict[str, bool], bugs: Found, control_lost: int) -> int:
    print(f"# control without an inbox: {control_lost} acknowledged events lost", flush=True)
    summary = {
        "events": sum(result.events for result in results), **_faults(results),
        "lost": sum(result.lost for result in results), "duplicated": sum(result.duplicated for result in results),
        "labels_differ": sum(result.labels_differ for result in results),
        "applied_p99_s": round(max(result.applied_p99_s for result in results), 2),
        "trials": len(trials), "trials_sound": sum(trials.values()), "planted_bugs_caught": caught(bugs), "control_lost": control_lost,
    }  # fmt: skip
    print(json.dumps(summary))
    sound = summary["lost"] == summary["duplicated"] == summary["labels_differ"] == 0
    return 0 if sound and all(trials.values()) and caught(bugs) == len(bugs) and control_lost > 0 else 1


def _faults(results: list[Result]) -> dict[str, int]:
    """SIGKILLs, pauses, faults on the wire, and locks."""
    kinds: Counter[str] = Counter()
    for result in results:
        for name, count in result.kills.items():
            kinds[name.partition(":")[0] if ":" in name else "kill"] += count
    return {f"{kind}s": kinds[kind] for kind in ("kill", "pause", "wire", "lock")}


if __name__ == "__main__":
    sys.exit(main())
