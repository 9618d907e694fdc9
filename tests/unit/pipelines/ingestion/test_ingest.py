"""One poll, one transaction; what the database refuses is isolated, what it cannot do now is tried again."""

import pytest

from app.domain.errors import Unavailable
from app.domain.streams import Delivery
from pipelines.ingestion.config import IngestionConfig
from pipelines.ingestion.ingest import Ingest
from tests.fakes.served import at, delivery_of, event_of, observation
from tests.fakes.streaming import PickyStore, ScriptedSource


def deliveries(*ids: str) -> list[Delivery]:
    return [delivery_of(event_of(observation(id_, of="t")), offset=offset) for offset, id_ in enumerate(ids)]


def ingest(source: ScriptedSource, store: PickyStore) -> Ingest:
    return Ingest(source=source, store=store, config=IngestionConfig(), clock=lambda: at(0), pause=lambda _: None)


def test_offsets_are_committed_to_kafka_only_after_the_database_has_them() -> None:
    source, store = ScriptedSource(deliveries("a", "b")), PickyStore()
    assert ingest(source, store).step() == 2
    assert store.batches[-1].next_offsets == source.committed[-1] == {("ratchet.events.1", 0): 2}


def test_a_busy_database_is_tried_again_with_the_same_batch() -> None:
    source, store = ScriptedSource(deliveries("a")), PickyStore(failures=4)
    assert ingest(source, store).step() == 1
    assert store.applied == ["a"]


def test_a_database_that_stays_away_ends_the_process_before_anything_is_committed() -> None:
    source, store = ScriptedSource(deliveries("a")), PickyStore(failures=1000)
    with pytest.raises(Unavailable):
        ingest(source, store).step()
    assert source.committed == []


def test_a_record_that_the_database_refuses_is_buried_and_every_other_one_applied_in_order() -> None:
    source, store = ScriptedSource(deliveries(*"abcdefg")), PickyStore(refuses=["c", "f"])
    assert ingest(source, store).step() == 5
    assert store.applied == list("abdeg")
    last = store.batches[-1]
    assert [letter.offset for letter in last.dead] == [2, 5]
    assert last.next_offsets == {("ratchet.events.1", 0): 7}
    assert all(not batch.next_offsets for batch in store.batches[:-1])


def test_a_broker_that_does_not_answer_is_waited_for() -> None:
    source, store = ScriptedSource(Unavailable("gone"), deliveries("a")), PickyStore()
    member = ingest(source, store)
    assert [member.step(), member.step()] == [0, 1]
