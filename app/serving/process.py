"""An engine as a process: worker, residency and uvicorn, started and ended together."""

import asyncio
import errno
import gc
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch
import uvicorn

from app.contact import Contact
from app.domain.errors import BadConfig, RatchetError
from app.domain.ports import EngineLedger, EngineWeights
from app.listening.barrier import Barrier
from app.listening.connections import Connection, Server
from app.listening.sockets import bound
from app.machine import usable_cores
from app.policy.decoding import body
from app.policy.precision import Precision
from app.policy.storage import delta_loops
from app.serving.engine import create_engine
from app.serving.memory import return_freed_memory
from app.serving.residency import Residency
from app.serving.worker import Limits, Worker
from app.telemetry.instruments import Instruments

log = logging.getLogger(__name__)
SWITCH_S = 0.001
"""How long a thread keeps the interpreter while another one waits: a step takes it hundreds of times, beside a version being made too."""


class OwnLedger(EngineLedger, Protocol):
    """A ledger that can take this engine's rows out again."""

    def forget(self) -> None: ...


def serve_engine(
    ledger: OwnLedger,
    weights: EngineWeights,
    *,
    host: str,
    port: int,
    only: frozenset[str] | None,
    rows: int,
    threads: int | None,
    stop: threading.Event,
    precision: Precision = Precision.BF16,
    drain_s: float = 0.0,
    version: str = "",
    region: str = "",
    barrier: Barrier | None = None,
    key: str | None = None,
) -> None:
    """Serve until `stop` is set, then finish what was begun, for `drain_s` at most. Raises `BadConfig` when the port is taken.

    `barrier`: which names it answers to; without one this machine's alone. `key`: what it asks of whoever samples.
    """
    return_freed_memory()
    sys.setswitchinterval(SWITCH_S)
    torch.set_num_threads(threads or usable_cores())
    listener = listen(host, port)
    # before anybody hears of this engine: while it compiles it answers nobody, and gateways would give it up
    for room in (body, delta_loops):
        room.prepare()
    worker = Worker(Limits(rows=rows))
    own = Instruments("engine", version=version)
    brought = own.histogram("ratchet_engine_swap_seconds").observe
    residency = Residency(worker, ledger, weights, only=only, precision=precision, brought=brought, contact=Contact(region=region))
    worker.start()
    residency.start()
    gc.freeze()  # what is loaded stays: the collector need not walk torch and transformers between two tokens
    server = _Server(
        uvicorn.Config(
            create_engine(worker, residency, instruments=own, barrier=barrier, key=key),
            http=Connection,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    if precision is not Precision.BF16:
        log.warning(
            "engine rounds weights to %s and multiplies them as before: an emulation, which shows how answers and their log-probabilities "
            "differ from the published weights', and saves neither time nor memory", precision,
        )  # fmt: skip
    log.info("engine ready address=http://%s:%d threads=%d rows=%d", host, port, torch.get_num_threads(), rows)
    try:
        asyncio.run(server.serve_until(stop, listener, worker, residency, leave=lambda: _leave(residency, ledger), drain_s=drain_s))
    finally:
        residency.close()
        worker.close()
        ledger.forget()
        log.info("engine ended")


class _Server(Server):
    """A server that ends by our event: the process's signal handlers are set already, one way for all processes."""

    async def serve_until(
        self, stop: threading.Event, listener: socket.socket, worker: Worker, residency: Residency, *, leave: Callable[[], None],
        drain_s: float,
    ) -> None:  # fmt: skip
        """Serve, leave the ledger, finish what was begun; raises when a thread of the two died, so that a whole engine is started again."""
        serving = asyncio.create_task(self._serve([listener]))
        while not stop.is_set() and not serving.done() and worker.alive and residency.alive:
            await asyncio.sleep(0.1)
        died = [name for name, part in (("samples", worker), ("takes up versions", residency)) if not part.alive]
        worker.draining = True
        if worker.alive and worker.load:
            until = time.monotonic() + drain_s
            await asyncio.to_thread(leave)
            while worker.load and worker.alive and time.monotonic() < until:
                await asyncio.sleep(0.05)
            log.info("engine drained left=%d", worker.load)
        self.should_exit = True
        await serving
        if died:
            raise RuntimeError(f"the thread that {died[0]} died; its traceback is above")


def _leave(residency: Residency, ledger: OwnLedger) -> None:
    """Take this engine out of the ledger, so that gateways send nothing more; what does not answer now is tried again at the end."""
    residency.close()
    try:
        ledger.forget()
    except RatchetError as error:
        log.warning("still in the ledger error=%s", error)


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises `BadConfig` where the port is taken."""
    try:
        listener = bound(host, port)
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise BadConfig(f"port {port} on {host} {why}: stop what holds it, or choose another with --port") from error
    listener.listen(1024)
    return listener
