"""One turn's way as OpenTelemetry has it, over OTLP to the collector that RATCHET_TRACES names; without one nothing is imported or counted.

```
 caller ─▶ chat ─▶ commit (inbox) ─▶ publish (relay) ─▶ apply (ingest) ─▶ label          the caller's trace, or a new one
                │
                └ linked from ─▶ cycle ─▶ batch · train · register · judge · queue ─▶ release  a trace for each slot
```

What ties them together travels with the data, as the tag `traceparent` of a turn and of a version. A turn whose trace is not taken has no
such tag, and costs nothing any further. A caller who says whether its trace is taken decides; of the others RATCHET_TRACES_SHARE are.
No span has words in it: names, ids, numbers, and of an error its class.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from app.domain.telemetry.traceparent import FORM

if TYPE_CHECKING:  # half a second of imports, for who wants traces alone
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span as SdkSpan
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext

EXPORT_S = 1.0
"""How long a collector may take; a process that is told to end waits for one that is away no longer."""
MOST_LINKS = 1000
"""Turns that a batch's span names; the others are counted."""
Attribute = str | int | float | bool


class SpanKind(StrEnum):
    """As OpenTelemetry's."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


@dataclass(frozen=True)
class Span:
    """Something that takes time and is traced."""

    own: "SdkSpan"

    @property
    def traceparent(self) -> str:
        """What continues here names this."""
        where = self.own.get_span_context()
        assert where is not None
        return f"00-{where.trace_id:032x}-{where.span_id:016x}-{where.trace_flags:02x}"

    def set(self, **attributes: Attribute) -> None:
        """Tell more; dots of a name are written as `__`."""
        self.own.set_attributes(_named(attributes))

    def link(self, traceparents: Sequence[str]) -> None:
        """Name other spans that this one came from."""
        for traceparent in traceparents[:MOST_LINKS]:
            if (where := _context_of(traceparent)) is not None:
                self.own.add_link(where)

    def end(self, *, at: datetime | None = None, failed: str | None = None) -> None:
        """It is over; `failed` is an error's class, never what it says."""
        if failed is not None:
            from opentelemetry.trace import StatusCode

            self.own.set_status(StatusCode.ERROR)
            self.own.set_attribute("error.type", failed)
        self.own.end(None if at is None else _nanoseconds(at))


class Traces:
    """Where spans go; nowhere without a provider."""

    def __init__(self, provider: "TracerProvider | None" = None, *, share: float = 1.0) -> None:
        """`share`: of what begins a trace, how much is taken. It is drawn here, in a hundredth of the time that the SDK needs to say no."""
        self._provider, self._share = provider, share
        self._tracer = None if provider is None else provider.get_tracer("ratchet")

    @property
    def on(self) -> bool:
        """Whether anything is traced at all."""
        return self._tracer is not None

    def begin(
        self, name: str, *, kind: SpanKind = SpanKind.INTERNAL, parent: str | None = None, started: datetime | None = None,
        always: bool = False, **attributes: Attribute,
    ) -> Span | None:  # fmt: skip
        """A span to be ended; without a parent it begins a trace, and `always` asks no lot. None where this one is not taken."""
        return self._start(name, kind, parent, started, attributes) if always or self._taken(parent) else None

    def _start(
        self, name: str, kind: SpanKind, parent: str | None, started: datetime | None, attributes: Mapping[str, Attribute]
    ) -> Span | None:
        if self._tracer is None:
            return None
        from opentelemetry.sdk.trace import Span as SdkSpan
        from opentelemetry.trace import SpanKind as Kind

        own = self._tracer.start_span(
            name, context=_parent(parent), kind=Kind[kind], attributes=_named(attributes),
            start_time=None if started is None else _nanoseconds(started),
        )  # fmt: skip
        return Span(own) if isinstance(own, SdkSpan) and own.is_recording() else None

    def _taken(self, parent: str | None) -> bool:
        """A caller's word, and else the lot."""
        match = None if parent is None else FORM.fullmatch(parent)
        return random.random() < self._share if match is None else bool(int(match[3], 16) & 1)

    def tell(
        self,
        name: str,
        *,
        parent: str | None,
        started: datetime,
        ended: datetime,
        kind: SpanKind = SpanKind.INTERNAL,
        **attributes: Attribute,
    ) -> None:
        """A span that is over; nothing where what it belongs to is not traced."""
        span = self._start(name, kind, parent, started, attributes) if parent is not None and self._taken(parent) else None
        if span is not None:
            span.end(at=max(started, ended))

    @contextmanager
    def span(self, name: str, *, parent: str | None, kind: SpanKind = SpanKind.INTERNAL, **attributes: Attribute) -> Iterator[Span | None]:
        """A span around work; nothing where what it belongs to is not traced."""
        span = self._start(name, kind, parent, None, attributes) if parent is not None and self._taken(parent) else None
        failed: str | None = None
        try:
            yield span
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            if span is not None:
                span.end(failed=failed)

    def close(self) -> None:
        """Send what waits."""
        if self._provider is not None:
            self._provider.shutdown()


NOWHERE = Traces()


def open_traces(endpoint: str | None, *, process: str, share: float, version: str = "") -> Traces:
    """Traces to an OTLP/HTTP collector (`http://collector:4318`; OTEL_EXPORTER_OTLP_HEADERS where it asks for any); nowhere without one."""
    if endpoint is None:
        return NOWHERE
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    told = {"service.name": f"ratchet-{process}", "service.namespace": "ratchet", "service.version": version}
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(told), span_limits=SpanLimits(max_links=MOST_LINKS))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S)))
    return Traces(provider, share=share)


def _context_of(traceparent: str | None) -> "SpanContext | None":
    match = None if traceparent is None else FORM.fullmatch(traceparent)
    if match is None:
        return None
    from opentelemetry.trace import SpanContext, TraceFlags

    where = SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=TraceFlags(int(match[3], 16)))
    return where if where.is_valid else None


def _parent(traceparent: str | None) -> "Context":
    """The context of a caller; an empty one where it says nothing that we can read."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    where = _context_of(traceparent)
    return Context() if where is None else set_span_in_context(NonRecordingSpan(where), Context())


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {name.replace("__", "."): value for name, value in attributes.items()}


def _nanoseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000) * 1_000
