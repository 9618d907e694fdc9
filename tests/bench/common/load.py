"""A small HTTP load generator: keep-alive connections, one request after the other on each, bodies with fresh ids.

Run as a process of its own (`python -m tests.bench.common.load …`), so that its CPU time is not the server's. Counts
an event as accepted when the answer says so of that event. The rate is over the time from the first request to the
last answer; connecting and start-up are left out. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from app.domain.ids import uuid7

EVENT = (
    '{"id":"%s","name":"rating","value":1.0,"inference_id":"%s","occurred_at":"2026-11-21T09:00:00+00:00","source":"sdk:bench",'
    '"actor":"somebody","tags":{"editor":"vim","note":"' + "x" * 760 + '"}}'
)
"""About 1 KB, as in the measurements of `facts/ingestion.md`, section 4."""
ASSESSMENT = (
    '{"assessment":{"assessment_name":"%s","trace_id":"%s","source":{"source_type":"HUMAN","source_id":"somebody"},"feedback":{"value":1.0},'
    '"create_time":"2026-11-21T09:00:00Z","last_update_time":"2026-11-21T09:00:00Z"}}'
)
"""MLflow's feedback on a trace, as its client sends it (`CreateAssessment`)."""
TAKEN = frozenset({"accepted", "duplicate"})


class Request(NamedTuple):
    """A body and the ids of the events in it."""

    body: bytes
    ids: Sequence[str]


class _Answer(msgspec.Struct):
    id: str | None = None
    status: str = ""


class _Answers(msgspec.Struct):
    results: list[_Answer] = []


_answers = msgspec.json.Decoder(_Answers)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one service is spoken to."""

    batch: int
    name: str = "ratchet"
    trace: str = ""
    """Of MLflow: what the assessments are about."""

    def request(self) -> Request:
        """A body of fresh events."""
        ids = [str(uuid7()) for _ in range(self.batch)]
        match self.name:
            case "karapace":
                text = '{"records":[' + ",".join('{"value":' + EVENT % (id_, uuid7()) + "}" for id_ in ids) + "]}"
            case "mlflow":
                text = ASSESSMENT % (ids[0], self.trace)
            case _:
                events = [EVENT % (id_, uuid7()) for id_ in ids]
                text = events[0] if self.batch == 1 else "[" + ",".join(events) + "]"
        return Request(text.encode(), ids)

    def accepted(self, head: bytes, body: bytes, ids: Sequence[str]) -> list[str]:
        """Which events the answer says were taken: ours answers for each, the others for all at once."""
        if not head.startswith((b"HTTP/1.1 202", b"HTTP/1.1 200")):
            return []
        if self.name != "ratchet":
            return list(ids)
        results = _answers.decode(body).results
        return [id_ for id_, answer in zip(ids, results, strict=True) if answer.status in TAKEN]


@dataclass
class Tally:
    """What came back."""

    accepted: list[str] = field(default_factory=list[str])
    refused: int = 0
    latencies_s: list[float] = field(default_factory=list[float])
    started: float = 0.0
    ended: float = 0.0


class Connection(asyncio.Protocol):
    """One connection: sends the next request when the last is answered."""

    def __init__(self, form: Form, head: str, tally: Tally) -> None:
        self._form, self._head, self._tally = form, head, tally
        self._until = 0.0
        self._ids: Sequence[str] = ()
        self._buffer = b""
        self._sent_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for `begin`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def begin(self, until: float) -> None:
        """Send the first request."""
        self._until = until
        self._send()

    def _send(self) -> None:
        content, self._ids = self._form.request()
        self._sent_at = time.perf_counter()
        self._transport.write(f"{self._head}content-length: {len(content)}\r\n\r\n".encode() + content)

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
        now = time.perf_counter()
        self._count(self._form.accepted(head, rest, self._ids), now)
        if now < self._until:
            self._send()
        else:
            self._transport.close()

    def _count(self, taken: list[str], now: float) -> None:
        self._tally.accepted += taken
        self._tally.refused += len(self._ids) - len(taken)
        self._tally.latencies_s.append(now - self._sent_at)
        self._tally.ended = now

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self.done.done():
            self.done.set_result(None)


async def drive(form: Form, *, port: int, path: str, connections: int, seconds: float, headers: str) -> Tally:
    """Connect, then load one endpoint for a while."""
    tally, loop = Tally(), asyncio.get_running_loop()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{headers}"
    connect: Callable[[], Connection] = lambda: Connection(form, head, tally)  # noqa: E731 - a factory per connection
    made = [await loop.create_connection(connect, "127.0.0.1", port) for _ in range(connections)]
    tally.started = time.perf_counter()
    for _, protocol in made:
        protocol.begin(tally.started + seconds)
    await asyncio.gather(*(protocol.done for _, protocol in made))
    return tally


def main() -> int:
    """Drive and report."""
    parser = argparse.ArgumentParser()
    for name, kind in (("port", int), ("path", str), ("batch", int), ("connections", int), ("seconds", float), ("authorization", str)):
        parser.add_argument(f"--{name}", type=kind, default="" if kind is str else 0)
    parser.add_argument("--form", choices=["ratchet", "karapace", "mlflow"], default="ratchet")
    parser.add_argument("--ids", type=Path, help="a file for the accepted ids, one a line")
    options = parser.parse_args()
    kind = "application/vnd.kafka.json.v2+json" if options.form == "karapace" else "application/json"
    headers = f"content-type: {kind}\r\n" + (f"authorization: Bearer {options.authorization}\r\n" if options.authorization else "")
    trace = options.path.split("/")[-2] if options.form == "mlflow" else ""
    form = Form(name=options.form, batch=options.batch, trace=trace)
    tally = asyncio.run(
        drive(form, port=options.port, path=options.path, connections=options.connections, seconds=options.seconds, headers=headers)
    )
    if options.ids:
        options.ids.write_text("\n".join(tally.accepted))
    latencies = sorted(tally.latencies_s) or [float("nan")]
    report = {
        "events": len(tally.accepted), "refused": tally.refused, "wall_s": tally.ended - tally.started,
        "p50_ms": latencies[len(latencies) // 2] * 1e3, "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }  # fmt: skip
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
