"""OTLP's JSON: what of it may tell of an evaluation, and nothing else of it is made into objects.

protobuf's own reader of JSON is Python all the way down: 40 ms for 130 kB, all of them taken from everybody else.
"""

import base64
import re
from functools import cache
from typing import Any, Self

import msgspec

from app.domain.errors import BadRequest

_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


@cache
def _snakes(part: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a part that stand for keys in snake_case."""
    return tuple(name for name in part.__struct_fields__ if name.startswith("snake_"))


def _snake(name: str) -> Any:  # noqa: ANN401 - a field
    """A key as protobuf's own files write it, which the standard says is none here. Of its own type: a union takes no `Raw`."""
    return msgspec.field(default=msgspec.Raw(), name=name)


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Keys are lowerCamelCase (OTLP 1.0, "JSON Protobuf Encoding"); null is as good as absent."""

    def in_our_keys(self) -> Self:
        """The part, where no key of it is in snake_case: what is taken and not understood is lost with a success. Raises `ValueError`."""
        for name in _snakes(type(self)):
            if bytes(getattr(self, name)) not in (b"", b"null"):
                raise ValueError(f"keys are lowerCamelCase, and `{name.removeprefix('snake_')}` is not: write it as in resourceLogs")
        return self


class Value(_Part, frozen=True):
    """A scalar; lists and maps mean nothing to us. Integers of 64 bits come as texts, too."""

    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | None = None
    double_value: float | None = None
    snake_string_value: msgspec.Raw = _snake("string_value")
    snake_bool_value: msgspec.Raw = _snake("bool_value")
    snake_int_value: msgspec.Raw = _snake("int_value")
    snake_double_value: msgspec.Raw = _snake("double_value")

    def plain(self) -> str | bool | int | float | None:
        """Whichever is set."""
        for value in (self.string_value, self.bool_value, self.int_value, self.double_value):
            if value is not None:
                return value
        self.in_our_keys()
        return None


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
    snake_trace_id: msgspec.Raw = _snake("trace_id")
    snake_span_id: msgspec.Raw = _snake("span_id")
    snake_time_unix_nano: msgspec.Raw = _snake("time_unix_nano")
    snake_observed_time_unix_nano: msgspec.Raw = _snake("observed_time_unix_nano")
    snake_event_name: msgspec.Raw = _snake("event_name")


class Event(_Part, frozen=True):
    """Of a span."""

    name: str | None = None
    time_unix_nano: int | None = None
    attributes: list[Pair] | None = None
    snake_time_unix_nano: msgspec.Raw = _snake("time_unix_nano")


class Span(_Part, frozen=True):
    """A span."""

    trace_id: str | None = None
    span_id: str | None = None
    attributes: list[Pair] | None = None
    events: list[Event] | None = None
    snake_trace_id: msgspec.Raw = _snake("trace_id")
    snake_span_id: msgspec.Raw = _snake("span_id")


class LogScope(_Part, frozen=True):
    """Records of one library."""

    log_records: list[msgspec.Raw] | None = None
    """Each is decoded by itself (`record`): all of them at once would be one piece of 20 ms a megabyte."""
    snake_log_records: msgspec.Raw = _snake("log_records")


class SpanScope(_Part, frozen=True):
    """Spans of one library."""

    spans: list[msgspec.Raw] | None = None


class LogResource(_Part, frozen=True):
    """Records of one process."""

    scope_logs: list[LogScope] | None = None
    snake_scope_logs: msgspec.Raw = _snake("scope_logs")


class SpanResource(_Part, frozen=True):
    """Spans of one process."""

    scope_spans: list[SpanScope] | None = None
    snake_scope_spans: msgspec.Raw = _snake("scope_spans")


class Logs(_Part, frozen=True):
    """An export of logs."""

    resource_logs: list[LogResource] | None = None
    snake_resource_logs: msgspec.Raw = _snake("resource_logs")


class Spans(_Part, frozen=True):
    """An export of spans."""

    resource_spans: list[SpanResource] | None = None
    snake_resource_spans: msgspec.Raw = _snake("resource_spans")


_logs = msgspec.json.Decoder(Logs, strict=False)
_spans = msgspec.json.Decoder(Spans, strict=False)
_record = msgspec.json.Decoder(Record, strict=False)
_span = msgspec.json.Decoder(Span, strict=False)


def logs(raw: bytes) -> Logs:
    """Raises `ValueError` for what is none, as the others do."""
    return _logs.decode(raw).in_our_keys()


def spans(raw: bytes) -> Spans:
    """An export of spans."""
    return _spans.decode(raw).in_our_keys()


def record(raw: msgspec.Raw) -> Record:
    """A log record."""
    return _record.decode(raw).in_our_keys()


def span(raw: msgspec.Raw) -> Span:
    """A span, with its events."""
    found = _span.decode(raw).in_our_keys()
    for event in found.events or ():
        event.in_our_keys()
    return found


def hexadecimal(id_: str | None) -> str:
    """A trace or span id in hexadecimal, as OTLP has it; protobuf's own JSON has base64. Raises `BadRequest` for neither."""
    try:
        return id_.lower() if id_ and _HEX.fullmatch(id_) else base64.b64decode(id_ or "", validate=True).hex()
    except ValueError as error:
        raise BadRequest(f"{(id_ or '')[:64]!r} is no trace or span id", code="not_otlp") from error
