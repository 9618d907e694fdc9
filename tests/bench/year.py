"""What a year of a product costs: `make bench-year` (`--quick` within 55 s; `--postgres` for a real server; `--turns N` at 1x).

The same acts over a table and over one with ten times the past: due turns, cutting a batch, forgetting a person of fifteen turns, the
numbers of /metrics, ingestion, trimming, retention. Each is the median of several, warm, on a quiet machine; beside other work the
exponent is noise. At the end a person is forgotten while ingestion is behind and after much was buried: of what waits in the inbox and of
dead letters every payload is looked into (`erase_ms_per_1000_waiting`, `…_letters`). What it leaves out: the network, Kafka, and the
Parquet files (segments are in memory). Ends with one line of JSON and, where a bound is missed, exit code 1; 2 where the disk is too small.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine, Table, func, insert, select, text, update

from app.db.access.erasures import SqlEraser
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.relay import SqlRelayOffice
from app.db.ingestion.streams import SqlEffects
from app.db.learning.batches import SqlBatchStore
from app.db.learning.labels import SqlLabels
from app.db.migrate import upgrade
from app.db.reads import SqlReads
from app.db.tables import dead_letters, inbox, metadata, turns
from app.db.upkeep import eras, identities, past
from app.db.upkeep.needs import Needs
from app.domain.telemetry.streams import EffectBatch, JoinRules
from pipelines.batching.config import BatchingConfig
from pipelines.batching.cut import cut_batch
from tests.bench.year_data import NOW, POLICY, VERSION, Year, fill
from tests.fakes.served import applied, erasure, observation, turn
from tests.fakes.streaming import MemorySegments

T = TypeVar("T")
COSTS = ("due_ms", "cut_ms", "erase_ms", "metrics_ms", "ingest_ms_per_1000", "trim_ms_per_1000", "retire_ms_per_1000")
BOUNDED = COSTS[:6]
"""Retention has a rate to keep: old rows lie on as many pages of the indexes over people and lots, unless those have fewer."""
GROWTH = 1.2
"""What an act may cost at ten times the past, against the past once."""
TRIM_PER_S = 3 * 40_000_000 / 86_400
"""Three times the arrival of 40 M events a day."""
RETIRED = 500
"""Turns of one step of retention, as `app.db.upkeep.keeper` takes them; fewer where there are few at all."""
INGESTED = 500
"""Events of one transaction of ingestion."""
RETIRE_PER_S = 3 * 130_000_000 / 86_400
"""Three times what those events leave: 40 M rows of the inbox, as many deduplication rows, 30 M observations, 20 M of turns and labels."""
WAITING, LETTERS = 50_000, 10_000
LOOKED_INTO = {"erase_ms_per_1000_waiting": 20.0, "erase_ms_per_1000_letters": 100.0}
"""What an erasure may pay for each thousand of them."""
BYTES, BYTES_SAID, LEAVE = 2_600, 450, 5 * 2**30
"""On the disk: a turn with all that comes with it, an observation, and what is left to others, PostgreSQL's log among them."""
UNDONE = RuntimeError("measured, and rolled back")


class Acts:
    """What is measured, over one database: each act by its name, as often as it is called."""

    def __init__(self, engine: Engine, *, step: int) -> None:
        self.engine = engine
        self.postgres = engine.dialect.name == "postgresql"
        self.step = step
        """Turns that retention looks at in one transaction."""
        self.segments = MemorySegments()
        self._reads, self._book = SqlReads(engine, engine, clock=lambda: NOW), SqlLabels(engine)
        self._eraser = SqlEraser(engine, engine, segments=self.segments)
        self._people, self._batches = iter(range(1_000_000)), iter(range(1_000_000))
        term = SqlRelayOffice(engine, engine, group="g").take("bench", now=NOW)
        assert term is not None
        self._term = term
        self._looked = 0

    def due_ms(self) -> None:
        """Turns whose wait is over."""
        self._book.due(POLICY, now=NOW, limit=256)

    def cut_ms(self) -> None:
        """Cut a batch, and take it back: the next one finds the same labels."""
        _cut(self.engine)

    def erase_ms(self) -> None:
        """A person of fifteen turns, another one each time."""
        self._eraser.erase(erasure(f"person-{next(self._people)}"), now=NOW)

    def metrics_ms(self) -> None:
        """The numbers of /metrics."""
        for read in (self._reads.counters, self._reads.turns_per_version, self._reads.backlog):
            read()

    def trim(self) -> int:
        """One transaction of trimming; returns its rows, 0 when nothing is old any more. PostgreSQL: the inbox's oldest era goes."""
        if self.postgres:
            return eras.drop_oldest(self.engine, before=NOW + timedelta(days=1)) or 0
        return self._term.trim(applied_before=NOW + timedelta(days=1))

    def retire(self) -> int:
        """A step of each class that grows with traffic, of the oldest rows; returns how many rows went."""
        identities_ = 0
        if not self.postgres:  # there they went with their era
            with writing(self.engine) as connection:
                identities_, self._looked = identities.forget_inbox(connection, before=NOW, limit=self.step, after=self._looked)
        with writing(self.engine) as connection:
            applied_ = identities.forget_applied(connection, before=NOW, limit=self.step)
        with writing(self.engine) as connection:
            turns_, _ = past.retire_turns(connection, Needs(frozenset(), {}), before=NOW, limit=self.step)
        return identities_ + applied_ + 4 * turns_  # a turn goes with its label and two observations

    def let_go(self, turns_: int) -> None:
        """The tokens of the oldest turns are gone already, as they are when their turns' time comes."""
        with writing(self.engine) as connection:
            until = connection.execute(select(turns.c.labelled_at).order_by(turns.c.labelled_at).limit(1).offset(turns_)).scalar()
            connection.execute(update(turns).where(turns.c.labelled_at <= until).values(payload_segment=None))

    def ingest(self) -> int:
        """One transaction of ingestion: turns, and what was said about them."""
        rules, batch = JoinRules(policies={}), next(self._batches)
        store = SqlEffects(self.engine, rules=lambda: rules, segments=self.segments)
        ids = [f"n{batch}-{n}" for n in range(INGESTED // 2)]
        effects = [turn(id_, policy=POLICY, version=VERSION) for id_ in ids] + [observation(f"o-{id_}", of=id_) for id_ in ids]
        events = tuple(applied(effect, offset=batch * INGESTED + n) for n, effect in enumerate(effects))
        store.apply(EffectBatch(events=events), now=NOW)
        return INGESTED

    def behind(self) -> None:
        """Ingestion stands still: so many events more wait in the inbox, of people who are not asked for."""
        row = {"source": "s", "type": "t", "key": "k", "time": NOW, "payload_hash": b"", "received_at": NOW, "payload": _PAYLOAD}
        self._insert(inbox, WAITING, lambda n: row | {"event_id": f"waiting-{n}", "key": f"episode-{n}"})

    def bury(self) -> None:
        """So many dead letters more."""
        row = {"topic": "t", "partition": 0, "reason": "bad", "headers": {}, "payload": _PAYLOAD, "first_seen_at": NOW, "last_seen_at": NOW}
        self._insert(dead_letters, LETTERS, lambda n: row | {"offset": n})

    def _insert(self, table: Table, count: int, row: Callable[[int], dict[str, Any]]) -> None:
        for start in range(0, count, 5_000):
            with writing(self.engine) as connection:
                connection.execute(insert(table), [row(n) for n in range(start, start + 5_000)])


_PAYLOAD = json.dumps({"actor": "somebody", "prompt_tokens": [777] * 150, "completion": "word " * 40, "logprobs": [-0.125] * 40}).encode()


def looked_into(acts: Acts, *, repeats: int) -> dict[str, float]:
    """What an erasure pays for each thousand payloads that it has to look into."""

    def erasing() -> float:
        return statistics.median(_timed(acts.erase_ms)[0] for _ in range(repeats))

    found, before = dict[str, float](), erasing()
    for (name, count), more in zip((("waiting", WAITING), ("letters", LETTERS)), (acts.behind, acts.bury), strict=True):
        more()
        after = erasing()
        found[f"erase_ms_per_1000_{name}"], before = (after - before) / count * 1_000, after
    return found


def measure(one: Acts, ten: Acts, *, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """The median milliseconds of every act on both, and the rates. Turn and turn about: what disturbs the machine disturbs both."""
    took: dict[tuple[Acts, str], list[float]] = defaultdict(list)
    for name in COSTS[:4]:
        for repeat in range((8 if name == "metrics_ms" else 1) * repeats + 1):  # a millisecond is soon disturbed
            for acts in (one, ten):
                spent, _ = _timed(getattr(acts, name))
                if repeat:  # the first one warms
                    took[acts, name].append(spent)
    for acts in (one, ten):
        acts.let_go(acts.step * (repeats + 2))
    often = (("ingest_ms_per_1000", Acts.ingest, repeats + 1), ("retire_ms_per_1000", Acts.retire, repeats + 1))
    for name, act, times in (*often, ("trim_ms_per_1000", Acts.trim, 1_000)):
        for repeat in range(times):
            done = 0
            for acts in (one, ten):
                spent, rows = _timed(lambda acts=acts, act=act: act(acts))
                done += rows
                if rows and (repeat or times > repeats + 1):
                    took[acts, name].append(spent / rows * 1_000)
            if not done:
                break
    one_, ten_ = ({name: statistics.median(took[acts, name]) for name in COSTS} for acts in (one, ten))
    for figures in (one_, ten_):
        figures["trim_rows_per_s"] = 1e6 / figures["trim_ms_per_1000"]
        figures["retire_rows_per_s"] = 1e6 / figures["retire_ms_per_1000"]
        figures["ingest_events_per_s"] = 1e6 / figures["ingest_ms_per_1000"]
    return one_, ten_


def _timed(act: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    done = act()
    return (time.perf_counter() - began) * 1_000, done


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
    from tests.postgres import DURABLE, running_postgres

    with running_postgres(DURABLE) as url:

        def create(name: str) -> str:
            server = open_engine(url.format("postgres"))
            with server.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text(f"CREATE DATABASE {name}"))
            server.dispose()
            return url.format(name)

        yield create


def run(*, turns: int, observations: int, repeats: int, postgres: bool) -> dict[str, float]:
    """The figures at ten times `turns`, with the exponent of the worst growth from 1x to 10x (0: flat, 1: as the table)."""
    engines: list[Engine] = []
    sizes: list[dict[str, float]] = []
    with _databases(postgres=postgres) as create:
        for scale in (1, 10):
            url = create(f"year_{scale}x")
            upgrade(url)
            engines.append(open_engine(url, session={}))
            fill(engines[-1], Year(turns=turns * scale, unlabelled=400, versions=2, kept=min(turns, 20_000), observations=observations))
            sizes.append({"rows": _rows(engines[-1]), "bytes_per_turn": _bytes(engines[-1]) / (turns * scale)})
            print(f"{scale}x: {sizes[-1]['rows']} rows", flush=True)
        step = min(RETIRED, turns // (2 * repeats + 4))
        acts = [Acts(engine, step=step) for engine in engines]
        both = measure(*acts, repeats=repeats)
        read_through = looked_into(acts[1], repeats=5)
        for engine in engines:
            engine.dispose()
    once, ten = (figures | size for figures, size in zip(both, sizes, strict=True))
    for scale, figures in ((1, once), (10, ten)):
        print(f"{scale}x: {json.dumps({name: round(value, 2) for name, value in figures.items()})}", flush=True)
    growth = {name: ten[name] / once[name] for name in BOUNDED}
    print(f"growth: {json.dumps({name: round(times, 2) for name, times in growth.items()})}", flush=True)
    return ten | read_through | {"growth_exponent": math.log10(max(growth.values()))}


def missed(figures: dict[str, float]) -> list[str]:
    """The bounds that the figures miss, as sentences."""
    told: list[str] = []
    if figures["growth_exponent"] > math.log10(GROWTH):
        told.append(f"growth_exponent is {figures['growth_exponent']:.3f}: some cost grew by more than {GROWTH} from 1x to 10x")
    if figures["trim_rows_per_s"] < TRIM_PER_S:
        told.append(f"trim_rows_per_s is {figures['trim_rows_per_s']:.0f}: three times the arrival is {TRIM_PER_S:.0f}")
    if figures["retire_rows_per_s"] < RETIRE_PER_S:
        told.append(f"retire_rows_per_s is {figures['retire_rows_per_s']:.0f}: three times the arrival is {RETIRE_PER_S:.0f}")
    told += [f"{name} is {figures[name]:.1f}: the bound is {bound}" for name, bound in LOOKED_INTO.items() if figures[name] > bound]
    return told


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a past of 12,000 and 120,000 turns")
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL server of its own instead of SQLite")
    parser.add_argument("--turns", type=int, default=340_000, help="turns at 1x, with six observations each; ten times as many for 10x")
    given = parser.parse_args()
    turns, said = (12_000, 2) if given.quick else (given.turns, 6)
    needed, free = 11 * turns * (BYTES + said * BYTES_SAID) + LEAVE, shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed:
        where = f"in {tempfile.gettempdir()}: name another folder by TMPDIR, or fewer --turns"
        print(f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} are free {where}", file=sys.stderr)
        return 2
    figures = run(turns=turns, observations=said, repeats=25, postgres=given.postgres)
    told = missed(figures)
    for sentence in told:
        print(sentence, file=sys.stderr)
    names = ("rows", *COSTS[:4], "trim_rows_per_s", "retire_rows_per_s", "ingest_events_per_s", "bytes_per_turn", "growth_exponent")
    print(json.dumps({name: round(figures[name], 3) for name in (*names, *LOOKED_INTO)}))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
