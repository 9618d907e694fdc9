"""Other systems' words in ours, and ours in theirs: what each field becomes, and where each bound lies."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.api import openapi
from app.api.chat import inference
from app.api.chat.recording import Recording
from app.api.dialects import cloudevents
from app.domain.errors import BadRequest
from app.domain.telemetry.events import Observation
from app.domain.telemetry.serving import GenerationChunk
from app.main import create_app
from tests.fakes.gateway import NOON, collaborators
from tests.fakes.inbox import MemoryInbox
from tests.unit.app.api.test_answers import CALL, CHAMPION, END, LENGTH, events, piece, recording

TRACE = "0190c2a07fb47f3e9d9b2f3b1c2d3e4f"
INFERENCE = "0190c2a0-7fb4-7f3e-9d9b-2f3b1c2d3e4f"


def service() -> tuple[TestClient, MemoryInbox]:
    inbox = MemoryInbox()
    return TestClient(create_app(collaborators(inbox=inbox)), raise_server_exceptions=False), inbox


def said(inbox: MemoryInbox) -> list[Observation]:
    return [msgspec.json.decode(event.data, type=Observation) for event in inbox.events.values()]


# --- CloudEvents ------------------------------------------------------------------------------------------------------------------


def imported(**changes: Any) -> dict[str, Any]:
    at = NOON - timedelta(hours=1)
    turn: dict[str, Any] = {
        "inference_id": "h", "episode_id": "e", "policy": "composer", "version": "v", "started_at": at.isoformat(),
        "finished_at": at.isoformat(), "messages": [], "completion": "x", "prompt_tokens": [], "completion_tokens": [], "logprobs": None,
        "sampling": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 0, "completion_tokens": 0}, "source": "import:chats",
    }  # fmt: skip
    return {"specversion": "1.0", "id": "h", "source": "import:chats", "type": "ratchet.turn.v1", "data": turn | changes}


@pytest.mark.parametrize(
    ("good", "wrong", "param"),
    [
        ({"inference_id": "i" * 64}, {"inference_id": "i" * 65}, "data.inference_id"),
        ({"inference_id": "i"}, {"inference_id": ""}, "data.inference_id"),
        ({"episode_id": "e" * 64}, {"episode_id": "e" * 65}, "data.episode_id"),
        ({"episode_id": "e"}, {"episode_id": ""}, "data.episode_id"),
        ({"version": "v" * 64}, {"version": "v" * 65}, "data.version"), ({"kind": "summary"}, {"kind": "other"}, "data.kind"),
        ({"segment": {"k": "s" * 198}}, {"segment": {"k": "s" * 199}}, "data.segment"), ({}, {"source": "gateway"}, "data.source"),
        ({}, {"completion_tokens": [1]}, "data.logprobs"),
        ({}, {"prompt_tokens": [1]}, "data.logprobs"),
        ({}, {"logprobs": []}, "data.logprobs"),
        ({}, {"policy": "nobody"}, "data.policy"), ({}, {"started_at": "1999-12-31T00:00:00Z"}, "data.started_at"),
        ({}, {"finished_at": "2999-12-31T00:00:00Z"}, "data.finished_at"), ({}, {"hologram": 1}, "hologram"),
        ({"sampling": {"top_k": 2**31 - 1}}, {"sampling": {"top_k": 2**31}}, "data.sampling.top_k"),
        ({"sampling": {"top_k": -1}}, {"sampling": {"top_k": -(2**31) - 1}}, "data.sampling.top_k"),
        (
            {"usage": {"prompt_tokens": 2**31 - 1, "completion_tokens": 0}}, {"usage": {"prompt_tokens": 2**31, "completion_tokens": 0}},
            "data.usage.prompt_tokens",
        ),
        (
            {"usage": {"prompt_tokens": 0, "completion_tokens": 2**31 - 1}}, {"usage": {"prompt_tokens": 0, "completion_tokens": -1}},
            "data.usage.completion_tokens",
        ),
        ({"source": "import:" + "s" * 113}, {"source": "import:" + "s" * 114}, "data.source"),
        ({"routed_experts": []}, {"routed_experts": [[[1]]]}, "data.routed_experts"),
        ({"kept_log_mass": []}, {"kept_log_mass": [-0.5]}, "data.kept_log_mass"),
        ({}, {"payload": {"segment": "s", "digest": "d", "bytes": 1, "has_logprobs": False}}, "data.payload"),
    ],
)  # fmt: skip
def test_an_imported_turn_is_held_to_what_columns_hold(good: dict[str, Any], wrong: dict[str, Any], param: str) -> None:
    client, inbox = service()
    assert client.post("/v1/events", json=imported(**good)).status_code == 202
    refused = client.post("/v1/events", json=imported(**wrong))
    assert (refused.status_code, refused.json()["results"][0]["param"]) == (422, param)
    assert len(inbox.events) == 1


ENVELOPE = {"specversion": "1.0", "id": "o", "source": "api", "type": "ratchet.observation.v1", "time": "2026-11-21T11:00:00Z"}
UNDO = {"name": "undo", "value": True}


@pytest.mark.parametrize(
    ("envelope", "data", "meant"),
    [
        ({"subject": "i"}, {}, {"id": "o", "inference_id": "i", "source": "api", "occurred_at": datetime(2026, 11, 21, 11, tzinfo=UTC)}),
        ({"subject": "i"}, {"inference_id": "j"}, {"inference_id": "j"}),
        ({"subject": "i"}, {"episode_id": "e"}, {"inference_id": None, "episode_id": "e"}),
        ({"subject": "i", "source": "https://shop/x?y"}, {}, {"source": "sdk:https___shop_x_y"}),
        ({"subject": "i", "source": "collector"}, {}, {"source": "collector"}),
        ({"subject": "i", "source": "s" * 120}, {}, {"source": "sdk:" + "s" * 100}),
        ({"subject": "i", "source": "import:old"}, {}, {"source": "import:old"}),
        (
            {"subject": "i"}, {"source": "sdk:own", "occurred_at": "2026-11-21T10:00:00Z", "id": "x"},
            {"id": "o", "source": "sdk:own", "occurred_at": datetime(2026, 11, 21, 10, tzinfo=UTC)},
        ),
    ],
)  # fmt: skip
def test_an_envelope_fills_in_what_its_observation_leaves_out(
    envelope: dict[str, Any], data: dict[str, Any], meant: dict[str, Any]
) -> None:
    client, inbox = service()
    answer = client.post("/v1/events", json=ENVELOPE | envelope | {"data": UNDO | data})
    assert answer.status_code == 202, answer.text
    (found,) = said(inbox)
    assert {name: getattr(found, name) for name in meant} == meant


@pytest.mark.parametrize(
    ("envelope", "param"),
    [
        ({"specversion": "0.3"}, "specversion"), ({"type": "other"}, "type"), ({"source": ""}, "source"), ({"source": "s" * 121}, "source"),
        ({"id": "i" * 181}, "id"),
    ],
)  # fmt: skip
def test_an_envelope_that_cannot_be_honoured_is_refused_by_the_name_of_its_field(envelope: dict[str, Any], param: str) -> None:
    client, inbox = service()
    refused = client.post("/v1/events", json=ENVELOPE | {"subject": "i", "data": UNDO} | envelope)
    assert (refused.status_code, refused.json()["results"][0]["param"]) == (422, param)
    assert inbox.events == {}


def test_a_binary_event_is_its_headers_around_its_body() -> None:
    headers = {b"ce-id": b"o", b"ce-specversion": b"1.0", b"other": b"x"}
    assert json.loads(cloudevents.structured(b'{"a": 1}', headers)) == {"id": "o", "specversion": "1.0", "data": {"a": 1}}
    assert json.loads(cloudevents.structured(b"", headers))["data"] is None
    assert [cloudevents.is_binary(one) for one in (headers, {b"ce-id": b"o"})] == [True, False]


# --- scores ----------------------------------------------------------------------------------------------------------------------


def attribute(name: str, value: Any) -> dict[str, Any]:
    kind = "boolValue" if isinstance(value, bool) else "stringValue" if isinstance(value, str) else "doubleValue"
    return {"key": f"gen_ai.{name}", "value": {kind: value}}


def logs(*records: dict[str, Any]) -> dict[str, Any]:
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": list(records)}]}]}


def evaluation(*, name: str | None = "thumb", about: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    named = {} if name is None else {"evaluation.name": name}
    pairs = [attribute(key, value) for key, value in (named | (about or {"evaluation.score.value": 1.0})).items()]
    return {
        "eventName": "gen_ai.evaluation.result",
        "traceId": TRACE,
        "spanId": "0f" * 8,
        "timeUnixNano": "1763722800000001999",
        "attributes": pairs,
    } | more


@pytest.mark.parametrize(
    ("record", "meant"),
    [
        (
            evaluation(),
            {"name": "rating", "value": True, "inference_id": INFERENCE, "source": "sdk:otel",
             "occurred_at": datetime(2025, 11, 21, 11, 0, 0, 1, tzinfo=UTC), "tags": {"key": "thumb"}},
        ),
        (evaluation(about={"evaluation.score.label": "fail"}), {"value": False, "tags": {"key": "thumb"}}),
        (
            evaluation(about={"evaluation.score.value": 1.0, "evaluation.score.label": "pass", "evaluation.kind": "human"}),
            {"value": True, "tags": {"key": "thumb", "label": "pass", "gen_ai.evaluation.kind": "human"}},
        ),
        (
            evaluation(about={"evaluation.score.value": 1.0, "response.id": "i", "conversation.id": "e"}),
            {"inference_id": "i", "episode_id": None},
        ),
        (evaluation(about={"evaluation.score.value": 1.0, "conversation.id": "e"}), {"inference_id": None, "episode_id": "e"}),
        (
            evaluation(timeUnixNano="0", observedTimeUnixNano="1763722800000001000"),
            {"occurred_at": datetime(2025, 11, 21, 11, 0, 0, 1, tzinfo=UTC)},
        ),
        (evaluation(about={"evaluation.explanation": "so"}), {"name": "comment", "value": "so"}),
    ],
)  # fmt: skip
def test_an_evaluation_is_an_observation(record: dict[str, Any], meant: dict[str, Any]) -> None:
    client, inbox = service()
    assert client.post("/v1/logs", json=logs(record)).json() == {}
    (found,) = said(inbox)
    assert {name: getattr(found, name) for name in meant} == meant


def test_evaluations_that_differ_in_anything_are_observations_of_their_own() -> None:
    client, inbox = service()
    base = {"evaluation.score.value": 1.0}
    records = [
        evaluation(),
        evaluation(name="score"),
        evaluation(traceId="ab" * 16),
        evaluation(spanId="ab" * 8),
        evaluation(timeUnixNano="1763722800000001998"),
        evaluation(about=base | {"response.id": "i"}), evaluation(about=base | {"conversation.id": "i"}), evaluation(),
    ]  # fmt: skip
    client.post("/v1/logs", json=logs(*records))
    assert len(inbox.events) == 7
    assert {len(one.id) for one in said(inbox)} == {32}


def test_what_was_rejected_is_counted_and_five_reasons_are_told() -> None:
    client, inbox = service()
    told = client.post("/v1/logs", json=logs(*[evaluation(name=None)] * 7, {"eventName": "other"}, evaluation())).json()["partialSuccess"]
    assert told["rejectedLogRecords"] == "8"
    assert told["errorMessage"].count("gen_ai.evaluation.name is missing") == 5
    assert told["errorMessage"].endswith("1 log records hold no gen_ai.evaluation.result, and nothing else is kept here")
    assert len(inbox.events) == 1


@pytest.mark.parametrize("number", ["-1", str(2**64)])
def test_a_time_before_1970_or_beyond_sixty_four_bits_is_none(number: str) -> None:
    client, inbox = service()
    assert client.post("/v1/logs", json=logs(evaluation(timeUnixNano=number))).status_code == 400
    assert inbox.events == {}


@pytest.mark.parametrize(
    ("path", "body", "values", "about", "tags"),
    [
        (
            "/feedback", {"id": "f", "key": "user_score", "run_id": TRACE, "score": 1, "value": "good", "session_id": "e"},
            [("f", "rating", True)], (INFERENCE, None), {"key": "user_score", "label": "good"},
        ),
        (
            "/feedback", {"id": "f", "key": "rating", "trace_id": TRACE, "value": "up", "correction": {"a": "b"}},
            [("f", "rating", True), ("f:demonstration", "demonstration", "b")], (INFERENCE, None), None,
        ),
        (
            "/feedback", {"id": "f", "key": "undo", "session_id": "e", "score": 0, "extra": {"a": 1}, "error": False},
            [("f", "undo", False)], (None, "e"), {"extra": '{"a":1}', "error": "false"},
        ),
        (
            "/v1/span_annotations",
            {"data": [{"name": "undo", "annotator_kind": "CODE", "span_id": TRACE, "identifier": "n",
                       "result": {"score": 1, "label": "x"}}]},
            [(None, "undo", True)], (INFERENCE, None), {"annotator_kind": "CODE", "identifier": "n", "label": "x"},
        ),
        (
            "/v1/trace_annotations",
            {"data": [{"name": "thumb", "annotator_kind": "HUMAN", "trace_id": "t", "result": {"label": "up"},
                       "metadata": {"inference_id": "i", "k": 2}}]},
            [(None, "rating", True)], ("i", None), {"annotator_kind": "HUMAN", "key": "thumb", "metadata.k": "2"},
        ),
        (
            "/v1/session_annotations", {"data": [{"name": "undo", "annotator_kind": "LLM", "session_id": "e", "result": {"score": 0}}]},
            [(None, "undo", False)], (None, "e"), {"annotator_kind": "LLM"},
        ),
        (
            "/api/public/scores", {"id": "s", "name": "undo", "value": 1, "traceId": TRACE, "environment": "live"},
            [("s", "undo", True)], (INFERENCE, None), None,
        ),
        ("/api/public/scores", {"id": "s", "name": "undo", "value": 1, "sessionId": "e"}, [("s", "undo", True)], (None, "e"), None),
        (
            "/feedback", {"metric_name": "undo", "value": True, "inference_id": "i", "id": "f", "tags": {"a": "b"}, "actor": "ada"},
            [("f", "undo", True)], ("i", None), {"a": "b"},
        ),
    ],
)  # fmt: skip
def test_a_score_of_another_system_keeps_what_it_said(
    path: str,
    body: dict[str, Any],
    values: list[tuple[str | None, str, Any]],
    about: tuple[str | None, str | None],
    tags: dict[str, str] | None,
) -> None:
    client, inbox = service()
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = said(inbox)
    assert [(one.name, one.value) for one in found] == [(name, value) for _, name, value in values]
    assert all(wanted in (None, one.id) for one, (wanted, _, _) in zip(found, values, strict=True))
    assert {(one.inference_id, one.episode_id) for one in found} == {about}
    assert tags is None or {json.dumps(one.tags, sort_keys=True) for one in found} == {json.dumps(tags, sort_keys=True)}


def test_a_span_of_somebody_else_s_trace_is_no_answer_of_ours() -> None:
    client, inbox = service()
    annotation = {"name": "undo", "annotator_kind": "CODE", "span_id": "0f" * 8, "result": {"score": 1}}
    refused = client.post("/v1/span_annotations", json={"data": [annotation | {"span_id": "i"}, annotation]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata.inference_id")
    assert inbox.events == {}, "all or none"


def test_a_key_of_a_body_and_an_id_have_a_hundred_and_eighty_characters() -> None:
    client, inbox = service()
    body = {"metric_name": "undo", "value": True, "inference_id": "i"}
    for size, status in ((180, 200), (181, 400)):
        assert client.post("/feedback", json=body, headers={"idempotency-key": "k" * size}).status_code == status
    assert len(inbox.events) == 1
    assert openapi.path_id("i" * 180) == "i" * 180
    for wrong in ("", "i" * 181, "\x00"):
        with pytest.raises(BadRequest, match="1 to 180 characters"):
            openapi.path_id(wrong)


# --- TensorZero's inference -------------------------------------------------------------------------------------------------------


def asked(**changes: Any) -> Any:
    body: dict[str, Any] = {"function_name": "composer", "input": {"messages": [{"role": "user", "content": "x"}]}}
    return json.loads(inference.read(json.dumps(body | changes).encode())[0])


def test_an_inference_asks_what_a_chat_asks() -> None:
    system = {
        "system": "be brief",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    }
    params = {"chat_completion": {"temperature": 0.5, "stop_sequences": ["x"], "seed": None}}
    found = asked(
        input=system,
        params=params,
        stream=True,
        episode_id="e",
        tags={"a": "b"},
        dryrun=True,
        variant_name="v",
        output_schema={"type": "object"},
        additional_tools=[{"name": "f"}], tool_choice={"specific": "f"}, parallel_tool_calls=False,
    )  # fmt: skip
    assert found == {
        "model": "composer", "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}], "stream": True,
        "tensorzero::episode_id": "e", "tensorzero::variant_name": "v", "tensorzero::dryrun": True, "tensorzero::tags": {"a": "b"},
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False, "temperature": 0.5, "stop": ["x"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }  # fmt: skip
    bare = asked(function_name=None, model_name="tab", tool_choice="off")
    assert (bare["model"], bare["stream"], bare["tool_choice"]) == ("tab", False, "none")
    assert not {"tools", "response_format", "temperature"} & set(bare)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"function_name": None}, "function_name"), ({"extra_body": [1]}, "extra_body"), ({"allowed_tools": ["f"]}, "allowed_tools"),
        ({"provider_tools": [1]}, "provider_tools"), ({"params": {"chat_completion": 3}}, "params.chat_completion"),
        ({"params": {"chat_completion": {"top_k": 3}}}, "params.chat_completion.top_k"),
        ({"input": {"messages": [{"role": "user", "content": [{"type": "image"}]}]}}, "input.messages[0].content"),
    ],
)  # fmt: skip
def test_what_an_inference_cannot_honour_is_refused_by_its_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(**changes)
    assert refused.value.param == param


def told(*chunks: GenerationChunk, **more: Any) -> tuple[Recording, Any]:
    made = recording(*chunks, **more)
    return made, json.loads(inference.InferenceStyle().whole([(made, [])]))


def test_an_inference_field_for_field() -> None:
    named = {"inference_id": "i", "episode_id": "e", "variant_name": "ratchet"}
    _, plain = told(piece("Hi", 7), END, token="ft")
    assert plain == named | {
        "feedback_token": "ft", "content": [{"type": "text", "text": "Hi"}], "usage": {"input_tokens": 3, "output_tokens": 2},
        "finish_reason": "stop",
    }  # fmt: skip
    assert told(LENGTH)[1]["content"] == [{"type": "text", "text": ""}]
    assert told(LENGTH)[1]["finish_reason"] == "length"
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    _, called = told(piece(f"so {CALL}", 7), END, said=tools)
    call = {"type": "tool_call", "id": "call_i_0", "raw_name": "f", "raw_arguments": '{"a":1}'}
    assert called["content"] == [{"type": "text", "text": "so"}, call | {"name": "f", "arguments": {"a": 1}}]
    assert called["finish_reason"] == "tool_call"
    assert [one["type"] for one in told(piece(CALL, 7), END, said=tools)[1]["content"]] == ["tool_call"]
    made, _ = told(said=tools, token="ft")
    assert made.arm.digest == CHAMPION
    writer, chunks = inference.InferenceStyle().streaming([made], 0), [piece("so ", 7), piece(CALL[:5], 8), piece(CALL[5:], 9)]
    out = writer.first()
    for chunk in chunks:
        made.take(chunk)
        out += writer.chunk(chunk)
    made.take(END)
    made.parse()
    found = events(out + writer.last(END) + inference.InferenceStyle().end([made]))
    assert found == [
        named | {"feedback_token": "ft", "content": [{"type": "text", "id": "0", "text": "so"}]},
        named | {"feedback_token": "ft", "content": [call], "usage": {"input_tokens": 3, "output_tokens": 4}, "finish_reason": "tool_call"},
        "[DONE]",
    ]  # fmt: skip
    assert writer.failure(b"{}") == b"data: {}\n\n"
