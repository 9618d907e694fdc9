"""OTLP's JSON: what of it may tell of an evaluation, and nothing else of it is made into objects.

protobuf's own reader of JSON is Python all the way down: 40 ms for 130 kB, all of them taken from everybody else.
"""

import base64
import re
from typing import TypeVar

import msgspec

from app.domain.errors import BadRequest

_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Keys are lowerCamelCase (OTLP 1.0, "JSON Protobuf Encoding"); null is as good as absent."""


class Value(_Part, frozen=True):
    """A scalar; lists and maps mean nothing to us. Integers of 64 bits come as texts, too."""

    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | None = None
    double_value: float | None = None

    def plain(self) -> str | bool | int | float | None:
        """Whichever is set."""
        return next((v for v in (self.string_value, self.bool_value, self.int_value, self.double_value) if v is not None), None)


class Pair(_Part, frozen=True):
    """An attribute."""

    key: str | None = None
    value: Value | None = None


class Record(_Part, frozen=True):
    """A log record."""

    trace_id: str | None = None
    span_id: str | None = None
    time_unix_nano: int | None = None
    observed_time_unix_nano: int | None = None
    event_name: str | None = None
    attributes: list[Pair] | None = None


class Event(_Part, frozen=True):
    """Of a span."""

    name: str | None = None
    time_unix_nano: int | None = None
    attributes: list[Pair] | None = None


class Span(_Part, frozen=True):
    """A span."""

    trace_id: str | None = None
    span_id: str | None = None
    attributes: list[Pair] | None = None
    events: list[Event] | None = None


class LogScope(_Part, frozen=True):
    """Records of one library."""

    log_records: list[msgspec.Raw] | None = None
    """Each is decoded by itself (`record`): all of them at once would be one piece of 20 ms a megabyte."""


class SpanScope(_Part, frozen=True):
    """Spans of one library."""

    spans: list[msgspec.Raw] | None = None


class LogResource(_Part, frozen=True):
    """Records of one process."""

    scope_logs: list[LogScope] | None = None


class SpanResource(_Part, frozen=True):
    """Spans of one process."""

    scope_spans: list[SpanScope] | None = None


class Logs(_Part, frozen=True):
    """An export of logs."""

    resource_logs: list[LogResource] | None = None
    snake: msgspec.Raw | None = msgspec.field(default=None, name="resource_logs")


class Spans(_Part, frozen=True):
    """An export of spans."""

    resource_spans: list[SpanResource] | None = None
    snake: msgspec.Raw | None = msgspec.field(default=None, name="resource_spans")


T = TypeVar("T", Logs, Spans)
_logs = msgspec.json.Decoder(Logs, strict=False)
_spans = msgspec.json.Decoder(Spans, strict=False)
record = msgspec.json.Decoder(Record, strict=False).decode
"""Raises `ValueError`, as `span` does."""
span = msgspec.json.Decoder(Span, strict=False).decode


def logs(raw: bytes) -> Logs:
    """Raises `ValueError` for what is none."""
    return _in_our_keys(_logs.decode(raw))


def spans(raw: bytes) -> Spans:
    """Raises `ValueError` for what is none."""
    return _in_our_keys(_spans.decode(raw))


def _in_our_keys(found: T) -> T:
    """Taken and not understood would be lost with a success."""
    if found.snake is not None:
        raise ValueError("keys are lowerCamelCase, as in resourceLogs")
    return found


def hexadecimal(id_: str | None) -> str:
    """A trace or span id in hexadecimal, as OTLP has it; protobuf's own JSON has base64. Raises `BadRequest` for neither."""
    try:
        return id_.lower() if id_ and _HEX.fullmatch(id_) else base64.b64decode(id_ or "", validate=True).hex()
    except ValueError as error:
        raise BadRequest(f"{(id_ or '')[:64]!r} is no trace or span id", code="not_otlp") from error
