"""What a lost PostgreSQL costs, by its size: `make bench-restore` (`ARGS="--gigabytes 1"`; it takes two and a half times that of disk)

    nine tenths of the rows ─▶ base backup ─▶ the last tenth, which is replayed ─▶ a second hand, one small commit after the other
    ─▶ SIGKILL, and the disk is gone ─▶ base backup and archived log, to the log's end ─▶ which second was the last?

The quiet seconds before the end are the worst for the log: a file of it (16 MB) is archived when it is full or `archive_timeout` old.

Ends with {"gigabytes", "base_backup_s", "restored_s", "restored_per_10_gb_s", "lost_s", "lost_commits", …}; exit code 1 where a bound
does not hold (facts/infra.md, section 6: what the last 60 s said may be lost, and a restore takes ten minutes for every 10 GB).
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from app.db.operations.server import MOST_LOST_S
from tests.archived_postgres import ArchivedPostgres

ROW_BYTES = 1_000
ROWS_A_GIGABYTE = 1_000_000
CHUNK = 200_000
"""Rows of one transaction."""
REPLAYED = 0.1
"""Share of the rows that comes after the base backup."""
QUIET_S = (40.0, 100.0)
"""How long the second hand goes before the end; the moment is drawn, because a file of the log may just have been closed."""
BEAT_S = 0.1
RESTORED_PER_10_GB_S = 600.0


def fill(server: ArchivedPostgres, rows: int) -> None:
    """Append so many rows of a kilobyte, which compression does not make smaller."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS ballast (id bigserial PRIMARY KEY, body text STORAGE PLAIN)")
        for start in range(0, rows, CHUNK):
            wanted = min(CHUNK, rows - start)
            row = sql.SQL("repeat(md5(random()::text), {})").format(sql.Literal(ROW_BYTES // 32))
            connection.execute(sql.SQL("INSERT INTO ballast (body) SELECT {} FROM generate_series(1, {})").format(row, sql.Literal(wanted)))
            print(f"# {start + wanted:,} of {rows:,} rows", file=sys.stderr, flush=True)


def tick(server: ArchivedPostgres, seconds: float) -> list[float]:
    """Commit one small row after the other; when each was acknowledged (monotonic)."""
    acknowledged: list[float] = []
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE beats (number bigint PRIMARY KEY)")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            connection.execute("INSERT INTO beats VALUES (%s)", (len(acknowledged),))
            acknowledged.append(time.monotonic())
            time.sleep(BEAT_S)
    return acknowledged


def measured(server: ArchivedPostgres, *, gigabytes: float, seed: int) -> dict[str, Any]:
    """The whole story; figures."""
    rows = round(gigabytes * ROWS_A_GIGABYTE)
    took: dict[str, float] = {}
    fill(server, rows - round(rows * REPLAYED))
    server.switch()
    server.forget_archive()
    with _timed(took, "base_backup_s"):
        base = server.base_backup()
    fill(server, round(rows * REPLAYED))
    acknowledged = tick(server, random.Random(seed).uniform(*QUIET_S))
    size = _one(server, "SELECT sum(pg_database_size(oid))::bigint FROM pg_database")
    server.lose()
    with _timed(took, "restored_s"):
        server.restore(base, None, patience_s=3 * RESTORED_PER_10_GB_S)
    kept = _one(server, "SELECT coalesce(max(number), -1) FROM beats") + 1
    whole = _one(server, "SELECT count(*) FROM ballast") == rows and _one(server, "SELECT count(*) FROM beats") == kept
    shutil.rmtree(base)
    return {
        "gigabytes": round(size / 1e9, 2), **{name: round(seconds, 1) for name, seconds in took.items()},
        "restored_per_10_gb_s": round(took["restored_s"] / size * 1e10, 1), "commits": len(acknowledged),
        "lost_commits": len(acknowledged) - kept, "lost_s": round(acknowledged[-1] - acknowledged[max(kept - 1, 0)], 1), "whole": whole,
        "quiet_s": round(acknowledged[-1] - acknowledged[0], 1), "seed": seed,
    }  # fmt: skip


def _one(server: ArchivedPostgres, query: str) -> int:
    with psycopg.connect(server.conninfo) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def _timed(took: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    took[name] = time.monotonic() - started
    print(f"# {name} {took[name]:.1f}", file=sys.stderr, flush=True)


def missed(found: dict[str, Any]) -> list[str]:
    """Bounds that do not hold."""
    bounds = {"lost_s": MOST_LOST_S, "restored_per_10_gb_s": RESTORED_PER_10_GB_S}
    told = [f"{name} is {found[name]}, {bound:g} is the bound" for name, bound in bounds.items() if found[name] > bound]
    return told + ([] if found["whole"] else ["what was restored has gaps"])


def main() -> int:
    """Run it, print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restore")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of rows")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000, help="of the moment at which the server is lost")
    options = parser.parse_args()
    with ArchivedPostgres() as server:
        found = measured(server, gigabytes=options.gigabytes, seed=options.seed)
    told = missed(found)
    print(json.dumps({**found, "missed": told}))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
