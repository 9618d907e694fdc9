"""Other systems' real clients against the service: fake engines, an inbox in memory, a real server on loopback."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest
from openai import OpenAI

from app.domain.ids import hash_actor, uuid7
from app.domain.policies import SignalConfig, SignalType
from app.domain.telemetry.events import EventType
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from tests.fakes.gateway import collaborators, events_of, policy_config, serving
from tests.fakes.inbox import MemoryInbox
from tests.fakes.said import observed, said

NOW = datetime.now(UTC)


@pytest.fixture
def inbox() -> MemoryInbox:
    return MemoryInbox()


@pytest.fixture
def url(inbox: MemoryInbox) -> Iterator[str]:
    signals = {"edit_persisted": SignalConfig(type=SignalType.BOOLEAN), "quality": SignalConfig(type=SignalType.FLOAT)}
    app = create_app(collaborators(inbox=inbox, policies={"composer": policy_config(signals=signals)}))
    with serving(app) as base:
        yield base


# --- tensorzero -----------------------------------------------------------------------------------------------------------


def test_tensorzero_feedback_on_an_inference_and_on_an_episode(url: str, inbox: MemoryInbox) -> None:
    from tensorzero import TensorZeroGateway

    inference, episode = uuid7(), uuid7()
    with TensorZeroGateway.build_http(gateway_url=url) as gateway:
        answer = gateway.feedback(metric_name="edit_persisted", value=True, inference_id=inference, tags={"a": "b"})
        gateway.feedback(metric_name="comment", value="nice", episode_id=episode)
        gateway.feedback(metric_name="demonstration", value="my own words", inference_id=inference)
        gateway.feedback(metric_name="edit_persisted", value=False, inference_id=inference, dryrun=True)
    assert said(inbox) == [
        (inference, "edit_persisted", True),
        (None, "comment", "nice"),
        (inference, "demonstration", "my own words"),
    ]
    assert str(answer.feedback_id) == observed(inbox)[0].id
    assert observed(inbox)[0].tags == {"a": "b"}


def test_tensorzero_infers_streamed_or_not_and_its_inference_is_rated(url: str, inbox: MemoryInbox) -> None:
    from tensorzero import TensorZeroGateway

    asked: Any = {"system": "be brief", "messages": [{"role": "user", "content": "say hello"}]}
    with TensorZeroGateway.build_http(gateway_url=url) as gateway:
        params = {"chat_completion": {"temperature": 0.5, "max_tokens": 7}}
        answer: Any = gateway.inference(function_name="composer", input=asked, params=params, tags={"a": "b"})
        streamed: Any = list(gateway.inference(function_name="composer", input=asked, stream=True))  # type: ignore[arg-type]
        gateway.feedback(metric_name="edit_persisted", value=True, inference_id=answer.inference_id)
    assert (answer.content[0].text, answer.usage.output_tokens) == ("Hello, world!", 5)
    assert "".join(part.text for chunk in streamed for part in chunk.content) == "Hello, world!"
    assert said(inbox) == [(str(answer.inference_id), "edit_persisted", True)]
    first, second = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert (first.inference_id, first.episode_id) == (str(answer.inference_id), str(answer.episode_id))
    assert (first.sampling.temperature, first.sampling.max_tokens, first.tags["a"]) == (0.5, 7, "b")
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert second.inference_id == str(streamed[0].inference_id)


def test_tensorzero_is_told_what_is_wrong(url: str, inbox: MemoryInbox) -> None:
    from tensorzero import TensorZeroError, TensorZeroGateway

    with TensorZeroGateway.build_http(gateway_url=url) as gateway, pytest.raises(TensorZeroError, match="no observation is named 'mood'"):
        gateway.feedback(metric_name="mood", value=True, inference_id=uuid7())
    assert inbox.events == {}


CAPTURED = (
    b'{"episode_id":null,"inference_id":"01920c75-d114-7aa1-aadb-26a31bb3c7a0","metric_name":"edit_persisted","value":true,'
    b'"internal":false,"tags":{"a":"b"},"dryrun":null}'
)
"""The bytes of tensorzero 2026.6.0."""


def test_feedback_is_accepted_before_its_inference_once_and_can_be_taken_back(url: str, inbox: MemoryInbox) -> None:
    headers = {"Idempotency-Key": "thumb-1", "content-type": "application/json"}
    answers = [httpx.post(f"{url}/feedback", content=CAPTURED, headers=headers) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"feedback_id": "thumb-1"}] * 2, "the second time is another, the feedback is not"
    assert len(observed(inbox)) == 1
    assert httpx.delete(f"{url}/feedback/thumb-1").status_code == 200
    assert observed(inbox) == []


def test_feedback_repeated_under_its_id_and_time_is_harmless_and_changed_is_a_conflict(url: str, inbox: MemoryInbox) -> None:
    body = {"metric_name": "rating", "value": True, "inference_id": uuid7(), "id": "f1", "occurred_at": "2026-11-21T10:00:00Z"}
    assert [httpx.post(f"{url}/feedback", json=body).status_code for _ in range(3)] == [200, 200, 200]
    conflict = httpx.post(f"{url}/feedback", json=body | {"value": False})
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (400, "conflict")
    assert len(inbox.events) == 1


# --- langfuse -------------------------------------------------------------------------------------------------------------


def test_langfuse_scores_arrive_and_a_score_under_the_same_id_replaces_the_first(url: str, inbox: MemoryInbox) -> None:
    from langfuse import Langfuse

    inference = uuid7()
    client = Langfuse(public_key="pk", secret_key="sk", base_url=url, tracing_enabled=True, timeout=60)
    trace = UUID(inference).hex
    client.create_score(name="thumb", value=1, data_type="BOOLEAN", trace_id=trace, score_id="s1", comment="good")
    client.flush()
    assert said(inbox) == [(inference, "rating", True), (inference, "comment", "good")]
    client.create_score(name="thumb", value=0, data_type="BOOLEAN", trace_id=trace, score_id="s1")
    client.create_score(name="quality", value=0.4, trace_id=trace, score_id="s2")
    client.flush()
    assert said(inbox) == [(inference, "comment", "good"), (inference, "quality", 0.4), (inference, "rating", False)]
    client.api.scores.delete("s1")
    assert said(inbox) == [(inference, "quality", 0.4)]
    client.shutdown()


def test_langfuse_hears_which_scores_of_a_batch_were_wrong(url: str, inbox: MemoryInbox) -> None:
    good = {"id": "a", "traceId": "t", "name": "thumb", "value": 1.0, "dataType": "BOOLEAN"}
    answer = httpx.post(f"{url}/api/public/scores", json=[good, good | {"id": "b", "name": "mood"}])
    assert answer.status_code == 207
    assert (answer.json()["accepted"], answer.json()["rejected"]) == (1, 1)
    assert httpx.post(f"{url}/api/public/scores", json=good | {"id": "c"}).json() == {"id": "c"}


# --- langsmith ------------------------------------------------------------------------------------------------------------


def test_langsmith_feedback_shares_the_path_with_tensorzero(url: str, inbox: MemoryInbox) -> None:
    from langsmith import Client

    run, session = uuid7(), uuid7()
    client = Client(api_url=url, api_key="k", auto_batch_tracing=False)
    created = client.create_feedback(run, "user_score", score=1, comment="thanks", session_id=session, feedback_id=uuid7())
    assert said(inbox) == [(run, "rating", True), (run, "comment", "thanks")]
    assert observed(inbox)[0].id == str(created.id)
    client.update_feedback(created.id, score=0, comment="on second thoughts, no")
    assert said(inbox) == [(run, "rating", False), (run, "comment", "on second thoughts, no")]
    client.update_feedback(created.id, score=1)
    assert sorted(said(inbox)) == [(run, "comment", "on second thoughts, no"), (run, "rating", True)]
    client.delete_feedback(created.id)
    assert observed(inbox) == []


def test_langsmith_updates_nothing_that_was_never_said(url: str, inbox: MemoryInbox) -> None:
    from langsmith import Client
    from langsmith.utils import LangSmithNotFoundError

    client = Client(api_url=url, api_key="k", auto_batch_tracing=False)
    with pytest.raises(LangSmithNotFoundError):
        client.update_feedback(uuid7(), score=1)
    only_words = client.create_feedback(uuid7(), "user_score", comment="hm", feedback_id=uuid7(), session_id=uuid7())
    with pytest.raises(Exception, match="its name is not known"):
        client.update_feedback(only_words.id, score=1)
    assert len(observed(inbox)) == 1


# --- mlflow ---------------------------------------------------------------------------------------------------------------


def test_mlflow_assessments_are_created_corrected_and_deleted(url: str, inbox: MemoryInbox) -> None:
    import mlflow
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    inference = uuid7()
    trace = f"tr-{UUID(inference).hex}"
    mlflow.set_tracking_uri(url)
    source = AssessmentSource(source_type="HUMAN", source_id="ada")
    thumb = mlflow.log_feedback(trace_id=trace, name="thumb", value=True, source=source, rationale="short and right")
    assert said(inbox) == [(inference, "rating", True), (inference, "comment", "short and right")]
    assert observed(inbox)[0].actor == hash_actor("ada", salt="salt")
    assert thumb.assessment_id is not None
    mlflow.update_assessment(trace, thumb.assessment_id, Feedback(name="thumb", value=False, source=source))
    assert (inference, "rating", False) in said(inbox)
    assert (inference, "rating", True) not in said(inbox)
    mlflow.delete_assessment(trace, thumb.assessment_id)
    assert observed(inbox) == []
    mlflow.log_assessment(trace, Expectation(name="wanted", value="print('hello')", source=source))
    assert said(inbox) == [(inference, "demonstration", "print('hello')")]
    mlflow.log_assessment(trace, Expectation(name="response", value={"expected_response": "print('hi')"}, source=source))
    assert said(inbox)[1:] == [(inference, "demonstration", "print('hi')")]
    with pytest.raises(Exception, match="a correction is the text"):
        mlflow.log_assessment(trace, Expectation(name="both", value={"a": "x", "b": [1]}, source=source, metadata={"k": "v"}))
    again = mlflow.log_feedback(trace_id=trace, name="thumb", value=False, source=source, rationale="slow")
    assert again.assessment_id is not None
    found = mlflow.get_assessment(trace, again.assessment_id)
    assert isinstance(found, Feedback)
    assert (found.name, found.value, found.rationale) == ("thumb", False, "slow")


# --- phoenix --------------------------------------------------------------------------------------------------------------


def test_phoenix_annotations_are_upserted_by_identifier(url: str, inbox: MemoryInbox) -> None:
    from phoenix.client import Client

    inference = uuid7()
    client = Client(base_url=url, api_key="k")
    client.spans.add_span_annotation(
        span_id="f" * 16, annotation_name="user_feedback", annotator_kind="HUMAN", label="thumbs-up", identifier="ada", sync=True,
        metadata={"inference_id": inference},
    )  # fmt: skip
    assert said(inbox) == [(inference, "rating", True)]
    client.spans.add_span_annotation(
        span_id="f" * 16, annotation_name="user_feedback", annotator_kind="HUMAN", score=0, explanation="no", identifier="ada", sync=True,
        metadata={"inference_id": inference},
    )  # fmt: skip
    assert said(inbox) == [(inference, "rating", False), (inference, "comment", "no")]


# --- areal ----------------------------------------------------------------------------------------------------------------


def test_areal_sessions_are_episodes_and_reward_their_last_interaction(url: str, inbox: MemoryInbox) -> None:
    session = httpx.post(f"{url}/rl/start_session", json={"task_id": "t1", "api_key": "k"}).json()
    with OpenAI(base_url=f"{url}/v1", api_key=session["api_key"]) as client:
        first = client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x"}])
        second = client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "y"}])
    assert {(answer.model_extra or {})["episode_id"] for answer in (first, second)} == {session["session_id"]}
    names = {"session_id": session["session_id"]}
    httpx.post(f"{url}/rl/set_reward", json={"reward": 0.5, "interaction_id": None} | names).raise_for_status()
    httpx.post(f"{url}/rl/set_reward", json={"reward": -1.0, "interaction_id": first.id}).raise_for_status()
    httpx.post(f"{url}/rl/set_reward", json={"reward": 0.25} | names).raise_for_status()
    assert said(inbox) == [(first.id, "rating", -1.0), (second.id, "rating", 0.25)]
    assert httpx.post(f"{url}/rl/end_session", json=names).status_code == 200
    assert httpx.post(f"{url}/rl/set_reward", json={"reward": 1}).status_code == 400
    own = {"authorization": f"Bearer {session['api_key']}"}
    assert httpx.post(f"{url}/rl/set_reward", json={"reward": 1} | names, headers=own).status_code == 403
    forged = {"authorization": "Bearer " + session["api_key"][:-2] + "zz"}
    assert httpx.post(f"{url}/rl/set_reward", json={"reward": 1} | names, headers=forged).status_code == 401


# --- opentelemetry --------------------------------------------------------------------------------------------------------


def test_evaluation_results_come_over_otlp(url: str, inbox: MemoryInbox) -> None:
    from opentelemetry._logs import LogRecord
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

    inference = uuid7()
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(endpoint=f"{url}/v1/logs", compression=Compression.Gzip)))
    logger = provider.get_logger("test")
    attributes = {
        "gen_ai.evaluation.name": "quality", "gen_ai.evaluation.score.value": 0.75, "gen_ai.response.id": inference,
        "gen_ai.evaluation.explanation": "clear", "gen_ai.evaluation.score.label": "good", "gen_ai.evaluation.judge": "j1",
        "gen_ai.request.model": "composer",
    }  # fmt: skip
    logger.emit(LogRecord(timestamp=time.time_ns(), event_name="gen_ai.evaluation.result", attributes=attributes))
    logger.emit(LogRecord(timestamp=time.time_ns(), event_name="something.else", attributes={}))
    provider.shutdown()
    assert said(inbox) == [(inference, "quality", 0.75), (inference, "comment", "clear")]
    assert observed(inbox)[0].tags == {"label": "good", "gen_ai.evaluation.judge": "j1"}


def test_otlp_json_is_read_too_and_a_busy_inbox_is_a_503(url: str, inbox: MemoryInbox) -> None:
    inference = uuid7()
    record = {
        "timeUnixNano": str(time.time_ns()), "eventName": "gen_ai.evaluation.result", "traceId": UUID(inference).hex, "spanId": "ab" * 8,
        "attributes": [
            {"key": "gen_ai.evaluation.name", "value": {"stringValue": "thumb"}},
            {"key": "gen_ai.evaluation.score.label", "value": {"stringValue": "fail"}},
        ],
    }  # fmt: skip
    body = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record, record | {"attributes": []}]}]}]}
    answer = httpx.post(f"{url}/v1/logs", json=body)
    assert answer.json()["partialSuccess"]["rejectedLogRecords"] == "1"
    assert said(inbox) == [(inference, "rating", False)]
    inbox.refusing = True
    busy = httpx.post(f"{url}/v1/logs", json=body)
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("path", ["/v1/traces", "/api/public/otel/v1/traces"])
def test_spans_and_records_that_nothing_is_kept_of_are_counted_in_the_answer(url: str, inbox: MemoryInbox, path: str) -> None:
    inference = uuid7()
    about = {"gen_ai.evaluation.name": "thumb", "gen_ai.evaluation.score.label": "pass", "gen_ai.response.id": inference}
    told = [{"key": name, "value": {"stringValue": value}} for name, value in about.items()]
    events = [{"name": "gen_ai.evaluation.result", "timeUnixNano": str(time.time_ns()), "attributes": told}, {"name": "first token"}]
    span = {"traceId": "ab" * 16, "spanId": "cd" * 8, "attributes": []}
    spans = [span | {"events": events}, span | {"events": [{"name": "first token"}]}, span]
    answer = httpx.post(f"{url}{path}", json={"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).json()["partialSuccess"]
    assert answer["rejectedSpans"] == "2"
    assert answer["errorMessage"] == "2 spans hold no gen_ai.evaluation.result, and nothing else is kept here"
    assert said(inbox) == [(inference, "rating", True)]
    record = {"timeUnixNano": "1", "eventName": "something.else", "attributes": []}
    answer = httpx.post(f"{url}/v1/logs", json={"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}).json()["partialSuccess"]
    assert (answer["rejectedLogRecords"], "log records hold no" in answer["errorMessage"]) == ("1", True)


# --- cloudevents ----------------------------------------------------------------------------------------------------------


def test_cloudevents_come_structured_batched_and_binary(url: str, inbox: MemoryInbox) -> None:
    from cloudevents.core.bindings.http import to_binary_event, to_structured_event
    from cloudevents.core.v1.event import CloudEvent

    def event(number: int, kind: str, data: dict[str, Any]) -> CloudEvent:
        attributes = {
            "id": f"c{number}",
            "source": "https://shop.example/cart",
            "type": kind,
            "time": NOW,
            "datacontenttype": "application/json",
        }
        return CloudEvent(attributes=attributes, data=data)

    thumb = {"inference_id": "i1", "name": "rating", "value": True}
    structured, binary = (
        to_structured_event(event(1, EventType.OBSERVATION, thumb)),
        to_binary_event(event(2, EventType.OBSERVATION, thumb)),
    )
    assert httpx.post(f"{url}/v1/events", content=structured.body, headers=structured.headers).status_code == 202
    assert httpx.post(f"{url}/v1/events", content=binary.body, headers=binary.headers).status_code == 202
    batch = [to_structured_event(event(n, EventType.OBSERVATION, thumb)).body for n in (3, 1)]
    answer = httpx.post(
        f"{url}/v1/events", content=b"[" + b",".join(batch) + b"]", headers={"content-type": "application/cloudevents-batch+json"}
    )
    assert [item["status"] for item in answer.json()["results"]] == ["accepted", "duplicate"]
    assert {o.source for o in observed(inbox)} == {"sdk:https___shop.example_cart"}
    retraction = to_structured_event(event(4, EventType.RETRACTION, {"observation_id": "c1"}))
    httpx.post(f"{url}/v1/events", content=retraction.body, headers=retraction.headers).raise_for_status()
    assert [o.id for o in observed(inbox)] == ["c2", "c3"]


def test_history_is_imported_as_turns_without_tokens(url: str, inbox: MemoryInbox) -> None:
    turn: dict[str, Any] = {
        "inference_id": "h1", "episode_id": "e1", "policy": "composer", "version": "imported", "started_at": "2025-01-01T00:00:00Z",
        "finished_at": "2025-01-01T00:00:01Z", "messages": [{"role": "user", "content": "hi"}], "completion": "hello", "prompt_tokens": [],
        "completion_tokens": [], "logprobs": None, "sampling": {}, "finish_reason": "stop",
        "usage": {"prompt_tokens": 0, "completion_tokens": 0}, "source": "import:sharegpt", "actor": "somebody",
    }  # fmt: skip
    envelope = {"specversion": "1.0", "id": "h1", "source": "import:sharegpt", "type": EventType.TURN}
    wrong = [{"source": "gateway"}, {"started_at": "0001-01-01T00:00:00+14:00"}, {"finished_at": "9999-12-31T23:59:59-14:00"}]
    answer = httpx.post(f"{url}/v1/events", json=[envelope | {"data": turn | changes} for changes in ({}, *wrong)])
    assert [(item["status"], item.get("param")) for item in answer.json()["results"]] == [
        ("accepted", None), ("rejected", "data.source"), ("rejected", "data.started_at"), ("rejected", "data.finished_at"),
    ]  # fmt: skip
    (event,) = events_of(inbox, EventType.TURN)
    assert (event.source, event.key) == ("import:sharegpt", "e1")
    assert b"somebody" not in event.data
