"""People who ask and say what they think of it, behind a balancer that tries once more elsewhere; everything is written down.

One thread with an event loop. An attempt that fails (no connection, an answer of 5xx or 429, nothing within `TIMEOUT_S`) is repeated once,
at another replica where there is one; a replica that failed is passed over for a while, as a balancer's health check would do.
"""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.domain.ids import utc_now, uuid7

TIMEOUT_S = 15.0
PASSED_OVER_S = 5.0
PROMPTS = ("Sort this list.", "Why does it rain?", "Name three rivers.", "Fix this loop.", "What is a lease?")
TOKENS = 12


def own_turn(person: str, prompt: str) -> dict[str, Any]:
    """A turn of the product's own model, as an event."""
    id_, now = str(uuid7()), utc_now().isoformat()
    return {"specversion": "1.0", "id": id_, "source": "import:bench", "type": "ratchet.turn.v1", "data": {
        "inference_id": id_, "episode_id": f"episode-{id_}", "policy": "composer", "version": "own", "source": "import:bench",
        "started_at": now, "finished_at": now, "messages": [{"role": "user", "content": prompt}], "completion": "yes", "prompt_tokens": [],
        "completion_tokens": [], "logprobs": None, "sampling": {}, "finish_reason": "stop", "actor": person, "segment": {},
        "usage": {"prompt_tokens": 4, "completion_tokens": 1},
    }}  # fmt: skip


@dataclass
class Book:
    """What was asked, answered and said."""

    answers: dict[str, float] = field(default_factory=dict[str, float])
    """Inference ids of answers that arrived whole, with when they were asked for."""
    said: dict[str, float] = field(default_factory=dict[str, float])
    """Ids of accepted observations, likewise."""
    accepted: list[float] = field(default_factory=list[float])
    """When observations were accepted."""
    of: dict[str, str] = field(default_factory=dict[str, str])
    """The observation of each answer."""
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """How long answers took, by phase; a second attempt counts from the first."""
    attempts_failed: Counter[str] = field(default_factory=Counter[str])
    failed: list[str] = field(default_factory=list[str])
    """Requests that failed twice, each with why and when."""
    requests: int = 0


@dataclass
class People:
    """So many people at a time, until they are told to go."""

    key: str
    people: int = 6
    pause_s: float = 0.2
    retries: int = 1
    keeps_s: float = 0.0
    """How long their product keeps what they said when nobody takes it, and sends it again, as products do."""
    own_answers: bool = False
    """Whether their product answers by itself and only reports its turns: then there need be no engine."""
    phase: str = "calm"
    book: Book = field(default_factory=Book)
    _doors: dict[str, float] = field(default_factory=dict[str, float])
    """Addresses of apis, and until when each is passed over."""
    _turn: "itertools.count[int]" = field(default_factory=itertools.count)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def add(self, url: str) -> None:
        """The balancer sends here from now on."""
        self._doors[url] = 0.0

    def remove(self, url: str) -> None:
        """The balancer sends nothing new there."""
        self._doors.pop(url, None)

    def start(self) -> None:
        """Let them begin."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="people", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let them finish what they are at."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    async def _live(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)  # a kept connection to a replica that has left says nothing about the service
        headers = {"Authorization": f"Bearer {self.key}"}
        timeout = httpx.Timeout(TIMEOUT_S, connect=3.0)
        async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._person(client, number) for number in range(self.people)))

    async def _person(self, client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        for turn in itertools.count():
            if self._stop.is_set():
                return
            asked, phase = time.monotonic(), self.phase
            id_ = await self._answered(client, f"person-{number}-{turn % 40}", chance.choice(PROMPTS), asked)
            if id_ is not None:
                self.book.seconds.setdefault(phase, []).append(time.monotonic() - asked)
                self.book.answers[id_] = asked
                await self._say(client, id_, chance.random(), asked)
            await asyncio.sleep(self.pause_s)

    async def _answered(self, client: httpx.AsyncClient, person: str, prompt: str, asked: float) -> str | None:
        """The id of an answer, the service's or their product's own; None where there is none."""
        if not self.own_answers:
            message = {"role": "user", "content": prompt}
            body = {"model": "composer", "messages": [message], "user": person, "max_tokens": TOKENS, "store": True}
            reply = await self._twice(client, "/v1/chat/completions", body, asked)
            return None if reply is None else str(reply["id"])
        told = own_turn(person, prompt)
        reply = await self._twice(client, "/v1/events", told, asked)
        return None if reply is None else self._taken(reply, str(told["id"]))

    def _taken(self, reply: dict[str, Any], id_: str) -> str | None:
        result = reply["results"][0]
        if result["status"] in ("accepted", "duplicate"):
            return id_
        self.book.failed.append(f"refused: {result}")
        return None

    async def _say(self, client: httpx.AsyncClient, id_: str, value: float, asked: float) -> None:
        event = {"id": f"{id_}-said", "inference_id": id_, "name": "rating", "value": round(value, 3)}
        ends = time.monotonic() + self.keeps_s
        reply = await self._twice(client, "/v1/events", event, asked, last=self.keeps_s == 0.0)
        while reply is None and time.monotonic() < ends:
            await asyncio.sleep(0.5)
            reply = await self._twice(client, "/v1/events", event, asked, last=time.monotonic() >= ends)
        if reply is not None and self._taken(reply, id_) is not None:
            self.book.said[str(event["id"])] = asked
            self.book.accepted.append(time.monotonic())
            self.book.of[id_] = str(event["id"])

    async def _twice(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any], asked: float, *, last: bool = True
    ) -> dict[str, Any] | None:  # fmt: skip
        """What was answered, with one repetition where that is allowed; None where nothing was: a failure, if it was the `last` try."""
        self.book.requests += 1
        tried: list[str] = []
        faults: list[str] = []
        for _ in range(1 + self.retries):
            door = self._door(besides=tried)
            if door is None:
                faults.append("no api is there")
                continue
            tried.append(door)
            try:
                reply = await client.post(door + path, json=body)
            except httpx.TransportError as error:
                faults.append(f"{type(error).__name__} at {path}")
            else:
                if reply.status_code < 429:
                    return dict(reply.json())
                faults.append(f"{reply.status_code} at {path}: {reply.text[:160]}")
            if door in self._doors:
                self._doors[door] = time.monotonic() + PASSED_OVER_S
            self.book.attempts_failed[faults[-1].split(":")[0]] += 1
        if last:
            self.book.failed.append(f"{' / '.join(faults)} ({self.phase}, after {time.monotonic() - asked:.1f} s)")
        return None

    def _door(self, *, besides: list[str]) -> str | None:
        now = time.monotonic()
        doors = sorted(self._doors)
        fresh = [door for door in doors if door not in besides] or doors
        well = [door for door in fresh if self._doors[door] <= now] or fresh
        return well[next(self._turn) % len(well)] if well else None
