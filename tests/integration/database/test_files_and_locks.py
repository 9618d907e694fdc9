"""No transaction waits for a disk or a bucket: whoever writes, copies or removes a segment holds no lock of the database meanwhile."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from app.db.access.erasures import SqlEraser, announce
from app.db.engine import open_engine, writing
from app.db.ingestion.segment_rows import GIVEN_UP, intend
from app.db.ingestion.streams import SqlEffects
from app.db.recovery.adoption import adopt, let_go
from app.db.tables import turns
from app.db.upkeep.compaction import compact
from app.db.upkeep.old_segments import drop_old
from app.domain.telemetry.streams import Effect, EffectBatch, JoinRules
from app.trajectories.segments import ParquetSegments
from tests.fakes.served import applied, at, erasure, turn

ACTS = ("write_sized", "copy", "turns", "size", "drop", "merge", "names")


class Watched:
    """Segments that look, before each act, whether somebody holds the database's one lock."""

    def __init__(self, files: ParquetSegments, database: Path) -> None:
        self._files, self._database = files, database
        self.acts = Counter[str]()
        self.locked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._files, name)

        def watched(*args: Any, **more: Any) -> Any:
            self.acts[name] += 1
            with sqlite3.connect(self._database, timeout=0, isolation_level=None) as other:
                try:
                    other.execute("BEGIN IMMEDIATE")
                    other.execute("ROLLBACK")
                except sqlite3.OperationalError:
                    self.locked.append(name)
            other.close()
            return act(*args, **more)

        return watched if name in ACTS else act


class Place:
    """A deployment on SQLite with real files."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.files: Any = Watched(ParquetSegments(str(folder / "segments")), Path(str(engine.url.database)))
        self.offset = 0

    @property
    def store(self) -> SqlEffects:
        return SqlEffects(self.engine, rules=lambda: JoinRules(policies={}), segments=self.files)

    def apply(self, *effects: Effect, received: float = 1) -> None:
        events = tuple(applied(effect, offset=self.offset + n, received=received) for n, effect in enumerate(effects))
        self.offset += len(events)
        self.store.apply(EffectBatch(events=events), now=at(received))


@pytest.fixture
def place(sqlite_url: str, tmp_path: Path) -> Iterator[Place]:
    engine = open_engine(sqlite_url)
    yield Place(engine, tmp_path)
    engine.dispose()


def test_the_watch_sees_an_act_under_a_lock(place: Place) -> None:
    with writing(place.engine):
        place.files.names()
    assert place.files.locked == ["names"]


def test_no_file_is_touched_while_a_transaction_holds_a_lock(place: Place) -> None:
    place.apply(turn("a"), turn("b", actor="bob"), turn("c", actor="carol"))
    announce(place.engine, erasure("bob"))
    place.apply(turn("late", actor="bob"), turn("d", actor="dora"))  # a shell: its words are left out of the file
    SqlEraser(place.engine, place.engine, segments=place.files).erase(erasure("alice"), now=at(100))
    intend(place.engine, "killed", now=at(1))
    place.store.expire_parked(now=at(2) + GIVEN_UP)
    compact(place.engine, place.files, now=at(3 * 86_400), over_for=timedelta(hours=1), at_most_bytes=1 << 30)
    with writing(place.engine) as connection:
        connection.execute(update(turns).where(turns.c.inference_id == "c").values(labelled_at=at(1)))
    drop_old(place.engine, place.files, now=at(9e9), before=at(8e9), limit=9)
    adopt(place.engine, place.files, now=at(9e9))
    let_go(place.engine, place.files, now=at(9e9))
    assert set(place.files.acts) == set(ACTS)
    assert place.files.locked == []
