"""Tells an engine that is slow from one that is gone.

A process that is stopped or cut off from the network leaves its connections open and says nothing, as one does that has a long queue. So
whoever has heard nothing for a while asks for `/health` beside: an engine that is only busy answers that, from a thread of its own.

    nothing heard for SILENT_S ─▶ /health within PROBE_S? ─ yes ─▶ wait on
                                          └─ no, PROBES times in a row ─▶ `httpx.ReadTimeout`, as if the connection had broken
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Self, TypeVar

import httpx

T = TypeVar("T")
SILENT_S, PROBE_S, PROBES = 2.0, 3.0, 2
"""Ten seconds until an engine is given up (2 + 3 + 2 + 3): an engine on a starved machine takes seconds for its /health."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for what."""

    silent_s: float = SILENT_S
    probe_s: float = PROBE_S
    probes: int = PROBES


class Listening:
    """Waits for what one engine says, for the length of a block, in one task."""

    def __init__(self, client: httpx.AsyncClient, url: str, patience: Patience) -> None:
        self._client = client
        self._url = url
        self._patience = patience
        self._limit: asyncio.Timeout | None = None
        """Of what is being waited for now."""
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def hear(self, said: Awaitable[T]) -> T:
        """What the engine says next. Raises `httpx.ReadTimeout` where it is gone."""
        try:
            async with asyncio.timeout(None) as self._limit:
                return await said
        except TimeoutError as error:
            raise httpx.ReadTimeout("it says nothing and does not answer /health") from error
        finally:
            self._limit = None

    async def _watch(self) -> None:
        waited_for, missed = self._limit, 0
        while True:
            await asyncio.sleep(self._patience.silent_s)
            if self._limit is None or self._limit is not waited_for:
                waited_for, missed = self._limit, 0
                continue
            missed = 0 if await self._answers() else missed + 1
            if missed >= self._patience.probes and waited_for is self._limit:
                self._limit.reschedule(asyncio.get_running_loop().time())
                return

    async def _answers(self) -> bool:
        try:
            await self._client.get(f"{self._url}/health", timeout=self._patience.probe_s)
        except httpx.HTTPError:
            return False
        return True
