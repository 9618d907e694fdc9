"""What a box reaches in the place of the gateway: a socket with one service behind it, for one episode.

    harness ─▶ 127.0.0.1:8080 in the box ─▶ socket ─▶ Interception ─▶ POST /v1/chat/completions of the gateway
                                                        └─▶ journal: each request and its answer, before the answer goes in

Only completions pass; policy, key, tags and the bounds of the episode are ours, whatever the box sends. Where the journal has an answer it
is given again and nobody is asked: so a rollout whose dispatcher died goes on in a fresh box, while the harness does its tool calls again.
A request that is not the one of then ends it (the box diverged).

An answer that the gateway could not give now (weights being replaced, engines full) is asked for again at the same turn, for as long as the
episode may take: a rollout survives a swap, and its turns say themselves which version sampled each.
"""

import hashlib
import os
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from app.domain.learning.rollouts import Outcome
from pipelines.rollouts.scratch import scratch

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
RETRY_S = 0.5
MOST_BODY_BYTES = 4 << 20
MOST_CONNECTIONS = 16
"""Of one box. Each may hold a body of that size, and a thread."""
ANSWER_S = 600.0
PASSED = ("messages", "tools", "temperature", "top_p", "top_k", "stop", "response_format", "tool_choice", "parallel_tool_calls")
"""Of a harness's request: what the product's own agent asks of the gateway in production."""
COMPONENT_TURNS = 4
"""Of another policy's, for each turn of the episode's own: two searches."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer."""

    asked: str
    """SHA-256 of the messages and tools, as the harness sent them."""
    request: dict[str, Any]
    answer: dict[str, Any]
    version: str
    """Digest of the weights that sampled it."""
    policy: str = ""
    """Whose turn it is; empty in journals of before there were several."""
    took_s: float = 0.0
    """Seconds from the request to its answer, without the wait for leave to ask."""


class Journal(Protocol):
    """What was said in an episode; written before it is acted upon."""

    def read(self) -> list[Exchange]: ...
    def append(self, exchange: Exchange) -> None: ...


@dataclass
class FileJournal:
    """A file of lines, each on the disk before the next turn begins."""

    path: Path

    def read(self) -> list[Exchange]:
        """What is whole; a line that a crash cut off was never acted upon."""
        return [msgspec.json.decode(line, type=Exchange) for line in self._whole().splitlines()]

    def append(self, exchange: Exchange) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(len(self._whole()))  # behind a line without an end this one could not be read
            file.write(msgspec.json.encode(exchange) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _whole(self) -> bytes:
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1]


class Permit(Protocol):
    """Leave to ask the engines."""

    def take(self) -> bool: ...
    def give_back(self) -> None: ...


class Always:
    """Leave for whoever asks: a gateway that nobody but practice uses."""

    def take(self) -> bool:
        """Yes."""
        return True

    def give_back(self) -> None:
        """Nothing was taken."""


@dataclass(kw_only=True)
class Bounds:
    """What an episode may use."""

    most_turns: int
    most_tokens: int
    deadline: float
    """`time.monotonic()`."""


@dataclass(kw_only=True)
class Interception:
    """The service of one episode."""

    gateway: httpx.Client
    """To the gateway, with the episode's key in its headers."""
    policy: str
    tags: Mapping[str, str]
    bounds: Bounds
    journal: Journal
    permit: Permit
    """Taken for each request to the gateway: practice uses the engines when nobody waits for them."""
    components: frozenset[str] = frozenset()
    """Other policies that the harness may name as `model`: a step of it is theirs. Whatever else it names is `policy`."""
    retry_s: float = RETRY_S
    """Before the same is asked for again."""
    ended: Outcome | None = None
    """Why it answers no more."""
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    replayed: int = 0
    _recorded: list[Exchange] = field(default_factory=list[Exchange])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._recorded = self.journal.read()

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return sum(int(one.answer.get("usage", {}).get("completion_tokens", 0)) for one in self.exchanges)

    @property
    def turns(self) -> list[Exchange]:
        """Of the episode's own policy, in order."""
        return [one for one in self.exchanges if one.policy not in self.components]

    @property
    def versions(self) -> list[str]:
        """Of each turn, in order."""
        return [one.version for one in self.turns]

    def answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """A completion, or why there is none. One at a time: a turn follows the one before."""
        with self._lock:
            return self._answer(body)

    def _answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            request = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _refused(400, f"this is no JSON: {error}")
        policy = next((name for name in self.components if name == request.get("model")), self.policy)
        if not self._has_turns_left(policy):
            self.ended = self.ended or Outcome.TURN_LIMIT
            return _refused(403, f"this episode has had its {self.bounds.most_turns} turns")
        left = self.bounds.most_tokens - self.tokens
        if left <= 0:
            self.ended = self.ended or Outcome.TOKEN_LIMIT
            return _refused(403, f"this episode has had its {self.bounds.most_tokens} tokens")
        wanted = request.get("max_tokens") or left
        if not isinstance(wanted, int):
            return _refused(400, "max_tokens is a whole number")
        asked = asked_hash(request)
        if len(self.exchanges) < len(self._recorded):
            return self._again(asked)
        return self._ask(request, asked, policy, min(wanted, left))

    def _has_turns_left(self, policy: str) -> bool:
        """Turns are the policy's own; a component's are bounded in proportion to what a step of it takes."""
        if policy == self.policy:
            return len(self.turns) < self.bounds.most_turns
        return len(self.exchanges) - len(self.turns) < COMPONENT_TURNS * (self.bounds.most_turns + 1)

    def _again(self, asked: str) -> tuple[int, dict[str, Any]]:
        recorded = self._recorded[len(self.exchanges)]
        if recorded.asked != asked:
            self.ended = Outcome.BOX_LOST
            return _refused(409, "the box does not do again what it did: its replay has diverged")
        self.exchanges.append(recorded)
        self.replayed += 1
        return 200, recorded.answer

    def _ask(self, request: dict[str, Any], asked: str, policy: str, most_tokens: int) -> tuple[int, dict[str, Any]]:
        ours = {"model": policy, "max_tokens": most_tokens, "stream": False, "metadata": dict(self.tags)}
        sent = {name: request[name] for name in PASSED if name in request} | ours
        while time.monotonic() < self.bounds.deadline:
            if self.permit.take():
                began = time.monotonic()
                try:
                    answered = self.gateway.post("/v1/chat/completions", json=sent, timeout=ANSWER_S)
                except httpx.HTTPError:
                    answered = None
                finally:
                    self.permit.give_back()
                if answered is not None and answered.status_code == 200:
                    return self._take(request, asked, policy, answered, time.monotonic() - began)
                if answered is not None and answered.status_code not in RETRIED:
                    return self._refusal(answered)
            time.sleep(self.retry_s)
        self.ended = self.ended or Outcome.GATEWAY_FAILED
        return _refused(503, "the gateway gave no answer in the time of this episode")

    def _refusal(self, answered: httpx.Response) -> tuple[int, dict[str, Any]]:
        """What the harness did wrong is its own business; a key or a policy that is not known is ours."""
        code = answered.json().get("error", {}).get("code") if "json" in answered.headers.get("content-type", "") else None
        if code == "context_length_exceeded":
            self.ended = self.ended or Outcome.TOKEN_LIMIT
        elif answered.status_code in (401, 403, 404):
            self.ended = self.ended or Outcome.GATEWAY_FAILED
        return answered.status_code, {"error": {"message": answered.text[:1000], "code": code}}

    def _take(
        self, request: dict[str, Any], asked: str, policy: str, answered: httpx.Response, took_s: float
    ) -> tuple[int, dict[str, Any]]:
        said = answered.json()
        exchange = Exchange(
            asked=asked, request={"messages": request.get("messages", [])}, answer=said, policy=policy, took_s=took_s,
            version=answered.headers.get("x-ratchet-version", ""),
        )  # fmt: skip
        self.journal.append(exchange)
        self.exchanges.append(exchange)
        return 200, said


def asked_hash(request: Mapping[str, Any]) -> str:
    """What decides an answer, as one number."""
    return hashlib.sha256(msgspec.json.encode([request.get("messages"), request.get("tools")], order="sorted")).hexdigest()


def _refused(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "invalid_request_error", "code": "episode_over"}}


Answer = Callable[[bytes], tuple[int, dict[str, Any]]]


class Answering:
    """A server whose requests are answered by a function."""

    answer: Answer


class _Server(Answering, socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, path: str, answer: Answer) -> None:
        self.answer = answer
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(path, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base class's
        """In a thread of its own, as long as there are not too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base class's
        """To its connection's end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base class's
        """A client that went away is its own business."""


class Handler(BaseHTTPRequestHandler):
    """Of a server with an `answer`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """The one thing that passes."""
        said = self.headers.get("content-length") or "0"
        length = int(said) if len(said) < 10 and said.isdecimal() else -1
        if not 0 <= length <= MOST_BODY_BYTES:
            self._send(413, {"error": {"message": f"a request says how long it is, and has at most {MOST_BODY_BYTES} bytes"}})
            return
        body = self.rfile.read(length)  # whatever is said to it: what is left unread would be taken for the next request
        if self.path != "/v1/chat/completions":
            self._send_nothing_here()
        else:
            assert isinstance(self.server, Answering)
            self._send(*self.server.answer(body))

    def do_GET(self) -> None:
        """Nothing is to be had."""
        self._send_nothing_here()

    def _send_nothing_here(self) -> None:
        self._send(404, {"error": {"message": "completions are all that is answered here: POST /v1/chat/completions"}})

    def _send(self, status: int, said: Mapping[str, Any]) -> None:
        body = msgspec.json.encode(said)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if status == 413:
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        """A socket's peer has no address."""
        return "box"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - the base class's
        """Turns are logged by the gateway."""


@dataclass
class Socket:
    """A socket that boxes may connect to, and the service behind it, which may change from episode to episode."""

    folder: Path = field(default_factory=lambda: scratch("socket"))
    service: Interception | None = None

    def __post_init__(self) -> None:
        self._server = _Server(str(self.path), self._answer)
        self.path.chmod(0o666)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder / "gateway.sock"

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self.path.unlink(missing_ok=True)
        self.folder.rmdir()

    def _answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.service is None:
            return _refused(503, "no episode has begun")
        return self.service.answer(body)
