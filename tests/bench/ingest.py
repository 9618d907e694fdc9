"""Telemetry throughput, with authentication, schema and durable inbox. `make bench-ingest` (`ARGS=--quick` within 50 s)

Events per CPU-second of the serving process ("per core"), so that the load generator on the other core does not count. The relay and
ingestion are measured on the real broker, from the inbox to rows and segments.

Peers in the same run: MLflow's assessments over its REST API, and Karapace's REST proxy where one is running: it is not on PyPI, so name
its address in KARAPACE_REST (a topic `ingest` at the embedded broker's, acks=all); without it those two numbers are null.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, func, select, text

from app import wiring
from app.db.engine import open_engine, reading, writing
from app.db.epochs import SqlEpochs
from app.db.inbox import SqlInbox
from app.db.labels import SqlLabels
from app.db.members import SqlMembership
from app.db.migrate import upgrade
from app.db.relay import SqlRelayOffice, has_backlog
from app.db.streams import SqlEffects, SqlPositions
from app.db.tables import inbox, observations, turns
from app.domain.access import Scope
from app.domain.ids import utc_now, uuid7
from app.domain.policies import PolicyConfig
from app.domain.streams import JoinRules
from app.messaging.consumer import KafkaSource
from app.messaging.producer import KafkaSink
from app.settings import from_environment
from app.trajectories.segments import ParquetSegments
from pipelines.ingestion.config import IngestionConfig, RelayConfig
from pipelines.ingestion.ingest import Ingest
from pipelines.ingestion.relay import Relay, Term
from pipelines.labelling.config import LabellingConfig
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.bench.faulty_world import environment
from tests.broker import free_port, running_broker
from tests.fakes.served import START, at, event_of, observation, turn
from tests.killable_postgres import KillablePostgres

ROOT = Path(__file__).resolve().parents[2]
POLICY = PolicyConfig(model="unused", base_name="bench", base_model="none", label_wait_s=1)
RULES = JoinRules(policies={"composer": POLICY})
GROUP = "ratchet-ingest"


def say(words: str) -> None:
    """Progress, on a line of its own."""
    print(f"# {words}", flush=True)


# --- HTTP --------------------------------------------------------------------------------------------------------------------


def http(seconds: float) -> dict[str, Any]:
    """The door: single events on 200 connections, batches of a hundred on 16."""
    with tempfile.TemporaryDirectory() as name, _api(Path(name)) as (process, port, key):
        drive(process, port, "/v1/events", batch=1, connections=20, seconds=1.0, key=key)  # warm up
        single = drive(process, port, "/v1/events", batch=1, connections=200, seconds=seconds, key=key)
        batch = drive(process, port, "/v1/events", batch=100, connections=16, seconds=seconds, key=key)
        accepted = sum(report["events"] for report in (single, batch))
        kept = _rows(open_engine(f"sqlite:///{name}/inbox.db"))
    say(f"single {single} batch {batch}")
    return {
        "single_events_per_core_s": round(single["per_core_s"]), "single_p99_ms": round(single["p99_ms"], 1),
        "batch100_events_per_core_s": round(batch["per_core_s"]), "batch100_p99_ms": round(batch["p99_ms"], 1),
        "door_lost": max(0, accepted - kept),
    }  # fmt: skip


@contextmanager
def _api(folder: Path) -> Iterator[tuple[psutil.Process, int, str]]:
    variables = environment(folder, port=free_port())
    settings = from_environment(variables)
    wiring.upgrade_schema(settings)
    _, key = wiring.key_book(settings).create(name="bench", scopes=[Scope.INGEST])
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "app.main"], cwd=ROOT, env=variables, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{settings.port}/status", folder / "api.log")
        yield psutil.Process(process.pid), settings.port, key
    finally:
        process.terminate()
        process.wait(10)


def wait_for(url: str, log: Path, timeout_s: float = 60.0) -> None:
    """Until somebody answers there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except urllib.request.HTTPError:  # it answers
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"{url} does not answer: {log.read_text(errors='replace')[-2000:]}")


def drive(
    process: psutil.Process | None,
    port: int,
    path: str,
    *,
    batch: int,
    connections: int,
    seconds: float,
    key: str = "",
    karapace: bool = False,
) -> dict[str, Any]:
    """Load an endpoint from another process; adds events per CPU-second of the server."""
    before = _cpu_s(process)
    command = [
        sys.executable, "-m", "tests.bench.load", "--port", str(port), "--path", path, "--batch", str(batch), "--connections",
        str(connections), "--seconds", str(seconds), "--authorization", key, *(["--karapace"] if karapace else []),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    return report | {"per_core_s": report["events"] / max(1e-9, _cpu_s(process) - before), "per_s": report["events"] / report["wall_s"]}


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system


def _rows(engine: Engine) -> int:
    with reading(engine) as connection:
        count = connection.execute(select(func.count()).select_from(inbox)).scalar_one()
    engine.dispose()
    return count


# --- relay, ingestion, labels --------------------------------------------------------------------------------------------------


def streams(events: int, url: str | None) -> dict[str, float]:
    """From the inbox over the real broker to rows, in this process; rates per CPU-second of this process."""
    with tempfile.TemporaryDirectory() as name, running_broker(Path(name)) as broker:
        folder = Path(name)
        state_url = url or f"sqlite:///{folder}/state.db"
        upgrade(state_url)
        engine = open_engine(state_url)
        door = SqlInbox(engine, free_bytes=lambda: 1 << 40)
        for start in range(0, events, 1_000):
            door.append_blocking([event for n in range(start, min(start + 1_000, events), 4) for event in _about(n)])
        door.close()
        segments = ParquetSegments(str(folder / "segments"))
        store = SqlEffects(engine, rules=lambda: RULES, write_segment=segments.write_sized, erase_from_segment=segments.erase)
        relay = Relay(
            office=SqlRelayOffice(engine, engine, group=GROUP),
            sink=KafkaSink(broker.cluster, SqlEpochs(engine)),
            store=store,
            config=RelayConfig(),
        )
        office = relay.office.take("bench", now=utc_now())
        assert office is not None
        term = Term(relay=relay, term=office)
        relay.sink.check_topics()
        relay.sink.send([])
        gc.freeze()  # as the processes do when they are ready
        sent_per_s = _rate(lambda: _until(term.send_inbox, events), events)
        source = KafkaSource(
            broker.cluster, SqlEpochs(engine), SqlMembership(engine, group=GROUP), group=GROUP,
            positions=SqlPositions(engine, group=GROUP), backlog=lambda: has_backlog(engine),
        )  # fmt: skip
        member = Ingest(source=source, store=store, config=IngestionConfig())
        _until(member.step, 1)
        applied_per_s = _rate(lambda: _until(member.step, events - _applied(engine)), events)
        labelled_per_s = _labels_per_s(engine)
        found = _applied(engine)
        source.close()
        relay.sink.close()
        engine.dispose()
    return {
        "relay": sent_per_s, "ingest": applied_per_s, "labels": labelled_per_s, "lost": max(0, events - found),
        "duplicated": max(0, found - events),
    }  # fmt: skip


def _about(number: int) -> list[Any]:
    """A turn that ended ten minutes ago and three ratings of it, all in time."""
    id_, ended_s = uuid7(), (utc_now() - START).total_seconds() - 600
    said = [observation(uuid7(), of=id_, value=0.5, occurred=ended_s + second) for second in (5, 10, 15)]
    return [event_of(effect) for effect in (turn(id_, finished=ended_s, actor=f"actor-{number % 999}"), *said)]


def _until(step: Any, wanted: int, timeout_s: float = 120.0) -> int:
    done, deadline = 0, time.monotonic() + timeout_s
    while done < wanted and time.monotonic() < deadline:
        done += step()
    return done


def _rate(act: Any, events: int) -> float:
    """Events per CPU-second of this process, threads included."""
    before = time.process_time()
    act()
    return events / (time.process_time() - before)


def _applied(engine: Engine) -> int:
    with reading(engine) as connection:
        return sum(connection.execute(select(func.count()).select_from(table)).scalar_one() for table in (turns, observations))


def _labels_per_s(engine: Engine) -> float:
    rule_set, book, labelled = parse_rule_set(default_toml()), SqlLabels(engine), 0
    before = time.process_time()
    while made := label_due(book, policy="composer", config=POLICY, rule_set=rule_set, now=utc_now(), limit=LabellingConfig().batch_turns):
        labelled += made
    return labelled / (time.process_time() - before)


# --- memory ---------------------------------------------------------------------------------------------------------------------


def memory(open_turns: int) -> float:
    """Resident memory (MB) of a process that ingests and labels while so many turns are open."""
    with tempfile.TemporaryDirectory() as name:
        url = f"sqlite:///{name}/state.db"
        upgrade(url)
        _fill(open_engine(url), open_turns)
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.ingest", "--memory-of", url], cwd=ROOT, capture_output=True, text=True, check=True
        )
    return float(done.stdout.strip().splitlines()[-1])


def _fill(engine: Engine, count: int) -> None:
    """Open turns that are due in a year, made by the database itself."""
    columns = [column for column in turns.c if not column.nullable and column.server_default is None]
    due = int(at(365 * 86_400).timestamp() * 1e6)
    values = {"inference_id": "'open-' || i", "episode_id": "'e-' || i", "label_due_at": str(due), "tool_calls": "'[]'", "tags": "'{}'"}
    chosen = ", ".join(
        values.get(column.name, "'x'" if "CHAR" in str(column.type) or "TEXT" in str(column.type) else "1") for column in columns
    )
    names = ", ".join(column.name for column in columns)
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
    with writing(engine) as connection:
        connection.execute(text(f"{numbers} INSERT INTO turns ({names}) SELECT {chosen} FROM n"))
    engine.dispose()


def memory_of(url: str) -> None:
    """In a process of its own: ingest and label a while, then print the peak of resident memory in MB."""
    from app.domain.streams import EffectBatch
    from pipelines.ingestion.decode import sort_out
    from tests.fakes.served import delivery_of

    engine = open_engine(url)
    with tempfile.TemporaryDirectory() as folder:
        segments = ParquetSegments(folder)
        store = SqlEffects(engine, rules=lambda: RULES, write_segment=segments.write_sized, erase_from_segment=segments.erase)
        for start in range(0, 10_000, 2_000):
            said = [event_of(observation(uuid7(), of=f"open-{n + 1}")) for n in range(start, start + 1_500)]
            said += [event for n in range(125) for event in _about(n)]
            events, _ = sort_out([delivery_of(event, offset=start + n) for n, event in enumerate(said)])
            store.apply(EffectBatch(events=tuple(events)), now=utc_now())
        store.expire_parked(now=utc_now())
        _labels_per_s(engine)
    status = Path("/proc/self/status").read_text()  # not ru_maxrss: that begins with the memory of the process that started this one
    print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


# --- peers ------------------------------------------------------------------------------------------------------------------------


def karapace(seconds: float) -> dict[str, int | None]:
    """Karapace's REST proxy at KARAPACE_REST (127.0.0.1:PORT), if there is one; its process's CPU time where KARAPACE_PID names it."""
    address = os.environ.get("KARAPACE_REST", "")
    if not address:
        say("no Karapace: it is not on PyPI; KARAPACE_REST=127.0.0.1:PORT names a running one")
        return {"karapace_single_per_core_s": None, "karapace_batch100_per_core_s": None}
    port, pid = int(address.rpartition(":")[2]), os.environ.get("KARAPACE_PID", "")
    process = psutil.Process(int(pid)) if pid else None
    rate = "per_core_s" if process else "per_s"
    single = drive(process, port, "/topics/ingest", batch=1, connections=200, seconds=seconds, karapace=True)
    batch = drive(process, port, "/topics/ingest", batch=100, connections=16, seconds=seconds, karapace=True)
    return {"karapace_single_per_core_s": round(single[rate]), "karapace_batch100_per_core_s": round(batch[rate])}


def mlflow_assessments(seconds: float) -> float:
    """Feedback on traces over MLflow's own server (SQLite, one worker), one after the other."""
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        command = [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{name}/mlflow.db", "--artifacts-destination", name,
            "--port", str(port), "--workers", "1",
        ]  # fmt: skip
        with (Path(name) / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=name, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", Path(name) / "log", timeout_s=120)
            done = subprocess.run(
                [sys.executable, "-c", _MLFLOW_CLIENT, str(port), str(seconds)], capture_output=True, text=True, check=True
            )
            return float(done.stdout.strip().splitlines()[-1])
        finally:
            for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
                process.kill()
            server.wait()


_MLFLOW_CLIENT = """
import sys, time, mlflow
mlflow.set_tracking_uri(f"http://127.0.0.1:{sys.argv[1]}")
mlflow.set_experiment("bench")
with mlflow.start_span("turn") as span:
    pass
mlflow.flush_trace_async_logging()
trace, until, count = span.trace_id, time.perf_counter() + float(sys.argv[2]), 0
started = time.perf_counter()
while time.perf_counter() < until:
    mlflow.log_feedback(trace_id=trace, name=f"rating-{count}", value=1.0)
    count += 1
print(count / (time.perf_counter() - started))
"""


def main() -> int:
    """Measure everything and print the JSON line; exit code 1 when a required figure is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        memory_of(options.memory_of)
        return 0
    summary = measure(quick=options.quick)
    print(json.dumps(summary))
    return 0 if kept(summary) else 1


def measure(*, quick: bool) -> dict[str, Any]:
    """All figures."""
    summary: dict[str, Any] = http(3.0 if quick else 10.0)
    summary |= karapace(3.0 if quick else 10.0)
    summary["mlflow_assessments_per_s"] = round(mlflow_assessments(2.0 if quick else 10.0))
    sqlite = streams(12_000 if quick else 100_000, None)
    say(f"streams on SQLite {sqlite}")
    with KillablePostgres() as server:
        postgres = streams(6_000 if quick else 50_000, server.url)
    say(f"streams on PostgreSQL {postgres}")
    open_turns = 200_000 if quick else 1_000_000
    summary |= {
        "relay_events_per_s": round(sqlite["relay"]), "ingest_events_per_s_sqlite": round(sqlite["ingest"]),
        "ingest_events_per_s_postgres": round(postgres["ingest"]), "labels_per_s": round(sqlite["labels"]),
        "rss_mb_at_1e6_open_turns": round(memory(open_turns)), "open_turns": open_turns,
        "lost": int(sqlite["lost"] + postgres["lost"] + summary.pop("door_lost")),
        "duplicated": int(sqlite["duplicated"] + postgres["duplicated"]),
    }  # fmt: skip
    return summary


def kept(summary: dict[str, Any]) -> bool:
    """Whether the required figures are reached."""
    required = {
        "single_events_per_core_s": 8_000, "batch100_events_per_core_s": 40_000, "relay_events_per_s": 30_000,
        "ingest_events_per_s_sqlite": 10_000, "labels_per_s": 10_000,
    }  # fmt: skip
    missed = [f"{name} is {summary[name]}, below {least}" for name, least in required.items() if summary[name] < least]
    missed += [f"{name} is {summary[name]}" for name in ("lost", "duplicated") if summary[name]]
    missed += [
        f"{name} is {summary[name]}, above {most}"
        for name, most in {"single_p99_ms": 50, "rss_mb_at_1e6_open_turns": 512}.items()
        if summary[name] > most
    ]
    for peer, ours, times in (("single", "single", 1.3), ("batch100", "batch100", 2.5)):
        theirs = summary[f"karapace_{peer}_per_core_s"]
        if theirs is not None and summary[f"{ours}_events_per_core_s"] < times * theirs:
            missed.append(f"{ours} is below {times} times Karapace's {theirs}")
    for sentence in missed:
        say(f"missed: {sentence}")
    return not missed


if __name__ == "__main__":
    sys.exit(main())
