"""Two members apply at the same moment and do not see each other: what belongs together is brought together afterwards."""

import pytest
from sqlalchemy import Engine, select

from app.db.engine import reading, writing
from app.db.ingestion.observations import apply_retractions, insert_observations, join_waiting
from app.db.ingestion.streams import SqlEffects
from app.db.ingestion.turns import insert_turns, lock_turns
from app.db.tables import observations, retractions, turns
from app.domain.telemetry.streams import EffectBatch, JoinRules
from tests.fakes.served import applied, at, observation, retraction, turn
from tests.fakes.streaming import MemorySegments

RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)


@pytest.fixture
def store(postgres_engine: Engine) -> SqlEffects:
    segments = MemorySegments()
    return SqlEffects(postgres_engine, rules=lambda: RULES, segments=segments)


def test_an_observation_parked_while_its_turn_was_being_inserted_is_joined(postgres_engine: Engine, store: SqlEffects) -> None:
    with writing(postgres_engine) as one:
        insert_turns(one, [turn("a", episode="e")], rules=RULES, erased={})
        join_waiting(one, ["a"], ["e"], rules=RULES)
        for said in (observation("o", of="a"), observation("about the episode", episode="e")):
            store.apply(EffectBatch(events=(applied(said),)), now=at(1))
    with reading(postgres_engine) as connection:
        assert set(connection.execute(select(observations.c.status)).scalars()) == {"parked"}
    store.expire_parked(now=at(2))
    with reading(postgres_engine) as connection:
        assert set(connection.execute(select(observations.c.status)).scalars()) == {"joined"}
        assert connection.execute(select(turns.c.evidence)).scalar_one() == 1


def test_an_observation_inserted_while_it_was_being_taken_back_is_taken_back(postgres_engine: Engine, store: SqlEffects) -> None:
    store.apply(EffectBatch(events=(applied(turn("a")),)), now=at(0))
    said = observation("o", of="a")
    with writing(postgres_engine) as one:
        apply_retractions(one, [(applied(retraction("o")), retraction("o"))])
        with writing(postgres_engine) as other:
            insert_observations(other, [(applied(said), said)], rules=RULES)
    store.expire_parked(now=at(2))
    with reading(postgres_engine) as connection:
        assert connection.execute(select(observations.c.retracted_at)).scalar_one() == at(2)
        assert connection.execute(select(retractions.c.matched)).scalar_one() is True
        assert connection.execute(select(turns.c.evidence)).scalar_one() == 1


@pytest.mark.parametrize(
    ("turns_", "episodes", "free"), [(["a"], [], {"b", "c"}), ([], ["e"], {"c"}), (["a"], ["e"], {"c"}), ([], [], {"a", "b", "c"})]
)
def test_what_a_transaction_will_touch_is_its_own_from_the_beginning(
    postgres_engine: Engine, store: SqlEffects, turns_: list[str], episodes: list[str], free: set[str]
) -> None:
    served = (turn("a", episode="e"), turn("b", episode="e"), turn("c"))
    store.apply(EffectBatch(events=tuple(applied(one, offset=n) for n, one in enumerate(served))), now=at(0))
    with writing(postgres_engine) as one, writing(postgres_engine) as other:
        lock_turns(one, turns_, episodes)
        assert set(other.execute(select(turns.c.inference_id).with_for_update(skip_locked=True)).scalars()) == free
