"""`POST /v1/events`: one answer per event, nothing stored from what is refused."""

import gzip
import json
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.api.telemetry.intake import Limits
from app.domain.access import Scope
from app.domain.ids import hash_actor
from app.domain.policies import Level, SignalConfig, SignalType
from app.domain.telemetry.events import Observation
from app.main import create_app
from tests.fakes.gateway import MemoryKeys, collaborators, policy_config
from tests.fakes.inbox import MemoryInbox

AT = "2026-11-21T12:00:00Z"


def service(**changes: Any) -> tuple[TestClient, MemoryInbox]:
    inbox = MemoryInbox()
    app = create_app(collaborators(inbox=inbox, **changes))
    return TestClient(app, raise_server_exceptions=False, headers={"content-type": "application/json"}), inbox


def thumb(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {"id": f"e{number}", "inference_id": f"i{number}", "name": "rating", "value": True, "occurred_at": AT} | changes


def results(response: Any) -> list[tuple[str, str | None]]:
    return [(item["status"], item.get("param")) for item in response.json()["results"]]


def test_events_are_answered_one_by_one() -> None:
    client, inbox = service()
    batch = [thumb(1), thumb(1), thumb(1, value=False), thumb(2, valeu=1), thumb(3, name="mood"), thumb(4, value="great")]
    response = client.post("/v1/events", json=batch)
    assert response.status_code == 202
    assert results(response) == [
        ("accepted", None), ("duplicate", None), ("conflict", None), ("rejected", "valeu"), ("rejected", "name"), ("rejected", "value"),
    ]  # fmt: skip
    assert [event.id for event in inbox.events.values()] == ["e1"]


def test_an_answer_says_for_how_long_the_same_event_is_known_again() -> None:
    ways: list[dict[str, Any]] = [{}, {"known_for": timedelta(hours=1)}, {"known_for": None}]
    headers = [service(**way)[0].post("/v1/events", json=thumb()).headers for way in ways]
    assert [answer.get("ratchet-dedupe-seconds") for answer in headers] == [str(30 * 86_400), "3600", None]


def test_a_body_without_a_valid_event_is_a_422() -> None:
    client, inbox = service()
    response = client.post("/v1/events", json=[thumb(1, value=3)])
    assert response.status_code == 422
    assert inbox.events == {}


def test_ndjson_lines_are_events_of_their_own() -> None:
    client, inbox = service()
    body = "\n".join([json.dumps(thumb(1)), "{broken", json.dumps(thumb(2)), ""])
    response = client.post("/v1/events", content=body, headers={"content-type": "application/x-ndjson"})
    assert results(response) == [("accepted", None), ("rejected", None), ("accepted", None)]
    assert len(inbox.events) == 2


def test_the_stored_event_is_what_labelling_reads() -> None:
    client, inbox = service()
    edit = {"horizon_s": 30, "four_gram": 0.8, "no_revert": 1.0}
    client.post("/v1/events", json=thumb(1, name="edit_persistence", value=edit, actor="ada", source="sdk:vim", tags={"a": "b"}))
    (event,) = inbox.events.values()
    observation = msgspec.json.decode(event.data, type=Observation)
    assert (event.source, event.id, event.key) == ("sdk:vim", "e1", "i1")
    assert observation.value == edit
    assert observation.actor == hash_actor("ada", salt="salt")


def test_an_event_without_an_id_is_named_by_its_content() -> None:
    client, inbox = service()
    anonymous = thumb(1)
    del anonymous["id"]
    first, second = (client.post("/v1/events", json=anonymous) for _ in range(2))
    assert (results(first), results(second)) == ([("accepted", None)], [("duplicate", None)])
    assert len(inbox.events) == 1


def test_an_idempotency_key_names_the_events_of_a_batch() -> None:
    client, inbox = service()
    nameless = [{"inference_id": "i1", "name": "undo", "value": True}, {"inference_id": "i2", "name": "undo", "value": True}]
    client.post("/v1/events", json=nameless, headers={"idempotency-key": "k"})
    assert [event.id for event in inbox.events.values()] == ["k:0", "k:1"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"episode_id": "x"}, "inference_id"),
        ({"inference_id": None}, "inference_id"),
        ({"occurred_at": "2026-11-21T12:00:00"}, "occurred_at"),
        ({"occurred_at": "2999-01-01T00:00:00Z"}, "occurred_at"),
        ({"occurred_at": "0001-01-01T00:00:00+14:00"}, "occurred_at"),
        ({"occurred_at": "9999-12-31T23:59:59-14:00"}, "occurred_at"),
        ({"source": "gateway"}, "source"),
        ({"policy": "nobody"}, "policy"),
        ({"name": "edit_persistence", "value": {"horizon_s": 1, "four_gram": 2}}, "value.four_gram"),
        ({"name": "edit_persistence", "value": {"horizon_s": 1, "before": "a", "inserted": "b", "aftre": "c"}}, "value.aftre"),
        ({"name": "follow_up", "value": "nul \x00"}, "value"),
        ({"tags": {"a": 1}}, "tags[...]"),
        ({"tags": {"a": "x\x00"}}, "tags"),
        ({"tags": {"x\x00": "a"}}, "tags"),
        ({"inference_id": "i" * 65}, "inference_id"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], param: str) -> None:
    client, inbox = service()
    response = client.post("/v1/events", json=thumb(1, **changes))
    assert results(response) == [("rejected", param)]
    assert inbox.events == {}


def test_declared_signals_are_checked_by_type_and_level() -> None:
    signals = {"accepted_chars": SignalConfig(type=SignalType.FLOAT, level=Level.EPISODE)}
    client, _ = service(policies={"composer": policy_config(signals=signals)})
    good = {"id": "a", "episode_id": "s", "name": "accepted_chars", "value": 12.5}
    wrong_level = {"id": "b", "inference_id": "i", "name": "accepted_chars", "value": 1.0}
    wrong_type = {"id": "c", "episode_id": "s", "name": "accepted_chars", "value": True}
    response = client.post("/v1/events", json=[good, wrong_level, wrong_type])
    assert results(response) == [("accepted", None), ("rejected", "episode_id"), ("rejected", "value")]


def test_a_score_of_langfuse_on_a_declared_scale_is_taken_as_a_number() -> None:
    scale = SignalConfig(type=SignalType.FLOAT, low=0, high=1)
    stars = SignalConfig(type=SignalType.FLOAT, low=0, high=5)
    client, inbox = service(policies={"composer": policy_config(signals={"user_score": scale, "rating": stars})})
    trace = "0190c2a07fb47f3e9d9b2f3b1c2d3e4f"
    scores = [("user_score", 0), ("user_score", 0.1), ("user_score", 1), ("rating", 4), ("rating", 0), ("thumbs", 1), ("like", True)]
    for number, (name, value) in enumerate(scores):
        body = {"id": f"s{number}", "name": name, "value": value, "traceId": trace}
        assert client.post("/api/public/scores", json=body).status_code == 200, (name, value)
    said = [msgspec.json.decode(event.data, type=Observation) for event in inbox.events.values()]
    assert [(one.name, one.value) for one in said] == [
        ("user_score", 0.0), ("user_score", 0.1), ("user_score", 1.0), ("rating", 4.0), ("rating", 0.0), ("rating", 1.0), ("rating", True),
    ]  # fmt: skip
    assert not any(isinstance(one.value, bool) for one in said[:-1])
    assert client.post("/api/public/scores", json={"id": "x", "name": "rating", "value": 6, "traceId": trace}).status_code == 400


def test_each_limit_holds_to_the_byte() -> None:
    limits = Limits(event_bytes=200, batch_bytes=1000, batch_events=3, depth=3, keys_per_object=4)
    client, inbox = service(limits=limits)
    padded = json.dumps(thumb(1)).encode()
    assert results(client.post("/v1/events", content=padded.ljust(200))) == [("accepted", None)]
    assert results(client.post("/v1/events", content=padded.ljust(201))) == [("rejected", None)]
    whole = json.dumps([thumb(2)]).encode()
    assert client.post("/v1/events", content=whole.ljust(1000)).status_code == 202
    assert client.post("/v1/events", content=whole.ljust(1001)).status_code == 413
    assert client.post("/v1/events", json=[thumb(n) for n in range(3, 6)]).status_code == 202
    assert client.post("/v1/events", json=[thumb(n) for n in range(6, 10)]).status_code == 400
    assert results(client.post("/v1/events", json=thumb(20, tags={str(n): "x" for n in range(4)}))) == [("accepted", None)]
    assert results(client.post("/v1/events", json=thumb(21, tags={str(n): "x" for n in range(5)}))) == [("rejected", "tags")]
    assert len(inbox.events) == 6


def test_a_batch_has_five_hundred_events_and_not_one_more() -> None:
    client, inbox = service()
    assert client.post("/v1/events", json=[thumb(n) for n in range(501)]).json()["error"]["code"] == "too_many_events"
    assert client.post("/v1/events", json=[thumb(n) for n in range(500)]).status_code == 202
    assert len(inbox.events) == 500


def test_gzip_is_read_and_bombs_are_not() -> None:
    client, inbox = service()
    body = gzip.compress(json.dumps([thumb(1)]).encode())
    headers = {"content-encoding": "gzip"}
    assert client.post("/v1/events", content=body, headers=headers).status_code == 202
    assert client.post("/v1/events", content=gzip.compress(b" " * 20_000_000), headers=headers).status_code == 413
    assert client.post("/v1/events", content=gzip.compress(b" " * 1_000_000), headers=headers).status_code == 413  # ratio about 1000
    assert client.post("/v1/events", content=body[:-4], headers=headers).status_code == 400
    assert client.post("/v1/events", content=b"plain", headers=headers).status_code == 400
    assert client.post("/v1/events", content=body, headers={"content-encoding": "br"}).status_code == 415
    assert len(inbox.events) == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 5000, b'{"id":"\xed\xa0\x80"}', b"NaN"])
def test_broken_bodies_are_refused_and_nothing_is_stored(body: bytes) -> None:
    client, inbox = service()
    response = client.post("/v1/events", content=body)
    assert response.status_code in (400, 422)
    assert inbox.events == {}


def test_a_full_inbox_is_a_429_that_says_when_to_come_back() -> None:
    client, inbox = service()
    inbox.refusing = True
    response = client.post("/v1/events", json=thumb())
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_bodies_above_the_bytes_in_flight_are_a_429() -> None:
    client, _ = service(limits=Limits(in_flight_bytes=50))
    assert client.post("/v1/events", json=thumb()).status_code == 429


def test_bytes_in_flight_are_given_back_after_every_kind_of_answer() -> None:
    client, _ = service(limits=Limits(in_flight_bytes=2_000, batch_bytes=1_500, unzipped_bytes=1_800))
    for _ in range(20):
        client.post("/v1/events", json=thumb())
        client.post("/v1/events", content=b"x" * 1_600)
        client.post("/v1/events", content=gzip.compress(b" " * 3_000), headers={"content-encoding": "gzip"})
        client.post("/v1/events", content=b"{")
    assert client.post("/v1/events", json=thumb(99)).status_code == 202
    assert "ratchet_api_in_flight_bytes 0.0" in client.get("/metrics").text


def test_a_key_for_one_policy_writes_to_that_policy_under_names_of_its_own() -> None:
    keys = MemoryKeys()
    bound, free = keys.add(Scope.INGEST, policy="composer"), keys.add(Scope.INGEST)
    client, inbox = service(keys=keys, policies={"composer": policy_config(), "tab": policy_config()})
    mine = client.post("/v1/events", json=thumb(1), headers={"authorization": f"Bearer {bound}"})
    theirs = client.post("/v1/events", json=thumb(1, value=False), headers={"authorization": f"Bearer {free}"})
    assert (results(mine), results(theirs)) == ([("accepted", None)], [("accepted", None)])
    assert set(inbox.events) == {("api@composer", "e1"), ("api", "e1")}
    wrong = client.post("/v1/events", json=thumb(2, policy="tab"), headers={"authorization": f"Bearer {bound}"})
    assert results(wrong) == [("rejected", "policy")]


def test_texts_are_redacted_where_the_policy_asks_for_it() -> None:
    client, inbox = service(policies={"composer": policy_config(redact=True)})
    said = "mail me at ada@example.org please"
    client.post("/v1/events", json=thumb(1, name="follow_up", value=said))
    client.post("/v1/events", json=thumb(2, name="follow_up", value="thanks", tags={"note": said}))
    for event in inbox.events.values():
        assert b"ada@example.org" not in event.data
        assert b"[EMAIL]" in event.data
    assert len(inbox.events) == 2
