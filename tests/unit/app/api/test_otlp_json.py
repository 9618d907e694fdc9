"""OTLP's JSON says what its protobuf says, and what cannot be understood is refused rather than lost."""

import base64
import json
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict, Parse
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from app.api.dialects import otlp_json
from app.api.dialects.otel import EVENT, LOGS, TRACES, Form
from app.domain.errors import BadRequest
from app.main import create_app
from tests.fakes.gateway import collaborators
from tests.fakes.inbox import MemoryInbox

NAMES = st.sampled_from([EVENT, "other", ""])
KEYS = st.sampled_from(["gen_ai.evaluation.name", "gen_ai.evaluation.score.value", "event.name", "x"])
TIMES = st.integers(0, 2**63 - 1)
VALUES = st.one_of(
    st.fixed_dictionaries({"stringValue": st.one_of(st.just(EVENT), st.text(max_size=5))}),
    st.fixed_dictionaries({"boolValue": st.booleans()}),
    st.fixed_dictionaries({"intValue": st.integers(-(2**63), 2**63 - 1).map(str)}),
    st.fixed_dictionaries(
        {"doubleValue": st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(["Infinity", "-Infinity", "1.5"])}
    ),
    st.fixed_dictionaries({"arrayValue": st.just({"values": [{"intValue": "1"}]})}),
    st.just({}),
)
ATTRIBUTES = st.lists(st.fixed_dictionaries({"key": KEYS}, optional={"value": VALUES}), max_size=3)


def id_(length: int) -> st.SearchStrategy[str]:
    return st.sampled_from(["", "ab" * length, "AB" * length, "0f" * length])


RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "eventName": NAMES, "traceId": id_(16), "spanId": id_(8), "timeUnixNano": TIMES.map(str), "observedTimeUnixNano": TIMES,
        "attributes": ATTRIBUTES, "severityNumber": st.just(9), "body": VALUES,
    },
)  # fmt: skip
EVENTS = st.fixed_dictionaries({}, optional={"name": NAMES, "timeUnixNano": TIMES.map(str), "attributes": ATTRIBUTES})
SPANS = st.fixed_dictionaries(
    {}, optional={"traceId": id_(16), "spanId": id_(8), "attributes": ATTRIBUTES, "events": st.lists(EVENTS, max_size=2)}
)


def found(form: Form, sent: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The evaluations that both readings find; of ids protobuf's own JSON has base64, which ours takes as well."""
    message = Parse(json.dumps(_base64(sent)), form.message())
    ours = [list(form.find(form.from_json(json.dumps(body).encode()))) for body in (sent, MessageToDict(message))]
    assert ours[0] == ours[1]
    return ours[0], list(form.find(message))


def _base64(sent: Any) -> Any:
    if isinstance(sent, dict):
        return {key: _in_base64(value) if key in ("traceId", "spanId") else _base64(value) for key, value in sent.items()}
    return [_base64(value) for value in sent] if isinstance(sent, list) else sent


def _in_base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()


@given(st.lists(st.lists(RECORDS, max_size=3), max_size=2))
def test_logs_in_json_say_what_they_say_in_protobuf(scopes: list[list[Any]]) -> None:
    ours, theirs = found(LOGS, {"resourceLogs": [{"scopeLogs": [{"logRecords": records} for records in scopes]}]})
    assert ours == theirs


@given(st.lists(st.lists(SPANS, max_size=3), max_size=2))
def test_spans_in_json_say_what_they_say_in_protobuf(scopes: list[list[Any]]) -> None:
    ours, theirs = found(TRACES, {"resourceSpans": [{"scopeSpans": [{"spans": spans} for spans in scopes]}]})
    assert ours == theirs


def test_records_are_made_into_objects_one_by_one() -> None:
    logs = otlp_json.logs(json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": EVENT}] * 3}]}]}).encode())
    records = [record for resource in logs.resource_logs or () for scope in resource.scope_logs or () for record in scope.log_records or ()]
    assert [type(record) for record in records] == [msgspec.Raw] * 3


EVALUATION = {"key": "gen_ai.evaluation.name", "value": {"stringValue": "quality"}}


@pytest.mark.parametrize(
    "body",
    [
        {"resource_logs": [{"scope_logs": []}]},
        {"resourceLogs": {}},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [5]}]}]},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"attributes": [{"key": 5}]}]}]}]},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": EVENT, "traceId": "no id", "attributes": [EVALUATION]}]}]}]},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": EVENT, "timeUnixNano": "9" * 30, "attributes": [EVALUATION]}]}]}]},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": EVENT, "timeUnixNano": -1, "attributes": [EVALUATION]}]}]}]},
    ],
)
def test_what_is_no_export_is_refused_and_not_lost_with_a_success(body: Any) -> None:
    inbox = MemoryInbox()
    client = TestClient(create_app(collaborators(inbox=inbox)), raise_server_exceptions=False)
    answer = client.post("/v1/logs", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_otlp")
    assert inbox.events == {}


SNAKES = [
    ("/v1/logs", "resourceLogs", {"scope_logs": []}), ("/v1/logs", "resourceLogs", {"scopeLogs": [{"log_records": []}]}),
    ("/v1/logs", "resourceLogs", {"scopeLogs": [{"logRecords": [{"trace_id": "ab"}]}]}),
    ("/v1/logs", "resourceLogs", {"scopeLogs": [{"logRecords": [{"eventName": EVENT, "attributes": [
        {"key": "gen_ai.evaluation.name", "value": {"string_value": "x"}}]}]}]}),
    ("/v1/traces", "resourceSpans", {"scope_spans": []}), ("/v1/traces", "resourceSpans", {"scopeSpans": [{"spans": [{"span_id": "ab"}]}]}),
    ("/v1/traces", "resourceSpans", {"scopeSpans": [{"spans": [{"events": [{"name": EVENT, "time_unix_nano": 1}]}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "top", "resource"), SNAKES)
def test_a_key_in_snake_case_is_refused_by_its_name_wherever_it_stands(path: str, top: str, resource: Any) -> None:
    client = TestClient(create_app(collaborators()), raise_server_exceptions=False)
    answer = client.post(path, json={top: [resource]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_otlp")
    assert "keys are lowerCamelCase" in answer.text


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        ({"stringValue": ""}, ""), ({"boolValue": False}, False), ({"intValue": "0"}, 0), ({"doubleValue": "0.0"}, 0.0), ({}, None),
        ({"stringValue": None, "intValue": 3}, 3), ({"arrayValue": {}}, None),
    ],
)  # fmt: skip
def test_a_value_that_is_nothing_much_is_a_value_all_the_same(sent: dict[str, Any], plain: object) -> None:
    value = msgspec.json.decode(json.dumps(sent), type=otlp_json.Value, strict=False).plain()
    assert (value, type(value)) == (plain, type(plain))


@pytest.mark.parametrize(
    ("id_", "hexadecimal"), [("AB0f", "ab0f"), ("q80=", "abcd"), (None, ""), ("", ""), ("abc", None), ("no id", None), ("ä", None)]
)
def test_an_id_is_hexadecimal_or_base64_or_none(id_: str | None, hexadecimal: str | None) -> None:
    if hexadecimal is not None:
        assert otlp_json.hexadecimal(id_) == hexadecimal
        return
    with pytest.raises(BadRequest, match="is no trace or span id") as refused:
        otlp_json.hexadecimal(id_)
    assert refused.value.code == "not_otlp"
