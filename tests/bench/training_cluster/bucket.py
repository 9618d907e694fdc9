"""S3 (moto's server) that counts what goes through it: `python -m tests.bench.training_cluster.bucket HOST PORT`.

`GET /-/bytes` answers {"in", "out", "requests"}: bodies of requests and of answers, without heads.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # pyright: ignore[reportMissingImports]
from werkzeug.serving import WSGIRequestHandler, run_simple  # pyright: ignore[reportMissingImports]

Answer = Callable[..., Any]


class Counting:
    """In front of an application."""

    def __init__(self, inner: Callable[[dict[str, Any], Answer], Iterable[bytes]]) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.bytes = {"in": 0, "out": 0, "requests": 0}

    def __call__(self, environ: dict[str, Any], answer: Answer) -> Iterable[bytes]:
        """WSGI."""
        if environ["PATH_INFO"] == "/-/bytes":
            answer("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self.bytes).encode()]
        content = list(self._inner(environ, answer))
        sent = 0 if environ["REQUEST_METHOD"] == "HEAD" else sum(map(len, content))
        with self._lock:
            self.bytes["in"] += int(environ.get("CONTENT_LENGTH") or 0)
            self.bytes["out"] += sent
            self.bytes["requests"] += 1
        return content


class Silent(WSGIRequestHandler):
    """No line per request."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Nothing."""


if __name__ == "__main__":
    served: Any = DomainDispatcherApplication(create_backend_app)
    run_simple(sys.argv[1], int(sys.argv[2]), Counting(served), threaded=True, request_handler=Silent)
