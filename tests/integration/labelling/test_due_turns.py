"""Which turns are due, in which order and how many, what is known of them then, and how many labels a batch could take; on SQLite alone."""

import hashlib
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select, update

from app.db.engine import reading, writing
from app.db.learning.labels import SqlLabels, count_trainable, lot_of
from app.db.tables import labels, turns
from tests.fakes.served import at, observation, turn
from tests.integration.labelling.test_label_book import Bench


@pytest.fixture
def bench(sqlite_engine: Engine) -> Bench:
    return Bench(sqlite_engine)


def due(bench: Bench, *, now: float, limit: int = 10, policy: str = "composer") -> list[str]:
    return [one.facts.inference_id for one in SqlLabels(bench.engine).due(policy, now=at(now), limit=limit)]


def marked(bench: Bench, *ids: str) -> None:
    """Labelled already, and wanted once more."""
    with writing(bench.engine) as connection:
        connection.execute(update(turns).where(turns.c.inference_id.in_(ids)).values(labelled_at=at(61), needs_relabel=True))


def test_a_turn_is_due_at_the_moment_its_wait_is_over_the_oldest_first(bench: Bench) -> None:
    bench.apply(turn("a", finished=3), turn("b", finished=1), turn("c", finished=2), turn("x", policy="tab"))
    assert due(bench, now=61.999) == ["b"]
    assert due(bench, now=62) == ["b", "c"]
    assert due(bench, now=100) == ["b", "c", "a"]
    assert due(bench, now=100, policy="tab") == ["x"]


def test_what_is_marked_for_another_label_comes_behind_what_has_none_as_far_as_there_is_room(bench: Bench) -> None:
    bench.apply(*(turn(name) for name in "dcba"))
    marked(bench, "c", "a")
    assert set(due(bench, now=100, limit=1)) < {"b", "d"}
    assert set(due(bench, now=100, limit=2)) == {"b", "d"}
    assert due(bench, now=100, limit=3)[2:] == ["a"]
    assert due(bench, now=100, limit=9)[2:] == ["a", "c"]
    assert due(bench, now=0) == ["a", "c"], "whatever the time"


def test_a_due_turn_comes_with_the_revision_it_has(bench: Bench) -> None:
    bench.apply(turn("a"), turn("b"))
    bench.label(at(61))
    marked(bench, "a")
    found = SqlLabels(bench.engine).due("composer", now=at(100), limit=10)
    assert [(one.facts.inference_id, one.revision) for one in found] == [("a", 1)]
    bench.apply(turn("c"), received=100)
    found = SqlLabels(bench.engine).due("composer", now=at(1000), limit=10)
    assert [(one.facts.inference_id, one.revision) for one in found] == [("c", 0), ("a", 1)]


def test_the_newest_word_of_success_counts_and_what_is_no_number_is_none(bench: Bench) -> None:
    said = (("1", "a", 1.0, 1), ("2", "a", 0.0, 3), ("3", "a", 1.0, 2), ("4", "b", True, 1))
    bench.apply(turn("a"), turn("b"), turn("c"))
    bench.apply(*(observation(id_, of=of, name="task_success", value=value, occurred=when) for id_, of, value, when in said))
    bench.apply(observation("5", of="c", value=0.75))
    bench.label(at(61))
    assert bench.rows("inference_id", "success") == [("a", 0.0), ("b", 1.0), ("c", None)]


def test_what_was_said_of_a_turn_and_of_its_episode_is_read_in_the_order_in_which_it_was_said(bench: Bench) -> None:
    bench.apply(turn("a", episode="e"), turn("b", episode="e"))
    bench.apply(
        observation("3", of="a", occurred=3), observation("1", episode="e", occurred=1), observation("2", of="a", occurred=1),
        observation("4", episode="e", occurred=4),
    )  # fmt: skip
    found = SqlLabels(bench.engine).due("composer", now=at(100), limit=10)
    assert {one.facts.inference_id: [o.id for o in one.observations] for one in found} == {"a": ["1", "2", "3", "4"], "b": ["1", "4"]}


def test_when_a_turn_was_first_labelled_is_kept_and_a_mark_goes_with_the_new_label(bench: Bench) -> None:
    bench.apply(turn("a"))
    bench.label(at(61))
    marked(bench, "a")
    bench.label(at(200))
    with reading(bench.engine) as connection:
        found = connection.execute(select(turns.c.labelled_at, turns.c.needs_relabel)).one()
    assert tuple(found) == (at(61), False)
    assert bench.rows("revision", "current") == [(1, False), (2, True)]


def test_a_lot_is_the_episode_s_and_has_sixty_bits() -> None:
    whole = hashlib.md5(b"episode", usedforsecurity=False).hexdigest()
    assert lot_of("episode") == int(whole, 16) >> 68
    assert lot_of("episode") != lot_of("another")


def label(id_: str, **more: Any) -> dict[str, Any]:
    return {
        "inference_id": id_, "revision": 1, "current": True, "policy": "composer", "version": "v1", "reward": 0.5, "terms": [],
        "rule_set": "r", "segment": "", "held_out": False, "finished_at": at(0), "labelled_at": at(60), "actor": None, "exclusion": None,
        "batch_id": None,
    } | more  # fmt: skip


def test_a_batch_could_take_what_is_current_eligible_and_in_none(bench: Bench) -> None:
    others = (
        label("held out", held_out=True), label("older", current=False), label("excluded", exclusion="erased"), label("v2", version="v2"),
        label("tab", policy="tab"), label("taken", batch_id="B"),
    )  # fmt: skip
    with writing(bench.engine) as connection:
        connection.execute(insert(labels), [label("a"), label("b"), label("c"), *others])
        counted = [count_trainable(connection, "composer", "v1", at_most=most) for most in (1, 2, 3, 100)]
    assert counted[:3] == [1, 2, 3]
    assert counted[3] == 3
