"""Batches written at once read back, by kafka-python's own reader, as what its own writer would have made of the records."""

import pytest
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


def test_the_header_says_what_kafka_asks_of_a_producer_without_an_id() -> None:
    """Offsets from 0, no leader epoch, magic 2, zstd, both times now, producer, epoch and sequence -1 (Kafka's message format)."""
    event = CloudEvent(id="1", source="api", type="t", time=at(0), key="k", data=b"{}")
    written = record_batch([(event, at(5))] * 3, now_ms=1_700_000_000_000)
    read = MemoryRecords(written).next_batch()
    assert read is not None
    assert (read.base_offset, read.leader_epoch, read.magic, read.attributes, read.last_offset_delta) == (0, -1, 2, 4, 2)
    assert (read.first_timestamp, read.max_timestamp) == (1_700_000_000_000, 1_700_000_000_000)
    assert (read.producer_id, read.producer_epoch, read.base_sequence, read.records_count) == (-1, -1, -1, 3)
    assert [record.timestamp for record in read] == [1_700_000_000_000] * 3
    assert int.from_bytes(written[8:12], "big") == len(written) - 12, "the length counts from behind itself"


@pytest.mark.parametrize("length", [0, 1, 63, 64, 127, 128, 8_191, 8_192, 16_383, 16_384, 16_385, 1_048_575, 1_048_576])
def test_lengths_around_every_step_of_a_varint_read_back(length: int) -> None:
    event = CloudEvent(id="1", source="api", type="t", time=at(0), key="k", data=b"x" * length)
    read = MemoryRecords(record_batch([(event, at(5))] * 2, now_ms=0)).next_batch()
    assert read is not None
    assert [len(record.value or b"") for record in read] == [length] * 2


@pytest.mark.parametrize(("key", "partition"), [(b"", 0), (b"a", 0xE8B7BE43 % 6), (b"123456789", 0xCBF43926 % 6)])
def test_a_key_s_partition_is_its_crc_32_modulo_six(key: bytes, partition: int) -> None:
    """Another one would put what is known of an episode into two partitions, one after an upgrade."""
    assert partition_of(key) == partition


def test_a_key_always_goes_to_the_same_partition_and_all_partitions_are_used() -> None:
    assert partition_of(b"episode-1") == partition_of(b"episode-1")
    assert {partition_of(f"episode-{n}".encode()) for n in range(100)} == set(range(6))
