"""Whose fault a refusal of the database is: only the data's may bury a record."""

import pytest
from sqlalchemy import Engine, select, text

from app.db.engine import reading, writing
from app.db.ingestion.streams import SqlEffects
from app.db.tables import dead_letters, turns
from app.domain.errors import OwnFault, RatchetError, Unavailable
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import Usage
from pipelines.ingestion.isolate import Isolator
from tests.fakes.served import applied, at, turn
from tests.fakes.streaming import MemorySegments

FIFTY = tuple(applied(turn(f"t{n}"), offset=n) for n in range(50))


def store_of(engine: Engine, segments: MemorySegments | None = None) -> SqlEffects:
    kept = segments or MemorySegments()
    return SqlEffects(engine, rules=lambda: JoinRules(policies={}), write_segment=kept.write_sized, erase_from_segment=kept.erase)


def refusal(engine: Engine, batch: EffectBatch) -> type[RatchetError] | None:
    try:
        Isolator(store=store_of(engine), clock=lambda: at(1), pause=lambda _: None).apply(batch)
    except RatchetError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE turns RENAME COLUMN completion TO answer",
        "DROP TABLE applied_events",
        {"sqlite": "ALTER TABLE turns RENAME COLUMN kind TO sort", "postgresql": "ALTER TABLE turns ADD COLUMN tenant TEXT NOT NULL"},
    ],
)
def test_a_schema_of_another_version_stops_ingestion_and_buries_none_of_fifty_healthy_turns(
    engine: Engine, change: str | dict[str, str]
) -> None:
    with writing(engine) as connection:
        connection.execute(text(change if isinstance(change, str) else change[engine.dialect.name]))
    assert refusal(engine, EffectBatch(events=FIFTY)) is OwnFault
    with reading(engine) as connection:
        assert connection.execute(select(dead_letters.c.id)).all() == []


def test_a_number_that_the_database_cannot_hold_buries_its_record_and_the_others_are_applied(engine: Engine) -> None:
    bad = turn("bad", usage=Usage(prompt_tokens=2**63, completion_tokens=2))
    batch = EffectBatch(events=(*FIFTY[:3], applied(bad, offset=60)))
    assert refusal(engine, batch) is None
    with reading(engine) as connection:
        assert len(connection.execute(select(turns.c.inference_id)).all()) == 3
        assert connection.execute(select(dead_letters.c.offset)).scalars().all() == [60]


def test_a_bucket_or_disk_that_takes_nothing_is_waited_for(engine: Engine) -> None:
    def full(name: str, payloads: object) -> int:
        raise OSError(28, "No space left on device")

    store = SqlEffects(engine, rules=lambda: JoinRules(policies={}), write_segment=full, erase_from_segment=MemorySegments().erase)
    with pytest.raises(Unavailable, match="No space left"):
        store.apply(EffectBatch(events=FIFTY, next_offsets={("t", 0): 50}), now=at(1))
    assert store_of(engine).apply(EffectBatch(events=FIFTY), now=at(1)) == 50
