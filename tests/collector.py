"""An OpenTelemetry collector for tests: OTLP over HTTP in, spans by name out."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A span, and the process that told it."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def place(self) -> tuple[bytes, bytes]:
        """Trace and span."""
        return self.span.trace_id, self.span.span_id

    @property
    def links(self) -> set[tuple[bytes, bytes]]:
        """Of other spans."""
        return {(link.trace_id, link.span_id) for link in self.span.links}

    @property
    def attributes(self) -> dict[str, str | int]:
        """Texts and numbers by name."""
        return {a.key: a.value.string_value if a.value.HasField("string_value") else a.value.int_value for a in self.span.attributes}


@dataclass
class Collector:
    """What was told so far."""

    url: str
    bodies: list[bytes] = field(default_factory=list[bytes])
    """As they were sent, unpacked."""

    @property
    def spans(self) -> list[Collected]:
        """All of them."""
        found: list[Collected] = []
        for body in list(self.bodies):
            for told in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = next(a.value.string_value for a in told.resource.attributes if a.key == "service.name")
                found += [Collected(service=service, span=span) for scope in told.scope_spans for span in scope.spans]
        return found

    def named(self, name: str) -> list[Collected]:
        """Those of one name."""
        return [one for one in self.spans if one.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                collector.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: tests look at what came."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, name="collector", daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
