"""An export: folders by policy and day, whole or absent, and what its reader finds in them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from app.domain.errors import BadInput, Unavailable
from app.domain.learning.batches import TurnPayload, payload_of
from app.domain.learning.decisions import ExportedTurn
from app.trajectories.corpus import read_texts
from app.trajectories.exporting import exported_turns, write_export
from tests.fakes.served import at, turn

DAY_S = 86_400


def exported(id_: str, *, policy: str = "composer", day: int = 0) -> tuple[ExportedTurn, TurnPayload]:
    served = turn(id_, policy=policy, finished=day * DAY_S)
    facts = ExportedTurn(
        inference_id=served.inference_id, policy=policy, version="v1", finished_at=served.finished_at, arm="candidate", stage="canary-1",
        probability=0.05, reward=0.5, exclusion=None, segment="task=edit", payload_segment=f"segment-of-{id_}", finish_reason="stop",
        train_consent=True, held_out=False, terms=[{"name": "rating", "value": 1.0}], rule_set="r", labelled_at=at(1),
    )  # fmt: skip
    return facts, payload_of(served)


def export(folder: Path, *pages: Sequence[tuple[ExportedTurn, TurnPayload]], gone: frozenset[str] = frozenset(), **more: int) -> int:
    there = {facts.inference_id: (facts.payload_segment, payload) for page in pages for facts, payload in page}

    def read(asked: list[tuple[str, str]]) -> Mapping[str, TurnPayload]:
        assert all(there[id_][0] == segment for segment, id_ in asked), "each turn is asked for where its row says that it lies"
        return {id_: there[id_][1] for _, id_ in asked if id_ not in gone}

    return write_export(folder, [[facts for facts, _ in page] for page in pages], read, **more)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet"))


def test_a_reader_finds_folders_by_policy_and_day_and_rewards_beside_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "turns"
    pages = [[exported("a"), exported("b", policy="tab/2"), exported("c")], [exported("d"), exported("e", day=1)]]
    assert export(folder, *pages) == 5
    assert [name.replace("day=", "") for name in files(folder)] == [
        f"policy=composer/{at(0):%Y-%m-%d}/part-00000.parquet", f"policy=composer/{at(DAY_S):%Y-%m-%d}/part-00000.parquet",
        f"policy=tab%2F2/{at(0):%Y-%m-%d}/part-00000.parquet",
    ]  # fmt: skip
    rows = pq.ParquetFile(folder / files(folder)[0]).read().to_pylist()
    assert [row["inference_id"] for row in rows] == ["a", "c", "d"]
    first, payload = rows[0], pages[0][0][1]
    assert (first["reward"], first["probability"], first["arm"], first["stage"]) == (0.5, 0.05, "candidate", "canary-1")
    assert (tuple(first["completion_tokens"]), json.loads(first["terms"])) == (
        payload.completion_tokens,
        [{"name": "rating", "value": 1.0}],
    )


def test_whose_turns_lie_in_exports_is_known_and_what_cannot_be_read_is_no_proof(tmp_path: Path) -> None:
    assert list(exported_turns(tmp_path / "nowhere")) == []
    export(tmp_path / "may", [exported("a"), exported("b", policy="tab")])
    export(tmp_path / "june", [exported("c")])
    assert sorted(exported_turns(tmp_path)) == ["a", "b", "c"]
    (tmp_path / "july.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(Unavailable, match=r"july\.parquet cannot be read as an export .*delete it"):
        list(exported_turns(tmp_path))


def test_turns_whose_tokens_are_gone_are_left_out_and_not_counted(tmp_path: Path) -> None:
    assert export(tmp_path / "x", [exported("a"), exported("b")], gone=frozenset({"a"})) == 1


def test_a_day_that_is_too_large_for_one_file_has_more(tmp_path: Path) -> None:
    assert export(tmp_path / "x", [exported("a")], [exported("b")], [exported("c", day=1)], [exported("d")], file_bytes=1) == 4
    assert [Path(name).name for name in files(tmp_path / "x")] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet",
                                                                  "part-00000.parquet"]  # fmt: skip


def test_a_folder_that_holds_something_is_not_written_into_and_an_empty_one_is(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(BadInput, match="holds something already: name a folder that is empty or absent"):
            export(tmp_path / name, [exported("a")])
    (tmp_path / "empty").mkdir()
    assert export(tmp_path / "empty", [exported("a")]) == 1


def test_an_export_that_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    def pages() -> Iterator[list[ExportedTurn]]:
        yield [exported("a")[0]]
        raise OSError("the database went away")

    with pytest.raises(OSError, match="went away"):
        write_export(tmp_path / "x", pages(), lambda places: {"a": exported("a")[1]})
    assert list(tmp_path.iterdir()) == []


def corpus(tmp_path: Path, **columns: list[str | None]) -> Path:
    import pyarrow as pa

    pq.write_table(pa.table(columns), tmp_path / "texts.parquet")
    return tmp_path / "texts.parquet"


def test_texts_are_read_with_their_domain_and_name_or_with_their_place_and_empty_ones_are_passed_over(tmp_path: Path) -> None:
    named = corpus(tmp_path, text=["one", "", "two", None], domain=["code", "code", None, "x"], name=["a", "b", "", "d"], more=["1"] * 4)
    assert list(read_texts(named, rows=2)) == [("a", "code", "one"), ("texts.parquet:2", "all", "two")]
    assert list(read_texts(corpus(tmp_path, text=["x"]))) == [("texts.parquet:0", "all", "x")]


def test_a_corpus_without_texts_says_which_columns_it_has(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no column `text` \(it has body, id\): rename the one that holds the text"):
        list(read_texts(corpus(tmp_path, id=["1"], body=["x"])))
