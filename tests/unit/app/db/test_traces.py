"""What is left of a person is found in every place, each by what it is called; here the places that an erasure seldom leaves behind."""

from pathlib import Path

from sqlalchemy import Engine, insert

from app.db.access import traces
from app.db.access.traces import SqlTraces
from app.db.engine import writing
from app.db.tables import blind_pairs, holdout_people, segments
from app.domain.ids import utc_now


class Files:
    """Segments in memory, of which one was written ahead of its events."""

    def names(self) -> list[str]:
        return ["known", "unknown"]

    def claims(self, before: object) -> list[str]:
        return ["ahead"]

    def turns(self, name: str) -> list[str]:
        return {"known": ["t1"], "unknown": ["t2"], "ahead": ["t3"]}[name]


def found(engine: Engine, *folders: Path, actor: str = "zoe") -> dict[str, int]:
    stored = {"s3://b/states": lambda words: int(words == b"anna")}
    topics = {"events": len(actor)}
    looked = SqlTraces(engine, engine, files=Files(), topics=lambda _: topics, exported=list, folders=folders, stored=stored)
    return {trace.place: trace.found for trace in looked.find(actor) if trace.found}


def test_files_with_the_persons_name_are_counted_also_where_it_lies_across_two_reads(sqlite_engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"x" * (traces.READ_BYTES - 1) + b"zoe")
    (tmp_path / "b").write_bytes(b"zoe")
    (tmp_path / "c").write_bytes(b"x" * traces.READ_BYTES + b"zo")
    left = found(sqlite_engine, tmp_path, tmp_path / "nowhere")
    assert left[f"files in {tmp_path}"] == 2
    assert f"files in {tmp_path / 'nowhere'}" not in left


def test_object_storage_is_looked_into_as_well(sqlite_engine: Engine) -> None:
    assert found(sqlite_engine, actor="anna")["files in s3://b/states"] == 1


def test_segments_that_no_row_knows_or_nobody_finished_are_told(sqlite_engine: Engine) -> None:
    with writing(sqlite_engine) as connection:
        for name, state in (("known", "whole"), ("begun", "writing")):
            connection.execute(insert(segments).values(name=name, rows=1, bytes=1, state=state, created_at=utc_now()))
    assert found(sqlite_engine) == {"topic events": 3, "segments that no row knows": 1, "segments begun and not finished": 1}


def test_pairs_and_followed_people_count_as_theirs_and_not_as_others(sqlite_engine: Engine) -> None:
    pair = {
        "release_id": "r", "policy": "p", "suite": "s", "task": "t", "messages": [], "champion_answer": "a", "candidate_answer": "b",
        "champion_score": 0.0, "candidate_score": 1.0, "salt": "x", "kept_at": utc_now(),
    }  # fmt: skip
    followed = {"holdout": "h", "week": 0, "metric": "reward", "held": True, "turns": 1, "total": 1.0}
    with writing(sqlite_engine) as connection:
        for n, person in enumerate(("zoe", "max", "zoe")):
            connection.execute(insert(blind_pairs).values(**pair, id=f"p{n}", cluster=person))
        for person in ("zoe", "max"):
            connection.execute(insert(holdout_people).values(**followed, person=person))
    left = found(sqlite_engine)
    assert (left["table blind_pairs"], left["table holdout_people"]) == (2, 1)
