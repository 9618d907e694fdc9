"""Record batches (Kafka message format 2) written at once, zstd-compressed.

kafka-python builds them record by record, with a future each: 60 µs a record with seven headers, here about 6. Layout of a record:

    length · attributes 0 · timestamp delta 0 · offset delta · key · value (−1 for a tombstone) · headers
    lengths and deltas are zigzag varints; the batch header is `HEADER`, its checksum CRC-32C over everything from the attributes on
"""

import struct
import zlib
from collections.abc import Sequence
from datetime import datetime

from kafka.codec import zstd_encode
from kafka.record.util import calc_crc32c

from app.domain.telemetry.events import CloudEvent
from app.domain.telemetry.streams import PARTITIONS
from app.messaging.codec import encode_headers

HEADER = struct.Struct(">qiibIhiqqqhii")
"""Base offset, length, leader epoch, magic, checksum, attributes, last offset delta, first and last time, producer id, epoch, sequence,
count."""
LENGTH_FROM = struct.calcsize(">qi")
CHECKED_FROM = struct.calcsize(">qiibI")
ZSTD = 4
SMALL = 16_384


def partition_of(key: bytes) -> int:
    """The partition of a key: all there is about one episode lies in one partition."""
    return zlib.crc32(key) % PARTITIONS


def record_batch(records: Sequence[tuple[CloudEvent, datetime]], *, now_ms: int) -> bytes:
    """One batch of these events (with when they were received), in order; offset deltas count from 0."""
    body = zstd_encode(b"".join([_record(delta, event, received) for delta, (event, received) in enumerate(records)]))
    last = len(records) - 1
    length = HEADER.size - LENGTH_FROM + len(body)
    batch = bytearray(HEADER.pack(0, length, -1, 2, 0, ZSTD, last, now_ms, now_ms, -1, -1, -1, len(records)))
    batch += body
    struct.pack_into(">I", batch, CHECKED_FROM - 4, calc_crc32c(memoryview(batch)[CHECKED_FROM:]))
    return bytes(batch)


def _record(delta: int, event: CloudEvent, received_at: datetime) -> bytes:
    key, value = event.key.encode(), event.data
    parts = [b"\x00\x00", _varint(delta), _varint(len(key)), key, _varint(len(value)) if value else b"\x01", value]
    headers = encode_headers(event, received_at)
    parts.append(_varint(len(headers)))
    for name, text in headers:
        parts += (_NAMES[name], _varint(len(text)), text)
    record = b"".join(parts)
    return _varint(len(record)) + record


def _encode_varint(value: int) -> bytes:
    """Zigzag varint of a number that is not negative."""
    value <<= 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_SMALL = [_encode_varint(value) for value in range(SMALL)]


def _varint(value: int) -> bytes:
    return _SMALL[value] if value < SMALL else _encode_varint(value)


class _HeaderNames(dict[str, bytes]):
    """Length and name of a header, encoded once."""

    def __missing__(self, name: str) -> bytes:
        encoded = name.encode()
        self[name] = _varint(len(encoded)) + encoded
        return self[name]


_NAMES = _HeaderNames()
