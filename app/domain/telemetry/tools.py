"""Finds tool calls in a completion and says what is wrong with them. Pure.

The Hermes convention (`app.policy.chat` writes the prompt): each call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`;
SmolLM2 also writes a list of calls into one pair of tags. A call without its closing tag was cut off and does not parse.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from app.domain.telemetry.schemas import satisfies
from app.domain.telemetry.turns import ToolCall, ToolVerdict

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A completion taken apart."""

    content: str
    """What is not a tool call; where there is one, without the white space at its end, so that what `settled` let through begins it."""
    calls: tuple[ToolCall, ...]


def parse(completion: str, tools: Sequence[Mapping[str, Any]], *, call_id_prefix: str) -> Parsed:
    """Find the calls. `tools` are OpenAI's tool definitions; ids are `<prefix>_<index>`."""
    calls: list[ToolCall] = []
    schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") for tool in tools}
    for match in _CALL.finditer(completion):
        whole = match.group(0).endswith(CLOSE)
        for name, arguments, verdict in _read(match.group(1), schemas, whole=whole):
            calls.append(ToolCall(id=f"{call_id_prefix}_{len(calls)}", name=name, arguments=arguments, verdict=verdict))
    return Parsed(content=_CALL.sub("", completion).rstrip() if calls else completion, calls=tuple(calls))


def settled(text: str) -> int:
    """How many characters at the start of an unfinished completion may be streamed: they are no part of a tool call, nor of the white
    space that `parse` leaves out where nothing but calls follows."""
    start = text.find(OPEN)
    if start < 0:
        begun = next((length for length in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:length])), 0)
        start = len(text) - begun
    return len(text[:start].rstrip())


def _read(text: str, schemas: Mapping[str, Any], *, whole: bool) -> list[tuple[str, str, ToolVerdict]]:
    """(name, raw arguments, verdict) of what stands between one pair of tags."""
    try:
        value = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [("", text.strip(), ToolVerdict.UNPARSABLE)]
    found = cast("list[object]", value) if isinstance(value, list) else [cast(object, value)]
    calls = [_judge(call, schemas) for call in found] or [("", text.strip(), ToolVerdict.UNPARSABLE)]
    return calls if whole else [(name, arguments, ToolVerdict.UNPARSABLE) for name, arguments, _ in calls]


def _judge(call: object, schemas: Mapping[str, Any]) -> tuple[str, str, ToolVerdict]:
    fields = cast("dict[str, object]", call) if isinstance(call, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str):
        return "", msgspec.json.encode(call).decode(), ToolVerdict.UNPARSABLE
    raw = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return name, raw, ToolVerdict.UNPARSABLE
    if name not in schemas:
        return name, raw, ToolVerdict.UNKNOWN_TOOL
    return name, raw, ToolVerdict.VALID if _satisfies(arguments, schemas[name]) else ToolVerdict.INVALID_ARGUMENTS


def _satisfies(arguments: object, schema: object) -> bool:
    """Whether the arguments are an object that satisfies the schema."""
    if not isinstance(arguments, dict):
        return False
    return not isinstance(schema, dict) or satisfies(cast("dict[str, Any]", arguments), cast("dict[str, Any]", schema))
