"""CloudEvents in binary mode: what goes out comes back, and a broken envelope is described."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.telemetry.events import CloudEvent
from app.messaging.codec import decode, encode_headers
from tests.fakes.served import START, at, event_of, observation

MICROSECOND = timedelta(microseconds=1)


@dataclass
class Record:
    """A record as kafka-python hands it out."""

    headers: list[tuple[str, bytes | None]]
    value: bytes | None = b"{}"
    key: bytes | None = b"k"
    topic: str = "ratchet.events.1"
    partition: int = 2
    offset: int = 7
    timestamp: int | None = field(default=int(START.timestamp() * 1000))


def record(event: CloudEvent, **changed: bytes | None) -> Record:
    headers = {**dict(encode_headers(event, at(5) + timedelta(microseconds=123_456))), **changed}
    return Record(
        [(name, value) for name, value in headers.items() if value != b"absent"], value=event.data or None, key=event.key.encode()
    )


def test_an_event_and_when_it_was_received_survive_the_way() -> None:
    event = event_of(observation("grüße", of="t"))
    delivery = decode(record(event))
    assert delivery.event == event
    assert delivery.received_at == at(5) + timedelta(microseconds=123_456)
    assert (delivery.partition, delivery.offset, delivery.problem) == (2, 7, None)


def test_a_tombstone_has_an_empty_value() -> None:
    event = CloudEvent(id="1", source="s", type="t", time=at(0), key="k", data=b"")
    assert decode(record(event)).event == event


def test_a_record_of_another_producer_is_dated_by_its_timestamp() -> None:
    delivery = decode(record(event_of(observation("o", of="t")), ce_ratchetreceived=b"absent", ce_time=b"absent"))
    assert delivery.event is not None
    assert delivery.received_at == delivery.event.time == START


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"ce_id": b"absent"}, "ce_id"),
        ({"ce_id": b""}, "ce_id"),
        ({"ce_source": b"x" * 201}, "ce_source"),
        ({"ce_type": b"a\x00b"}, "ce_type"),
        ({"ce_id": b"\xff\xfe"}, "utf-8"),
        ({"ce_time": b"yesterday"}, "isoformat"),
        ({"ce_time": b"2026-11-21T12:00:00"}, "no timezone"),
        ({"ce_ratchetreceived": b"soon"}, "invalid literal"),
        ({"ce_ratchetreceived": b"9" * 40}, "too large"),
    ],
)
def test_a_broken_envelope_is_described_never_raised(changed: dict[str, bytes], problem: str) -> None:
    delivery = decode(record(event_of(observation("o", of="t")), **changed))
    assert delivery.event is None
    assert delivery.problem is not None
    assert problem in delivery.problem


@pytest.mark.parametrize(
    ("moment", "inside"),
    [
        (datetime(2000, 1, 1, tzinfo=UTC) - MICROSECOND, False),
        (datetime(2000, 1, 1, tzinfo=UTC), True),
        (datetime(2200, 1, 1, tzinfo=UTC) - MICROSECOND, True),
        (datetime(2200, 1, 1, tzinfo=UTC), False),
    ],
)
def test_a_record_was_received_from_2000_to_2200(moment: datetime, inside: bool) -> None:
    micros = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // MICROSECOND
    delivery = decode(record(event_of(observation("o", of="t")), ce_ratchetreceived=str(micros).encode()))
    if inside:
        assert (delivery.received_at, delivery.problem) == (moment, None)
    else:
        assert "outside 2000 to 2200" in (delivery.problem or "")


def test_a_record_without_any_headers_is_described() -> None:
    assert decode(Record([], value=b"\x00\x01")).problem is not None


@pytest.mark.parametrize("name", ["ce_id", "ce_source", "ce_type"])
def test_a_name_has_one_to_200_characters_and_a_longer_one_is_shown_by_its_first_forty(name: str) -> None:
    for length in (1, 200):
        assert decode(record(event_of(observation("o", of="t")), **{name: b"x" * length})).event is not None
    problem = decode(record(event_of(observation("o", of="t")), **{name: b"x" * 201})).problem
    assert problem == f"broken envelope: header {name} is {'x' * 40!r}, 1 to 200 characters without NUL are needed"


@pytest.mark.parametrize(("stamp", "micros"), [(None, 0), (0, 0), (-1, 0), (-5_000, 0), (1, 1_000), (1_500, 1_500_000)])
def test_a_timestamp_is_in_milliseconds_and_none_from_before_1970(stamp: int | None, micros: int) -> None:
    told = Record([("ce_id", b"1"), ("ce_source", b"s"), ("ce_type", b"t")], timestamp=stamp)
    delivery = decode(told)
    assert delivery.received_at == datetime(1970, 1, 1, tzinfo=UTC) + micros * MICROSECOND
    assert delivery.event is not None
    assert delivery.event.time == delivery.received_at


@pytest.mark.parametrize("stamp", [1_764_000_000_000_000, 1 << 62])
def test_a_timestamp_that_is_no_date_is_described_as_part_of_a_broken_envelope(stamp: int) -> None:
    delivery = decode(Record([("ce_id", b"1"), ("ce_source", b"s"), ("ce_type", b"t")], timestamp=stamp, value=b"v"))
    assert (delivery.event, delivery.value, delivery.received_at) == (None, b"v", datetime(1970, 1, 1, tzinfo=UTC))
    assert (delivery.problem or "").startswith("broken envelope: ")


def test_a_record_without_key_value_or_a_header_s_text_is_read_as_empty() -> None:
    headers = [("ce_id", b"1"), ("ce_source", b"s"), ("ce_type", b"t"), ("x", None)]
    delivery = decode(Record(headers, key=None, value=None))
    assert delivery.event is not None
    assert (delivery.event.key, delivery.event.data, delivery.value, delivery.headers["x"]) == ("", b"", b"", "")
    broken = decode(Record([*headers, ("y", b"\xff"), ("z", None)], value=b"v", key=b"k"))
    assert (broken.event, broken.headers["y"], broken.headers["z"], broken.value) == (None, "\ufffd", "", b"v")
