"""`make bench-abuse`: one client sends the worst input we know, again and again; what do the others notice?

    server      the whole HTTP service with engines that answer at once; a heartbeat on its loop, every 5 ms
    others      small chats and events, one after the other, on two connections
    attacker    one attack on two connections, as fast as it is answered; bodies are made once; runs when nobody else does (SCHED_IDLE)

Each is a process of its own, so that what it costs to send is not what is measured. Before each attacked window is one in which the
same two connections send what everybody sends. Per attack `others_p99_ratio` is the others' p99 under attack over that of the window
before, the median over the rounds; `loop_block_ms_p99` the p99 of the heartbeat's lateness under attack, `refused` the share of the
attacker's requests that got a 4xx. The first row is what two more ordinary connections cost: the window before is a quiet one there,
and no bound is on it. Not measured: the engine's side of a long prompt (bounded in `app.policy.chat`).

The last line names the worst attack; the exit code is 1 where its ratio is above 2. On a machine that does other things too the p99 of
a few hundred requests is mostly theirs: `--seconds` makes the windows longer. `--context 131072` is a policy of long prompts.
"""

import argparse
import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import IO, Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from app.domain.errors import BadRequest
from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.main import create_app, settle
from app.serving.pieces import numbers
from app.trajectories.segments import ParquetSegments
from tests.bench.common.attacks import AT, CALL, CONTEXT, JSON, ORDINARY, Attack, attacks, chat
from tests.fakes.gateway import FixedRoutes, ScriptedEngines, collaborators, policy_config, serving
from tests.fakes.inbox import MemoryInbox

BEAT_S = 0.005
BOUND = 2.0


# --- the server -------------------------------------------------------------------------------------------------------------------


@dataclass
class Heart:
    """Beats on the loop of the application behind it; how late each beat came can be fetched at `/beats`."""

    app: ASGIApp
    late_s: list[float] = field(default_factory=list[float])
    task: "asyncio.Task[None] | None" = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start beating with the first request."""
        self.task = self.task or asyncio.create_task(self._beat())
        if scope["type"] == "http" and scope["path"] == "/beats":
            late, self.late_s = self.late_s, []
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": json.dumps(late).encode()})
            return
        await self.app(scope, receive, send)

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.late_s.append(time.monotonic() - due)


@dataclass
class Forgetful(MemoryInbox):
    """Keeps the newest alone: the real one is a database, and a heap that grew here would be the collector's work."""

    engines: ScriptedEngines

    def __post_init__(self) -> None:
        super().__init__()

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        """Answer per event; what was asked of the engines is forgotten too."""
        if len(self.events) > 2000:
            self.events.clear()
        self.engines.requests.clear()
        return await super().append(events)


LONGEST = b"[" + b"49151," * 200_000


@dataclass
class Long(ScriptedEngines):
    """Reads a prompt elsewhere, as engines do: token ids come back as the text that an engine sends, four characters a token."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        """As the script says. Raises `BadRequest` for what is longer than the context."""
        count = sum(len(message["content"]) for message in request.messages if isinstance(message["content"], str)) // 4
        if count > self.context_tokens:
            raise BadRequest(f"{count} tokens and {self.context_tokens} fit", param="messages", code="context_length_exceeded")
        tokens = await numbers(LONGEST[: 1 + 6 * count] + b"0]")
        async for chunk in super().generate(msgspec.structs.replace(request, messages=[])):
            yield msgspec.structs.replace(chunk, prompt_tokens=tokens) if chunk.finish_reason else chunk


def serve(context: int) -> None:
    """Serve until standard input ends; the address is the first line of standard output."""
    sizes = {"max_context_tokens": context}
    policies = {"composer": policy_config(**sizes), "redacting": policy_config(redact=True, **sizes)}
    engines = Long(words=("Hello", CALL), context_tokens=context)
    with tempfile.TemporaryDirectory(prefix="ratchet-abuse-") as folder:
        app = create_app(
            collaborators(
                inbox=Forgetful(engines), policies=policies, routes=FixedRoutes("composer", "redacting"), engines=engines,
                claims=ParquetSegments(folder),
            )
        )  # fmt: skip
        settle()
        with serving(Heart(app)) as url:
            print(url, flush=True)
            sys.stdin.read()


# --- who attacks, and who else is there -----------------------------------------------------------------------------------------------


@dataclass
class Connection:
    """One connection, kept alive; made again where the service has closed it."""

    host: str
    open: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """The status of the answer; 0 where the connection was closed before one could be read."""
        self.open = self.open or http.client.HTTPConnection(self.host, timeout=120)
        try:
            self.open.request("POST", path, body, headers)
            answer = self.open.getresponse()
            answer.read()
        except (ConnectionError, http.client.HTTPException):
            self.open = None
            return 0
        return answer.status


def together(work: Callable[[], None], count: int = 2) -> None:
    """Do the same on several connections, a thread for each."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def others(host: str, until: float, took_s: list[float]) -> None:
    """Small requests on two connections, one after the other on each; how long each took."""

    def ask() -> None:
        connection, number = Connection(host), 0
        while time.monotonic() < until:
            number += 1
            event = {
                "id": f"o{number}-{threading.get_ident()}-{until}",
                "inference_id": "i",
                "name": "rating",
                "value": True,
                "occurred_at": AT,
            }
            for path, body in (("/v1/chat/completions", chat()), ("/v1/events", json.dumps(event).encode())):
                began = time.monotonic()
                assert connection.post(path, body, JSON) in (200, 202)
                took_s.append(time.monotonic() - began)

    together(ask)


def attacking(host: str, context: int) -> None:
    """For each line of standard input, `{"attack", "until"}`, the attack on two connections, as fast as it is answered; then its codes.

    A process of its own, with the time that nobody else wants: what it costs to send is the attacker's machine's, not the service's.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    known = {attack.name: attack for attack in attacks(context)}
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        attack, codes = known[asked["attack"]], list[int]()

        def send(attack: Attack = attack, until: float = asked["until"], codes: list[int] = codes) -> None:
            connection = Connection(host)
            while time.monotonic() < until:
                codes.append(connection.post(attack.path, attack.body, attack.headers))

        together(send)
        print(json.dumps(codes), flush=True)


# --- the measurement ----------------------------------------------------------------------------------------------------------------


@contextmanager
def process(*arguments: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """Another role of this bench: its standard input and output; it ends with its input."""
    command = [sys.executable, "-m", "tests.bench.abuse", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdin is not None
        assert role.stdout is not None
        yield role.stdin, role.stdout
        role.stdin.close()
        role.wait(20)


def p99(values: Sequence[float]) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)] if values else 0.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A server and an attacker."""

    host: str
    orders: IO[str]
    codes: IO[str]

    def measured(self, attack: Attack, *, seconds: float, rounds: int) -> dict[str, Any]:
        """One attack's figures: medians over the rounds."""
        before, attacked, late, codes = list[float](), list[float](), list[float](), list[int]()
        for _ in range(rounds):
            before.append(self._p99(seconds, sent=None if attack.name == ORDINARY else ORDINARY)[0])
            self.beats()
            found, sent = self._p99(seconds, sent=attack.name)
            late.append(p99(self.beats()))
            attacked.append(found)
            codes += sent
        ratio = median(a / b for a, b in zip(attacked, before, strict=True))
        return {
            "worst_input": attack.name, "loop_block_ms_p99": round(1000 * median(late), 1),
            "others_p99_ratio": round(ratio, 2), "refused": round(sum(c == 0 or 400 <= c < 500 for c in codes) / len(codes), 2),
            "attacks": len(codes), "others_p99_ms": round(1000 * median(attacked), 1), "before_p99_ms": round(1000 * median(before), 1),
        }  # fmt: skip

    def _p99(self, seconds: float, *, sent: str | None) -> tuple[float, list[int]]:
        """The others' p99 while the attacker sends this, and what it was answered."""
        took, until = list[float](), time.monotonic() + seconds
        if sent is not None:
            print(json.dumps({"attack": sent, "until": until}), file=self.orders, flush=True)
        others(self.host, until, took)
        return p99(took), [] if sent is None else json.loads(self.codes.readline())

    def beats(self) -> list[float]:
        """How late the loop's beats came since this was asked last."""
        with urllib.request.urlopen(f"http://{self.host}/beats", timeout=120) as answer:
            return json.load(answer)


def main(report: Callable[[str], None] = print) -> int:
    """Every attack in turn; the worst one last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of windows per attack")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens that fit into a policy's context")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve or given.attack:
        serve(given.context) if given.serve else attacking(given.attack, given.context)
        return 0
    found: list[dict[str, Any]] = []
    size = ("--context", str(given.context))
    with process("--serve", *size) as (_, said):
        host = said.readline().strip().removeprefix("http://")
        with process("--attack", host, *size) as (orders, codes):
            assert codes.readline().strip() == "ready"
            bench = Bench(host=host, orders=orders, codes=codes)
            for attack in attacks(given.context):
                if given.only in attack.name:
                    found.append(bench.measured(attack, seconds=given.seconds, rounds=given.rounds))
                    report(json.dumps(found[-1]))
    worst = max((row for row in found if row["worst_input"] != ORDINARY or len(found) == 1), key=lambda row: row["others_p99_ratio"])
    report(json.dumps(worst))
    return 0 if worst["others_p99_ratio"] <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
