"""Telemetry throughput, with authentication, schema and durable inbox. `make bench-ingest` (`ARGS=--quick` for a short form)

Keys end in what their figure is per. `…_per_cpu_s`: events per CPU-second of the one process that does this part ("per core"); the load
generator, the broker and a database server are left out of it, and so is all waiting. `…_per_s`: events per second by the wall, with all of
that, on whatever the machine had left. Warm-up, start-up and the joining of the consumer group are left out of both, with their events;
they are not left out of `lost` and `duplicated`, which compare every acknowledged id with what is kept (`tests.bench.common.accounts`).

| bound                                                        | least or most                                             |
|--------------------------------------------------------------|-----------------------------------------------------------|
| `single_events_per_cpu_s`, `batch100_events_per_cpu_s`       | 8,000; 40,000                                             |
| `single_p99_ms`                                              | 50                                                        |
| `relay_events_per_s`                                         | 30,000: one process, sustained, the broker's word awaited |
| `ingest_events_per_cpu_s_sqlite`, `labels_per_cpu_s`         | 10,000; 10,000                                            |
| `rss_mb_at_open_turns`                                       | 512                                                       |
| `lost`, `duplicated`                                         | 0                                                         |
| Karapace's, per CPU-second, where one runs                   | a 1.3th, a 2.5th of ours                                  |

Exit code 1 where one is missed, with a sentence for each. MLflow gets the same load on the same number of connections, 200 and one.
"""

import argparse
import json
import sys
from typing import Any

from tests.bench.common.accounts import Accounts
from tests.bench.ingesting.door import CONNECTIONS, DoorFigures, measure_door
from tests.bench.ingesting.memory import memory
from tests.bench.ingesting.peers import MlflowFigures, karapace, mlflow_assessments
from tests.bench.ingesting.streams import StreamFigures, measure_streams
from tests.killable_postgres import KillablePostgres

AT_LEAST = {
    "single_events_per_cpu_s": 8_000, "batch100_events_per_cpu_s": 40_000, "relay_events_per_s": 30_000,
    "ingest_events_per_cpu_s_sqlite": 10_000, "labels_per_cpu_s": 10_000,
}  # fmt: skip
AT_MOST = {"single_p99_ms": 50, "rss_mb_at_open_turns": 512, "lost": 0, "duplicated": 0}
TIMES_KARAPACE = {"single": 1.3, "batch100": 2.5}


def say(words: str) -> None:
    """Progress, on a line of its own."""
    print(f"# {words}", flush=True)


def main() -> int:
    """Measure everything and print the JSON line; exit code 1 when a required figure is missed."""
    parser = argparse.ArgumentParser(description="Telemetry throughput; the last line is JSON.")
    parser.add_argument("--quick", action="store_true", help="a short form of everything")
    summary = measure(quick=parser.parse_args().quick)
    for sentence in missed(summary):
        say(f"missed: {sentence}")
    print(json.dumps(summary))
    return 1 if missed(summary) else 0


def measure(*, quick: bool) -> dict[str, Any]:
    """All figures."""
    seconds = 3.0 if quick else 10.0
    door = measure_door(seconds)
    peer = mlflow_assessments(seconds, connections=CONNECTIONS)
    proxy = karapace(seconds, connections=CONNECTIONS)
    sqlite = measure_streams(12_000 if quick else 100_000, None)
    with KillablePostgres() as server:
        postgres = measure_streams(6_000 if quick else 50_000, server.url)
    open_turns = 200_000 if quick else 1_000_000
    single, batch = proxy if proxy else (None, None)
    return {
        **door_keys(door), **peer_keys(peer), "karapace_single_per_cpu_s": single, "karapace_batch100_per_cpu_s": batch,
        **stream_keys(sqlite, postgres), **totals(door.accounts, sqlite.accounts, postgres.accounts),
        "rss_mb_at_open_turns": round(memory(open_turns)), "open_turns": open_turns,
    }  # fmt: skip


def door_keys(door: DoorFigures) -> dict[str, Any]:
    """The door's part of the line."""
    return {
        "single_events_per_cpu_s": round(door.single.rate.per_cpu_s), "single_events_per_s": round(door.single.rate.per_s),
        "single_p99_ms": round(door.single.p99_ms, 1), "one_connection_events_per_s": round(door.alone.rate.per_s),
        "batch100_events_per_cpu_s": round(door.batch100.rate.per_cpu_s), "batch100_events_per_s": round(door.batch100.rate.per_s),
        "batch100_p99_ms": round(door.batch100.p99_ms, 1),
        "refused": sum(load.refused for load in (door.single, door.alone, door.batch100)),
    }  # fmt: skip


def peer_keys(peer: MlflowFigures) -> dict[str, Any]:
    """MLflow's part of the line."""
    return {
        "mlflow_assessments_per_cpu_s": round(peer.single.rate.per_cpu_s), "mlflow_assessments_per_s": round(peer.single.rate.per_s),
        "mlflow_p99_ms": round(peer.single.p99_ms, 1), "mlflow_refused": peer.single.refused,
        "mlflow_one_connection_assessments_per_s": round(peer.alone.rate.per_s),
    }  # fmt: skip


def stream_keys(sqlite: StreamFigures, postgres: StreamFigures) -> dict[str, Any]:
    """The streams' part of the line."""
    return {
        "relay_events_per_cpu_s": round(sqlite.relay.per_cpu_s), "relay_events_per_s": round(sqlite.relay.per_s),
        "ingest_events_per_cpu_s_sqlite": round(sqlite.ingest.per_cpu_s), "ingest_events_per_s_sqlite": round(sqlite.ingest.per_s),
        "ingest_events_per_cpu_s_postgres": round(postgres.ingest.per_cpu_s), "ingest_events_per_s_postgres": round(postgres.ingest.per_s),
        "labels_per_cpu_s": round(sqlite.labels.per_cpu_s), "labels_per_s": round(sqlite.labels.per_s),
        "events": [sqlite.events, postgres.events], "ingest_left_out": [sqlite.ingest_left_out, postgres.ingest_left_out],
        "sent_twice": sqlite.sent_twice + postgres.sent_twice,
    }  # fmt: skip


def totals(*accounts: Accounts) -> dict[str, int]:
    """Losses and doubles of every part."""
    return {"lost": sum(one.lost for one in accounts), "duplicated": sum(one.duplicated for one in accounts)}


def missed(summary: dict[str, Any]) -> list[str]:
    """The required figures that are not reached, a sentence each. A figure that is not a number is not reached."""
    found = [f"{name} is {summary[name]}, below {least}" for name, least in AT_LEAST.items() if not summary[name] >= least]
    found += [f"{name} is {summary[name]}, above {most}" for name, most in AT_MOST.items() if not summary[name] <= most]
    for name, times in TIMES_KARAPACE.items():
        theirs = summary[f"karapace_{name}_per_cpu_s"]
        if theirs is not None and not summary[f"{name}_events_per_cpu_s"] >= times * theirs:
            found.append(f"{name} is below {times} times Karapace's {theirs}")
    return found


if __name__ == "__main__":
    sys.exit(main())
