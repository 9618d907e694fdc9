"""What a chat request may say, at each bound and one beyond it; and what is meant by what it leaves out."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.api.chat.request import ChatRequest, read_body, understand
from app.api.chat.shapes import SCHEMA_CHARS
from app.api.entry.access import ANONYMOUS, Caller
from app.api.telemetry.intake import Limits
from app.domain.errors import BadRequest
from app.domain.ids import hash_actor
from app.domain.telemetry.turns import Form
from app.listening.errors import HttpError
from tests.fakes.gateway import policy_config

HELLO = {"role": "user", "content": "x"}
OUTLINED = 32 * 1024


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "composer", "messages": [HELLO]} | changes


def raw(body: dict[str, Any], size: int = 0) -> bytes:
    """The body, padded with blanks to a size."""
    return json.dumps(body, separators=(",", ":")).encode().ljust(size)


def asked(body: dict[str, Any], *, headers: dict[str, str] | None = None, caller: Caller = ANONYMOUS, **config: Any) -> ChatRequest:
    read, shape = read_body(raw(body), Limits())
    sent = {name.encode(): value.encode() for name, value in (headers or {}).items()}
    return understand(read, sent, caller, policy_config(**config), salt="salt", shape=shape)


def refused(body: dict[str, Any], *, limits: Limits | None = None, size: int = 0) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        read_body(raw(body, size), limits or Limits())
    return error.value


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def biases(count: int) -> dict[str, float]:
    return {str(n): 1.0 for n in range(count)}


def schema(chars: int) -> dict[str, Any]:
    """A response format whose schema has so many characters as JSON."""
    empty = len('{"description":""}')
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {"description": "d" * (chars - empty)}}}


@pytest.mark.parametrize(
    ("field", "most", "beyond"),
    [
        ("n", 16, 17), ("n", 1, 0), ("presence_penalty", 2, 2.01), ("presence_penalty", -2, -2.01), ("frequency_penalty", 2.0, 2.5),
        ("logit_bias", {"5": 100}, {"5": 100.5}), ("logit_bias", {"5": -100}, {"5": -101}),
        ("logit_bias", biases(1024), biases(1025)), ("logit_bias", {"9" * 9: 1}, {"9" * 10: 1}), ("logit_bias", {"0": 1}, {"-1": 1}),
        ("logit_bias", {"7": 1}, {"٧": 1}), ("session_id", "s" * 64, "s" * 65), ("session_id", "s", ""),
        ("tensorzero::episode_id", "e" * 64, "e" * 65), ("response_format", schema(SCHEMA_CHARS), schema(SCHEMA_CHARS + 1)),
        ("response_format", {"type": "json_object"}, {"type": "xml"}), ("tool_choice", "auto", "perhaps"), ("top_logprobs", 0, 1),
        ("tool_choice", "auto", "required"), ("user", "u", "u\x00"), ("safety_identifier", "u", "\x00"), ("session_id", "u", "u\x00"),
        ("tensorzero::variant_name", "u", "\x00u"), ("tensorzero::episode_id", "u", "\x00"), ("model", "m", "m\x00"),
        ("tools", [tool(type="object")], [tool(type="objekt")]), ("tools", [tool()], [{"type": "function", "function": {}}]),
        ("tools", [tool()], [{"type": "retrieval", "function": {"name": "f"}}]), ("metadata", {"a": "x"}, {"a": "\x00"}),
        ("tensorzero::tags", {"a": "x"}, {"a": "\x00"}),
    ],
)  # fmt: skip
def test_each_field_is_taken_at_its_bound_and_refused_by_its_name_one_beyond(field: str, most: Any, beyond: Any) -> None:
    read_body(raw(chat(**{field: most})), Limits())
    error = refused(chat(**{field: beyond}))
    assert (error.param or "").startswith(field.replace("tensorzero::tags", "tags"))


def test_what_a_request_leaves_out_is_the_policy_s_or_nothing() -> None:
    plain = asked(chat(), max_tokens=300)
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.max_tokens, plain.sampling.seed) == (1.0, 1.0, 300, None)
    assert (plain.sampling.stop, plain.shape, plain.tools, plain.actor, plain.likely) == ((), None, None, None, None)
    assert (plain.stream, plain.include_usage, plain.logprobs, plain.dryrun, plain.stored) == (False, False, False, False, True)
    assert (plain.continues, plain.ends, plain.rateable, plain.source) == (False, False, True, "gateway")
    assert (plain.segment, plain.tags, plain.consent.train) == ({}, {}, True)


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({}, 300), ({"max_tokens": 299}, 299), ({"max_tokens": 301}, 300), ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_completion_tokens": 1}, 1),
    ],
)  # fmt: skip
def test_no_answer_is_longer_than_its_policy_allows(said: dict[str, int], tokens: int) -> None:
    assert asked(chat(**said), max_tokens=300).sampling.max_tokens == tokens


def test_what_is_said_is_what_is_sampled() -> None:
    said = asked(
        chat(temperature=0, top_p=0.5, seed=-7, stop=["", "a", "b"], stream=True, stream_options={"include_usage": True}, store=False,
             logprobs=True, session_done=True, user="u", **{"tensorzero::dryrun": True, "tensorzero::variant_name": "v"})
    )  # fmt: skip
    assert (said.sampling.temperature, said.sampling.top_p, said.sampling.seed, said.sampling.stop) == (0.0, 0.5, -7, ("a", "b"))
    assert (said.stream, said.include_usage, said.stored, said.logprobs, said.likely, said.ends, said.dryrun) == (
        True, True, False, True, 0, True, True,
    )  # fmt: skip
    assert said.tags == {"variant_name": "v"}
    assert asked(chat(stop="a")).sampling.stop == ("a",)
    assert asked(chat(logprobs=True, top_logprobs=20)).likely == 20
    assert asked(chat(stream=True, stream_options={})).include_usage is False


def test_whoever_asks_is_kept_under_a_hash_and_at_practice_nobody_is() -> None:
    both = chat(user="u", safety_identifier="s")
    assert [asked(body).actor for body in (both, chat(user="u"))] == [hash_actor("s", salt="salt"), hash_actor("u", salt="salt")]
    practice = replace(ANONYMOUS, source="rollout:tasks", episode_id="e")
    found = asked(both, caller=practice)
    assert (found.actor, found.source, found.rateable, found.episode_id) == (None, "rollout:tasks", False, "e")
    assert asked(chat(session_id="e"), caller=practice).episode_id == "e"
    with pytest.raises(HttpError, match="for another episode") as refused:
        asked(chat(session_id="f"), caller=practice)
    assert (refused.value.status, refused.value.code) == (403, "wrong_episode")


@pytest.mark.parametrize(
    ("body", "headers", "trains"),
    [
        ({}, {}, True), ({"store": True}, {}, True), ({"store": False}, {}, False), ({"turn_type": "side"}, {}, False),
        ({"turn_type": "main"}, {"x-turn-type": "side"}, True), ({}, {"x-turn-type": "side"}, False),
        ({"metadata": {"train": "False"}}, {}, False), ({"metadata": {"train": "0"}}, {}, False),
        ({"metadata": {"train": "no"}}, {}, False),
        ({"metadata": {"train": "perhaps"}}, {}, True),
    ],
)  # fmt: skip
def test_any_no_keeps_a_turn_from_training_and_a_yes_only_counts_where_the_default_is_no(
    body: dict[str, Any], headers: dict[str, str], trains: bool
) -> None:
    assert asked(chat(**body), headers=headers).consent.train is trains
    assert asked(chat(**body), headers=headers, train_by_default=False).consent.train is False
    yes = body | {"metadata": {"train": "yes"}}
    if trains:
        assert asked(chat(**yes), headers=headers, train_by_default=False).consent.train is True


@pytest.mark.parametrize(("said", "ends"), [("true", True), ("1", True), ("TRUE", True), ("0", False), ("yes", False), ("", False)])
def test_the_last_turn_of_an_episode_may_be_named_by_a_header(said: str, ends: bool) -> None:
    assert asked(chat(), headers={"x-session-done": said}).ends is ends


@pytest.mark.parametrize(
    ("body", "headers", "episode"),
    [
        ({"session_id": "s"}, {"x-session-id": "h"}, "s"), ({}, {"x-session-id": "h"}, "h"), ({"metadata": {"episode_id": "m"}}, {}, "m"),
        ({"tensorzero::episode_id": "t", "metadata": {"episode_id": "m"}, "session_id": "s"}, {}, "t"),
        ({"metadata": {"episode_id": "m"}, "session_id": "s"}, {}, "m"), ({"metadata": {"episode_id": "m" * 64}}, {}, "m" * 64),
        ({}, {"x-session-id": "h" * 64}, "h" * 64),
    ],
)  # fmt: skip
def test_an_episode_is_named_in_one_of_four_ways_the_body_s_first(body: dict[str, Any], headers: dict[str, str], episode: str) -> None:
    found = asked(chat(**body), headers=headers)
    assert (found.episode_id, found.continues, found.tags) == (episode, True, {})


@pytest.mark.parametrize("named", ["m" * 65, "a\nb", "\x07"])
def test_an_episode_s_name_is_short_and_can_be_printed(named: str) -> None:
    with pytest.raises(BadRequest, match="1 to 64 printable characters"):
        asked(chat(metadata={"episode_id": named}))


def test_a_segment_is_cut_and_cleared_of_what_separates_and_the_rest_are_tags() -> None:
    found = asked(
        chat(
            metadata={"task": "t" * 47 + "=yz", "language": "de,at", "tier": "", "else": "e"},
            **{"tensorzero::tags": {"tier": "x", "own": "o"}},
        )
    )
    assert found.segment == {"task": "t" * 47 + "_", "language": "de_at"}
    assert found.tags == {"else": "e", "own": "o"}


BENDS: list[tuple[dict[str, Any], Any]] = [
    ({"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {"3": 0.0}}, None),
    ({"tools": [tool()], "tool_choice": "auto"}, None), ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Form(answer={"type": "object"}, many=False)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, Form(answer={"type": "object"}, many=False)),
]  # fmt: skip


@pytest.mark.parametrize(("body", "form"), BENDS)
def test_what_adds_nothing_to_a_plain_draw_is_no_shape(body: dict[str, Any], form: Form | None) -> None:
    shape = asked(chat(**body)).shape
    assert (None if shape is None else shape.form) == form


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
        "properties": {"name": {"const": name}, "arguments": arguments},
    }  # fmt: skip


ANY = {"type": "object"}


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ({"tool_choice": "required"}, Form(call={"anyOf": [call("f", ANY), call("g", {"type": "object", "required": ["a"]})]}, many=True)),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            Form(call={"anyOf": [call("f", ANY), call("g", {"type": "object", "required": ["a"]})]}, many=False),
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, Form(call=call("f", ANY), many=False)),
        (
            {"response_format": {"type": "json_object"}},
            Form(answer=ANY, call={"anyOf": [call("f", ANY), call("g", {"type": "object", "required": ["a"]})]}, many=True),
        ),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, Form(answer=ANY, many=False)),
    ],
)
def test_a_form_is_the_schema_of_what_may_be_said(more: dict[str, Any], form: Form) -> None:
    shape = asked(chat(tools=[tool("f"), tool("g", type="object", required=["a"])], **more)).shape
    assert shape is not None
    assert shape.form == form


def test_the_definitions_of_forced_tools_are_kept_apart() -> None:
    own = tool(
        "f", **{"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"anyOf": [{"$ref": "#/$defs/n"}]}}}
    )
    older = tool("g", definitions={"n": {"type": "string"}}, properties={"a": {"$ref": "#/definitions/n"}})
    shape = asked(chat(tools=[own, older], tool_choice="required")).shape
    assert shape is not None
    assert shape.form is not None
    assert shape.form.call is not None
    assert shape.form.call["$defs"] == {"tool0.n": {"type": "integer"}, "tool1.n": {"type": "string"}}
    first, second = (one["properties"]["arguments"] for one in shape.form.call["anyOf"])
    assert first == {"properties": {"a": {"$ref": "#/$defs/tool0.n"}, "b": {"anyOf": [{"$ref": "#/$defs/tool0.n"}]}}}
    assert second == {"properties": {"a": {"$ref": "#/$defs/tool1.n"}}}
    elsewhere = tool("f", properties={"a": {"$ref": "https://example.org/n"}})
    with pytest.raises(BadRequest, match="only their own"):
        asked(chat(tools=[elsewhere], tool_choice="required"))


def test_penalties_and_biases_are_kept_as_they_were_said() -> None:
    shape = asked(chat(presence_penalty=0.5, frequency_penalty=-0.25, logit_bias={"7": 2.0, "8": 0.0})).shape
    assert shape is not None
    assert (shape.presence_penalty, shape.frequency_penalty, shape.logit_bias, shape.form) == (0.5, -0.25, {7: 2.0}, None)


FEW = Limits(nodes=30)


def messages(count: int, text: str = "x") -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": text}] * count)


def test_a_large_body_is_looked_through_before_it_is_decoded_and_a_small_one_is_not() -> None:
    """Of thirty values ten may be messages; both refusals are the same but for who notices."""
    assert str(refused(messages(11), limits=FEW, size=OUTLINED)) == "there are more than 30 values in it"
    early = refused(messages(11), limits=FEW, size=OUTLINED + 1)
    assert (str(early), early.param, early.code) == ("the messages have more than 30 values", "messages", "too_many_values")
    assert str(refused(messages(10), limits=FEW, size=OUTLINED + 1)) == "there are more than 30 values in it"
    read_body(raw(messages(5), OUTLINED + 1), FEW)


def test_more_objects_than_could_be_messages_are_asked_for_their_roles() -> None:
    rest = {"content": "x"}
    error = refused(chat(messages=[HELLO, HELLO, *[rest] * 8]), limits=FEW, size=OUTLINED + 1)
    assert error.param == "messages[2].role"
    assert str(error) == "messages[2].role: one of assistant, developer, system, tool, user"
    read_body(raw(chat(messages=[*[rest] * 9]), OUTLINED + 1), FEW)


def test_brackets_in_the_parts_of_messages_are_counted_and_those_in_a_text_alone_are_not() -> None:
    """Two for each value that there may be: one list, one object, and 58 in the words of the part."""

    def parts(brackets: int) -> bytes:
        return raw(chat(messages=[{"role": "user", "content": [{"type": "text", "text": "[" * brackets}]}]), OUTLINED + 1)

    read_body(parts(58), FEW)
    with pytest.raises(BadRequest, match="the messages have more than 30 values") as error:
        read_body(parts(59), FEW)
    assert (error.value.param, error.value.code) == ("messages", "too_many_values")
    read_body(raw(messages(1, "[" * 1000), OUTLINED + 1), FEW)


def test_tools_are_refused_by_their_bytes_and_by_their_characters() -> None:
    limits, inner = Limits(tool_chars=20_000), json.dumps([tool()]).encode()

    def padded(size: int) -> bytes:
        tools = inner[:-1].ljust(size - 1) + b"]"
        return raw(chat())[:-1] + b',"tools":' + tools + b"}"

    read_body(padded(80_000), limits)
    with pytest.raises(BadRequest, match="the tools have more than 20000 characters") as error:
        read_body(padded(80_001), limits)
    assert (error.value.param, error.value.code) == ("tools", "size")
    names = len("typefunctionfunctionnamefparametersdescription")
    read_body(raw(chat(tools=[tool(description="d" * (20_000 - names))])), limits)
    assert refused(chat(tools=[tool(description="d" * (20_001 - names))]), limits=limits).code == "size"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (HELLO | {"name": "n", "refusal": None}, None), (HELLO | {"tool_call_id": 3}, "messages[1].tool_call_id"),
        (HELLO | {"name": 3}, "messages[1].name"), (HELLO | {"weight": 1}, "messages[1].weight"),
        ({"role": "robot", "content": ""}, "messages[1].role"),
        ({"role": 3, "content": ""}, "messages[1].role"), ({"role": "assistant"}, None), ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"), ({"role": "user", "content": [{"type": "image"}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, None),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 3, "arguments": "{}"}}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls"),
    ],
)  # fmt: skip
def test_a_message_is_understood_or_refused_by_the_name_of_what_is_wrong(message: dict[str, Any], param: str | None) -> None:
    if param is None:
        assert len(asked(chat(messages=[HELLO, message])).messages) == 2
        return
    with pytest.raises(BadRequest) as error:
        asked(chat(messages=[HELLO, message]))
    assert error.value.param == param


def test_a_message_is_fed_as_text_and_without_empty_fields() -> None:
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}], "name": None},
        {"role": "assistant", "content": None, "refusal": "no", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ]
    assert asked(chat(messages=said)).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ]
