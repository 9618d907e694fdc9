"""The real `openai` client's other ways to ask, responses and completions: each is a recorded turn, rated like any."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import OpenAI

from app.domain.errors import Unavailable
from app.domain.telemetry.events import EventType
from app.domain.telemetry.turns import FinishReason, Form, Shape, TurnServed
from app.main import create_app
from tests.fakes.gateway import ScriptedEngines, collaborators, events_of, serving
from tests.fakes.inbox import MemoryInbox

CALL = ('<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}', "</tool_call>")
WEATHER: Any = {
    "type": "function", "name": "weather", "description": "now", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip


@pytest.fixture
def inbox() -> MemoryInbox:
    return MemoryInbox()


@pytest.fixture
def engines() -> ScriptedEngines:
    return ScriptedEngines()


@pytest.fixture
def client(inbox: MemoryInbox, engines: ScriptedEngines) -> Iterator[OpenAI]:
    app = create_app(collaborators(inbox=inbox, engines=engines))
    with serving(app) as url, OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def turn(inbox: MemoryInbox) -> TurnServed:
    (event,) = events_of(inbox, EventType.TURN)
    return msgspec.json.decode(event.data, type=TurnServed)


def test_a_response_is_a_turn(client: OpenAI, inbox: MemoryInbox) -> None:
    found = client.responses.create(model="composer", instructions="be brief", input="say hello", temperature=0.5, max_output_tokens=9)
    assert (found.output_text, found.status, found.object) == ("Hello, world!", "completed", "response")
    assert found.usage is not None
    assert (found.usage.output_tokens, found.usage.total_tokens) == (5, found.usage.input_tokens + 5)
    kept = turn(inbox)
    assert (kept.inference_id, kept.completion) == (found.id, "Hello, world!")
    assert [m["role"] for m in kept.messages] == ["system", "user"]
    assert (kept.sampling.temperature, kept.sampling.max_tokens) == (0.5, 9)
    assert (found.model_extra or {})["feedback_token"].startswith("ft_")


def test_a_response_streams_in_typed_events_that_add_up(client: OpenAI) -> None:
    events: list[Any] = list(client.responses.create(model="composer", input="say hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    text_done, part_done, item_done, completed = kinds[-4:]
    assert (text_done, part_done) == ("response.output_text.done", "response.content_part.done")
    assert (item_done, completed) == ("response.output_item.done", "response.completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello, world!"
    assert events[-1].response.output_text == "Hello, world!"
    with client.responses.stream(model="composer", input="say hello") as stream:
        assert stream.get_final_response().output_text == "Hello, world!"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_calls_a_tool_and_takes_its_output(client: OpenAI, engines: ScriptedEngines, inbox: MemoryInbox, streamed: bool) -> None:
    engines.words = CALL
    asked: Any = {"model": "composer", "input": "weather?", "tools": [WEATHER]}
    if streamed:
        events: list[Any] = list(client.responses.create(**asked, stream=True))
        found: Any = events[-1].response
    else:
        found = client.responses.create(**asked)
    call: Any = found.output[0]
    assert len(found.output) == 1
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city":"Bern"}')
    engines.words = ("sunny",)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "20 C"}
    items: Any = [{"role": "user", "content": "weather?"}, call.model_dump(), output]
    answered = client.responses.create(model="composer", input=items)
    assert answered.output_text == "sunny"
    roles = [message["role"] for message in engines.requests[-1].messages]
    assert roles == ["user", "assistant", "tool"]
    assert engines.requests[-1].messages[1]["tool_calls"][0]["id"] == call.call_id


def test_the_client_puts_a_stream_together_that_goes_on_behind_a_call(client: OpenAI, engines: ScriptedEngines) -> None:
    engines.words = ("\n", "Let me ", "look.\n", *CALL, "\nThen ", "I tell you.\n")
    said, arguments = "\nLet me look.\n\nThen I tell you.", '{"city":"Bern"}'
    with client.responses.stream(model="composer", input="weather?", tools=[WEATHER]) as responding:
        output: list[Any] = list(responding.get_final_response().output)
        assert [item.type for item in output] == ["message", "function_call"]
        assert (output[0].content[0].text, output[1].arguments) == (said, arguments)
    function: Any = {name: value for name, value in WEATHER.items() if name != "type"}
    asked: Any = {"model": "composer", "messages": [{"role": "user", "content": "weather?"}]}
    with client.chat.completions.stream(**asked, tools=[{"type": "function", "function": function}]) as chatting:
        message = chatting.get_final_completion().choices[0].message
        assert message.content == said
        assert [call.function.arguments for call in message.tool_calls or []] == [arguments]


def test_a_response_that_was_cut_off_says_so(client: OpenAI, engines: ScriptedEngines) -> None:
    engines.finish_reason = FinishReason.LENGTH
    found = client.responses.create(model="composer", input="say hello")
    assert (found.status, found.incomplete_details.reason if found.incomplete_details else None) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"previous_response_id": "r"}, "previous_response_id"), ({"background": True}, "background"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"), ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": "a cat"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content"),
    ],
)  # fmt: skip
def test_what_a_response_cannot_do_is_a_400_with_the_cure(client: OpenAI, inbox: MemoryInbox, asked: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**({"model": "composer", "input": "x"} | asked))
    assert refused.value.param == named
    assert inbox.events == {}


def test_a_completion_goes_on_with_a_text_and_fits_one_in_before_a_suffix(
    client: OpenAI, inbox: MemoryInbox, engines: ScriptedEngines
) -> None:
    found = client.completions.create(model="composer", prompt="def f(", suffix="return x", max_tokens=9, logprobs=0)
    assert (found.choices[0].text, found.choices[0].finish_reason, found.object) == ("Hello, world!", "stop", "text_completion")
    assert found.choices[0].logprobs is not None
    assert found.choices[0].logprobs.token_logprobs == [-0.5, -0.5, -0.5, -0.5, -0.1]
    (message,) = engines.requests[0].messages
    assert message["content"] == "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>"
    assert turn(inbox).inference_id == found.id


def test_top_k_is_asked_for_in_every_form_and_off_is_not_recorded(client: OpenAI, inbox: MemoryInbox, engines: ScriptedEngines) -> None:
    asked: Any = {"model": "composer", "extra_body": {"top_k": 40}}
    client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **asked)
    client.completions.create(prompt="x", **asked)
    client.responses.create(input="x", **asked)
    for off in (-1, 0):
        client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **asked | {"extra_body": {"top_k": off}})
    assert [asked.sampling.top_k or 0 for asked in engines.requests] == [40, 40, 40, 0, 0]
    written = [json.loads(event.data) for event in inbox.events.values() if event.type == EventType.TURN]
    assert [turn["sampling"].get("top_k") for turn in written] == [40, 40, 40, None, None]


def test_a_completion_streams(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="composer", prompt="x", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "Hello, world!"
    assert chunks[-1].usage is not None
    assert (chunks[0].model_extra or {})["feedback_token"].startswith("ft_")


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"n": 17}, "n"), ({"echo": True}, "echo"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"frequency_penalty": 3}, "frequency_penalty")],
)
def test_what_a_completion_cannot_do_is_a_400_that_names_it(client: OpenAI, asked: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="composer", prompt="x", **asked)
    assert str(refused.value.param).startswith(param)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 0}, "n"), ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"), ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"5": 101}}, "logit_bias"), ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"), ({"tool_choice": "maybe"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strnig"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "x" * 64_000}}}}, "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_a_400_that_names_it(client: OpenAI, inbox: MemoryInbox, asked: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x"}], **asked)
    assert str(refused.value.param).startswith(param)
    assert inbox.events == {}
    harmless: Any = {"n": 1, "top_logprobs": 0, "presence_penalty": 0.0, "logit_bias": {}, "tool_choice": "auto"}
    assert client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x"}], **harmless).id
    assert not turn(inbox).shape


def test_every_answer_of_one_request_is_a_turn_that_is_rated_by_itself(
    client: OpenAI, inbox: MemoryInbox, engines: ScriptedEngines
) -> None:
    found = client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x"}], n=3, seed=7)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    named: list[Any] = [choice.model_extra for choice in found.choices]
    assert found.id == named[0]["inference_id"]
    assert len({extra["inference_id"] for extra in named}) == len({extra["feedback_token"] for extra in named}) == 3
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (2, 15)
    turns = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert sorted(t.inference_id for t in turns) == sorted(extra["inference_id"] for extra in named)
    assert sorted(t.sampling.seed or 0 for t in turns) == [7, 8, 9]
    assert len({t.episode_id for t in turns}) == len({t.version for t in turns}) == 1
    assert len(events_of(inbox, EventType.EXPOSURE)) == 3
    token = named[1]["feedback_token"]
    said = httpx.post(
        str(client.base_url).replace("/v1/", "/feedback"), json={"metric_name": "rating", "value": True},
        headers={"authorization": f"Bearer {token}"},
    )  # fmt: skip
    assert said.status_code == 200, said.text
    (observed,) = events_of(inbox, EventType.OBSERVATION)
    assert named[1]["inference_id"].encode() in observed.data


def test_several_answers_stream_beside_each_other(client: OpenAI, inbox: MemoryInbox) -> None:
    chunks = list(
        client.chat.completions.create(
            model="composer", messages=[{"role": "user", "content": "x"}], n=3, stream=True, stream_options={"include_usage": True}
        )
    )  # fmt: skip
    for index in range(3):
        of_it = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in of_it) == "Hello, world!"
        assert [choice.finish_reason for choice in of_it if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 15
    assert len({chunk.id for chunk in chunks}) == 1
    completions = list(client.completions.create(model="composer", prompt="x", n=2, stream=True))
    assert {choice.index for chunk in completions for choice in chunk.choices} == {0, 1}
    assert len(events_of(inbox, EventType.TURN)) == 5


def test_one_broken_answer_ends_all_of_its_request_and_each_is_recorded(
    client: OpenAI, inbox: MemoryInbox, engines: ScriptedEngines
) -> None:
    async def slow_then_broken(index: int) -> None:
        if len(engines.requests) == 3 and index == 2:
            raise Unavailable("the engine burns")
        await asyncio.sleep(0.02)

    engines.before_token = slow_then_broken
    with pytest.raises(openai.APIStatusError) as failed:
        client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x"}], n=3)
    assert failed.value.status_code == 503
    turns = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert len(turns) == 3
    assert all(t.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED) for t in turns)


def test_what_bends_the_draw_reaches_the_engine_and_is_recorded(client: OpenAI, inbox: MemoryInbox, engines: ScriptedEngines) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    client.chat.completions.create(
        model="composer", messages=[{"role": "user", "content": "x"}], presence_penalty=0.5, frequency_penalty=-1,
        logit_bias={str(token): 3 for token in range(1024)},  # as many as may be
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    shape = Shape(presence_penalty=0.5, frequency_penalty=-1.0, logit_bias=dict.fromkeys(range(1024), 3.0), form=Form(answer=schema))
    assert (engines.requests[0].shape, engines.requests[0].likely) == (shape, 2)
    assert turn(inbox).shape == shape


@pytest.mark.parametrize("asked", ["required", {"type": "function", "name": "weather"}])
def test_a_response_can_force_a_call_and_a_schema(client: OpenAI, engines: ScriptedEngines, asked: Any) -> None:
    engines.words = CALL
    found = client.responses.create(model="composer", input="x", tools=[WEATHER], tool_choice=asked, parallel_tool_calls=False)
    assert found.output[0].type == "function_call"
    form = (engines.requests[0].shape or Shape()).form
    assert form is not None
    assert form.call is not None
    assert (form.call["properties"]["name"], form.many) == ({"const": "weather"}, False)
    wanted: Any = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}}
    client.responses.create(model="composer", input="x", text=wanted)
    assert engines.requests[1].shape == Shape(form=Form(answer={"type": "object"}))


def test_a_response_says_its_log_probabilities_where_they_are_included(client: OpenAI) -> None:
    found: Any = client.responses.create(model="composer", input="x", include=["message.output_text.logprobs"], top_logprobs=0)
    assert [item.logprob for item in found.output[0].content[0].logprobs] == [-0.5, -0.5, -0.5, -0.5, -0.1]
