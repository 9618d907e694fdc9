"""`make bench-abuse`: one client sends the worst input we know, again and again; what do the others notice?

    server (a process of its own)     the whole HTTP service with engines that answer at once; a heartbeat on its loop, every 5 ms
    others                            small chats and events, one after the other, on two connections
    attacker                          one attack on two connections, as fast as it is answered

Quiet and attacked windows alternate, so that what else runs on the machine falls on both. Per attack `others_p99_ratio` is the others' p99
under attack over their p99 in quiet, `loop_block_ms_p99` the p99 of the heartbeat's lateness under attack, `refused` the share of the
attacker's requests that got a 4xx. Not measured: the engine's side of a long prompt, whose bound is in `app.policy.chat`.

The last line names the worst attack; the exit code is 1 where its ratio is above 2. On a machine that does other things too the p99 of
a few hundred requests is mostly theirs: `--seconds` makes the windows longer.
"""

import argparse
import asyncio
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent
from app.main import create_app, settle
from tests.fakes.gateway import FixedRoutes, ScriptedEngines, collaborators, policy_config, serving
from tests.fakes.inbox import MemoryInbox

BEAT_S = 0.005
BOUND = 2.0
AT = "2026-11-21T12:00:00Z"
JSON = {"content-type": "application/json"}
PHONE = "+44 20 7031 3000, "
CALL = '<tool_call>{"name": "f", "arguments": {"a": "' + "a" * 40 + '!"}}</tool_call>'


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


def serve() -> None:
    """Serve until standard input ends; the address is the first line of standard output."""
    policies = {"composer": policy_config(), "redacting": policy_config(redact=True)}
    engines = ScriptedEngines(words=("Hello", CALL))
    app = create_app(
        collaborators(inbox=Forgetful(engines), policies=policies, routes=FixedRoutes("composer", "redacting"), engines=engines)
    )
    settle()
    with serving(Heart(app)) as url:
        print(url, flush=True)
        sys.stdin.read()


# --- attacks ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One request that is made to hurt."""

    name: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: JSON)


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "composer", "messages": [{"role": "user", "content": "x"}]} | more).encode()


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def attacks() -> list[Attack]:
    """The worst found, per kind: just under the caps, and far above them."""
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(20)} | {"d20": {"type": "string"}}
    properties = {f"p{n}": {"type": "string", "description": "d" * 30} for n in range(200)}
    big = [tool({"type": "object", "properties": properties}) for _ in range(16)]
    event = {"name": "comment", "occurred_at": AT, "inference_id": "i", "policy": "redacting"}
    record = {"eventName": "gen_ai.evaluation.result", "attributes": [{"key": "a", "value": {"stringValue": "b"}}] * 4}
    otlp = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record] * 400}]}]}
    lists = event | {"policy": "composer", "name": "tool_call", "value": {"name": "f", "a": [[]] * 19_000}}
    scores = [{"id": f"s{n}", "traceId": "t", "name": "rating", "value": 1.0, "comment": PHONE * 60} for n in range(500)]
    return [
        Attack(name="3 MB of tool schemas", path="/v1/chat/completions", body=chat(tools=big * 14)),
        Attack(name="tool schemas under the cap", path="/v1/chat/completions", body=chat(tools=big)),
        Attack(
            name="a schema that doubles", path="/v1/chat/completions", body=chat(tools=[tool({"$ref": "#/$defs/d0", "$defs": doubling})])
        ),
        Attack(
            name="an endless pattern", path="/v1/chat/completions",
            body=chat(tools=[tool({"properties": {"a": {"pattern": "(a+)+$"}}})]),
        ),
        Attack(
            name="messages of empty lists", path="/v1/chat/completions", body=chat(messages=[{"role": "user", "content": [[]] * 1_000_000}])
        ),
        Attack(name="a prompt of 4 MB", path="/v1/chat/completions", body=chat(messages=[{"role": "user", "content": "word " * 800_000}])),
        Attack(
            name="a prompt under the cap", path="/v1/chat/completions", body=chat(messages=[{"role": "user", "content": "w" * 130_000}])
        ),
        Attack(
            name="250 kB of phone numbers", path="/v1/events", body=json.dumps(event | {"value": (PHONE * 14_000)[:250_000]}).encode()
        ),
        Attack(
            name="phone numbers under the cap", path="/v1/events", body=json.dumps(event | {"value": (PHONE * 4000)[:65_000]}).encode()
        ),
        Attack(name="500 comments full of phone numbers", path="/api/public/scores", body=json.dumps(scores).encode()),
        Attack(name="empty lists by the hundred thousand", path="/v1/events", body=json.dumps(event | {"value": [[]] * 60_000}).encode()),
        Attack(
            name="events of many lists, none redacted", path="/v1/events", body=json.dumps([lists] * 10).encode()
        ),
        Attack(name="half a million members", path="/v1/events", body=b"[" + b"1," * 499_000 + b"1]"),
        Attack(name="OTLP of 130 kB", path="/v1/logs", body=json.dumps(otlp).encode()),
        Attack(
            name="OTLP records of nothing", path="/v1/logs", body=_field(1, _field(2, b"\x12\x00" * 495_000)),
            headers={"content-type": "application/x-protobuf"},
        ),
        Attack(
            name="OTLP records of little", path="/v1/logs", body=_field(1, _field(2, b"\x12\x02\x10\x09" * 247_000)),
            headers={"content-type": "application/x-protobuf"},
        ),
        Attack(
            name="a gzip bomb", path="/v1/events", body=gzip.compress(b"[" + b" " * 50_000_000 + b"]"),
            headers=JSON | {"content-encoding": "gzip"},
        ),
    ]  # fmt: skip


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes in protobuf."""
    length, left = b"", len(content)
    while left > 127:
        length, left = length + bytes([left & 127 | 128]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + content


# --- the measurement ----------------------------------------------------------------------------------------------------------------


async def others(client: httpx.AsyncClient, until: float, took_s: list[float]) -> None:
    """Small requests, one after the other; how long each took."""
    number = 0
    while time.monotonic() < until:
        number += 1
        event = {"id": f"o{number}-{until}", "inference_id": "i", "name": "rating", "value": True, "occurred_at": AT}
        for path, body in (("/v1/chat/completions", chat()), ("/v1/events", json.dumps(event).encode())):
            began = time.monotonic()
            (await client.post(path, content=body, headers=JSON)).raise_for_status()
            took_s.append(time.monotonic() - began)


async def attacking(client: httpx.AsyncClient, attack: Attack, until: float, codes: list[int]) -> None:
    """The attack, as fast as it is answered."""
    while time.monotonic() < until:
        codes.append((await client.post(attack.path, content=attack.body, headers=attack.headers)).status_code)


def p99(values: list[float]) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)] if values else 0.0


async def measured(url: str, attack: Attack, *, seconds: float, rounds: int) -> dict[str, Any]:
    """One attack's figures."""
    quiet: list[float] = []
    attacked: list[float] = []
    late: list[float] = []
    codes: list[int] = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        for _ in range(rounds):
            until = time.monotonic() + seconds
            await asyncio.gather(*(others(client, until, quiet) for _ in range(2)))
            await client.get("/beats")
            until = time.monotonic() + seconds
            under: list[Awaitable[None]] = [others(client, until, attacked) for _ in range(2)]
            await asyncio.gather(*under, *(attacking(client, attack, until, codes) for _ in range(2)))
            late += (await client.get("/beats")).json()
    return {
        "worst_input": attack.name, "loop_block_ms_p99": round(1000 * p99(late), 1),
        "others_p99_ratio": round(p99(attacked) / p99(quiet), 2), "refused": round(sum(400 <= c < 500 for c in codes) / len(codes), 2),
        "attacks": len(codes), "others_p99_ms": round(1000 * p99(attacked), 1), "quiet_p99_ms": round(1000 * p99(quiet), 1),
    }  # fmt: skip


def main(report: Callable[[str], None] = print) -> int:
    """Every attack in turn; the worst one last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=3, help="quiet and attacked windows per attack")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.abuse", "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        found: list[dict[str, Any]] = []
        for attack in attacks():
            if given.only in attack.name:
                found.append(asyncio.run(measured(url, attack, seconds=given.seconds, rounds=given.rounds)))
                report(json.dumps(found[-1]))
    finally:
        server.stdin.close()
        server.wait(20)
    worst = max(found, key=lambda row: row["others_p99_ratio"])
    report(json.dumps(worst))
    return 0 if worst["others_p99_ratio"] <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
