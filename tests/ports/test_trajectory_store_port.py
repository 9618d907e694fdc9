"""One suite over segments in memory and in Parquet files; the files' own promises below."""

import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from app.domain.errors import BadInput, Unavailable
from app.domain.learning.batches import TurnPayload, payload_of
from app.domain.ports import TrajectoryStore
from app.domain.telemetry.streams import SegmentFiles
from app.domain.telemetry.turns import SamplingParams
from app.trajectories.segments import ParquetSegments
from tests.disk import asked_of_the_disk
from tests.fakes.served import turn
from tests.fakes.streaming import MemorySegments


def payload(id_: str, **more: Any) -> TurnPayload:
    return payload_of(turn(id_, **more))


@pytest.fixture(params=["memory", "parquet"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TrajectoryStore:
    return MemorySegments() if request.param == "memory" else ParquetSegments(str(tmp_path / "segments"))


RICH = payload(
    "rich",
    routed_experts=[[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
    kept_log_mass=[-0.25, 0.0],
    messages=[{"role": "user", "content": [{"type": "text", "text": "grüße 🙂"}]}, {"role": "tool", "x": None}],
    completion="naïve\n",
)
BARE = payload("bare", logprobs=None, completion_tokens=[], messages=[], completion="")


def test_what_is_read_is_what_was_written_to_the_last_bit(store: TrajectoryStore) -> None:
    plain = payload("plain", logprobs=[-0.1, -1e-300])
    store.write("s-0-1", [RICH, BARE, plain])
    assert store.read([("s-0-1", id_) for id_ in ("rich", "bare", "plain")]) == {"rich": RICH, "bare": BARE, "plain": plain}


def test_segments_of_before_a_column_are_read_merged_and_erased_from_as_any(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    store.write("old", [RICH, BARE])
    older = pq.ParquetFile(tmp_path / "old.parquet").read().drop_columns(["top_k", "shape"])
    pq.write_table(older, tmp_path / "old.parquet")
    narrow = payload("narrow", sampling=SamplingParams(top_k=40))
    store.write("new", [narrow])
    assert store.read([("old", "rich"), ("new", "narrow")]) == {"rich": RICH, "narrow": narrow}
    store.merge({"old": 1, "new": 1}, target=lambda policy: "day", at_most_bytes=1 << 20)
    assert store.read([("day", "rich"), ("day", "narrow")]) == {"rich": RICH, "narrow": narrow}
    assert store.copy("old", "new-2", without={"bare"}) == store.size("new-2")
    assert store.read([("new-2", "rich"), ("new-2", "bare")]) == {"rich": RICH}


def test_what_is_gone_is_absent_from_the_answer(store: TrajectoryStore) -> None:
    store.write("s-0-1", [BARE])
    assert store.read([("s-0-1", "bare"), ("s-0-1", "unknown"), ("no-such", "bare")]) == {"bare": BARE}


def test_writing_the_same_segment_again_changes_nothing_and_a_longer_one_replaces_it(store: TrajectoryStore) -> None:
    store.write("s-0-1", [BARE])
    store.write("s-0-1", [BARE])
    store.write("s-0-1", [BARE, RICH])
    assert set(store.read([("s-0-1", "bare"), ("s-0-1", "rich")])) == {"bare", "rich"}


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_a_copy_leaves_turns_out_and_what_it_was_made_from_stays_as_it_was(tmp_path: Path, kind: str) -> None:
    files: SegmentFiles = ParquetSegments(str(tmp_path)) if kind == "files" else MemorySegments()
    assert files.write_sized("s-0-1", [BARE, RICH]) > 0
    assert files.copy("s-0-1", "s-0-1.2", without={"bare", "unknown"}) > 0
    assert (sorted(files.turns("s-0-1")), files.turns("s-0-1.2")) == (["bare", "rich"], ["rich"])
    assert files.copy("no-such", "s-0-1.3", without={"rich"}) == 0
    assert (files.turns("no-such"), files.turns("s-0-1.3")) == ([], [])
    for _ in range(2):
        files.drop("s-0-1")
    assert (files.turns("s-0-1"), files.turns("s-0-1.2")) == ([], ["rich"])


def test_a_file_holds_nothing_of_an_erased_turn_and_no_partial_files_are_left(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    store.write("s-0-1", [payload("a", completion="canary-word-of-a"), payload("b")])
    store.copy("s-0-1", "s-0-2", without={"a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-0-1.parquet", "s-0-2.parquet"]
    words = [b"canary-word-of-a" in (tmp_path / f"s-0-{n}.parquet").read_bytes() for n in (1, 2)]
    assert words == [True, False]


def test_a_segment_is_on_the_disk_before_it_has_its_name_and_its_name_before_anything_refers_to_it(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    partial = f"s-0-1.parquet.{os.getpid()}.partial"
    with asked_of_the_disk(tmp_path) as seen:
        store.write("s-0-1", [BARE])
    assert seen == [("flush", [partial]), ("rename", [partial]), ("flush", ["s-0-1.parquet"])]


def test_the_same_payloads_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    one, two = ParquetSegments(str(tmp_path / "1")), ParquetSegments(str(tmp_path / "2"))
    one.write("s", [RICH, BARE])
    two.write("s", [BARE, RICH])
    assert (tmp_path / "1" / "s.parquet").read_bytes() == (tmp_path / "2" / "s.parquet").read_bytes()
    assert one.names() == ["s"]


@pytest.mark.parametrize("name", ["", "../escape", ".hidden", "a/b"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="no name of a segment"):
        ParquetSegments(str(tmp_path)).write(name, [BARE])


def test_a_claimed_payload_is_read_like_any_other_and_a_broken_or_missing_one_is_noticed(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path))
    claim = store.deposit(RICH)
    assert store.deposit(RICH) == claim
    assert store.deposit(replace(RICH, prompt_tokens=array("i", RICH.prompt_tokens))) == claim, "as a gateway has a long prompt"
    assert store.read([(claim.segment, "rich")]) == {"rich": RICH}
    assert store.holds(claim)
    assert (claim.has_logprobs, claim.bytes > 1_000) == (True, True)
    path = tmp_path / "claims" / f"{claim.segment}.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    assert not store.holds(claim)
    path.unlink()
    assert not store.holds(claim)
    assert not store.holds(msgspec.structs.replace(claim, segment="s-0-1"))


def test_a_store_that_is_full_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    store = ParquetSegments(str(tmp_path / "segments"))
    (tmp_path / "segments" / "claims").write_text("in the way")
    with pytest.raises(Unavailable, match="does not take a payload"):
        store.deposit(RICH)
