"""The gateway's decisions, over fakes: consent, segments, arms, tools, redaction, refusals."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ids import hash_actor
from app.domain.ports import EpisodeState, Receipt
from app.domain.release.assignment import Arm
from app.domain.telemetry.events import CloudEvent, EventType, Exposure
from app.domain.telemetry.turns import FinishReason, ToolVerdict, TurnServed
from app.main import create_app
from tests.fakes.gateway import (
    CANDIDATE,
    CHAMPION,
    FixedRoutes,
    MemoryEpisodes,
    ScriptedEngines,
    UndeployedRoutes,
    collaborators,
    events_of,
    policy_config,
)
from tests.fakes.inbox import MemoryInbox
from tests.fakes.streaming import MemoryClaims

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}


def service(**changes: Any) -> tuple[TestClient, MemoryInbox]:
    inbox = changes.pop("inbox", None) or MemoryInbox()
    return TestClient(create_app(collaborators(inbox=inbox, **changes)), raise_server_exceptions=False), inbox


def ask(client: TestClient, headers: dict[str, str] | None = None, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    body = {"model": "composer", "messages": [{"role": "user", "content": "hi"}]} | changes | (extra or {})
    return client.post("/v1/chat/completions", json=body, headers=headers)


def turns(inbox: MemoryInbox) -> list[TurnServed]:
    return [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]


def exposures(inbox: MemoryInbox) -> list[Exposure]:
    return [msgspec.json.decode(event.data, type=Exposure) for event in events_of(inbox, EventType.EXPOSURE)]


@pytest.mark.parametrize(
    ("changes", "headers", "default", "train"),
    [
        ({}, {}, True, True),
        ({}, {}, False, False),
        ({"metadata": {"train": "true"}}, {}, False, True),
        ({"metadata": {"train": "false"}}, {}, True, False),
        ({"store": False, "metadata": {"train": "true"}}, {}, True, False),
        ({"store": True}, {}, False, False),
        ({"turn_type": "side"}, {}, True, False),
        ({}, {"X-Turn-Type": "side"}, True, False),
        ({}, {"X-Turn-Type": "main"}, True, True),
    ],
)
def test_any_no_wins_and_silence_means_the_policys_default(changes: Any, headers: Any, default: bool, train: bool) -> None:
    client, inbox = service(policies={"composer": policy_config(train_by_default=default)})
    assert ask(client, headers, changes).status_code == 200
    assert turns(inbox)[0].consent.train is train


@pytest.mark.parametrize(
    ("changes", "headers"),
    [
        ({"tensorzero::episode_id": "ep-1"}, {}),
        ({"metadata": {"episode_id": "ep-1"}}, {}),
        ({"session_id": "ep-1"}, {}),
        ({}, {"X-Session-Id": "ep-1"}),
    ],
)
def test_the_caller_may_name_the_episode(changes: Any, headers: Any) -> None:
    client, inbox = service()
    assert ask(client, headers, changes).json()["episode_id"] == "ep-1"
    assert turns(inbox)[0].episode_id == exposures(inbox)[0].episode_id == "ep-1"


def test_metadata_becomes_segment_and_tags() -> None:
    client, inbox = service()
    ask(
        client,
        metadata={"task": "a,b=c", "language": "python", "ticket": "7"},
        extra={"tensorzero::tags": {"x": "y"}, "tensorzero::variant_name": "v"},
    )
    assert turns(inbox)[0].segment == {"task": "a_b_c", "language": "python"}
    assert turns(inbox)[0].tags == {"ticket": "7", "x": "y", "variant_name": "v"}


def test_safety_identifier_comes_before_user_and_neither_is_stored() -> None:
    client, inbox = service()
    ask(client, user="ada", safety_identifier="grace")
    ask(client, user="ada")
    assert [turn.actor for turn in turns(inbox)] == [hash_actor(name, salt="salt") for name in ("grace", "ada")]
    assert not any(b'"ada"' in event.data or b'"grace"' in event.data for event in inbox.events.values())


def test_a_dry_run_leaves_nothing_behind() -> None:
    client, inbox = service()
    assert ask(client, extra={"tensorzero::dryrun": True}).status_code == 200
    assert inbox.events == {}


def test_both_paths_serve_the_same() -> None:
    client, inbox = service()
    body = {"model": "composer", "messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/openai/v1/chat/completions", json=body).status_code == 200
    assert len(turns(inbox)) == 1


# --- arms -----------------------------------------------------------------------------------------------------------------


def test_a_running_episode_finishes_on_its_arm_when_the_stage_changes() -> None:
    routes = FixedRoutes("composer")
    routes.canary("composer", share=1.0)
    client, inbox = service(routes=routes)
    ask(client, extra={"tensorzero::episode_id": "ep"})
    routes.canary("composer", share=0.0)
    ask(client, extra={"tensorzero::episode_id": "ep"})
    ask(client, extra={"tensorzero::episode_id": "other"})
    assert [turn.version for turn in turns(inbox)] == [CANDIDATE, CANDIDATE, CHAMPION]
    assert [exposure.probability for exposure in exposures(inbox)] == [1.0, 1.0, 1.0]


def test_a_running_episode_leaves_a_version_that_was_rolled_back() -> None:
    routes = FixedRoutes("composer")
    routes.canary("composer", share=1.0)
    client, inbox = service(routes=routes)
    ask(client, extra={"tensorzero::episode_id": "ep"})
    routes.routes["composer"] = replace(FixedRoutes("composer").route("composer"), quarantined=frozenset({CANDIDATE}))
    ask(client, extra={"tensorzero::episode_id": "ep"})
    assert [turn.version for turn in turns(inbox)] == [CANDIDATE, CHAMPION]


def test_an_episode_that_began_elsewhere_is_looked_up() -> None:
    routes = FixedRoutes("composer")
    routes.canary("composer", share=0.0)
    episodes = MemoryEpisodes()
    arm = Arm(digest=CANDIDATE, release_id="r", stage="canary-0", arm="candidate", probability=0.05, share=0.05, holdback=0.0)
    episodes.states["ep"] = EpisodeState(arm=arm, last_inference_id="i")
    client, inbox = service(routes=routes, episodes=episodes)
    ask(client, extra={"tensorzero::episode_id": "ep"})
    assert (turns(inbox)[0].version, exposures(inbox)[0].stage, exposures(inbox)[0].probability) == (CANDIDATE, "canary-0", 0.05)


def test_the_unit_is_the_actor_else_the_episode() -> None:
    client, inbox = service()
    ask(client, user="ada")
    ask(client, extra={"tensorzero::episode_id": "ep"})
    assert [exposure.actor for exposure in exposures(inbox)] == [hash_actor("ada", salt="salt"), "ep"]


# --- tools ----------------------------------------------------------------------------------------------------------------


def call(text: str) -> ScriptedEngines:
    return ScriptedEngines(words=[text[i : i + 4] for i in range(0, len(text), 4)])


def test_a_valid_tool_call_is_a_tool_call() -> None:
    client, inbox = service(engines=call('Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'))
    choice = ask(client, tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert turns(inbox)[0].finish_reason == FinishReason.TOOL_CALLS
    assert turns(inbox)[0].completion.startswith("Let me see. <tool_call>"), "what was sampled, as it was sampled"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"town": "Oslo"}}</tool_call>', ToolVerdict.INVALID_ARGUMENTS),
        ('<tool_call>{"name": "wether", "arguments": {}}</tool_call>', ToolVerdict.UNKNOWN_TOOL),
        ('<tool_call>{"name": "weather", "argu', ToolVerdict.UNPARSABLE),
        ("<tool_call>weather(Oslo)</tool_call>", ToolVerdict.UNPARSABLE),
    ],
)
def test_a_broken_tool_call_is_recorded_with_its_verdict(text: str, verdict: ToolVerdict) -> None:
    client, inbox = service(engines=call(text))
    assert ask(client, tools=[WEATHER]).status_code == 200
    assert [c.verdict for c in turns(inbox)[0].tool_calls] == [verdict]
    assert turns(inbox)[0].finish_reason == FinishReason.STOP


def streamed(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_streamed_tool_call_never_shows_as_text() -> None:
    client, _ = service(engines=call('Look: <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'))
    chunks = streamed(ask(client, tools=[WEATHER], stream=True))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "Look:"
    (delta,) = [chunk["choices"][0]["delta"] for chunk in chunks if "tool_calls" in chunk["choices"][0]["delta"]]
    assert delta["tool_calls"][0]["function"]["name"] == "weather"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_streamed_call_that_breaks_off_becomes_text_in_the_end() -> None:
    client, _ = service(engines=call("a <tool_call>{oops"))
    chunks = streamed(ask(client, tools=[WEATHER], stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "a <tool_call>{oops"


def test_tool_choice_none_offers_no_tools() -> None:
    engines = ScriptedEngines()
    client, _ = service(engines=engines)
    ask(client, tools=[WEATHER], tool_choice="none")
    assert engines.requests[0].tools is None


# --- redaction ------------------------------------------------------------------------------------------------------------


def test_a_turn_with_personal_data_is_stored_without_it_and_without_tokens() -> None:
    engines = ScriptedEngines(words=("Write", " to", " ada@example.org"))
    client, inbox = service(engines=engines, policies={"composer": policy_config(redact=True)})
    answer = ask(client, messages=[{"role": "user", "content": "call +44 20 7946 0958"}])
    assert "ada@example.org" in answer.json()["choices"][0]["message"]["content"], "the user gets what was sampled"
    assert engines.requests[0].messages[0]["content"] == "call +44 20 7946 0958", "the model reads what was written"
    (turn,) = turns(inbox)
    assert turn.completion == "Write to [EMAIL]"
    assert turn.messages[0]["content"] == "call [PHONE]"
    assert (turn.logprobs, turn.completion_tokens, turn.prompt_tokens) == (None, [], [])
    assert turn.tags["redacted"] == "true"


ROOMY = {"composer": policy_config(max_context_tokens=100_000)}
"""A context that a megabyte of text may fit into."""


def test_of_a_turn_that_is_not_to_be_stored_nothing_that_was_said_reaches_the_inbox() -> None:
    client, inbox = service(claims=(claims := MemoryClaims()), policies=ROOMY)
    answer = ask(client, messages=[{"role": "user", "content": "canary-prompt " * 80_000}], store=False, metadata={"note": "canary-note"})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
    said = b"".join(event.data for event in inbox.events.values())
    assert not any(word in said for word in (b"canary", b"Hello"))
    assert claims.payloads == {}
    (turn,) = turns(inbox)
    assert (turn.usage.completion_tokens, turn.finish_reason, turn.consent.train, turn.tags) == (5, "stop", False, {"stored": "false"})
    assert (turn.prompt_tokens, turn.completion_tokens, turn.logprobs) == ([], [], None)


def test_a_turn_without_personal_data_keeps_its_tokens() -> None:
    client, inbox = service(policies={"composer": policy_config(redact=True)})
    ask(client)
    assert turns(inbox)[0].logprobs is not None


# --- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 17}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"logit_bias": {"1": 200}}, "logit_bias[...]"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "cache": 1}]}, "messages[0].cache"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strnig"}}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"metadata": {"a": "x\x00"}}, "metadata"),
        ({"session_id": "a\r\nx-header: injected"}, "metadata.episode_id"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: Any, param: str) -> None:
    client, inbox = service()
    response = ask(client, extra=changes)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert inbox.events == {}


def test_ignored_fields_are_accepted() -> None:
    client, _ = service()
    assert ask(client, service_tier="auto", prompt_cache_key="k", reasoning_effort="low", parallel_tool_calls=True).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("all engines are full", retry_after_s=3), 429),
        (Unavailable("no engine holds the weights"), 503),
        (BadRequest("the prompt has 9000 tokens", param="messages", code="context_length_exceeded"), 400),
        (ZeroDivisionError("a bug"), 500),
    ],
)
def test_an_engine_that_refuses_leaves_a_turn_all_the_same(error: Exception, status: int) -> None:
    def refuse(index: int) -> None:
        raise error

    client, inbox = service(engines=ScriptedEngines(before_token=refuse))
    response = ask(client)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert turns(inbox)[0].finish_reason == FinishReason.ERROR
    assert [turn.inference_id for turn in turns(inbox)] == [exposure.inference_id for exposure in exposures(inbox)]


def test_a_busy_inbox_is_a_429_before_any_work() -> None:
    engines, inbox = ScriptedEngines(), MemoryInbox()
    inbox.refusing = True
    client, _ = service(engines=engines, inbox=inbox)
    response = ask(client)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert engines.requests == []


class AwayForAMoment(MemoryInbox):
    """A database that is being started anew: the first two commits find nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        self.tries += 1
        if self.tries <= 2:
            raise Unavailable("the database does not answer")
        return await super().append(events)


def test_a_database_that_is_away_for_a_moment_sends_nobody_away() -> None:
    client, inbox = service(inbox=AwayForAMoment())
    assert ask(client).status_code == 200
    assert len(exposures(inbox)) == len(turns(inbox)) == 1


def test_nothing_deployed_is_a_503() -> None:
    client, _ = service(routes=UndeployedRoutes())
    assert ask(client).status_code == 503


def test_the_answers_limit_is_the_policys() -> None:
    engines = ScriptedEngines()
    client, _ = service(engines=engines, policies={"composer": policy_config(max_tokens=50)})
    ask(client)
    ask(client, max_completion_tokens=7)
    ask(client, max_tokens=5000)
    assert [request.sampling.max_tokens for request in engines.requests] == [50, 7, 50]
