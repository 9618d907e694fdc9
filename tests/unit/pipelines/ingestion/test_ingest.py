"""One poll, one transaction; what the database refuses is isolated, what it cannot do now is tried again."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pytest

from app.domain.errors import OwnFault, Unavailable
from app.domain.telemetry.streams import Delivery
from pipelines.ingestion.config import IngestionConfig
from pipelines.ingestion.ingest import Ingest
from tests.fakes.served import at, delivery_of, event_of, observation
from tests.fakes.streaming import PickyStore, ScriptedSource


def deliveries(*ids: str) -> list[Delivery]:
    return [delivery_of(event_of(observation(id_, of="t")), offset=offset) for offset, id_ in enumerate(ids)]


def ingest(source: ScriptedSource, store: PickyStore, *, pause: Callable[[float], None] = lambda _: None, **more: Any) -> Ingest:
    return Ingest(source=source, store=store, config=IngestionConfig(), clock=lambda: at(0), pause=pause, **more)


def test_offsets_are_committed_to_kafka_only_after_the_database_has_them() -> None:
    source, store = ScriptedSource(deliveries("a", "b")), PickyStore()
    assert ingest(source, store).step() == 2
    assert store.batches[-1].next_offsets == source.committed[-1] == {("ratchet.events.1", 0): 2}


def test_a_database_that_stays_away_is_waited_for_and_said_so_and_nothing_is_committed_meanwhile() -> None:
    source, store, said = ScriptedSource(deliveries("a"), deliveries("b")), PickyStore(failures=40), list[str | None]()
    member = ingest(source, store, report=said.append)
    store.on_failure = lambda: source.committed and pytest.fail("committed before the database had it")
    assert [member.step(), member.step()] == [1, 1]
    assert said == [*["the database is busy: it is tried again"] * 40, None, None]
    assert (store.applied, len(source.committed)) == (["a", "b"], 2)


def test_a_database_that_stays_away_is_asked_less_and_less_often_but_not_less_than_every_fifteen_seconds() -> None:
    pauses = list[float]()
    ingest(ScriptedSource(deliveries("a")), PickyStore(failures=40), pause=pauses.append).step()
    for pause, middle in zip(pauses, [0.6, 1.8, 5.4, *[10.0] * 37], strict=True):
        assert middle / 2 <= pause <= middle * 3 / 2


def test_a_database_that_stays_away_does_not_hold_up_the_end_of_the_process() -> None:
    source, store = ScriptedSource(deliveries("a")), PickyStore(failures=1000)
    with pytest.raises(Unavailable):
        ingest(source, store).step(stopping=lambda: True)
    assert source.committed == []


def test_what_nobody_expected_of_one_record_buries_that_record_after_a_few_tries_and_the_others_go_on() -> None:
    """A `finished_at` of year 9999 once raised OverflowError in apply, for ever, and nothing behind it moved."""
    source, store = ScriptedSource(deliveries(*"abcdefg")), PickyStore(breaks_on=["d"])
    assert ingest(source, store).step() == 6
    assert store.applied == list("abcefg")
    (letter,) = store.batches[-1].dead
    assert (letter.offset, letter.reason) == (3, "OverflowError: date value out of range")
    assert source.committed == [{("ratchet.events.1", 0): 7}]


def test_when_every_record_of_a_type_fails_alike_the_fault_is_ours_and_nothing_is_buried() -> None:
    names = [f"o{n}" for n in range(50)]
    source, store, said = ScriptedSource(deliveries(*names)), PickyStore(breaks_on=names), list[str | None]()
    with pytest.raises(OwnFault, match="no fault of the data"):
        ingest(source, store, report=said.append).step()
    assert (store.batches, source.committed) == ([], [])
    assert len(said) == 1


def test_five_records_of_a_type_in_a_row_may_be_broken_and_the_sixth_makes_it_our_fault() -> None:
    source, store = ScriptedSource(*(deliveries(name) for name in "abcdef")), PickyStore(breaks_on="abcdef")
    member = ingest(source, store)
    assert [member.step() for _ in range(5)] == [0] * 5
    assert [len(batch.dead) for batch in store.batches] == [1] * 5
    with pytest.raises(OwnFault, match="6 records of type Observation in a row"):
        member.step()
    assert len(source.committed) == 5


def test_a_schema_that_is_not_ours_stops_the_process_and_buries_nothing() -> None:
    source, store = ScriptedSource(deliveries("a", "b")), PickyStore()
    store.own_fault = True
    with pytest.raises(OwnFault):
        ingest(source, store).step()
    assert (store.batches, source.committed) == ([], [])


def test_a_busy_database_is_tried_again_with_the_same_batch() -> None:
    source, store = ScriptedSource(deliveries("a")), PickyStore(failures=4)
    assert ingest(source, store).step() == 1
    assert store.applied == ["a"]


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


class Watched(ScriptedSource):
    """Counts how often it was let go of."""

    closed = 0

    def close(self) -> None:
        """Remember."""
        self.closed += 1


class Expiring(PickyStore):
    """What is parked expires as it was told, or the database is away."""

    def __init__(self, *found: int | Unavailable) -> None:
        super().__init__()
        self.found, self.expired = [*found], 0

    def expire_parked(self, *, now: datetime) -> int:
        """The next of them."""
        self.expired += 1
        said = self.found.pop(0) if self.found else 0
        if isinstance(said, Unavailable):
            raise said
        return said


def run(source: ScriptedSource, store: PickyStore, *, every_s: float = 0.0, polls: int = 3) -> None:
    left = iter(range(polls))
    config = msgspec.structs.replace(IngestionConfig(), expire_every_s=every_s)
    Ingest(source=source, store=store, config=config, clock=lambda: at(0), pause=lambda _: None).run(lambda: next(left, None) is None)


def test_a_member_applies_until_it_is_told_to_stop_and_hands_its_partitions_over() -> None:
    source, store = Watched(deliveries("a"), Unavailable("gone"), deliveries("b")), PickyStore()
    run(source, store)
    assert (store.applied, source.closed) == (["a", "b"], 1)


def test_what_waited_for_its_turn_too_long_is_looked_for_now_and_then_and_a_database_that_is_away_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, store = Watched(deliveries("a"), deliveries("b"), deliveries("c")), Expiring(Unavailable("the database is busy"), 0, 7)
    run(source, store)
    assert (store.applied, store.expired, source.closed) == (["a", "b", "c"], 3, 1)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["event=waiting error=the database is busy", "event=orphaned count=7"]
    rare = Expiring()
    run(Watched(deliveries("a")), rare, every_s=3600.0)
    assert rare.expired == 1


def test_a_database_that_is_away_at_the_end_lets_the_member_end_and_commits_nothing() -> None:
    source, store, asked = Watched(deliveries("a")), PickyStore(failures=1000), list[bool]()

    def stopping() -> bool:
        asked.append(True)
        return len(asked) > 1

    Ingest(source=source, store=store, config=IngestionConfig(), clock=lambda: at(0), pause=lambda _: None).run(stopping)
    assert (source.committed, source.closed) == ([], 1)
