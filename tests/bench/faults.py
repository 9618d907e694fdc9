"""Fault injection: telemetry and labels while every process is killed and paused. `make bench-faults` (`ARGS=--quick` within 55 s)

1. Real processes (a broker, four relays, ingests, labels and, on PostgreSQL, doors; in the quick run two, two and one) are killed with
   SIGKILL or paused past their timeouts, one after the other; connections of each of them to the broker and to PostgreSQL, and of clients
   to each door, are cut, stall, crawl and lose answers to requests that arrived; the databases are locked; the broker comes back empty;
   PostgreSQL is killed, and lost, so that its synchronous standby takes over and gets a standby of its own.
   Meanwhile clients post a story with 20 % repetitions, reordering and early feedback.
2. The labels must be byte for byte those of a run without faults; nothing that was acknowledged may be lost, nothing doubled.
3. The same with kills alone, one every three seconds: 99 of 100 events are applied within 20 s (not in the quick run).
4. Faults that do not come by chance, one by one: oversize turns, version skew, a cluster that comes back empty, bad times, a full disk,
   fsync errors, clocks that jump.
5. The eight bugs, planted in the product's own code, must be caught, and the control (HTTP as well, without an inbox) must lose events.

Ends with {"events", "kills", "pauses", "wires", "locks", "failovers", "lost", "duplicated", "labels_differ", "applied_p99_s",
"kills_applied_p99_s", "trials_sound", …}; exit code 1 when a bound is broken. Every run prints its seed; `--seed` repeats it.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kafka import KafkaConsumer
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from app.db.engine import open_engine
from app.db.migrate import upgrade
from app.domain.ids import utc_now
from app.trajectories.segments import ParquetSegments
from tests.bench.faulty.checks import applied_p99_s, differences, duplicated, fault_free_labels, label_lines, lost, settled, unlike
from tests.bench.faulty.deployment import Torment, tormented
from tests.bench.faulty.story import Story, make_story, utc
from tests.bench.faulty.trials import run_trials
from tests.bench.faulty.unsafe_door import post, unsafe_door
from tests.bench.faulty.world import tell
from tests.bench.planted_bugs import Found, caught, hunt
from tests.broker import running_broker

FINAL_PHASE_S = 90.0
TOLD = 6
"""Labels that are not alike, at most, of each part."""
KILLS_P99_S = 20.0
"""From the door to its effect, 99 events of a hundred, where somebody is killed every three seconds."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run found."""

    database: str
    torment: str
    events: int
    kills: Counter[str]
    lost: int
    duplicated: int
    labels: int
    labels_differ: int
    applied_p99_s: float
    drain_s: float


def run(*, events: int, per_s: float, seed: int, database: str, torment: Torment) -> Result:
    """One story told to one deployment under torment."""
    with tempfile.TemporaryDirectory(prefix="ratchet-faults-") as name, tormented(Path(name), database, torment) as (world, url):
        story = make_story(events, seed=seed, now=utc(utc_now()))
        over = threading.Event()
        tormentor = world.torment(period_s=torment.kill_every_s, seed=seed, until=over, longest_pause_s=torment.pause_s)
        tell(world, story.told, clients=2, per_s=per_s / world.slowness)
        over.set()
        tormentor.join()
        engine, door = (open_engine(url(file)) for file in ("ratchet", "inbox"))
        drain_s = _drained(engine, story)
        print(f"#   slowness {world.slowness:.1f}", flush=True)
        world.stop()
        labels, wanted = label_lines(engine), fault_free_labels(story, Path(name))
        for line in sorted(unlike(labels, wanted))[:TOLD]:
            print(f"#   not alike: {line}", flush=True)
        result = Result(
            database=database, torment=torment.name, events=len(story.told), kills=world.kills, lost=len(lost(engine, story)),
            duplicated=duplicated(engine, ParquetSegments(f"{name}/segments"), story), labels=len(labels),
            labels_differ=differences(labels, wanted), applied_p99_s=applied_p99_s(door, engine),
            drain_s=drain_s,
        )  # fmt: skip
        if keep := os.environ.get("KEEP_FAULTS"):
            shutil.copytree(name, keep, dirs_exist_ok=True)
        engine.dispose()
        door.dispose()
        return result


def _drained(engine: Engine, story: Story) -> float:
    """Seconds until nothing was left to do, or the patience was over. A server that fails over at this moment is waited for."""
    ended = time.monotonic()
    while time.monotonic() - ended < FINAL_PHASE_S:
        with suppress(OperationalError):
            if settled(engine, story):
                break
        time.sleep(0.5)
    return time.monotonic() - ended


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
    shares = {"sqlite": 1.0, "postgres": 0.5 if len(databases) > 1 else 1.0}
    results = [
        _told(int(events * shares[database] * share), database, torment, 400, options.seed)
        for database in databases
        for torment, share in ([(QUICK, 1.0)] if options.quick else [(WHOLE, 1.0), (KILLS, 0.5)])
    ]
    trials = run_trials()
    for name, sound in trials.items():
        print(f"# trial {name}: {'nothing lost' if sound else 'NOT SOUND'}", flush=True)
    return _report(results, trials, _caught(), control())


QUICK = Torment(name="everything", kill_every_s=0.8, pause_s=2.0, lock_s=1.0, wires=True, replicas=2)
WHOLE = Torment(name="everything", kill_every_s=2.0, pause_s=14.0, lock_s=5.0, wires=True)
KILLS = Torment(name="kills", kill_every_s=3.0)


def _told(events: int, database: str, torment: Torment, per_s: float, seed: int) -> Result:
    print(f"# {database}, {torment.name}: {events} events, seed {seed}", flush=True)
    result = run(events=events, per_s=per_s, seed=seed, database=database, torment=torment)
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
    p99 = {name: [r.applied_p99_s for r in results if r.torment == name] for name in ("everything", "kills")}
    summary = {
        "events": sum(result.events for result in results), **_faults(results),
        "lost": sum(result.lost for result in results), "duplicated": sum(result.duplicated for result in results),
        "labels_differ": sum(result.labels_differ for result in results),
        "applied_p99_s": round(max(p99["everything"]), 2), "kills_applied_p99_s": round(max(p99["kills"]), 2) if p99["kills"] else None,
        "trials": len(trials), "trials_sound": sum(trials.values()), "planted_bugs_caught": caught(bugs), "control_lost": control_lost,
    }  # fmt: skip
    print(json.dumps(summary))
    sound = summary["lost"] == summary["duplicated"] == summary["labels_differ"] == 0 and max(p99["kills"], default=0) <= KILLS_P99_S
    return 0 if sound and all(trials.values()) and caught(bugs) == len(bugs) and control_lost > 0 else 1


def _faults(results: list[Result]) -> dict[str, int]:
    """SIGKILLs, pauses, faults on the wire, locks, and standbys that took over."""
    kinds: Counter[str] = Counter()
    for result in results:
        for name, count in result.kills.items():
            kinds[name.partition(":")[0] if ":" in name or name == "failover" else "kill"] += count
    return {f"{kind}s": kinds[kind] for kind in ("kill", "pause", "wire", "lock", "failover")}


if __name__ == "__main__":
    sys.exit(main())
