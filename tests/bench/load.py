"""A small HTTP load generator: keep-alive connections, one request after the other on each, bodies with fresh ids.

Run as a process of its own (`python -m tests.bench.load …`), so that its CPU time is not the server's. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.domain.ids import uuid7

EVENT = (
    '{"id":"%s","name":"rating","value":1.0,"inference_id":"%s","occurred_at":"2026-11-21T09:00:00+00:00","source":"sdk:bench",'
    '"actor":"somebody","tags":{"editor":"vim","note":"' + "x" * 760 + '"}}'
)
"""About 1 KB, as in the measurements of `facts/ingestion.md`, section 4."""
KARAPACE_RECORD = '{"value":' + EVENT + "}"


def body(batch: int, *, karapace: bool = False) -> bytes:
    """A body with `batch` events, each with an id of its own."""
    form = KARAPACE_RECORD if karapace else EVENT
    events = [form % (uuid7(), uuid7()) for _ in range(batch)]
    if karapace:
        return ('{"records":[' + ",".join(events) + "]}").encode()
    return (events[0] if batch == 1 else "[" + ",".join(events) + "]").encode()


@dataclass
class Tally:
    """What came back."""

    requests: int = 0
    refused: int = 0
    latencies_s: list[float] = field(default_factory=list[float])


class Connection(asyncio.Protocol):
    """One connection: sends the next request when the last is answered."""

    def __init__(self, request: Callable[[], bytes], tally: Tally, until: float) -> None:
        self._request, self._tally, self._until = request, tally, until
        self._buffer = b""
        self._sent_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._request())

    def data_received(self, data: bytes) -> None:
        """Count a whole answer and go on."""
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(rest) < length:
            return
        self._buffer = b""
        self._tally.requests += 1
        self._tally.refused += not head.startswith((b"HTTP/1.1 202", b"HTTP/1.1 200"))
        self._tally.latencies_s.append(time.perf_counter() - self._sent_at)
        if time.perf_counter() < self._until:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self.done.done():
            self.done.set_result(None)


async def drive(*, port: int, path: str, batch: int, connections: int, seconds: float, headers: str, karapace: bool) -> Tally:
    """Load one endpoint for a while."""
    tally, until = Tally(), time.perf_counter() + seconds

    def request() -> bytes:
        content = body(batch, karapace=karapace)
        return f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(content)}\r\n\r\n".encode() + content

    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Connection(request, tally, until), "127.0.0.1", port) for _ in range(connections)]
    await asyncio.gather(*(protocol.done for _, protocol in made))
    return tally


def main() -> int:
    """Drive and report."""
    parser = argparse.ArgumentParser()
    for name, kind in (("port", int), ("path", str), ("batch", int), ("connections", int), ("seconds", float), ("authorization", str)):
        parser.add_argument(f"--{name}", type=kind, default="" if kind is str else 0)
    parser.add_argument("--karapace", action="store_true")
    options = parser.parse_args()
    kind = "application/vnd.kafka.json.v2+json" if options.karapace else "application/json"
    headers = f"content-type: {kind}\r\n" + (f"authorization: Bearer {options.authorization}\r\n" if options.authorization else "")
    started = time.perf_counter()
    tally = asyncio.run(
        drive(
            port=options.port, path=options.path, batch=options.batch, connections=options.connections, seconds=options.seconds,
            headers=headers, karapace=options.karapace,
        )
    )  # fmt: skip
    latencies = sorted(tally.latencies_s) or [float("nan")]
    report = {
        "events": (tally.requests - tally.refused) * options.batch, "refused": tally.refused, "wall_s": time.perf_counter() - started,
        "p50_ms": latencies[len(latencies) // 2] * 1e3, "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }  # fmt: skip
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
