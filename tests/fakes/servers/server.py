"""What the servers of other makes have alike, whatever their endpoints are called."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tests.fakes.servers.brain import Brain


class FakeServer:
    """`calls` remembers what the control side was asked, in order; `bodies` what requests carried.

    `raw`: log-probabilities are the model's and not those of the sampled distribution. `stale_head`: new weights leave the old head.
    """

    def __init__(self, base: str, *, folder: Path | None = None, raw: bool = False, stale_head: bool = False) -> None:
        self.base = base
        self.version = "default"
        self.adapters: dict[str, Brain | None] = {}
        self.paused = False
        self.brain = None if folder is None else Brain(folder)
        self.raw, self.stale_head = raw, stale_head
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.failing: dict[str, int] = {}
        """Status by path."""
        self.failing_once: dict[str, int] = {}
        self.lacking: set[str] = set()
        """Paths that a server of another version does not know."""
        self.losing_once: set[str] = set()
        """Paths whose next answer gets lost: what was asked for is done."""
        self.cut_after: int | None = None
        """End the stream after so many tokens."""
        self.aborts = 0
        """Answers still to abort before their first token."""
        self.labels: list[str] | None = None
        """Label of the weights behind each token of an answer, where it is not the present one's."""
        self.app = FastAPI()
        self.app.middleware("http")(self._fail)
        self.app.get("/health")(self._health)

    async def _fail(self, request: Request, call_next: Any) -> Response:
        path = request.url.path
        is_asked_for = request.method != "OPTIONS"  # which only asks whether there is such an endpoint
        status = (self.failing.get(path) or self.failing_once.pop(path, None)) if is_asked_for else None
        if status is not None:
            return JSONResponse({"error": {"message": f"failing at {path}"}}, status, headers={"retry-after": "3"})
        if path in self.lacking:
            return JSONResponse({"detail": "Not Found"}, 404)
        answer = await call_next(request)
        if is_asked_for and path in self.losing_once:
            self.losing_once.remove(path)
            return JSONResponse({"error": {"message": "the proxy timed out"}}, 504)
        return answer

    async def _health(self) -> Response:
        return Response()

    def _take_adapter(self, body: dict[str, Any]) -> None:
        self.calls.append(f"load {body['lora_name']} {body['lora_path']}")
        self.adapters[body["lora_name"]] = None if self.brain is None else Brain(Path(body["lora_path"]))

    def _drop_adapter(self, body: dict[str, Any]) -> bool:
        """Whether it was there."""
        self.calls.append(f"unload {body['lora_name']}")
        held = body["lora_name"] in self.adapters
        self.adapters.pop(body["lora_name"], None)
        return held

    def _metrics_of(self, named: dict[str, float], label: str) -> Response:
        lines = (f"{name}{label} {value}\n" for name, value in named.items())
        return Response("# HELP x y\n" + "".join(lines), media_type="text/plain")
