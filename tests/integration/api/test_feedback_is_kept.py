"""What a client is told is stored can be found again as observations; what would be lost is refused, and the client raises."""

from collections.abc import Iterator
from uuid import UUID

import httpx
import pytest

from app.domain.ids import uuid7
from app.domain.policies import SignalConfig, SignalType
from app.main import create_app
from tests.fakes.gateway import collaborators, policy_config, serving
from tests.fakes.inbox import MemoryInbox
from tests.fakes.said import observed, said


@pytest.fixture
def inbox() -> MemoryInbox:
    return MemoryInbox()


@pytest.fixture
def url(inbox: MemoryInbox) -> Iterator[str]:
    signals = {"edit_persisted": SignalConfig(type=SignalType.BOOLEAN), "quality": SignalConfig(type=SignalType.FLOAT)}
    app = create_app(collaborators(inbox=inbox, policies={"composer": policy_config(signals=signals)}))
    with serving(app) as base:
        yield base


def test_a_number_under_a_thumb_s_name_is_refused_until_its_scale_is_declared(url: str, inbox: MemoryInbox) -> None:
    """0.2 of 1 and 4 of 5 stars: read as a rating from -1 to 1 the first would be praise and the second an error."""
    score = {"id": "s", "traceId": "t", "name": "user_score", "value": 0.2}
    for wrong in (score, score | {"value": 4}):
        answer = httpx.post(f"{url}/api/public/scores", json=wrong)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "scale")
    assert inbox.events == {}
    assert httpx.post(f"{url}/api/public/scores", json=score | {"value": 1}).status_code == 200
    assert httpx.post(f"{url}/api/public/scores", json=score | {"id": "q", "name": "quality"}).status_code == 200
    assert said(inbox) == [("t", "rating", True), ("t", "quality", 0.2)]
    assert [o.tags for o in observed(inbox)] == [{"key": "user_score"}, {}]


def test_langsmith_feedback_with_a_trace_id_is_stored_when_the_client_says_so_and_read_back(url: str, inbox: MemoryInbox) -> None:
    """With its defaults the client queues such feedback with its traces and reports success, unless the server asks for the direct way."""
    from langsmith import Client

    run, session = uuid7(), uuid7()
    client = Client(api_url=url, api_key="k")
    made = client.create_feedback(
        run, "user_score", trace_id=run, score=1, comment="thanks", correction={"output": "x"}, session_id=session
    )
    assert said(inbox) == [(run, "rating", True), (run, "comment", "thanks"), (run, "demonstration", "x")]
    (found,) = client.list_feedback(run_ids=[run])
    assert (found.id, str(found.run_id), found.key, found.score, found.comment) == (made.id, run, "user_score", 1, "thanks")
    assert found.correction == {"output": "x"}
    assert list(client.list_feedback(run_ids=[run], feedback_key=["other"])) == []
    client.update_feedback(made.id, score=0)
    assert [(feedback.key, feedback.score) for feedback in client.list_feedback(run_ids=[run])] == [("user_score", 0)]
    client.delete_feedback(made.id)
    assert list(client.list_feedback(run_ids=[run])) == []
    client.close()


def test_langsmith_raises_where_a_part_of_the_feedback_would_be_lost(url: str, inbox: MemoryInbox) -> None:
    from langsmith import Client

    client, run = Client(api_url=url, api_key="k"), uuid7()
    for more in ({"correction": {"a": "x", "b": "y"}}, {"value": {"any": "thing"}}, {"score": 0.2}):
        with pytest.raises(Exception, match=r"correction|value|scale"):
            client.create_feedback(run, "user_score", trace_id=run, session_id=uuid7(), comment="c", **more)  # type: ignore[arg-type]
    client.close()
    assert inbox.events == {}


def test_phoenix_annotates_traces_and_sessions_and_is_told_what_can_be_about_nothing(url: str, inbox: MemoryInbox) -> None:
    from phoenix.client import Client

    inference, episode = uuid7(), uuid7()
    client = Client(base_url=url, api_key="k")
    made = client.traces.add_trace_annotation(
        trace_id=UUID(inference).hex, annotation_name="thumb", annotator_kind="HUMAN", score=1.0, label="great", sync=True
    )
    about = {"session_id": episode, "annotation_name": "comment", "annotator_kind": "HUMAN"}
    client.sessions.add_session_annotation(**about, explanation="went well")  # type: ignore[call-overload] - of several keywords each
    assert made is not None
    assert [(o.inference_id, o.episode_id, o.name, o.value) for o in observed(inbox)] == [
        (inference, None, "rating", True), (None, episode, "comment", "went well"),
    ]  # fmt: skip
    assert made["id"] == observed(inbox)[0].id
    again = uuid7()
    client.sessions.add_session_annotation(**(about | {"session_id": again}), explanation="went well")  # type: ignore[call-overload]
    client.sessions.add_session_annotation(**about, explanation="went badly")  # type: ignore[call-overload]
    said = [(o.episode_id, o.value) for o in observed(inbox)[1:]]
    assert sorted(said) == sorted([(episode, "went badly"), (again, "went well")]), "said again of the same session, it replaces"
    assert observed(inbox)[0].tags == {"key": "thumb", "label": "great", "annotator_kind": "HUMAN"}
    with pytest.raises(httpx.HTTPStatusError):
        client.spans.add_span_annotation(span_id="f" * 16, annotation_name="rating", annotator_kind="HUMAN", score=1, sync=True)


def test_what_else_a_system_says_about_a_score_is_kept_beside_it(url: str, inbox: MemoryInbox) -> None:
    """Metadata was read for the inference that it may name, and gone: the answer said that all of it was stored."""
    inference, run = uuid7(), uuid7()
    langfuse = {
        "id": "s", "traceId": "t", "name": "quality", "value": 0.7, "environment": "staging", "queueId": "q1",
        "metadata": {"inference_id": inference, "reviewer": "team a", "checks": {"links": 3}},
    }  # fmt: skip
    httpx.post(f"{url}/api/public/scores", json=langfuse).raise_for_status()
    phoenix = {
        "span_id": UUID(inference).hex, "name": "quality", "annotator_kind": "CODE", "identifier": "v2", "result": {"score": 0.5},
        "metadata": {"key": "theirs", "label": 1},
    }  # fmt: skip
    httpx.post(f"{url}/v1/span_annotations", json={"data": [phoenix]}).raise_for_status()
    langsmith = {
        "id": str(UUID(run)), "key": "quality", "run_id": run, "score": 0.9, "value": {"of": 1}, "extra": {"model": "judge"},
        "feedback_source": {"type": "api", "metadata": {"who": "a"}},
    }  # fmt: skip
    httpx.post(f"{url}/feedback", json=langsmith).raise_for_status()
    assert [(o.inference_id, o.value, o.tags) for o in observed(inbox)] == [
        (inference, 0.7, {"environment": "staging", "queue_id": "q1", "metadata.reviewer": "team a", "metadata.checks": '{"links":3}'}),
        (inference, 0.5, {"annotator_kind": "CODE", "identifier": "v2", "metadata.key": "theirs", "metadata.label": "1"}),
        (run, 0.9, {
            "label": '{"of":1}', "feedback_source": '{"type":"api","metadata":{"who":"a"}}', "extra": '{"model":"judge"}',
        }),
    ]  # fmt: skip
    httpx.patch(f"{url}/feedback/{langsmith['id']}", json={"score": 0.1}).raise_for_status()
    assert (observed(inbox)[-1].value, observed(inbox)[-1].tags["extra"]) == (0.1, '{"model":"judge"}')
    found = httpx.get(f"{url}/v1/observations", params={"inference_id": inference}).json()["data"]
    assert [o["tags"]["metadata.reviewer"] for o in found if "metadata.reviewer" in o["tags"]] == ["team a"]


def test_the_metadata_of_an_mlflow_assessment_comes_back(url: str, inbox: MemoryInbox) -> None:
    inference = uuid7()
    traces = f"{url}/api/3.0/mlflow/traces/tr-{UUID(inference).hex}/assessments"
    said_so = {
        "assessment_name": "quality", "source": {"source_type": "LLM_JUDGE", "source_id": "judge-1"}, "feedback": {"value": 0.4},
        "metadata": {"prompt": "v3"},
    }  # fmt: skip
    made = httpx.post(traces, json={"assessment": said_so}).json()["assessment"]
    assert observed(inbox)[0].tags == {"metadata.prompt": "v3", "source": '{"source_type":"LLM_JUDGE","source_id":"judge-1"}'}
    found = httpx.get(f"{traces}/{made['assessment_id']}").json()["assessment"]
    assert (found["metadata"], found["feedback"]["value"]) == ({"prompt": "v3"}, 0.4)


def test_an_mlflow_feedback_that_overrides_another_takes_its_place_and_says_which_span_it_is_about(url: str, inbox: MemoryInbox) -> None:
    """Both stood beside each other, and a reader heard the judge and the person who had corrected it."""
    import mlflow
    from mlflow.entities import AssessmentSource, Feedback

    trace, judge = f"tr-{UUID(uuid7()).hex}", AssessmentSource(source_type="LLM_JUDGE", source_id="j")
    mlflow.set_tracking_uri(url)
    first = mlflow.log_feedback(trace_id=trace, name="quality", value=0.6, source=judge, span_id="span-7")
    assert first.assessment_id is not None
    person = AssessmentSource(source_type="HUMAN", source_id="ada")
    second = mlflow.override_feedback(trace_id=trace, assessment_id=first.assessment_id, value=0.9, source=person)
    assert [(o.value, o.tags.get("span_id"), o.tags.get("overrides")) for o in observed(inbox)] == [(0.9, "span-7", first.assessment_id)]
    assert second.assessment_id is not None
    found = mlflow.get_assessment(trace, second.assessment_id)
    assert isinstance(found, Feedback)
    assert (found.value, found.span_id, found.overrides) == (0.9, "span-7", first.assessment_id)


def test_who_said_it_is_read_back_and_asked_for(url: str, inbox: MemoryInbox) -> None:
    """A judge was read back as a person, and a reader who asked for a person's feedback got a model's."""
    import mlflow
    from langsmith import Client
    from mlflow.entities import AssessmentSource

    run = uuid7()
    client = Client(api_url=url, api_key="k")
    for value, kind in ((0.2, "model"), (0.8, "api")):
        client.create_feedback(run, "quality", trace_id=run, session_id=uuid7(), score=value, feedback_source_type=kind)
    assert [(f.score, f.feedback_source and f.feedback_source.type) for f in client.list_feedback(run_ids=[run])] == [
        (0.2, "model"), (0.8, "api"),
    ]  # fmt: skip
    for kind, score in (("model", 0.2), ("api", 0.8)):
        assert [f.score for f in client.list_feedback(run_ids=[run], feedback_source_type=[kind])] == [score]  # type: ignore[list-item]
    client.close()

    trace = f"tr-{UUID(uuid7()).hex}"
    mlflow.set_tracking_uri(url)
    for source in (AssessmentSource(source_type="LLM_JUDGE", source_id="j"), AssessmentSource(source_type="HUMAN", source_id="ada")):
        made = mlflow.log_feedback(trace_id=trace, name="quality", value=0.5, source=source)
        assert made.assessment_id is not None
        found = mlflow.get_assessment(trace, made.assessment_id).source
        assert (found.source_type, found.source_id) == (source.source_type, "j" if source.source_id == "j" else "unknown")
    forged = {"id": str(UUID(uuid7())), "inference_id": run, "name": "quality", "value": 1, "source": "sdk:langsmith"}
    deep = forged | {"tags": {"feedback_source": '{"type":' + "[" * 20_000}}
    httpx.post(f"{url}/v1/events", json=deep).raise_for_status()
    assert [item["feedback_source"] for item in httpx.get(f"{url}/feedback", params={"run": run}).json()][-1] is None


def test_metadata_of_more_entries_than_an_object_may_have_is_refused_and_nothing_is_kept(url: str, inbox: MemoryInbox) -> None:
    score = {"id": "s", "traceId": "t", "name": "quality", "value": 0.7, "metadata": {f"n{k}": "x" for k in range(5000)}}
    answer = httpx.post(f"{url}/api/public/scores", json=score)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_keys")
    assert inbox.events == {}


def test_what_was_said_about_an_answer_can_be_read_back(url: str, inbox: MemoryInbox) -> None:
    inference = uuid7()
    for name, value in (("rating", True), ("comment", "nice")):
        event = {"id": name, "inference_id": inference, "name": name, "value": value, "actor": "ada"}
        httpx.post(f"{url}/v1/events", json=event).raise_for_status()
    httpx.delete(f"{url}/feedback/comment").raise_for_status()
    found = httpx.get(f"{url}/v1/observations", params={"inference_id": inference}).json()["data"]
    assert [(o["id"], o["value"], o["status"], o["retracted"]) for o in found] == [
        ("rating", True, "accepted", False), ("comment", "nice", "accepted", True),
    ]  # fmt: skip
    assert all("actor" not in o for o in found)
    assert httpx.get(f"{url}/v1/observations").status_code == 400


def test_langfuse_s_auth_check_passes_and_its_traces_are_taken(url: str, inbox: MemoryInbox) -> None:
    from langfuse import Langfuse

    client = Langfuse(
        public_key="pk-auth", secret_key="sk", base_url=url, tracing_enabled=True, timeout=5
    )  # one client per key and process
    assert client.auth_check()
    client.start_observation(name="an answer").end()
    client.flush()
    client.shutdown()
    assert inbox.events == {}


def test_a_batch_says_of_a_score_that_is_in_it_twice_what_came_last_and_loses_no_other(url: str, inbox: MemoryInbox) -> None:
    score = {"traceId": "t", "name": "thumb", "dataType": "BOOLEAN"}
    batch = [
        score | {"id": "a", "value": 1}, score | {"id": "b", "value": 1, "comment": "fine"}, score | {"id": "a", "value": 0},
        {"id": "c", "traceId": "t", "name": "nobody declared this", "value": 1}, score | {"id": "d", "value": 0},
        score | {"id": "a", "value": 0},
    ]  # fmt: skip
    answer = httpx.post(f"{url}/api/public/scores", json=batch)
    assert (answer.status_code, answer.json()["accepted"], answer.json()["rejected"]) == (207, 5, 1)
    assert answer.json()["errors"][0]["message"].startswith("[3]")
    kept = {(o.id.partition("#")[0], o.value) for o in observed(inbox)}
    assert kept == {("a", False), ("b", True), ("b:comment", "fine"), ("d", False)}
