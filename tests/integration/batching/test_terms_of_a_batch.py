"""What the terms of a batch's labels say in sum, worked out by hand: shares of the reward, and means where a term spoke."""

from sqlalchemy import Engine, insert

from app.db.engine import writing
from app.db.learning.runs import SqlRunStore
from app.db.tables import batch_items, batches
from tests.integration.batching.rows import NOON, add_turn


def term(name: str, value: float | None, weight: float) -> dict[str, object]:
    return {"name": name, "value": value, "weight": weight}


def test_a_term_counts_by_its_size_and_not_where_it_kept_silent(engine: Engine) -> None:
    add_turn(engine, "one", terms=[term("rating", 1.0, 0.5), term("length", -0.25, 2.0), term("undo", None, 3.0)])
    add_turn(engine, "two", terms=[term("rating", -0.5, 0.5), term("undo", None, 3.0)])
    add_turn(engine, "in no batch", terms=[term("latency", -1.0, 9.0)])
    with writing(engine) as connection:
        connection.execute(
            insert(batches).values(
                id="b", policy="composer", slot=0, champion="champion", anchor="champion", rule_set="r", window_from=NOON, window_to=NOON,
                left_out={}, created_at=NOON,
            )
        )  # fmt: skip
        for name in ("one", "two"):
            connection.execute(
                insert(batch_items).values(
                    inference_id=name, batch_id="b", episode_id=f"episode-of-{name}", reward=0.0, label_revision=1, segment=""
                )
            )
    store = SqlRunStore(engine)
    assert store.term_shares("b") == {"length": 0.4, "rating": 0.6, "undo": 0.0}  # .5 of .5 + .25 + .5
    assert store.term_means("b") == {"length": -0.25, "rating": 0.25}
