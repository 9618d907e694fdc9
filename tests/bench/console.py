"""The console's pages and streams over a large deployment: a million labels, a thousand versions, a hundred thousand audit entries.

`make bench-console` (`ARGS=--quick` for a small one within a minute). The service is a process of its own, asked over HTTP; what it
asks its database is counted there. Ends with one JSON line, and exit code 1 beyond its bounds:

    page_p95_ms  worst_page  page_kb  assets_gz_kb  sse_delay_p95_ms  queries_per_s_50_viewers
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import multiprocessing
import random
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import event, text
from sqlalchemy.engine import Engine

from app import wiring
from app.console import rendering
from app.db.engine import open_engine, writing
from app.db.learning.rollups import rebuild
from app.db.release import audit
from app.db.tables import EPOCH
from app.domain.ids import utc_now
from app.settings import Settings, from_environment
from tests.broker import free_port

POLICY = "tab"
VIEWERS = 50
IDLE_S, CHANGES = 10.0, 20
BOUNDS = {
    "page_p95_ms": 200.0, "page_kb": 300.0, "assets_gz_kb": 60.0, "sse_delay_p95_ms": 1000.0, "queries_per_s_50_viewers": 2.0,
}  # fmt: skip
SEGMENTS = tuple(f"task={task},tier={tier}" for task in ("edit", "chat", "explain") for tier in ("free", "team"))


def settings_of(folder: Path, port: int) -> Settings:
    """Of a service that only this machine reaches."""
    config = folder / "ratchet.toml"
    config.write_text(f'[policies.{POLICY}]\nmodel = "m"\nbase_name = "tiny"\nbase_model = "tiny"\n')
    return from_environment({"RATCHET_DATA": str(folder), "RATCHET_CONFIG": str(config), "RATCHET_PORT": str(port)})


def fill(settings: Settings, *, labels: int, versions: int, entries: int) -> None:
    """A deployment that ran for versions × 5 h: versions, releases, turns, exposures and labels, and its audit chain."""
    wiring.upgrade_schema(settings)
    drawn, now = random.Random(5), _micros()
    raw = sqlite3.connect(settings.data / "ratchet.db", isolation_level=None)
    raw.execute("PRAGMA synchronous=OFF")
    raw.execute("BEGIN")
    step = 5 * 3600 * 1_000_000
    begun = now - versions * step
    for n in range(versions):
        at, digest, before, id_ = begun + n * step, f"d{n:05}", f"d{max(0, n - 1):05}", f"r{n:05}"
        state = "CHAMPION" if n == versions - 2 else "READY" if n == versions - 1 else "SUPERSEDED"
        common = {"policy": POLICY, "digest": digest}
        _into(
            raw, "versions", **common, name=f"tiny-v{n}", kind="rl", parent=before if n else None, step=n, base_model="tiny",
            licence="Apache-2.0", tags="{}", created_at=at,
        )  # fmt: skip
        _into(
            raw, "releases", **common, id=id_, version_name=f"tiny-v{n}", state=state, generation=7, champion_digest=before,
            champion_generation=n + 1, evidence_digest=f"e{n}", reason="as it goes", config="{}", created_at=at, changed_at=at,
            approvals_needed=1, approval_expires_at=now + step,
        )  # fmt: skip
        _into(
            raw, "deployment_history", **common, generation=n + 1, anchor="d00000", holdback=0.1, action="promote", good=1, release_id=id_,
            actor="system:watch", occurred_at=at,
        )  # fmt: skip
        _decisions(raw, id_, digest, at)
    _into(
        raw, "deployment_pointer", policy=POLICY, digest=f"d{versions - 2:05}", generation=versions, previous=f"d{versions - 3:05}",
        anchor="d00000", holdback=0.1, release_id=f"r{versions - 2:05}", changed_at=now - step,
    )  # fmt: skip
    for start in range(0, labels, 50_000):
        count = min(50_000, labels - start)
        _turns(raw, [_turn(drawn, start + n, labels=labels, versions=versions, begun=begun, step=step) for n in range(count)])
    _asked(raw, labels)
    raw.execute("COMMIT")
    raw.close()
    engine = open_engine(settings.database_url)
    with writing(engine) as connection:
        rebuild(connection)
    with writing(engine) as connection:
        for n in range(entries):
            detail = {"policy": POLICY, "reason": "as it goes", "to": "CANARY"}
            audit.append(
                connection, actor="system:watch", action="release.canary", subject=f"r{n % versions:05}", detail=detail, now=utc_now()
            )
        connection.execute(text("ANALYZE"))
    engine.dispose()


def _asked(raw: sqlite3.Connection, labels: int) -> None:
    """A tenth of the labels wait for people to read their follow-up, and a rule set was replayed over some of them."""
    raw.execute(
        "INSERT INTO follow_up_readings (inference_id, observation_id, policy, labelled_at, leaned_to, unsure)"
        " SELECT inference_id, 'f' || inference_id, policy, labelled_at, 'neutral', 1 FROM labels WHERE rowid % 10 = 0"
    )
    raw.execute(
        "INSERT INTO observations (source, id, policy, inference_id, name, value, occurred_at, received_at, tags, status)"
        " SELECT 'api', observation_id, policy, inference_id, 'follow_up', '\"and now?\"', labelled_at, labelled_at, '{}', 'joined'"
        " FROM follow_up_readings"
    )
    paid = {"edit_persistence": 0.5, "follow_up": -0.2, "length": -0.1}
    movers = [
        {"inference_id": f"i{n:08}", "segment": SEGMENTS[0], "before": 0.1, "after": -0.4, "paid_before": paid, "paid_after": paid}
        for n in range(min(50, labels))
    ]
    outcome = {
        "turns": 5_000, "changed": 2_000, "before": [0.0] * 5, "after": [0.1] * 5, "movers": movers, "excluded": {"no_signal": 5},
        "segments": {name: [800, 0.1, 0.2] for name in SEGMENTS}, "name": "other", "digest": "d" * 64,
        "terms": {name: {"spoke_before": 1, "mean_before": 0.1, "spoke_after": 2, "mean_after": 0.2} for name in paid},
    }  # fmt: skip
    common = {"policy": POLICY, "toml": "a = 1", "asked_by": "user:cora", "asked_at": _micros(), "settled_at": _micros()}
    _into(raw, "rule_set_replays", id="replay", outcome=json.dumps(outcome), **common)


def _into(raw: sqlite3.Connection, table: str, **row: Any) -> None:
    raw.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))


def _micros() -> int:
    return (utc_now() - EPOCH) // timedelta(microseconds=1)


def _decisions(raw: sqlite3.Connection, release: str, digest: str, at: int) -> None:
    effects = {f"metric_{n}": {"treated": 0.5, "control": 0.49, "n_treated": 400.0, "n_control": 800.0} for n in range(8)}
    harm = {"log_e": 0.7, "peak_log_e": 1.2, "needed": 3.0, "cause": "metric_1", "effects": effects}
    for gate, count in (("g0_training_health", 1), ("g1_offline", 1), ("g3_canary", 12)):
        for n in range(count):
            _into(
                raw, "gate_results", release_id=release, gate=gate, digest=digest, verdict="pass", action="continue", reason="fine",
                evidence=json.dumps({"harm": harm}), config_hash="c", evidence_hash="e", decided_at=at + n * 600_000_000,
            )  # fmt: skip


def _turn(drawn: random.Random, n: int, *, labels: int, versions: int, begun: int, step: int) -> tuple[Any, ...]:
    share = n / labels
    number = min(versions - 1, int(share * versions) + (drawn.random() < 0.2))
    at = begun + int(share * versions * step)
    return f"i{n:08}", f"d{number:05}", SEGMENTS[n % len(SEGMENTS)], f"p{n % 5000}", at, drawn.random(), number


def _turns(raw: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
    raw.executemany(
        "INSERT INTO turns (inference_id, episode_id, policy, version, kind, source, started_at, finished_at, label_due_at, labelled_at,"
        " segment, finish_reason, train_consent, has_logprobs, prompt_tokens, completion_tokens, tool_calls, stage, arm, probability,"
        " completion, tags, actor) VALUES (?,?,?,?,'answer','gateway',?,?,?,?,?,'stop',1,1,9,9,'[]','canary-0','candidate',0.5,'x','{}',?)",
        [(i, f"e{i}", POLICY, v, at, at, at, at, s, a) for i, v, s, a, at, _, _ in rows],
    )
    raw.executemany(
        "INSERT INTO exposures (id, policy, inference_id, episode_id, actor, stage, arm, probability, share, holdback, digest, occurred_at,"
        " release_id) VALUES (?,?,?,?,?,'canary-0','candidate',0.5,0.5,0.1,?,?,?)",
        [(f"x{i}", POLICY, i, f"e{i}", a, v, at, f"r{number:05}") for i, v, _, a, at, _, number in rows],
    )
    raw.executemany(
        "INSERT INTO labels (inference_id, revision, current, policy, version, reward, terms, rule_set, exclusion, segment, actor,"
        " held_out, finished_at, labelled_at, lot, success) VALUES (?,1,1,?,?,?,?,'rs',?,?,?,0,?,?,0,?)",
        [(i, POLICY, v, x, _terms(x), "no_signal" if x < 0.1 else None, s, a, at, at, float(x > 0.5)) for i, v, s, a, at, x, _ in rows],
    )


def _terms(x: float) -> str:
    follow_up = "null" if x < 0.5 else f"{2 * x - 1:.3f}"
    return (
        f'[{{"name":"edit_persistence","value":{x:.3f},"weight":1.0,"detail":{{"survival":{x:.3f}}}}},'
        f'{{"name":"follow_up","value":{follow_up},"weight":0.5}},{{"name":"length","value":{-x / 10:.3f},"weight":0.2}}]'
    )


def serve(folder: str, port: int, asked: Any) -> None:
    """The service, with every statement but BEGIN counted."""
    from app import main

    @event.listens_for(Engine, "before_cursor_execute")
    def _count(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not statement.startswith(("BEGIN", "PRAGMA")):
            with asked.get_lock():
                asked.value += 1

    main.serve(settings_of(Path(folder), port))


def pages(versions: int, labels: int) -> list[str]:
    """Every page, lists on their first and on a later page."""
    ready, live, middle = f"r{versions - 1:05}", f"r{versions - 2:05}", f"r{versions // 2:05}"
    far = _micros() - versions * 5 * 3600 * 1_000_000 // 2
    return [
        "", "/releases", f"/releases?after={far}.r", f"/releases/{ready}", f"/releases/{middle}", "/versions", f"/versions?after={far}.d",
        f"/versions?a=d00001&b=d{versions - 2:05}", f"/versions/d{versions // 2:05}", "/history", "/rewards", f"/rewards?after={far}.i",
        f"/labels/i{labels // 2:08}", "/data", "/trust", "/audit", "/audit?after=500", "/audit?actor=system:watch", f"/act/approve/{ready}",
        f"/act/roll_back/{live}", f"/act/pin/d{versions // 2:05}", "/readings", "/replays/replay", "/do/replay_letters/all",
    ]  # fmt: skip


def look(url: str, paths: list[str], rounds: int) -> dict[str, Any]:
    """Times of every page over HTTP, one after the other."""
    times: dict[str, list[float]] = {path: [] for path in paths}
    largest = 0
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
        for n in range(rounds + 1):
            for path in paths:
                begun = time.perf_counter()
                answer = client.get(f"/console{path}")
                took = (time.perf_counter() - begun) * 1000
                assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
                largest = max(largest, len(answer.content))
                if n:  # the first round opens files and compiles templates
                    times[path].append(took)
    p95 = {path: _p95(found) for path, found in times.items()}
    worst = max(p95, key=lambda path: p95[path])
    every = [took for found in times.values() for took in found]
    medians = {path: round(statistics.median(found), 1) for path, found in times.items()}
    worst_page = re.sub(r"[ri]?\d{4,}", "…", worst) or "/"
    return {
        "page_p95_ms": round(_p95(every), 1),
        "worst_page": worst_page,
        "worst_p95_ms": round(p95[worst], 1),
        "page_kb": round(largest / 1000, 1),
        "medians_ms": medians,
    }


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]


async def watch(settings: Settings, url: str, asked: Any) -> dict[str, float]:
    """Fifty viewers: how long a change takes to each of them, and what an idle minute asks of the database."""
    arrived: list[asyncio.Queue[float]] = [asyncio.Queue() for _ in range(VIEWERS)]
    limits = httpx.Limits(max_connections=VIEWERS + 5)
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=limits) as client:
        tasks = [asyncio.create_task(_viewer(client, queue)) for queue in arrived]
        await asyncio.gather(*(queue.get() for queue in arrived))
        before, begun = asked.value, time.perf_counter()
        await asyncio.sleep(IDLE_S)
        per_s = (asked.value - before) / (time.perf_counter() - begun)
        delays: list[float] = []
        engine = open_engine(settings.database_url)
        for n in range(CHANGES):
            await asyncio.sleep(random.Random(n).random())
            changed = time.perf_counter()
            await asyncio.to_thread(_change, engine)
            delays += [(await asyncio.wait_for(queue.get(), 20) - changed) * 1000 for queue in arrived]
        engine.dispose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"sse_delay_p95_ms": round(_p95(delays), 1), "queries_per_s_50_viewers": round(per_s, 2)}


async def _viewer(client: httpx.AsyncClient, arrived: "asyncio.Queue[float]") -> None:
    async with client.stream("GET", "/console/stream") as stream:
        async for line in stream.aiter_lines():
            if line.startswith(("retry:", "event: changed")):
                arrived.put_nowait(time.perf_counter())


def _change(engine: Engine) -> None:
    with writing(engine) as connection:
        audit.append(connection, actor="user:ada", action="bench.change", subject=POLICY, detail={}, now=utc_now())


def assets_kb() -> float:
    """Everything a page loads, compressed."""
    files = [path for path in (rendering.HERE / "static").rglob("*") if path.suffix in (".js", ".css")]
    return round(sum(len(gzip.compress(path.read_bytes())) for path in files) / 1000, 1)


def bench(*, labels: int, versions: int, entries: int, rounds: int, folder: Path | None = None) -> dict[str, Any]:
    """Fill, serve, look and watch."""
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="ratchet-console-") as name:
        port, asked = free_port(), multiprocessing.get_context("spawn").Value("q", 0)
        settings = settings_of(Path(name), port)
        begun = time.monotonic()
        if not (settings.data / "filled").is_file():
            fill(settings, labels=labels, versions=versions, entries=entries)
            (settings.data / "filled").touch()
        filled_s = time.monotonic() - begun
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(str(name), port, asked), daemon=True)
        process.start()
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url)
            looked = look(url, pages(versions, labels), rounds)
            watched = asyncio.run(watch(settings, url, asked))
        finally:
            process.kill()
            process.join()
    print(json.dumps(looked.pop("medians_ms")), file=sys.stderr)
    return {
        **looked,
        "assets_gz_kb": assets_kb(),
        **watched,
        "labels": labels,
        "versions": versions,
        "audit": entries,
        "filled_s": round(filled_s),
    }


def _wait(url: str) -> None:
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        try:
            httpx.get(f"{url}/status", timeout=5.0, trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the service did not start")


def main() -> int:
    """Print the line; 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="twenty thousand labels, 200 versions, 5,000 audit entries")
    parser.add_argument("--folder", type=Path, help="keep the deployment there, and take the one that is there")
    asked = parser.parse_args()
    quick = asked.quick
    size = {"labels": 20_000, "versions": 200, "entries": 5_000} if quick else {"labels": 1_000_000, "versions": 1_000, "entries": 100_000}
    if asked.folder:
        asked.folder.mkdir(parents=True, exist_ok=True)
    found = bench(**size, rounds=5 if quick else 20, folder=asked.folder)
    broken = [f"{name} is {found[name]}, the bound is {bound:g}" for name, bound in BOUNDS.items() if found[name] > bound]
    for sentence in broken:
        print(sentence, file=sys.stderr)
    print(json.dumps(found))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
