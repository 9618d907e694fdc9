"""Scores that are taken back and given again, and set back to what they were: what was said last stands."""

from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.domain.telemetry.events import RETRACTED, EventType, Observation
from app.main import create_app
from tests.fakes.gateway import collaborators, events_of
from tests.fakes.inbox import MemoryInbox
from tests.unit.app.api.test_feedback_tokens import Service, bearer

SCORE: dict[str, Any] = {"id": "s1", "name": "thumbs_up", "traceId": "t1"}


def told(inbox: MemoryInbox) -> list[Observation]:
    return [msgspec.json.decode(event.data, type=Observation) for event in events_of(inbox, EventType.OBSERVATION)]


class Langfuse:
    """A client of Langfuse's kind, whose scores come alone or in batches."""

    def __init__(self, *, batched: bool) -> None:
        self.inbox, self._batched = MemoryInbox(), batched
        self._client = TestClient(create_app(collaborators(inbox=self.inbox)), raise_server_exceptions=False)

    def say(self, value: int, **more: Any) -> None:
        score = SCORE | {"value": value} | more
        assert self._client.post("/api/public/scores", json=[score] if self._batched else score).is_success

    def take_back(self) -> None:
        assert self._client.delete("/api/public/scores/s1").is_success

    @property
    def standing(self) -> list[Any]:
        gone = {event.id.removesuffix(RETRACTED) for event in events_of(self.inbox, EventType.RETRACTION)}
        return [one.value for one in told(self.inbox) if one.id not in gone]


@pytest.mark.parametrize("batched", [False, True])
def test_a_score_that_is_given_again_after_it_was_taken_back_stands(*, batched: bool) -> None:
    client = Langfuse(batched=batched)
    for _ in range(3):
        client.say(1)
        client.say(1)
        assert client.standing == [True]
        client.take_back()
        assert client.standing == []
    client.say(0)
    assert client.standing == [False]


@pytest.mark.parametrize("batched", [False, True])
def test_a_score_that_is_set_back_to_what_it_was_is_that_again(*, batched: bool) -> None:
    client = Langfuse(batched=batched)
    for value in (1, 0, 1, 1, 0):
        client.say(value)
        assert client.standing == [bool(value)]


@pytest.mark.parametrize("batched", [False, True])
def test_a_score_with_a_time_that_is_sent_again_with_it_is_a_repetition(*, batched: bool) -> None:
    client = Langfuse(batched=batched)
    early, late = {"timestamp": "2026-11-21T10:00:00Z"}, {"timestamp": "2026-11-21T10:00:01Z"}
    client.say(1, **early)
    client.say(0, **late)
    client.say(1, **early)
    assert client.standing == [False], "a retry that comes late takes nothing back"
    client.take_back()
    client.say(0, **late)
    assert client.standing == []


def test_a_thumb_that_a_browser_takes_back_and_gives_again_stands() -> None:
    service = Service()
    token = service.answer()["feedback_token"]
    for _ in range(2):
        name = service.say(token, value=True).json()["feedback_id"]
        gone = {event.id.removesuffix(RETRACTED) for event in events_of(service.inbox, EventType.RETRACTION)}
        assert [heard.value for heard in service.heard() if heard.id not in gone] == [True]
        service.clock.advance(1)
        assert service.client.delete(f"/feedback/{name}", headers=bearer(token)).status_code == 200
