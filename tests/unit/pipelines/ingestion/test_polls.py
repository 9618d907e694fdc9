"""What one poll asks for, hands on and says: positions, tries, spans, and whom a refusal is laid to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
import pytest

from app.domain.errors import BadRequest, OwnFault, RatchetError, Unavailable
from app.domain.telemetry.streams import Delivery, EffectBatch, TopicPartition
from app.telemetry.traces import NOWHERE, Traces
from pipelines.ingestion.config import IngestionConfig
from pipelines.ingestion.ingest import Ingest
from pipelines.ingestion.isolate import Isolator
from tests.fakes.served import applied, at, delivery_of, event_of, observation, turn
from tests.fakes.streaming import PickyStore, ScriptedSource
from tests.unit.app.telemetry.test_traces import TAKEN, Kept

CONFIG = msgspec.structs.replace(IngestionConfig(), group="g", poll_s=0.125, retries=2)


class Source(ScriptedSource):
    """Knows its topic, and how long it was asked to wait."""

    def __init__(self, *polls: Sequence[Delivery] | Exception) -> None:
        super().__init__(*polls)
        self.waited: list[float] = []

    def poll(self, timeout_s: float) -> list[Delivery]:
        """The next script entry."""
        self.waited.append(timeout_s)
        return super().poll(timeout_s)

    def high_waters(self) -> Mapping[TopicPartition, int]:
        """A hundred records."""
        return {("ratchet.events.1", 0): 100}

    def incarnations(self) -> Mapping[str, str]:
        """The first."""
        return {"ratchet.events.1": "first"}


def member(source: ScriptedSource, store: PickyStore, *, traces: Traces = NOWHERE, **more: Any) -> Ingest:
    defaults: dict[str, Any] = {"clock": lambda: at(0), "pause": lambda _: None}
    return Ingest(source=source, store=store, config=CONFIG, traces=traces, **defaults | more)


def said(id_: str, *, offset: int, partition: int = 0) -> Delivery:
    return delivery_of(event_of(observation(id_, of="t")), offset=offset, partition=partition)


def test_a_batch_says_how_far_each_partition_was_read_whatever_came_first_and_where_that_stands_at_the_broker() -> None:
    source, store = Source([said("b", offset=8), said("c", offset=3, partition=1), said("a", offset=7)]), PickyStore()
    assert member(source, store).step() == 3
    (batch,) = store.batches
    assert batch.next_offsets == {("ratchet.events.1", 0): 9, ("ratchet.events.1", 1): 4}
    assert (batch.group, batch.high_waters, batch.incarnations) == ("g", source.high_waters(), source.incarnations())
    assert source.waited == [0.125]


def test_a_broker_that_is_away_is_said_and_asked_again_after_half_a_second_and_its_silence_is_none() -> None:
    told, pauses, new = list[str | None](), list[float](), list[int]()
    source = Source(Unavailable("the broker is gone"), [], [said("a", offset=0), said("b", offset=1)])
    one = member(source, PickyStore(), report=told.append, pause=pauses.append, applied=new.append)
    assert [one.step() for _ in range(3)] == [0, 0, 2]
    assert (told, pauses, new) == (["the broker is gone", None, None], [0.5], [2])


class Failing(PickyStore):
    """Raises what it is given, and counts how often it was asked."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors, self.asked = [*errors], 0

    def apply(self, batch: EffectBatch, *, now: datetime) -> int:
        """The next error, and then as any other."""
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().apply(batch, now=now)


@pytest.mark.parametrize(("failures", "asked", "dead"), [(1, 2, 0), (2, 3, 1)])
def test_what_nobody_expected_is_tried_as_often_as_the_configuration_says(
    failures: int, asked: int, dead: int, caplog: pytest.LogCaptureFixture
) -> None:
    pauses, store = list[float](), Failing(*[OSError("odd")] * failures)
    assert member(Source([said("a", offset=0)]), store, pause=pauses.append).step() == 1 - dead
    assert (store.asked, pauses, len(store.batches[-1].dead)) == (asked, [0.1], dead)
    tries = [record.getMessage() for record in caplog.records if "apply_failed" in record.getMessage()]
    assert tries == [f"event=apply_failed attempt={n} records=1 error=OSError('odd')" for n in range(1, failures + 1)]


@pytest.mark.parametrize("error", [Unavailable("busy"), OwnFault("no such column")])
def test_what_is_no_record_s_fault_is_tried_once_and_handed_on(error: RatchetError) -> None:
    store = Failing(error)
    with pytest.raises(type(error)):
        Isolator(store=store, clock=lambda: at(0), pause=lambda _: pytest.fail("waited")).apply(
            EffectBatch(events=(applied(observation("a", of="t")),))
        )
    assert store.asked == 1


@pytest.mark.parametrize("error", [BadRequest("the database refuses its headers"), OverflowError("date value out of range")])
def test_a_batch_without_a_record_that_is_refused_says_why_itself(error: Exception) -> None:
    """There is nothing in it to look for and to bury."""
    with pytest.raises(type(error), match=str(error)):
        Isolator(store=Failing(*[error] * 3), clock=lambda: at(0), pause=lambda _: None).apply(EffectBatch(events=()))


def test_what_was_dead_already_is_buried_beside_what_is_refused_and_each_is_said(caplog: pytest.LogCaptureFixture) -> None:
    odd = replace(said("odd", offset=0), value=b"{", event=msgspec.structs.replace(event_of(observation("odd", of="t")), data=b"{"))
    store = PickyStore(refuses=["b"])
    assert member(Source([odd, said("a", offset=1), said("b", offset=2), said("c", offset=3)]), store).step() == 2
    assert [letter.offset for letter in store.batches[-1].dead] == [0, 2]
    lines = [record.getMessage() for record in caplog.records if "dead_letter" in record.getMessage()]
    assert [line.partition(" reason=")[0] for line in lines] == [
        f"event=dead_letter topic=ratchet.events.1 partition=0 offset={offset}" for offset in (0, 2)
    ]


def test_records_that_the_database_refuses_are_never_our_fault_however_many_there_are() -> None:
    names = [f"o{n}" for n in range(12)]
    store = PickyStore(refuses=names)
    assert member(Source([said(name, offset=n) for n, name in enumerate(names)]), store).step() == 0
    assert len(store.batches[-1].dead) == 12


@pytest.mark.parametrize("beside", ["in the same batch", "in one before"])
def test_one_record_of_a_type_that_passes_clears_all_of_its_type(beside: str) -> None:
    """Ten broken ones are no fault of ours, where one that passes came between them."""
    between = [said("good", offset=5), said("f", offset=6)] if beside == "in the same batch" else [said("good", offset=5)]
    polls = (
        [[said(name, offset=n)] for n, name in enumerate("abcde")],
        [between],
        [[said(name, offset=n)] for n, name in enumerate("ghijk", 7)],
    )
    source, store = ScriptedSource(*(poll for some in polls for poll in some)), PickyStore(breaks_on=[*"abcdefghijk"])
    one = member(source, store)
    assert [one.step() for _ in range(11)] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert store.applied == ["good"]


def test_types_are_held_against_themselves_alone() -> None:
    store = PickyStore(breaks_on=[*"abcde", "turn-t"])
    polls = [[said(name, offset=n)] for n, name in enumerate("abcde")]
    one = member(ScriptedSource(*polls, [delivery_of(event_of(turn("t")), offset=5)]), store)
    assert [one.step() for _ in range(6)] == [0] * 6


def test_a_traced_record_s_span_says_where_it_lay_and_with_how_many_it_came() -> None:
    kept, clock = Kept(), iter((at(1), at(1), at(3)))
    plain, traced = said("a", offset=6), said("b", offset=7, partition=2)
    traced = replace(traced, headers={**traced.headers, "ce_traceparent": TAKEN})
    member(Source([plain, traced]), PickyStore(), traces=kept.traces, clock=lambda: next(clock)).step()
    (span,) = kept.spans
    assert (span.name, span.kind.name) == ("apply ratchet.events.1", "CONSUMER")
    assert (span.end_time or 0) - (span.start_time or 0) == 2_000_000_000
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka", "messaging.destination.name": "ratchet.events.1", "messaging.kafka.offset": 7,
        "messaging.destination.partition.id": "2", "messaging.batch.message_count": 2, "ratchet.inference_id": "b",
    }  # fmt: skip
