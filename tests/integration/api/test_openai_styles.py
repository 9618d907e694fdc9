"""The real `openai` client's other ways to ask, responses and completions: each is a recorded turn, rated like any."""

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI

from app.domain.events import EventType
from app.domain.turns import FinishReason, TurnServed
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


def test_a_response_that_was_cut_off_says_so(client: OpenAI, engines: ScriptedEngines) -> None:
    engines.finish_reason = FinishReason.LENGTH
    found = client.responses.create(model="composer", input="say hello")
    assert (found.status, found.incomplete_details.reason if found.incomplete_details else None) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"previous_response_id": "r"}, "previous_response_id"), ({"background": True}, "background"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"), ({"text": {"format": {"type": "json_object"}}}, "response_format.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
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


def test_a_completion_streams(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="composer", prompt="x", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "Hello, world!"
    assert chunks[-1].usage is not None
    assert (chunks[0].model_extra or {})["feedback_token"].startswith("ft_")


@pytest.mark.parametrize("asked", [{"n": 2}, {"echo": True}, {"logit_bias": {"5": 1}}, {"frequency_penalty": 0.5}])
def test_what_a_completion_cannot_do_is_a_400_that_names_it(client: OpenAI, asked: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="composer", prompt="x", **asked)
    assert refused.value.param == next(iter(asked))


@pytest.mark.parametrize(
    "asked",
    [{"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"presence_penalty": 0.1}, {"logit_bias": {"5": 1}}, {"tool_choice": "required"}],
)
def test_what_would_change_the_sampled_distribution_is_a_400_with_the_cure(client: OpenAI, inbox: MemoryInbox, asked: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r": .*") as refused:
        client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x"}], **asked)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", list(asked)[-1])
    assert inbox.events == {}
    harmless: Any = {"n": 1, "top_logprobs": 0, "presence_penalty": 0.0, "logit_bias": {}, "tool_choice": "auto"}
    assert client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x"}], **harmless).id
