"""The embedded engine's HTTP side.

| request            | answer                                                                                        |
|--------------------|-----------------------------------------------------------------------------------------------|
| `POST /generate`   | `GenerateRequest` → one `GenerationChunk` per line of JSON, as they are sampled                 |
| `POST /count`      | `GenerateRequest` → `{"prompt_tokens": n}`                                                      |
| `POST /score`      | `ScoreRequest` → `{"logprobs": [T]}`; read in pieces, between which live answers go on          |
| `GET /versions`    | what is held, by digest                                                                        |
| `GET /health`      | `{"status": "ok", …}`                                                                          |
| `GET /ready`       | 200 while it holds a version, 503 before                                                       |
| `GET /metrics`     | load, sampled tokens, versions, swaps and GPU memory, for Prometheus (docs/metrics.md)          |

Refusals are `{"error": {"message", "param", "code"}}`: 400 (the request), 401 (no key), 404 (weights not held), 421 (going away, ask
another), 429 with Retry-After (full).
Behind the gateway, on loopback by default and open there. With a key (RATCHET_ENGINE_KEY) everything but `/health`, `/ready` and
`/metrics`, which say nothing of what people wrote, asks for it as a bearer token. What a browser sends for somebody's page is stopped
in either case.
"""

import asyncio
import hmac
import math
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.domain.errors import BadRequest, NotFound, Overloaded, RatchetError
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk, ScoreRequest
from app.listening.admission import admit
from app.listening.barrier import Barrier
from app.listening.bodies import TOO_LARGE, read_json
from app.listening.errors import HttpError
from app.listening.headers import header
from app.listening.leaving import while_connected
from app.serving.jobs import Job
from app.serving.measures import measured
from app.serving.refusals import DRAINING
from app.serving.residency import Residency
from app.serving.worker import Draining, Worker
from app.telemetry.instruments import Instruments

MAX_BODY_BYTES = 8 << 20
OPEN = frozenset({"/health", "/ready", "/metrics"})
"""What probes and Prometheus ask, who hold no key."""
Asked = TypeVar("Asked", GenerateRequest, ScoreRequest)


class EngineApplication(FastAPI):
    """FastAPI behind the barrier and the key."""

    barrier: Barrier
    key: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stop what another site's page sent, and who does not hold the key."""
        if scope["type"] == "http":
            await admit(self.barrier, self._let_in, scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key is None or scope["path"] in OPEN or _is_bearer(scope, self.key):
            await super().__call__(scope, receive, send)
        else:
            refused = HttpError(401, "this engine asks for a key: set RATCHET_ENGINE_KEY to what it was started with", code="key")
            await _refusal(refused)(scope, receive, send)


def _is_bearer(scope: Scope, key: str) -> bool:
    given = header(dict(scope["headers"]), b"authorization") or ""
    return hmac.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode())


def create_engine(
    worker: Worker,
    residency: Residency,
    *,
    instruments: Instruments | None = None,
    barrier: Barrier | None = None,
    key: str | None = None,
) -> EngineApplication:
    """The application over a running worker and residency; without a barrier of its own only this machine's names are answered, and
    without a key nobody is asked for one."""
    own = measured(instruments or Instruments("engine"), worker, residency)
    app = EngineApplication(title="Ratchet engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.barrier, app.key = barrier or Barrier(), key

    @app.exception_handler(RatchetError)
    async def refuse(_request: Request, error: Exception) -> Response:
        return _refusal(error)

    _sampling(app, worker)
    _looking(app, worker, residency, own)
    return app


def _sampling(app: FastAPI, worker: Worker) -> None:
    # one thread: prompts in the order in which they came, and no more of them at a time than leaves the loop and the sampling their share
    tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizing")
    preparing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="preparing")

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        asked = await _read(request, GenerateRequest)
        loop = asyncio.get_running_loop()
        with _taken(worker, asked):
            if asked.shape is not None or asked.likely is not None:
                await loop.run_in_executor(preparing, worker.prepare, asked)
            prompt = await loop.run_in_executor(tokenizing, worker.prompt, asked)
        job = worker.submit(asked, prompt)
        # the first update decides the status: a refusal found on the worker's side must not come as a broken stream
        first = await _first(request, worker, job)
        if first is None:
            return Response(status_code=499)  # nobody hears it
        if isinstance(first, Exception):
            raise first
        return StreamingResponse(_lines(worker, job, first), media_type="application/x-ndjson")

    @app.post("/count")
    async def count(request: Request) -> Response:
        asked = await _read(request, GenerateRequest)
        with _taken(worker, asked):
            prompt = await asyncio.get_running_loop().run_in_executor(tokenizing, worker.prompt, asked)
        worker.let_go()
        return _json({"prompt_tokens": len(prompt)})

    @app.post("/score")
    async def score(request: Request) -> Response:
        asked = await _read(request, ScoreRequest)
        logprobs = await while_connected(request.receive, asyncio.wrap_future(worker.score(asked)))
        if logprobs is None:
            return Response(status_code=499)  # nobody hears it
        # JSON has no -inf: a token that top-k or top-p excludes
        return _json({"logprobs": [value if math.isfinite(value) else None for value in logprobs]})


def _looking(app: FastAPI, worker: Worker, residency: Residency, own: Instruments) -> None:
    @app.get("/versions")
    async def versions() -> Response:
        return _json({digest: {"state": state, "detail": detail} for digest, (state, detail) in residency.states().items()})

    @app.get("/health")
    async def health() -> Response:
        ready = [digest for digest in residency.states() if worker.holds(digest)]
        return _json({
            "status": "draining" if worker.draining else "ok", "ready": ready, "load": worker.load, "sampled_tokens": worker.sampled_tokens,
            "precision": residency.precision, "mismatch": {digest: asdict(found) for digest, found in residency.mismatches().items()},
            "last_swap": residency.last_swap, "acceptance": worker.acceptance, "drafters": residency.drafters(),
            "batch_invariant": None if residency.invariance is None else residency.invariance.holds,
            "region": residency.contact.region, "cut_off": _cut_off(residency, ready),
        })  # fmt: skip

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(own.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/ready")
    async def ready() -> Response:
        """200 while this engine holds a version; it asks nobody else, so a database that is away unreadies no engine."""
        holds = any(worker.holds(digest) for digest in residency.states())
        return _json({"ready": holds}, status=200 if holds else 503)


def _cut_off(residency: Residency, ready: list[str]) -> dict[str, object] | None:
    """Since when nothing was heard of the control plane, and what is served meanwhile; None while it answers."""
    if (said := residency.contact.sentence()) is None:
        return None
    silences = residency.contact.silences().items()
    return {
        "says": f"{said}: what is served is the last that was heard of and may be old", "may_be_old": ready,
        "since": {part: {"at": silence.since.isoformat(), "why": silence.why} for part, silence in silences},
    }  # fmt: skip


@contextmanager
def _taken(worker: Worker, asked: GenerateRequest) -> Iterator[None]:
    """In the engine's count while it is prepared, and after it; out of it where that fails."""
    worker.take(asked)
    try:
        yield
    except BaseException:
        worker.let_go()
        raise


async def _read(request: Request, expected: type[Asked]) -> Asked:
    try:
        body = await read_json(request, most=MAX_BODY_BYTES)
    except HttpError as error:
        if error.code != TOO_LARGE:
            raise
        raise BadRequest(f"the request has more than {MAX_BODY_BYTES} bytes: shorten the conversation", param="messages") from error
    try:
        return msgspec.json.decode(body, type=expected)
    except msgspec.DecodeError as error:
        raise BadRequest(f"this is not a {expected.__name__}: {error}") from error


async def _first(request: Request, worker: Worker, job: Job) -> GenerationChunk | Exception | None:
    """What comes first of an answer; None where its client left before. Then, and where this is given up, it is computed no further."""
    first = None
    try:
        first = await while_connected(request.receive, asyncio.ensure_future(job.updates.get()))
    finally:
        if first is None:
            worker.cancel(job)
    return first


async def _lines(worker: Worker, job: Job, first: GenerationChunk) -> AsyncIterator[bytes]:
    """Chunks as lines; what piled up while the client was slow becomes one chunk. A client that leaves frees its row."""
    chunk = first
    try:
        while True:
            while chunk.finish_reason is None and not job.updates.empty():
                chunk = _joined(chunk, job.updates.get_nowait())
            yield msgspec.json.encode(chunk) + b"\n"
            if chunk.finish_reason is not None:
                return
            update = await job.updates.get()
            assert isinstance(update, GenerationChunk)
            chunk = update
    finally:
        worker.cancel(job)


def _joined(chunk: GenerationChunk, later: GenerationChunk | Exception) -> GenerationChunk:
    """Two chunks as one; what only the last chunk has comes from the later one."""
    assert isinstance(later, GenerationChunk)
    likely = None if later.likely is None else (chunk.likely or []) + later.likely
    return msgspec.structs.replace(
        later, text=chunk.text + later.text, tokens=chunk.tokens + later.tokens, logprobs=chunk.logprobs + later.logprobs, likely=likely
    )


def _refusal(error: Exception) -> Response:
    headers: dict[str, str] = {}
    param = code = None
    if isinstance(error, HttpError):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, BadRequest):
        status, param, code = 400, error.param, error.code
    elif isinstance(error, NotFound):
        status, code = 404, "weights_not_held"
    elif isinstance(error, Draining):
        status, code = DRAINING, "draining"
    elif isinstance(error, Overloaded):
        status, code = 429, "overloaded"
        headers["Retry-After"] = f"{max(1, round(error.retry_after_s))}"
    else:
        status = 503
    return _json({"error": {"message": str(error), "param": param, "code": code}}, status=status, headers=headers)


def _json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type="application/json")
