"""A whole engine in this process: worker, residency and uvicorn on a free port."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from app.domain.ports import EngineState, EngineWeights
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import SamplingParams
from app.listening.barrier import Barrier
from app.listening.connections import Connection, Server
from app.serving.client import HttpEngines
from app.serving.engine import create_engine
from app.serving.residency import Residency
from app.serving.worker import Limits, Worker
from tests.fakes.engines import MemoryEngineLedger


@dataclass(kw_only=True)
class RunningEngine:
    """What a test may touch."""

    url: str
    worker: Worker
    residency: Residency
    ledger: MemoryEngineLedger


@contextmanager
def engine(
    weights: EngineWeights,
    *digests: str,
    limits: Limits = Limits(rows=8),  # noqa: B008 - immutable
    barrier: Barrier | None = None,
    key: str | None = None,
    **options: Any,
) -> Iterator[RunningEngine]:
    """Serve until the block ends; the digests are resident when it begins."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ledger = MemoryEngineLedger(address=url)
    ledger.wants = {("composer", digest) for digest in digests}
    worker = Worker(limits)
    residency = Residency(worker, ledger, weights, poll_s=0.02, **options)
    server = Server(
        uvicorn.Config(create_engine(worker, residency, barrier=barrier, key=key), http=Connection, log_config=None, access_log=False)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined] - a thread may not set them
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    worker.start()
    residency.start()
    thread.start()
    try:
        until(lambda: server.started and all(ledger.states.get(("composer", d), (None,))[0] is EngineState.READY for d in digests))
        yield RunningEngine(url=url, worker=worker, residency=residency, ledger=ledger)
    finally:
        residency.close()
        server.should_exit = True
        thread.join(timeout=5)
        worker.close()
        listener.close()


def until(holds: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def request(digest: str, *, content: str = "def f(x):", **sampling: Any) -> GenerateRequest:
    """A request for one completion."""
    params = SamplingParams(**{"max_tokens": 12, "seed": 1, **sampling})
    return GenerateRequest(policy="composer", digest=digest, messages=[{"role": "user", "content": content}], sampling=params)


async def complete(engines: HttpEngines, asked: GenerateRequest) -> list[GenerationChunk]:
    """All chunks of a completion."""
    return [chunk async for chunk in engines.generate(asked)]


async def ask(asked: GenerateRequest, *urls: str, **options: Any) -> list[GenerationChunk]:
    """All chunks of a completion, over a client of its own."""
    async with HttpEngines(urls, **options) as engines:
        return await complete(engines, asked)
