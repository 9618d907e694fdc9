"""`ratchet engine` from its start to its end: worker, residency and server together, as the process runs them."""

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch

from app.domain.errors import BadConfig
from app.domain.ports import EngineState
from app.domain.telemetry.turns import FinishReason
from app.policy.storage.store import LocalWeights
from app.serving.client import HttpEngines
from app.serving.process import serve_engine
from tests.broker import free_port
from tests.fakes.engines import MemoryEngineLedger
from tests.integration.serving.running import ask, complete, request, until


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a process sets for itself does not outlive the test."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


class Witness(MemoryEngineLedger):
    """Sees whether the engine still answers when it is taken out."""

    def __init__(self, *, port: int) -> None:
        super().__init__(address=f"http://127.0.0.1:{port}")
        self.port = port
        self.answered: list[bool] = []

    def forget(self) -> None:
        with socket.socket() as probe:
            self.answered.append(probe.connect_ex(("127.0.0.1", self.port)) == 0)
        super().forget()


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A process's main function in a thread."""

    port: int
    digest: str
    ledger: Witness
    ended: "Future[None]"
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        return self.ledger.states.get(("composer", self.digest), (None,))[0] is EngineState.READY


@contextmanager
def serving(snapshot: Path, folder: Path, *, drain_s: float = 0.0) -> Iterator[Serving]:
    store, port, stop = LocalWeights(folder), free_port(), threading.Event()
    digest, ledger = store.publish(snapshot), Witness(port=port)
    ledger.wants = {("composer", digest), ("other", "not ours")}
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(
            serve_engine, ledger, store, host="127.0.0.1", port=port, only=frozenset({"composer"}), rows=4, threads=1, stop=stop,
            drain_s=drain_s, version="1.2.3",
        )  # fmt: skip
        one = Serving(port=port, digest=digest, ledger=ledger, ended=ended, stop=stop)
        try:
            until(lambda: one.is_ready() or ended.done(), within_s=200)
            yield one
        finally:
            stop.set()


def test_it_serves_what_its_policies_want_and_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as one:
        answer = asyncio.run(ask(request(one.digest, max_tokens=5), one.url))
        assert answer[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert one.ledger.history == [(one.digest, EngineState.LOADING), (one.digest, EngineState.READY)], "of its own policy only"
        metrics = httpx.get(f"{one.url}/metrics").text
        assert 'version="1.2.3"' in metrics
        assert "ratchet_engine_swap_seconds_count 1.0" in metrics
        assert torch.get_num_threads() == 1
        one.stop.set()
        assert one.ended.result(timeout=100) is None
        assert (one.ledger.states, one.ledger.answered) == ({}, [False])
        with socket.socket() as again:
            again.bind(("127.0.0.1", one.port))


def test_it_leaves_the_ledger_and_then_finishes_what_was_begun(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, drain_s=100.0) as one:

        async def scenario() -> None:
            async with HttpEngines([one.url]) as engines:
                chunks = engines.generate(request(one.digest, max_tokens=200))
                begun = [asyncio.ensure_future(complete(engines, request(one.digest, max_tokens=200, seed=n))) for n in range(24)]
                first = await anext(chunks)
                while ((await engines.sights())[0].queue or 0) + sum(answer.done() for answer in begun) < len(begun):
                    await asyncio.sleep(0.01)
                one.stop.set()
                rest = [chunk async for chunk in chunks]  # nothing, where a short answer came in one piece
                ends = [(await answer)[-1].finish_reason for answer in begun] + [[first, *rest][-1].finish_reason]
                assert set(ends) <= {FinishReason.LENGTH, FinishReason.STOP}

        asyncio.run(scenario())
        assert one.ended.result(timeout=100) is None
        assert one.ledger.answered == [True, False], "gateways were told while it still served"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is what is tested
def test_an_engine_that_takes_up_nothing_more_finishes_what_it_has_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    def break_down() -> set[tuple[str, str]]:
        raise AssertionError("a bug")

    with serving(tiny_model, tmp_path, drain_s=100.0) as one:

        async def scenario() -> None:
            async with HttpEngines([one.url]) as engines:
                begun = [asyncio.ensure_future(complete(engines, request(one.digest, max_tokens=200, seed=n))) for n in range(24)]
                while not (await engines.sights())[0].queue:  # one answer would be over before it is seen
                    assert not all(answer.done() for answer in begun)
                    await asyncio.sleep(0.01)
                one.ledger.wanted = break_down
                assert {(await answer)[-1].finish_reason for answer in begun} <= {FinishReason.LENGTH, FinishReason.STOP}

        asyncio.run(scenario())
        with pytest.raises(RuntimeError, match="the thread that takes up versions died"):
            one.ended.result(timeout=100)
        assert one.ledger.states == {}


def test_a_port_that_is_taken_is_named_and_nothing_is_begun(tiny_model: Path, tmp_path: Path) -> None:
    store, ledger = LocalWeights(tmp_path), MemoryEngineLedger()
    ledger.wants = {("composer", store.publish(tiny_model))}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig, match=f"port {port} on 127.0.0.1 is in use: stop what holds it, or choose another with --port"):
            serve_engine(ledger, store, host="127.0.0.1", port=port, only=None, rows=4, threads=1, stop=threading.Event())
    assert ledger.history == []
