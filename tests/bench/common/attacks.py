"""Requests that are made to hurt, for `tests.bench.abuse`."""

import gzip
import json
import random
from dataclasses import dataclass, field
from typing import Any

AT = "2026-11-21T12:00:00Z"
JSON = {"content-type": "application/json"}
PHONE = "+44 20 7031 3000, "
CALL = '<tool_call>{"name": "f", "arguments": {"a": "' + "a" * 40 + '!"}}</tool_call>'
ORDINARY = "(what everybody sends)"
CONTEXT = 2048
"""Tokens that fit, unless `--context` says more: what a body may have grows with it."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One request that is made to hurt."""

    name: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: JSON)


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "composer", "messages": [{"role": "user", "content": "x"}]} | more).encode()


def said(*contents: Any) -> bytes:
    """A conversation in which people and model take turns."""
    return chat(messages=[{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)])


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def attacks(context: int) -> list[Attack]:
    """The worst found, per kind: just under the caps, and far above them."""
    larger = context // CONTEXT
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(20)} | {"d20": {"type": "string"}}
    properties = {f"p{n}": {"type": "string", "description": "d" * 30} for n in range(200)}
    big = [tool({"type": "object", "properties": properties}) for _ in range(16)]
    event = {"name": "comment", "occurred_at": AT, "inference_id": "i", "policy": "redacting"}
    record = {"eventName": "gen_ai.evaluation.result", "attributes": [{"key": "a", "value": {"stringValue": "b"}}] * 4}
    otlp = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record] * 400}]}]}
    large = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record] * 3100}]}]}
    lists = event | {"policy": "composer", "name": "tool_call", "value": {"name": "f", "a": [[]] * 19_000}}
    scores = [{"id": f"s{n}", "traceId": "t", "name": "rating", "value": 1.0, "comment": PHONE * 60} for n in range(500)]
    drawn = random.Random(0)
    numbers = [
        event | {"policy": "composer", "value": {"a": [drawn.randrange(10**9) for _ in range(1000)]}, "id": f"n{n}"} for n in range(180)
    ]
    return [
        Attack(name=ORDINARY, path="/v1/chat/completions", body=chat()),
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
            name="messages of empty lists", path="/v1/chat/completions", body=said([[]] * 1_000_000)
        ),
        Attack(
            name="lists in messages under the cap", path="/v1/chat/completions", body=said([[]] * 19_000 * min(8, larger)),
        ),
        Attack(
            name="64,000 lists in a small body", path="/v1/chat/completions", body=said([[]] * 64_000),
        ),
        Attack(name="a prompt of 4 MB", path="/v1/chat/completions", body=said("word " * 800_000)),
        Attack(name="a prompt under the cap", path="/v1/chat/completions", body=said("w" * (64 * context - 1000))),
        Attack(name="a prompt that fits", path="/v1/chat/completions", body=said("word " * (context * 4 // 5))),
        Attack(name="a prompt of small messages", path="/v1/chat/completions", body=said(*["word"] * (240 * larger))),
        Attack(name="messages without a role", path="/v1/chat/completions", body=chat(messages=[{"a": 1}] * 30_000)),
        Attack(
            name="250 kB of phone numbers", path="/v1/events", body=json.dumps(event | {"value": (PHONE * 14_000)[:250_000]}).encode()
        ),
        Attack(
            name="phone numbers under the cap", path="/v1/events", body=json.dumps(event | {"value": (PHONE * 4000)[:65_000]}).encode()
        ),
        Attack(
            name="dots under the cap", path="/v1/events", body=json.dumps(event | {"value": "1.1." * 16_000}).encode()
        ),
        Attack(name="500 comments full of phone numbers", path="/api/public/scores", body=json.dumps(scores).encode()),
        Attack(name="empty lists by the hundred thousand", path="/v1/events", body=json.dumps(event | {"value": [[]] * 60_000}).encode()),
        Attack(
            name="events of many lists, none redacted", path="/v1/events", body=json.dumps([lists] * 10).encode()
        ),
        Attack(name="small objects to a dialect", path="/api/public/scores", body=json.dumps({"metadata": [{"a": 1}] * 39_000}).encode()),
        Attack(name="half a million members", path="/v1/events", body=b"[" + b"1," * 499_000 + b"1]"),
        Attack(name="OTLP of 130 kB", path="/v1/logs", body=json.dumps(otlp).encode()),
        Attack(name="OTLP of 1 MB", path="/v1/logs", body=json.dumps(large).encode()),
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
        Attack(
            name="2 MB of numbers in gzip", path="/v1/events", body=gzip.compress(json.dumps(numbers).encode()),
            headers=JSON | {"content-encoding": "gzip"}
        ),
    ]  # fmt: skip


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes in protobuf."""
    length, left = b"", len(content)
    while left > 127:
        length, left = length + bytes([left & 127 | 128]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + content
