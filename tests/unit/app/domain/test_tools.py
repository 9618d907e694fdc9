"""Tool calls in completions: what is found, what is wrong with it, what may be streamed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.telemetry.tools import OPEN, parse, settled
from app.domain.telemetry.turns import ToolVerdict

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}
FREE: dict[str, Any] = {"type": "function", "function": {"name": "free"}}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [("add", '{"a":1}', ToolVerdict.VALID)]),
        ('<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>', [("add", '{"a": 1}', ToolVerdict.VALID)]),
        ('<tool_call>{"name": "free", "arguments": {"x": [1]}}</tool_call>', [("free", '{"x":[1]}', ToolVerdict.VALID)]),
        ('<tool_call>{"name": "free"}</tool_call>', [("free", "{}", ToolVerdict.VALID)]),
        ('<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>', [("add", '{"a":"1"}', ToolVerdict.INVALID_ARGUMENTS)]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [("add", "[1]", ToolVerdict.INVALID_ARGUMENTS)]),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', [("sub", "{}", ToolVerdict.UNKNOWN_TOOL)]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [("add", '{"a":1}', ToolVerdict.UNPARSABLE)]),
        ("<tool_call>add(1)</tool_call>", [("", "add(1)", ToolVerdict.UNPARSABLE)]),
        ("<tool_call>[]</tool_call>", [("", "[]", ToolVerdict.UNPARSABLE)]),
        ("<tool_call>[1]</tool_call>", [("", "1", ToolVerdict.UNPARSABLE)]),
        ("<tool_call>" + "[" * 5000, [("", "[" * 5000, ToolVerdict.UNPARSABLE)]),
        (
            '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "free"}]</tool_call>',
            [("add", '{"a":1}', ToolVerdict.VALID), ("free", "{}", ToolVerdict.VALID)],
        ),
        ("no call at all", []),
    ],
)
def test_calls_and_their_verdicts(text: str, calls: list[tuple[str, str, ToolVerdict]]) -> None:
    parsed = parse(text, [ADD, FREE], call_id_prefix="c")
    assert [(call.name, call.arguments, call.verdict) for call in parsed.calls] == calls
    assert [call.id for call in parsed.calls] == [f"c_{index}" for index in range(len(calls))]


def test_references_outside_the_schema_are_not_fetched() -> None:
    remote = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://127.0.0.1:9/schema"}}}
    parsed = parse('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [remote], call_id_prefix="c")
    assert parsed.calls[0].verdict == ToolVerdict.INVALID_ARGUMENTS


def test_content_is_what_is_left() -> None:
    text = 'First <tool_call>{"name": "free"}</tool_call> then <tool_call>{"name": "free"}</tool_call>'
    assert parse(text, [FREE], call_id_prefix="c").content == "First  then"


@given(st.text(alphabet="<tool_ca>/{} x", max_size=60))
def test_what_was_streamed_stays_true_whatever_follows(text: str) -> None:
    """Characters that were let through early are exactly the beginning of what is let through later."""
    sent = 0
    for end in range(len(text) + 1):
        upto = settled(text[:end])
        assert upto >= sent or OPEN in text[:end]
        sent = max(sent, upto)
    assert OPEN not in text[:sent]
