"""CloudEvents 1.0 in Kafka's binary mode: envelope in the headers, the wire type's JSON as the value.

`ce_ratchetreceived` (an extension attribute, microseconds since the epoch) carries when the inbox committed the event.
"""

from datetime import datetime, timedelta
from typing import Any

from app.domain.telemetry.events import EPOCH, RECEIVED, CloudEvent, envelope
from app.domain.telemetry.moments import EARLIEST, LATEST
from app.domain.telemetry.streams import Delivery

MAX_NAME = 200
"""Length of the names in the tables."""


def encode_headers(event: CloudEvent, received_at: datetime) -> list[tuple[str, bytes]]:
    """The headers of a record; the value is `event.data`, the key `event.key`."""
    return [(name, text.encode()) for name, text in envelope(event, received_at).items()]


def decode(record: Any) -> Delivery:  # noqa: ANN401 - kafka-python's record
    """A record as a Delivery; a broken envelope is described, never raised."""
    headers: dict[str, str] = {}
    event: CloudEvent | None = None
    problem: str | None = None
    received_at = EPOCH
    try:
        received_at += timedelta(milliseconds=max(0, record.timestamp or 0))
        headers = {name: (value or b"").decode() for name, value in record.headers}
        event = CloudEvent(
            id=_named(headers, "ce_id"), source=_named(headers, "ce_source"), type=_named(headers, "ce_type"),
            time=_time(headers.get("ce_time"), received_at), key=(record.key or b"").decode(), data=record.value or b"",
        )  # fmt: skip
        if RECEIVED in headers:
            received_at = _received(headers[RECEIVED])
    except (ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
        event, problem = None, f"broken envelope: {error}"
        headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    return Delivery(
        topic=record.topic, partition=record.partition, offset=record.offset, headers=headers,
        value=record.value or b"", event=event, received_at=received_at, problem=problem,
    )  # fmt: skip


def _named(headers: dict[str, str], name: str) -> str:
    text = headers.get(name, "")
    if not text or len(text) > MAX_NAME or "\x00" in text:
        raise ValueError(f"header {name} is {text[:40]!r}, 1 to {MAX_NAME} characters without NUL are needed")
    return text


def _received(text: str) -> datetime:
    moment = EPOCH + timedelta(microseconds=int(text))
    if not EARLIEST <= moment < LATEST:
        raise ValueError(f"header {RECEIVED} says {moment.isoformat()}, outside {EARLIEST:%Y} to {LATEST:%Y}")
    return moment


def _time(text: str | None, otherwise: datetime) -> datetime:
    """`ce_time` is optional in CloudEvents; a time without a zone would be a guess."""
    if text is None:
        return otherwise
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"header ce_time is {text!r}, which has no timezone")
    return moment
