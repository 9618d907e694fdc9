"""What a year of a product costs: `make bench-year` (`--quick` within 55 s; `--postgres` for a real server; `--turns N` at 1x).

The same acts over a table and over one with ten times the past: due turns, cutting a batch, forgetting a person of fifteen turns, the
numbers of /metrics. Each is the median of several, warm, on a quiet machine; beside other work the exponent is noise. What it leaves out:
the network, Kafka, and the Parquet files (segments are in memory). Ends with one line of JSON and, where a bound is missed, exit code 1.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, select, text

from app.db.batches import SqlBatchStore
from app.db.engine import open_engine, reading
from app.db.erasures import SqlEraser
from app.db.labels import SqlLabels
from app.db.migrate import upgrade
from app.db.reads import SqlReads
from app.db.relay import SqlRelayOffice
from app.db.streams import SqlEffects
from app.db.tables import metadata
from app.domain.streams import EffectBatch, JoinRules
from pipelines.batching.config import BatchingConfig
from pipelines.batching.cut import cut_batch
from tests.bench.year_data import NOW, POLICY, VERSION, Year, fill
from tests.fakes.served import applied, erasure, observation, turn
from tests.fakes.streaming import MemorySegments

COSTS = ("due_ms", "cut_ms", "erase_ms", "metrics_ms")
GROWTH = 1.2
"""What an act may cost at ten times the past, against the past once."""
TRIM_PER_S = 3 * 40_000_000 / 86_400
"""Three times the arrival of 40 M events a day."""
UNDONE = RuntimeError("measured, and rolled back")


def measure(engine: Engine, *, repeats: int) -> dict[str, float]:
    """The median milliseconds of every act, and the rates."""
    reads, book = SqlReads(engine, engine, clock=lambda: NOW), SqlLabels(engine)
    segments = MemorySegments()
    eraser = SqlEraser(engine, engine, erase_from_segment=segments.erase)
    people = iter(range(1_000_000))
    return {
        "due_ms": _median_ms(lambda: book.due(POLICY, now=NOW, limit=256), repeats),
        "cut_ms": _median_ms(lambda: _cut(engine), repeats),
        "erase_ms": _median_ms(lambda: eraser.erase(erasure(f"person-{next(people)}"), now=NOW), repeats),
        "metrics_ms": _median_ms(lambda: (reads.counters(), reads.turns_per_version(), reads.backlog()), repeats),
        "trim_rows_per_s": _trim(engine),
        "ingest_events_per_s": _ingest(engine, segments),
    }


def _median_ms(act: Callable[[], object], repeats: int) -> float:
    act()
    took: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        took.append((time.perf_counter() - began) * 1_000)
    return statistics.median(took)


def _cut(engine: Engine) -> None:
    """Cut a batch, and take it back: the next one finds the same labels."""

    class Undone(SqlBatchStore):
        @contextmanager
        def cutting(self, policy: str) -> Iterator[Any]:
            with super().cutting(policy) as session:
                yield session
                raise UNDONE

    try:
        cut_batch(
            Undone(engine), policy=POLICY, slot=18_000, champion=VERSION, anchor=VERSION, config=BatchingConfig(max_turns=256), now=NOW
        )
    except RuntimeError as error:
        if error is not UNDONE:
            raise


def _trim(engine: Engine) -> float:
    term = SqlRelayOffice(engine, engine, group="g").take("bench", now=NOW)
    assert term is not None
    began, rows = time.perf_counter(), 0
    while trimmed := term.trim(applied_before=NOW + timedelta(days=1)):
        rows += trimmed
    return rows / (time.perf_counter() - began)


def _ingest(engine: Engine, segments: MemorySegments, *, batches: int = 4, size: int = 500) -> float:
    rules = JoinRules(policies={})
    store = SqlEffects(engine, rules=lambda: rules, write_segment=segments.write_sized, erase_from_segment=segments.erase)
    began = time.perf_counter()
    for batch in range(batches):
        ids = [f"n{batch}-{n}" for n in range(size // 2)]
        effects = [turn(id_, policy=POLICY, version=VERSION) for id_ in ids] + [observation(f"o-{id_}", of=id_) for id_ in ids]
        events = tuple(applied(effect, offset=batch * size + n) for n, effect in enumerate(effects))
        store.apply(EffectBatch(events=events), now=NOW)
    return batches * size / (time.perf_counter() - began)


def _rows(engine: Engine) -> int:
    with reading(engine) as connection:
        return sum(connection.execute(select(func.count()).select_from(table)).scalar_one() for table in metadata.sorted_tables)


def _bytes(engine: Engine) -> int:
    with reading(engine) as connection:
        if engine.dialect.name == "postgresql":
            return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
        pages = connection.execute(text("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"))
        return int(pages.scalar_one())


@contextmanager
def _databases(*, postgres: bool) -> Iterator[Callable[[str], str]]:
    """Makes the URL of a migrated, empty database by name."""
    if not postgres:
        with tempfile.TemporaryDirectory() as folder:
            yield lambda name: f"sqlite:///{Path(folder) / name}.db"
        return
    from tests.postgres import running_postgres

    with running_postgres() as url:

        def create(name: str) -> str:
            server = open_engine(url.format("postgres"))
            with server.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text(f"CREATE DATABASE {name}"))
            server.dispose()
            return url.format(name)

        yield create


def run(*, turns: int, repeats: int, postgres: bool) -> dict[str, float]:
    """The figures at ten times `turns`, with the exponent of the worst growth from 1x to 10x (0: flat, 1: as the table)."""
    found: list[dict[str, float]] = []
    with _databases(postgres=postgres) as create:
        for scale in (1, 10):
            url = create(f"year_{scale}x")
            upgrade(url)
            engine = open_engine(url, session={})
            fill(engine, Year(turns=turns * scale, unlabelled=400, versions=2, kept=min(turns, 20_000)))
            sizes = {"rows": _rows(engine), "bytes_per_turn": _bytes(engine) / (turns * scale)}
            found.append(measure(engine, repeats=repeats) | sizes)
            print(f"{scale}x: {json.dumps({k: round(v, 2) for k, v in found[-1].items()})}", flush=True)
            engine.dispose()
    once, ten = found
    return ten | {"growth_exponent": max(math.log10(ten[name] / once[name]) for name in COSTS)}


def missed(figures: dict[str, float]) -> list[str]:
    """The bounds that the figures miss, as sentences."""
    told: list[str] = []
    if figures["growth_exponent"] > math.log10(GROWTH):
        told.append(f"growth_exponent is {figures['growth_exponent']:.3f}: some cost grew by more than {GROWTH} from 1x to 10x")
    if figures["trim_rows_per_s"] < TRIM_PER_S:
        told.append(f"trim_rows_per_s is {figures['trim_rows_per_s']:.0f}: three times the arrival is {TRIM_PER_S:.0f}")
    return told


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a past of 4,000 and 40,000 turns")
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL server of its own instead of SQLite")
    parser.add_argument("--turns", type=int, default=1_000_000, help="turns at 1x; ten times as many are written for 10x")
    given = parser.parse_args()
    figures = run(turns=4_000 if given.quick else given.turns, repeats=9 if given.quick else 25, postgres=given.postgres)
    told = missed(figures)
    for sentence in told:
        print(sentence, file=sys.stderr)
    names = ("rows", *COSTS, "trim_rows_per_s", "ingest_events_per_s", "bytes_per_turn", "growth_exponent")
    print(json.dumps({name: round(figures[name], 3) for name in names}))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
