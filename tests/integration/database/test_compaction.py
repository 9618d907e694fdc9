"""Merging segments: killed at every step, read and erased meanwhile; nothing is lost, doubled or remembered by mistake."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, select, update

from app.db.access.erasures import SqlEraser
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.segment_rows import GIVEN_UP
from app.db.ingestion.streams import SqlEffects
from app.db.tables import segments, turns
from app.db.upkeep.compaction import Merged, compact, places_of
from app.db.upkeep.keeper import SqlUpkeep
from app.domain.learning.batches import TurnPayload, payload_of
from app.domain.retention import Retention
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import TurnServed
from app.trajectories import merging
from app.trajectories.segments import ParquetSegments
from tests.fakes.served import applied, at, erasure, turn

RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)
NEXT_DAY = at(2 * 86_400)
SERVED = [turn(f"t{n:02}", actor=("alice", "bob", "carol")[n % 3], policy=("composer", "tab")[n % 2]) for n in range(24)]


class Killed(BaseException):
    """The process is gone at this point: nothing after it runs, no clean-up either."""


class Place:
    """A deployment whose segments are real files."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.files = ParquetSegments(str(folder), moved=self.moved)

    def moved(self, ids: Any) -> Mapping[str, str]:
        with reading(self.engine) as connection:
            return places_of(connection, ids)

    def serve(self, *served: TurnServed, offset: int) -> None:
        store = SqlEffects(self.engine, rules=lambda: RULES, segments=self.files)
        store.apply(EffectBatch(events=tuple(applied(one, offset=offset + n) for n, one in enumerate(served))), now=at(1))

    def compact(self, files: Any = None, **more: Any) -> Merged | None:
        given = {"now": NEXT_DAY, "over_for": timedelta(hours=1), "at_most_bytes": 1 << 30} | more
        return compact(self.engine, files or self.files, **given)

    def erase(self, actor: str) -> None:
        SqlEraser(self.engine, self.engine, segments=self.files).erase(erasure(actor), now=at(100))

    def places(self) -> dict[str, str | None]:
        with reading(self.engine) as connection:
            return {row[0]: row[1] for row in connection.execute(select(turns.c.inference_id, turns.c.payload_segment))}

    def rows(self) -> dict[str, tuple[str, int]]:
        with reading(self.engine) as connection:
            return {row.name: (row.state, row.rows) for row in connection.execute(select(segments))}

    def read(self) -> dict[str, TurnPayload]:
        return self.files.read([(name, id_) for id_, name in self.places().items() if name])

    def sweep(self) -> None:
        store = SqlEffects(self.engine, rules=lambda: RULES, segments=self.files)
        store.expire_parked(now=NEXT_DAY + GIVEN_UP + timedelta(seconds=1))

    def words(self) -> list[str]:
        """Turns whose words lie in some file, once for each file."""
        return sorted(id_ for name in self.files.names() for id_ in self.files.turns(name))


@pytest.fixture
def place(sqlite_url: str, tmp_path: Path) -> Iterator[Place]:
    yield from _place(sqlite_url, tmp_path)


@pytest.fixture
def anywhere(database_url: str, tmp_path: Path) -> Iterator[Place]:
    yield from _place(database_url, tmp_path)


def _place(url: str, tmp_path: Path) -> Iterator[Place]:
    engine = open_engine(url)
    found = Place(engine, tmp_path / "segments")
    for start in range(0, len(SERVED), 4):
        found.serve(*SERVED[start : start + 4], offset=start)
    yield found
    engine.dispose()


def whole(place: Place, *, without: Sequence[str] = ()) -> None:
    """Everything is there once, reads as it was written, and no file is unknown or left over."""
    served = [one for one in SERVED if one.actor not in without]
    assert place.read() == {one.inference_id: payload_of(one) for one in served}
    assert place.words() == sorted(one.inference_id for one in served)
    assert sorted(place.files.names()) == sorted(place.rows())
    assert all(state == "whole" for state, _ in place.rows().values())
    assert sum(rows for _, rows in place.rows().values()) == len(served)
    assert not list(place.folder.glob("*.partial"))


def test_small_segments_become_one_for_each_policy(place: Place) -> None:
    before = place.rows()
    made = place.compact()
    assert made is not None
    assert (made.sources, made.files) == (6, 2)
    assert before.keys().isdisjoint(place.rows())
    whole(place)
    for name in place.files.names():
        table = pq.read_table(place.folder / f"{name}.parquet")
        assert len(set(table["policy"].to_pylist())) == 1
        assert table["inference_id"].to_pylist() == sorted(table["inference_id"].to_pylist())
    assert place.compact() is None  # merged ones are not merged again


def test_a_day_that_is_not_over_is_left_alone(place: Place) -> None:
    assert place.compact(now=at(3600)) is None


def test_a_day_is_over_for_as_long_as_was_said_before_its_segments_are_merged(place: Place) -> None:
    midnight = at(0).replace(hour=0) + timedelta(days=1)
    assert place.compact(now=midnight + timedelta(hours=5, minutes=59), over_for=timedelta(hours=6)) is None
    assert place.compact(now=midnight + timedelta(hours=6), over_for=timedelta(hours=6)) is not None


def test_a_file_is_closed_at_its_size_and_the_rest_goes_on(place: Place) -> None:
    with reading(place.engine) as connection:
        large = max(connection.execute(select(segments.c.bytes)).scalars())
    made = [place.compact(at_most_bytes=large) for _ in range(3)]  # of two policies: two segments at a time
    assert [None if one is None else one.sources for one in made] == [2, 2, 2]
    whole(place)


def test_small_files_of_a_policy_and_a_day_are_merged_again_until_only_large_ones_and_one_rest_are_left(place: Place) -> None:
    with reading(place.engine) as connection:
        large = max(connection.execute(select(segments.c.bytes)).scalars())
    made = []
    while (one := place.compact(at_most_bytes=large)) is not None:
        made.append(one.sources)
    assert made[:3] == [2, 2, 2]  # three files of each policy, all of them small
    whole(place)
    sizes = {name: place.files.size(name) for name in place.files.names()}
    by_policy = [[size for name, size in sizes.items() if name.startswith(start)] for start in {name.partition(".")[0] for name in sizes}]
    assert len(by_policy) == 2
    assert all(sum(size < large // 2 for size in files) <= 1 for files in by_policy)
    while place.compact(at_most_bytes=large) is not None:
        raise AssertionError("what is large enough, or has nobody to be merged with, is left alone")


def test_a_policy_with_most_of_the_traffic_gets_several_files_and_no_small_rest(place: Place) -> None:
    usual, merging.GROUP_BYTES = merging.GROUP_BYTES, 500
    try:
        place.compact(at_most_bytes=6_000)
    finally:
        merging.GROUP_BYTES = usual
    whole(place)
    names = place.files.names()
    assert len(names) > 2
    sizes = [place.files.size(name) for name in names]
    assert min(sizes) > 3_000


def kills(place: Place) -> Iterator[tuple[str, Any]]:
    """Every moment at which a process can end, as files that end it there."""

    class Dying:
        """The files of a process that is killed before its nth act."""

        def __init__(self, at_act: int) -> None:
            self.left = at_act

        def act(self, name: str, *args: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Killed(name)
            return getattr(place.files, name)(*args, **more)

        def merge(self, sources: Mapping[str, int], *, target: Callable[[str], str], at_most_bytes: int) -> Any:
            def told(policy: str) -> str:
                self.left -= 1
                if self.left < 0:
                    raise Killed("between a row and its file")
                return target(policy)

            return self.act("merge", sources, target=told, at_most_bytes=at_most_bytes)

        def size(self, name: str) -> int:
            return self.act("size", name)

        def drop(self, name: str) -> None:
            self.act("drop", name)

        def turns(self, name: str) -> list[str]:
            return self.act("turns", name)

        def copy(self, name: str, to: str, *, without: Collection[str]) -> int:
            return self.act("copy", name, to, without=without)

    for at_act in range(40):
        yield f"act {at_act}", Dying(at_act)


def test_killed_at_every_step_nothing_is_lost_and_nothing_is_left(anywhere: Place) -> None:
    killed = 0
    for _, files in kills(anywhere):
        try:
            done = anywhere.compact(files)
        except Killed:
            killed += 1
            assert anywhere.read() == {one.inference_id: payload_of(one) for one in SERVED}
            anywhere.sweep()
            whole(anywhere)
        else:
            if done is None:
                break
    assert killed >= 10
    assert anywhere.compact() is None
    assert len(anywhere.rows()) == 2


def test_whoever_looked_before_reads_after(place: Place) -> None:
    looked = [(name, id_) for id_, name in place.places().items() if name]
    place.compact()
    assert place.files.read(looked) == {one.inference_id: payload_of(one) for one in SERVED}
    assert ParquetSegments(str(place.folder)).read(looked) == {}  # which is what would happen without looking again


def test_an_erasure_while_the_files_are_written_is_kept_to(anywhere: Place) -> None:
    class Meanwhile(ParquetSegments):
        def merge(self, sources: Mapping[str, int], *, target: Callable[[str], str], at_most_bytes: int) -> dict[str, frozenset[str]]:
            held = super().merge(sources, target=target, at_most_bytes=at_most_bytes)
            anywhere.erase("alice")
            return held

    anywhere.compact(Meanwhile(str(anywhere.folder)))
    whole(anywhere, without=["alice"])


def test_an_erasure_of_everybody_while_the_files_are_written_leaves_none(place: Place) -> None:
    class Meanwhile(ParquetSegments):
        def merge(self, sources: Mapping[str, int], *, target: Callable[[str], str], at_most_bytes: int) -> dict[str, frozenset[str]]:
            held = super().merge(sources, target=target, at_most_bytes=at_most_bytes)
            for actor in ("alice", "bob", "carol"):
                place.erase(actor)
            return held

    place.compact(Meanwhile(str(place.folder)))
    whole(place, without=["alice", "bob", "carol"])


def test_an_erasure_after_it_rewrites_the_large_file_group_by_group(place: Place) -> None:
    usual, merging.GROUP_BYTES = merging.GROUP_BYTES, 500  # so that a file of this test has several row groups
    try:
        place.compact()
    finally:
        merging.GROUP_BYTES = usual
    groups = [pq.ParquetFile(place.folder / f"{name}.parquet").num_row_groups for name in place.files.names()]
    assert min(groups) > 2
    place.erase("bob")
    whole(place, without=["bob"])


def test_words_that_wait_to_be_removed_go_with_the_person(place: Place) -> None:
    """Killed between the switch and the removal of the small files; then somebody asks to be forgotten."""

    class Dead(ParquetSegments):
        def drop(self, name: str) -> None:
            raise Killed

    with pytest.raises(Killed):
        place.compact(Dead(str(place.folder)))
    assert len(place.words()) == 2 * len(SERVED)
    place.erase("carol")
    whole(place, without=["carol"])


def test_a_file_that_is_gone_keeps_its_row_and_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    name = place.places()["t00"]
    assert name is not None
    (place.folder / f"{name}.parquet").unlink()
    place.compact()
    assert "event=segments_missing count=1" in caplog.text
    assert place.rows()[name][0] == "whole"
    assert place.places()["t00"] == name


@pytest.mark.parametrize("gone", [2, 3, 6])
def test_files_that_are_gone_hold_up_neither_the_small_ones_behind_them_nor_the_keeper(
    place: Place, caplog: pytest.LogCaptureFixture, gone: int
) -> None:
    lost, large = sorted(place.rows())[:gone], max(place.files.size(name) for name in place.files.names())
    healthy = {id_ for id_, name in place.places().items() if name not in lost}
    for name in lost:
        (place.folder / f"{name}.parquet").unlink()
    kept, steps = Retention(compact_bytes=large), itertools.count()  # of two policies: two segments at a time
    keeper = SqlUpkeep(place.engine, place.engine, files=place.files, retention=kept, owner="me", clock=lambda: NEXT_DAY)
    with keeper.office() as lease:
        assert lease is not None
        keeper.merge(lease, stopping=lambda: next(steps) == 20)
    assert next(steps) < 20, "the keeper came back by itself"
    assert {name: state for name, (state, _) in place.rows().items() if not name.startswith("day-")} == dict.fromkeys(lost, "whole")
    assert place.words() == sorted(healthy)
    assert set(place.read()) == healthy
    assert sum(int(count) for count in re.findall(r"event=segments_missing count=(\d+)", caplog.text)) == gone, "each is told of once"


def test_tokens_are_not_kept_longer_for_being_merged(place: Place) -> None:
    with writing(place.engine) as connection:
        connection.execute(update(segments).where(segments.c.name != place.places()["t00"]).values(created_at=at(2)))
    place.compact()
    with reading(place.engine) as connection:
        assert set(connection.execute(select(segments.c.created_at)).scalars()) == {at(2)}
