"""Segments where files cannot be renamed into their place: an object appears when its upload ends, and a store that is away says so."""

import datetime as dt
import hashlib
import os
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from app.domain.errors import BadConfig, BadInput, Unavailable
from app.domain.learning.batches import payload_of
from app.trajectories.segments import ParquetSegments
from tests.fakes.served import turn

A, B, OTHER = payload_of(turn("a")), payload_of(turn("b")), payload_of(turn("c", policy="tab"))
LATER = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)


@pytest.fixture
def store(tmp_path: Path) -> ParquetSegments:
    """Files behind a file system that is not this machine's own, as pyarrow sees it."""
    made = ParquetSegments(str(tmp_path))
    made._filesystem = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    made._root = "prefix"
    made._filesystem.create_dir("prefix")
    return made


def test_segments_are_written_read_merged_and_erased_there_as_here(store: ParquetSegments) -> None:
    assert store.write_sized("s-0-1", [A, OTHER]) == store.size("s-0-1") > 0
    store.write("s-0-2", [B])
    merged = store.merge({"s-0-1": 1, "absent": 1, "s-0-2": 1}, target=lambda policy: f"day-{policy}", at_most_bytes=1 << 20)
    assert merged == {"day-composer": frozenset("ab"), "day-tab": frozenset("c")}
    assert store.names() == ["day-composer", "day-tab", "s-0-1", "s-0-2"]
    assert (store.turns("day-composer"), store.turns("absent")) == (["a", "b"], [])
    assert store.copy("day-composer", "day-composer.2", without="a") == store.size("day-composer.2") > 0
    assert store.read([("day-composer.2", "a"), ("day-composer.2", "b")]) == {"b": B}
    assert (store.copy("absent", "nothing", without="a"), store.size("nothing")) == (0, 0)
    for name in ("day-tab", "day-composer"):
        store.drop(name)
    assert store.size("day-tab") == 0
    store.drop("s-0-1")
    store.drop("s-0-1")
    assert store.names() == ["day-composer.2", "s-0-2"]
    assert store.unchanged_since("s-0-2") is not None


def test_a_merge_that_breaks_off_leaves_none_of_its_segments(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    store.write("s-0-1", [A, OTHER])

    def target(policy: str) -> str:
        if policy == "tab":
            raise RuntimeError("killed here")
        return f"day-{policy}"

    with pytest.raises(RuntimeError, match="killed here"):
        store.merge({"s-0-1": 1}, target=target, at_most_bytes=1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["s-0-1.parquet"]


def test_a_segment_that_a_kill_cut_off_is_deleted_all_the_same(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    (tmp_path / "s-0-1.parquet").write_bytes(b"PAR1 cut off")
    store.drop("s-0-1")
    assert list(tmp_path.iterdir()) == []


def test_whose_segment_was_merged_since_is_found_where_it_lies_now(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path), moved=lambda ids: {id_: "day-composer" for id_ in ids if id_ != "b"})
    store.write("day-composer", [A, B])
    assert store.read([("s-0-1", "a"), ("s-0-2", "b")]) == {"a": A}


def test_what_a_claim_promises_is_checked_and_a_store_that_is_away_is_neither_yes_nor_no(store: ParquetSegments, tmp_path: Path) -> None:
    claim = store.deposit(A)
    assert (store.holds(claim), store.claims(LATER), store.read([(claim.segment, "a")])) == (True, [claim.segment], {"a": A})
    assert store.claims(LATER - dt.timedelta(days=2)) == [], "young ones may still be waited for"
    file = tmp_path / "prefix" / "claims" / f"{claim.segment}.parquet"
    file.write_bytes(b"another")
    assert not store.holds(claim)
    file.unlink()
    assert not store.holds(claim)
    file.mkdir()
    with pytest.raises(Unavailable, match="does not answer"):
        store.holds(claim)
    with pytest.raises(Unavailable, match=r"does not take a payload .*check its space and its address"):
        store.deposit(A)


def test_word_of_the_forgotten_outlives_the_database_and_the_last_word_counts(store: ParquetSegments) -> None:
    assert store.noted_erasures() == {}
    first, second = dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
    for moment in (first, second):
        store.note_erasure("pseudonym-1", moment)
    assert store.noted_erasures() == {"pseudonym-1": second}
    assert store.names() == []


def test_an_address_that_is_none_and_a_name_that_leads_elsewhere_are_refused(store: ParquetSegments) -> None:
    for address, why in (("s3://", "it names no bucket"), ("s3://a b", "Cannot parse URI")):
        with pytest.raises(BadConfig, match=rf"RATCHET_SEGMENTS is '{address}', which cannot be opened \({why}.*use s3://bucket/prefix"):
            ParquetSegments(address)
    for name in ("", ".hidden", "a/b"):
        with pytest.raises(BadInput, match="is no name of a segment"):
            store.write(name, [A])


def test_a_claim_is_named_after_its_turn_and_counts_as_old_after_the_moment_it_was_written(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path / "made" / "with" / "parents"))
    claim = store.deposit(A)
    assert claim.segment == "claim-" + hashlib.blake2b(b"a", digest_size=16).hexdigest()
    file = tmp_path / "made" / "with" / "parents" / "claims" / f"{claim.segment}.parquet"
    assert (claim.bytes, claim.digest) == (file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
    os.utime(file, (1_000_000_000, 1_000_000_000))
    written = dt.datetime.fromtimestamp(1_000_000_000, dt.UTC)
    assert store.claims(written) == []
    assert store.claims(written + dt.timedelta(microseconds=1)) == [claim.segment]
    (file.parent / "note.parquet").write_bytes(b"")
    assert store.claims(LATER) == [claim.segment]


def test_a_large_segment_is_merged_into_files_of_about_the_size_and_nobody_is_lost(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    sizes = {f"s-0-{n}": store.write_sized(f"s-0-{n}", [payload_of(turn(f"{n}-{m}")) for m in range(3)]) for n in range(4)}
    assert all(size == store.size(name) > 0 for name, size in sizes.items())
    made: list[str] = []

    def target(policy: str) -> str:
        made.append(f"day-{policy}.{len(made)}")
        return made[-1]

    held = store.merge(sizes, target=target, at_most_bytes=1 << 30)
    assert held == {"day-composer.0": frozenset(f"{n}-{m}" for n in range(4) for m in range(3))}
    assert store.turns("day-composer.0") == [f"{n}-{m}" for n in range(4) for m in range(3)], "in the order of their segments"
    store.copy("day-composer.0", "day-composer.1", without={"0-0", "3-2", "nobody"})
    assert sorted(set(store.turns("day-composer.0")) - set(store.turns("day-composer.1"))) == ["0-0", "3-2"]
    assert len(store.turns("day-composer.1")) == 10


def test_word_of_the_forgotten_is_a_file_beside_the_segments_and_nothing_else_is_read_as_one(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    store.note_erasure("p", moment)
    (tmp_path / "erasures" / "p.json.1.partial").write_text("{")
    assert store.noted_erasures() == {"p": moment}
    assert [path.name for path in sorted((tmp_path / "erasures").iterdir())] == ["p.json", "p.json.1.partial"]
    assert store.unchanged_since("nothing") is None
