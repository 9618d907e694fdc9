"""Events and scores of others that are not what they should be: each is refused by itself, and none is read as its opposite."""

from typing import Any

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.db.ingestion.inbox import SqlInbox
from app.domain.telemetry.events import EventType
from app.main import create_app
from tests.fakes.gateway import collaborators
from tests.unit.app.api.test_dialects_by_hand import imported, said, service


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (EventType.RETRACTION, {"observation_id": "a\x00b"}),
        (EventType.TURN, imported(source="import:" + "x" * 300)["data"]),
    ],
)
def test_an_event_that_no_row_can_hold_does_not_refuse_those_beside_it(sqlite_engine: Engine, kind: str, data: dict[str, Any]) -> None:
    inbox = SqlInbox(sqlite_engine, free_bytes=lambda: 1 << 40)
    client = TestClient(create_app(collaborators(inbox=inbox)), raise_server_exceptions=False)
    good = [{"name": "rating", "value": True, "inference_id": f"t{n}", "id": f"o{n}"} for n in range(3)]
    answer = client.post("/v1/events", json=[*good, {"specversion": "1.0", "id": "r", "source": "api", "type": kind, "data": data}])
    inbox.close()
    assert [one["status"] for one in answer.json()["results"]] == ["accepted"] * 3 + ["rejected"]


@pytest.mark.parametrize(
    ("value", "meant"), [("false", False), ("False", False), ("true", True), (0, False), (1, True), (False, False), (True, True)]
)
def test_a_boolean_of_langfuse_is_what_it_says(value: Any, *, meant: bool) -> None:
    client, inbox = service()
    score = {"id": "s", "name": "thumb", "value": value, "dataType": "BOOLEAN", "traceId": "t1"}
    assert client.post("/api/public/scores", json=score).status_code == 200
    assert [one.value for one in said(inbox)] == [meant]


def test_a_boolean_of_langfuse_that_says_neither_is_refused() -> None:
    client, inbox = service()
    score = {"id": "s", "name": "thumb", "value": "perhaps", "dataType": "BOOLEAN", "traceId": "t1"}
    refused = client.post("/api/public/scores", json=score)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "value")
    assert said(inbox) == []
