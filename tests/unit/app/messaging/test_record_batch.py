"""Batches written at once read back, by kafka-python's own reader, as what its own writer would have made of the records."""

from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecords

from app.domain.telemetry.events import CloudEvent
from app.messaging.codec import decode, encode_headers
from app.messaging.record_batch import partition_of, record_batch
from tests.fakes.served import at
from tests.unit.app.messaging.test_codec import Record

EVENTS = st.builds(
    CloudEvent,
    id=st.text(min_size=1, max_size=60).filter(lambda text: "\x00" not in text),
    source=st.sampled_from(["api", "sdk:python", "grüße"]),
    type=st.just("ratchet.turn.v1"),
    time=st.just(at(0)),
    key=st.text(max_size=80),
    data=st.binary(max_size=300) | st.just(b"x" * 70_000),
)


@given(st.lists(EVENTS, min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_batch_reads_back_as_what_was_written(events: list[CloudEvent]) -> None:
    read = MemoryRecords(record_batch([(event, at(5)) for event in events], now_ms=1_700_000_000_000)).next_batch()
    assert read is not None
    assert read.validate_crc()
    records = list(read)
    assert [record.offset for record in records] == list(range(len(events)))
    for event, record in zip(events, records, strict=True):
        assert (record.key, record.value) == (event.key.encode(), event.data or None)
        assert list(record.headers) == encode_headers(event, at(5))
        assert decode(Record(list(record.headers), value=record.value, key=record.key)).event == event


def test_a_key_always_goes_to_the_same_partition_and_all_partitions_are_used() -> None:
    assert partition_of(b"episode-1") == partition_of(b"episode-1")
    assert {partition_of(f"episode-{n}".encode()) for n in range(100)} == set(range(6))
