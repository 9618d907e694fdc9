"""The control of the fault runs: a door over HTTP that answers when the broker has the events, and keeps nothing itself."""

import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kafka import KafkaProducer


@contextmanager
def unsafe_door(servers: str, *, topic: str) -> Iterator[int]:
    """Serve `POST /` with a JSON array of ids; 202 and the ids when each was acknowledged with acks=all. Gives the port."""
    producer: Any = KafkaProducer(bootstrap_servers=servers, enable_idempotence=False, acks="all", linger_ms=20)

    class Door(BaseHTTPRequestHandler):
        """One request."""

        def do_POST(self) -> None:
            """Send, wait for the broker, answer."""
            ids = json.loads(self.rfile.read(int(self.headers["content-length"])))
            futures = [producer.send(topic, id_.encode()) for id_ in ids]
            body = json.dumps([id_ for id_, future in zip(ids, futures, strict=True) if future.get(60) is not None]).encode()
            self.send_response(202)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        producer.close()


def post(port: int, ids: Sequence[str]) -> set[str]:
    """Send ids; those that were acknowledged."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps(list(ids)).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        return set(json.loads(response.read()))
