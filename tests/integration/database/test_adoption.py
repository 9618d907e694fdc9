"""A database that went back to a moment finds the words of its turns in the files that took the place of those it knows."""

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from app.db.access.erasures import SqlEraser
from app.db.engine import open_engine, reading
from app.db.ingestion import segment_rows
from app.db.ingestion.streams import SqlEffects
from app.db.recovery.adoption import adopt, let_go
from app.db.tables import segments, turns
from app.db.upkeep.compaction import compact, places_of
from app.domain.learning.batches import payload_of
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.trajectories.segments import ParquetSegments
from tests.fakes.served import applied, at, erasure, turn

SERVED = [turn(f"t{n:02}", actor=("alice", "bob", "carol")[n % 3], policy=("composer", "tab")[n % 2]) for n in range(12)]
LATER = at(3 * 86_400)


class Place:
    """Files that stay, and a database that goes back."""

    def __init__(self, database: Path, folder: Path) -> None:
        self._database, self._kept = database, folder / "kept.db"
        self.files = ParquetSegments(str(folder / "segments"))
        self.engine: Engine = open_engine(f"sqlite:///{database}")

    def keep(self) -> None:
        self.engine.dispose()
        shutil.copyfile(self._database, self._kept)

    def go_back(self) -> None:
        self.engine.dispose()
        for name in ("-wal", "-shm"):
            Path(f"{self._database}{name}").unlink(missing_ok=True)
        shutil.copyfile(self._kept, self._database)

    def erase(self, actor: str) -> None:
        SqlEraser(self.engine, self.engine, segments=self.files).erase(erasure(actor), now=at(100))

    def read(self) -> dict[str, object]:
        with reading(self.engine) as connection:
            places = places_of(connection, [one.inference_id for one in SERVED])
        return dict(self.files.read([(name, id_) for id_, name in places.items()]))

    def rows(self) -> dict[str, str]:
        with reading(self.engine) as connection:
            return {row.name: row.state for row in connection.execute(select(segments.c.name, segments.c.state))}


@pytest.fixture
def place(sqlite_url: str, tmp_path: Path) -> Iterator[Place]:
    found = Place(Path(sqlite_url.removeprefix("sqlite:///")), tmp_path)
    store = SqlEffects(found.engine, rules=lambda: JoinRules(policies={}), segments=found.files)
    for start in range(0, len(SERVED), 3):
        events = tuple(applied(one, offset=start + n) for n, one in enumerate(SERVED[start : start + 3]))
        store.apply(EffectBatch(events=events), now=at(1))
    found.keep()
    yield found
    found.engine.dispose()


def whole(place: Place, *, without: str = "") -> None:
    assert place.read() == {one.inference_id: payload_of(one) for one in SERVED if one.actor != without}
    assert sorted(place.rows()) == sorted(place.files.names())
    assert set(place.rows().values()) == {"whole"}
    assert sorted(id_ for name in place.files.names() for id_ in place.files.turns(name)) == sorted(place.read())


def test_after_a_merge(place: Place) -> None:
    compact(place.engine, place.files, now=LATER, over_for=timedelta(hours=1), at_most_bytes=1 << 30)
    place.go_back()
    assert place.read() == {}
    assert adopt(place.engine, place.files, now=LATER) == 12
    assert let_go(place.engine, place.files, now=LATER) == 4, "the files that were merged into one"
    whole(place)
    assert (adopt(place.engine, place.files, now=LATER), let_go(place.engine, place.files, now=LATER)) == (0, 0)
    with reading(place.engine) as connection:
        assert set(connection.execute(select(segments.c.created_at)).scalars()) == {at(1)}, "not kept longer for having been lost"


def test_after_somebody_was_forgotten_who_is_forgotten_again(place: Place) -> None:
    place.erase("alice")
    place.go_back()
    assert adopt(place.engine, place.files, now=LATER) == 8
    place.erase("alice")
    let_go(place.engine, place.files, now=LATER)
    whole(place, without="alice")


def test_whose_file_is_there_stays_where_it_is_and_words_of_the_forgotten_do_not_come_back(place: Place) -> None:
    """A file that only one of its turns needs: another one's own is there, and the third was forgotten before the moment."""
    place.erase("bob")
    wanted, there = SERVED[0], SERVED[3]
    with reading(place.engine) as connection:
        own = places_of(connection, [wanted.inference_id])[wanted.inference_id]
    place.files.write("stray", [payload_of(one) for one in (wanted, SERVED[1], there)])
    place.files.drop(own)
    assert adopt(place.engine, place.files, now=LATER) == 1
    assert wanted.inference_id in place.read()
    assert "stray" not in place.rows(), "copied without the others"
    held = [id_ for name in place.files.names() for id_ in place.files.turns(name)]
    assert [held.count(one.inference_id) for one in (wanted, SERVED[1], there)] == [1, 0, 1]


def test_of_what_no_row_knows_the_words_of_the_forgotten_go(place: Place) -> None:
    place.erase("bob")
    place.files.write("came-back", [payload_of(SERVED[1])])
    segment_rows.forget_in(place.engine, place.files, ["came-back"], now=LATER)
    assert place.files.size("came-back") == 0
    with reading(place.engine) as connection:
        assert connection.execute(select(turns.c.inference_id).where(turns.c.erased_at.is_not(None))).all()
    whole(place, without="bob")
