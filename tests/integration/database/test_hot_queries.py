"""What is asked all the time finds its rows by an index, on both databases: every statement is explained, over tables where a scan shows.

A plan that walks a whole table is told with its statement. Small tables (policies, leases, counters) may be walked.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from app.db.access.erasures import SqlEraser
from app.db.engine import writing
from app.db.ingestion.backlog import SqlBacklog
from app.db.ingestion.relay import SqlRelayOffice, has_backlog
from app.db.ingestion.streams import SqlEffects
from app.db.learning.batches import SqlBatchStore
from app.db.learning.labels import SqlLabels, count_trainable
from app.db.learning.learned_turns import count_own_turns, own_turns
from app.db.operations.readings import SqlReadings
from app.db.release.evidence import SqlEvidenceBook
from app.db.tables import EPOCH, metadata
from app.db.upkeep import eras
from app.domain.telemetry.streams import EffectBatch, JoinRules
from pipelines.batching.config import BatchingConfig
from pipelines.batching.cut import cut_batch
from tests.bench.year_data import NOW, POLICY, VERSION, Year, fill
from tests.fakes.served import applied, erasure, exposure, observation, retraction, turn
from tests.fakes.streaming import MemorySegments

BIG = {"inbox", "applied_events", "turns", "turn_words", "observations", "labels", "exposures", "outbox", "retractions"}
"""Not `batch_items`: of 16,000 turns 800 are in one, which PostgreSQL rightly reads at once rather than look 500 of them up by key."""
WALK = re.compile(r"(?:Seq Scan on|^SCAN) (\w+)(?: USING (?:COVERING )?INDEX (\w+))?", re.MULTILINE)
"""Also from one end of an index to the other (SQLite says SCAN of both)."""
PARTIAL = {
    index.name for table in metadata.tables.values() for index in table.indexes if index.dialect_kwargs.get("sqlite_where") is not None
}
"""Indexes of a few rows alone, which may be walked."""
YEAR = Year(turns=16_000, unlabelled=200, versions=40, kept=400)


class Asked:
    """Statements that an engine was asked, with their plans."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.walks: list[str] = []
        self.explained: dict[str, str] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Explain everything that is asked meanwhile."""
        event.listen(self.engine, "before_cursor_execute", self._explain)
        try:
            yield
        finally:
            event.remove(self.engine, "before_cursor_execute", self._explain)

    def _explain(self, connection: Connection, cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if not statement.lstrip().startswith(("SELECT", "UPDATE", "DELETE")) or statement in self.explained:
            return
        mode = "EXPLAIN QUERY PLAN " if connection.dialect.name == "sqlite" else "EXPLAIN "
        own = cursor.connection.cursor()
        own.execute(mode + statement, parameters[0] if many and parameters else parameters)
        plan = "\n".join(str(row[-1]) for row in own.fetchall())
        self.explained[statement] = plan
        walked = [name for name, index in WALK.findall(plan) if index not in PARTIAL]
        names = self._aliases(statement)
        if big := BIG & {re.sub(r"_\d+$", "", names.get(name) or name) for name in walked}:  # an era's partition is `inbox_3`
            self.walks.append(f"walks {sorted(big)}\n{statement}\n{plan}")

    @staticmethod
    def _aliases(statement: str) -> dict[str, str]:
        return {alias: table for table, alias in re.findall(r"(\w+) AS (\w+)", statement)}


@pytest.fixture
def year(engine: Engine) -> Engine:
    fill(engine, YEAR)
    return engine


def acts(engine: Engine) -> dict[str, Callable[[], object]]:
    """The hot paths by name."""
    segments, rules = MemorySegments(), JoinRules(policies={})
    store = SqlEffects(engine, rules=lambda: rules, segments=segments)
    served = [turn(f"new-{n}", policy=POLICY, version=VERSION) for n in range(3)]
    said = [observation("new-o", of="t-5"), observation("new-e", episode="e-3"), retraction("o-7"), exposure("new-1")]
    term = SqlRelayOffice(engine, engine, group="g").take("one", now=NOW)
    assert term is not None
    book, evidence = SqlLabels(engine), SqlEvidenceBook(engine)

    def pool() -> int:
        with writing(engine) as connection:
            return count_trainable(connection, POLICY, VERSION)

    def own() -> int:
        with writing(engine) as connection:
            return len(own_turns(connection, POLICY, VERSION, newest=50)) + count_own_turns(connection, POLICY, VERSION, at_most=50)

    def cut() -> object:
        config = BatchingConfig(min_turns=8, max_turns=64)
        return cut_batch(SqlBatchStore(engine), policy=POLICY, slot=3, champion=VERSION, anchor=VERSION, config=config, now=NOW)

    return {
        "apply": lambda: store.apply(EffectBatch(events=tuple(map(applied, [*served, *said]))), now=NOW),
        "expire": lambda: store.expire_parked(now=NOW),
        "due": lambda: book.due(POLICY, now=NOW, limit=100),
        "pool": pool,
        "own answers": own,
        "cut": cut,
        "unsent": lambda: (term.unsent_inbox(100), term.unsent_outbox(100)),
        "mark": lambda: term.mark_inbox([1, 2, 3], now=NOW),
        "confirm": lambda: term.confirm_applied(relayed_before=NOW, limit=100, now=NOW),
        "trim": lambda: term.trim(applied_before=NOW - timedelta(hours=6)),
        "era": lambda: eras.drop_oldest(engine, before=EPOCH),
        "backlog": lambda: (SqlBacklog(engine, engine).complete_until(now=NOW), has_backlog(engine), term.applied_before(now=NOW)),
        "metrics": SqlReadings(engine, engine, clock=lambda: NOW).readings,
        "lag": lambda: evidence.lag_s(POLICY, now=NOW),
        "erase": lambda: SqlEraser(engine, engine, segments=segments).erase(erasure("person-7"), now=NOW),
    }


def test_no_hot_query_walks_a_table(year: Engine) -> None:
    asked = Asked(year)
    with asked.listening():
        for act in acts(year).values():
            act()
    assert len(asked.explained) > 40
    assert "\n\n".join(asked.walks) == ""


def test_a_cut_finds_its_labels_along_their_lots(year: Engine) -> None:
    """Along their times every label that was ever made comes before now: no walk in the words of the plan, and yet the whole table."""
    asked = Asked(year)
    with asked.listening():
        acts(year)["cut"]()
    (plan,) = [plan for statement, plan in asked.explained.items() if "episode_open" in statement]
    assert "ix_labels_lot" in plan or "ix_labels_pool" in plan
    assert "ix_labels_time" not in plan


def test_a_walk_over_a_table_is_told(year: Engine) -> None:
    """The test above sees what it is there for."""
    asked = Asked(year)
    with asked.listening(), writing(year) as connection:
        connection.execute(text("SELECT count(*) FROM turns WHERE completion = 'x'"))
    assert len(asked.walks) == 1
