"""What one label adds to the sums, to the millionth, and what rewriting them counts; on SQLite alone."""

import math
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine, insert

from app.db.engine import reading, writing
from app.db.learning.rollups import Sums, add_up, hour_of, read_rollups, rebuild, recount
from app.db.tables import labels
from tests.fakes.served import at

HALF_PAST = datetime(2026, 11, 25, 9, 30, 15, 250, tzinfo=UTC)


def label(**more: Any) -> dict[str, Any]:
    return {
        "policy": "composer", "version": "v1", "finished_at": HALF_PAST, "segment": "edit", "reward": 0.5, "terms": [], "exclusion": None,
        "success": None,
    } | more  # fmt: skip


def sums(engine: Engine, *written: Any, taken_back: tuple[Any, ...] = ()) -> dict[str, Sums]:
    """By measure, of the one cell that there is."""
    with writing(engine) as connection:
        add_up(connection, written, taken_back=taken_back)
    with reading(engine) as connection:
        found = read_rollups(connection)
    assert {key[:4] for key in found} <= {("composer", "v1", hour_of(HALF_PAST), "edit")}
    return {key[4]: value for key, value in found.items()}


def test_an_hour_begins_at_its_beginning() -> None:
    assert hour_of(HALF_PAST) == datetime(2026, 11, 25, 9, tzinfo=UTC)


def test_a_value_is_added_and_taken_away_to_the_last_millionth() -> None:
    one = Sums().plus(-0.25, 1)
    assert one == (1, -250_000, 62_500, 1)
    assert one.plus(0.5, 1) == (2, 250_000, 312_500, 1)
    assert one.plus(0.0, 1).negative == 1
    assert one.plus(-0.25, -1) == Sums()


def test_a_label_adds_its_reward_its_terms_and_why_it_is_not_trained_on(sqlite_engine: Engine) -> None:
    terms = [
        {"name": "rating", "value": -1.0, "detail": None}, {"name": "silent", "value": None}, {"name": "odd", "value": math.nan},
        {"name": "edit_persistence", "value": 0.5, "detail": {"survival": 0.25}}, {"name": "x" * 300, "value": 2.0},
        SimpleNamespace(name="given", value=0.125, detail={}),
    ]  # fmt: skip
    found = sums(sqlite_engine, label(terms=terms, exclusion="erased", success=True))
    assert found == {
        "reward": (1, 500_000, 250_000, 0), "term:rating": (1, -1_000_000, 1_000_000, 1), "term:given": (1, 125_000, 15_625, 0),
        "term:edit_persistence": (1, 500_000, 250_000, 0), "survival": (1, 250_000, 62_500, 0), "success": (1, 1_000_000, 1_000_000, 0),
        "excluded:erased": (1, 1_000_000, 1_000_000, 0), "term:" + "x" * 195: (1, 2_000_000, 4_000_000, 0),
    }  # fmt: skip


def test_of_an_edit_nobody_measured_nothing_survives_and_other_terms_details_are_their_own(sqlite_engine: Engine) -> None:
    terms = [{"name": "edit_persistence", "value": None, "detail": {}}, {"name": "rating", "value": 1.0, "detail": {"survival": 0.5}}]
    assert set(sums(sqlite_engine, label(terms=terms))) == {"reward", "term:rating"}


def test_a_row_that_came_to_nothing_goes_and_one_that_has_more_stays(sqlite_engine: Engine) -> None:
    sums(sqlite_engine, label(), label(success=1.0))
    assert sums(sqlite_engine, taken_back=(label(success=1.0),)) == {"reward": (1, 500_000, 250_000, 0)}
    assert sums(sqlite_engine, label(reward=-1.0), taken_back=(label(),)) == {"reward": (1, -1_000_000, 1_000_000, 1)}
    assert sums(sqlite_engine, taken_back=(label(reward=-1.0),)) == {}


def test_sums_are_written_anew_from_the_current_labels_where_there_are_none(sqlite_engine: Engine) -> None:
    rows = [
        label(
            inference_id=f"i{n}", revision=revision, current=current, rule_set="r", actor=None, held_out=False, labelled_at=at(0),
            success=1.0,
        )
        for n, revision, current in ((1, 1, False), (1, 2, True), (2, 1, True))
    ]  # fmt: skip
    with writing(sqlite_engine) as connection:
        connection.execute(insert(labels), rows)
        assert rebuild(connection, only_if_empty=True) == 2
        found = read_rollups(connection)
        assert rebuild(connection, only_if_empty=True) == 0
        assert found == recount(connection)
    assert {key[4]: value.n for key, value in found.items()} == {"reward": 2, "success": 2}
