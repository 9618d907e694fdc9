"""Fakes of what the HTTP service needs: engines that follow a script, routes, keys, episodes and reads in memory; and a server."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp

from app.domain.access import USED_EVERY, ApiKey, Scope, hash_secret, key_text, new_secret
from app.domain.errors import BadRequest, RatchetError, Unavailable, UnknownPolicy
from app.domain.ids import uuid7
from app.domain.policies import PolicyConfig
from app.domain.ports import EpisodeState, EpisodeSummary
from app.domain.release.releases import Pointer, Route
from app.domain.telemetry.events import RETRACTED, CloudEvent, EventType, Heard, Observation
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import FinishReason
from app.listening.barrier import Barrier
from app.listening.connections import Connection, Server
from app.main import Collaborators
from tests.fakes.inbox import MemoryInbox
from tests.fakes.streaming import MemoryClaims

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
CHAMPION, CANDIDATE, PREVIOUS = "c" * 64, "d" * 64, "b" * 64


@dataclass
class ScriptedEngines:
    """Answers every request with the same words, one token a word; `before_token` may wait or raise."""

    words: Sequence[str] = ("Hello", ",", " world", "!")
    finish_reason: FinishReason = FinishReason.STOP
    message: str | None = None
    context_tokens: int = 10_000
    before_token: Callable[[int], Any] = lambda index: None
    last: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the last chunk says."""
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    closed: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        try:
            for index, word in enumerate(self.words):
                waiting = self.before_token(index)
                if waiting is not None:
                    await waiting
                yield GenerationChunk(text=word, tokens=[100 + index], logprobs=[-0.5])
            yield GenerationChunk(
                text="", tokens=[2], logprobs=[-0.1], finish_reason=self.finish_reason, message=self.message,
                prompt_tokens=list(range(count_words(request.messages))), **self.last,
            )  # fmt: skip
        finally:
            self.closed += 1

    async def count_tokens(self, request: GenerateRequest) -> int:
        return count_words(request.messages)

    async def score(self, request: ScoreRequest) -> list[float]:
        if not request.completion_tokens or len(request.prompt_tokens) + len(request.completion_tokens) > self.context_tokens:
            raise BadRequest("these tokens cannot be scored", param="completion_tokens")
        return [-0.1 if token == 2 else -0.5 for token in request.completion_tokens]

    async def ping(self) -> None:
        """It is there."""

    async def sights(self) -> list[EngineSight]:
        return [EngineSight(address="http://scripted", answers=True, queue=0)]


def count_words(messages: Sequence[Mapping[str, Any]]) -> int:
    """The fake tokenizer: a token a word, and one a message."""
    return sum(1 + len(str(message["content"]).split()) for message in messages)


def _pointer(policy: str) -> Pointer:
    return Pointer(
        policy=policy, digest=CHAMPION, generation=1, previous=None, anchor=CHAMPION, holdback=0.0, release_id=None, changed_at=NOON
    )  # fmt: skip


class FixedRoutes:
    """A champion per policy, and a canary where one is set."""

    def __init__(self, *policies: str) -> None:
        self.routes = {name: Route(policy=name, pointer=_pointer(name)) for name in policies}

    def route(self, policy: str) -> Route:
        if policy not in self.routes:
            raise UnknownPolicy(policy)
        return self.routes[policy]

    def knows(self, policy: str, digest: str) -> bool:
        return policy in self.routes and digest in (CHAMPION, CANDIDATE, PREVIOUS)

    def canary(self, policy: str, *, share: float) -> None:
        """Give the candidate a share."""
        self.routes[policy] = replace(
            self.routes[policy], canary_digest=CANDIDATE, canary_release="release-1", canary_stage=1, canary_share=share
        )


class UndeployedRoutes:
    """Nothing was ever released."""

    def route(self, policy: str) -> Route:
        raise Unavailable(f"nothing is deployed for {policy} yet: run `ratchet up`")

    def knows(self, policy: str, digest: str) -> bool:
        return False


class MemoryKeys:
    """Keys in a list."""

    def __init__(self) -> None:
        self.keys: list[ApiKey] = []
        self.made = 0
        self.reads = 0
        self.writes = 0

    def all(self) -> list[ApiKey]:
        self.reads += 1
        return list(self.keys)

    def ever(self) -> bool:
        return self.made > 0

    def note_used(self, used: Mapping[str, datetime]) -> None:
        self.writes += 1
        for number, key in enumerate(self.keys):
            at = used.get(key.id)
            if at is not None and (key.last_used_at is None or at - key.last_used_at >= USED_EVERY):
                self.keys[number] = replace(key, last_used_at=at)

    def add(self, *scopes: Scope, policy: str | None = None, rate_per_s: float | None = None, expires_at: datetime | None = None) -> str:
        """Make a key; returns its text."""
        prefix, secret = new_secret()
        key_id = uuid7()
        self.made += 1
        self.keys.append(
            ApiKey(
                id=key_id, prefix=prefix, hash=hash_secret(key_id, secret), name="test", scopes=frozenset(scopes), policy=policy,
                rate_per_s=rate_per_s, created_at=NOON, expires_at=expires_at,
            )
        )  # fmt: skip
        return key_text(prefix, secret)


class MemoryEpisodes:
    """Episodes in a dict."""

    def __init__(self) -> None:
        self.states: dict[str, EpisodeState] = {}

    def find(self, episode_id: str, policy: str) -> EpisodeState | None:
        return self.states.get(episode_id)

    def summaries(self, episode_id: str, policy: str) -> tuple[EpisodeSummary, ...]:
        state = self.states.get(episode_id)
        return () if state is None else state.summaries


class InboxLedger:
    """What a `MemoryInbox` has accepted."""

    def __init__(self, inbox: MemoryInbox) -> None:
        self._inbox = inbox

    def seen(self, source: str, ids: Sequence[str]) -> set[str]:
        return {i for i in ids if (source, i) in self._inbox.events}

    def observation(self, source: str, observation_id: str) -> Observation | None:
        event = self._inbox.events.get((source, observation_id))
        return None if event is None else msgspec.json.decode(event.data, type=Observation)

    def about(
        self, *, inference_ids: Sequence[str] = (), episode_ids: Sequence[str] = (), policy: str | None, most: int = 10_000
    ) -> list[Heard]:
        found = [msgspec.json.decode(e.data, type=Observation) for e in events_of(self._inbox, EventType.OBSERVATION)]
        mine = [o for o in found if o.inference_id in inference_ids or o.episode_id in episode_ids]
        return [
            Heard(observation=o, status="accepted", retracted=(o.source, o.id + RETRACTED) in self._inbox.events)
            for o in mine
            if policy in (None, o.policy)
        ][-most:]


class FixedReads:
    """Answers with constants; `broken` makes it unavailable."""

    def __init__(self) -> None:
        self.broken: RatchetError | None = None

    def ping(self) -> None:
        if self.broken is not None:
            raise self.broken

    def counters(self) -> list[tuple[str, str, int]]:
        self.ping()
        return [("composer", "late", 3)]

    def turns_per_version(self) -> list[tuple[str, str, int, int]]:
        return [("composer", CHAMPION, 10, 7)]

    def backlog(self) -> dict[str, float]:
        return {"inbox_unsent": 5}

    def engines(self, policy: str | None) -> list[dict[str, Any]]:
        held = {"digest": CHAMPION, "state": "ready", "detail": None, "since": NOON, "seen_at": NOON, "role": "champion"}
        lag = {"champions": 0, "seconds": 2.5}
        entry = {"engine": "e:1", "address": "http://scripted", "region": "eu", "reports": True, "versions": [held], "lag": lag}
        return [entry | {"policy": name} for name in ("composer", "tab") if policy in (None, name)]

    def runs(self, policy: str | None, limit: int) -> list[dict[str, Any]]:
        return [{"id": "run-1", "policy": policy}][:limit]

    def versions(self, policy: str | None, limit: int) -> list[dict[str, Any]]:
        return [{"digest": CHAMPION, "policy": policy}][:limit]

    def labels_report(self, policy: str) -> dict[str, Any]:
        return {"policy": policy, "turns": 10}


def policy_config(**changes: Any) -> PolicyConfig:
    """A policy with nothing special."""
    given: dict[str, Any] = {"model": "/models/tiny", "base_name": "tiny", "base_model": "tiny"}
    return PolicyConfig(**given | changes)


def collaborators(**changes: Any) -> Collaborators:
    """Fakes all round, the policy `composer`."""
    inbox = changes.pop("inbox", None) or MemoryInbox()
    ledger = InboxLedger(inbox if isinstance(inbox, MemoryInbox) else MemoryInbox())
    given: dict[str, Any] = {
        "inbox": inbox, "routes": FixedRoutes("composer"), "engines": ScriptedEngines(), "policies": {"composer": policy_config()},
        "keys": MemoryKeys(), "episodes": MemoryEpisodes(),
        "claims": MemoryClaims(),
        "ledger": ledger, "reads": FixedReads(), "actor_salt": "salt", "barrier": Barrier(hosts=frozenset({"testserver"})),
        "alone": True, "session_secrets": lambda: ("a session secret",),
    }  # fmt: skip
    return Collaborators(**given | changes)


def events_of(inbox: Any, kind: str) -> list[CloudEvent]:
    """The events of one type in a `MemoryInbox`, in order of arrival."""
    return [event for event in inbox.events.values() if event.type == kind]


@contextmanager
def serving(app: ASGIApp, *, connection: type[Connection] = Connection) -> Iterator[str]:
    """The app behind a real uvicorn on a free loopback port, in a thread; yields its base URL."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        config = uvicorn.Config(app, http=connection, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        server = Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
