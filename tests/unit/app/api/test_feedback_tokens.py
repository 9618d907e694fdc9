"""Tokens of answers: one answer, one voice, a week, and nothing else."""

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.api.entry.access import Access
from app.api.entry.feedback_tokens import FEEDBACK_S, FeedbackTokens
from app.api.entry.sessions import Sessions
from app.domain.access import Scope
from app.domain.errors import Overloaded
from app.domain.telemetry.events import EventType, Observation
from app.main import create_app
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import MemoryKeys, collaborators, events_of
from tests.fakes.inbox import MemoryInbox

CHAT = {"model": "composer", "messages": [{"role": "user", "content": "x"}]}


class Service:
    """A closed service with one key, and a clock."""

    def __init__(self) -> None:
        self.inbox, self.keys, self.clock = MemoryInbox(), MemoryKeys(), FrozenClock()
        self.key = self.keys.add(Scope.INGEST)
        self.app = create_app(collaborators(inbox=self.inbox, keys=self.keys, clock=self.clock))
        self.client = TestClient(self.app, raise_server_exceptions=False)

    def answer(self, **body: Any) -> dict[str, Any]:
        return self.client.post("/v1/chat/completions", json=CHAT | body, headers=bearer(self.key)).json()

    def say(self, token: str, **body: Any) -> Any:
        self.clock.advance(1)
        return self.client.post("/feedback", json={"metric_name": "rating", "value": True} | body, headers=bearer(token))

    def heard(self) -> list[Observation]:
        return [msgspec.json.decode(event.data, type=Observation) for event in events_of(self.inbox, EventType.OBSERVATION)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_browser_rates_the_answer_it_was_given_with_its_token_and_nothing_else() -> None:
    service = Service()
    answer = service.answer()
    said = service.say(answer["feedback_token"])
    assert said.status_code == 200
    (heard,) = service.heard()
    assert (heard.inference_id, heard.name, heard.value, heard.policy) == (answer["id"], "rating", True, "composer")
    assert (heard.id, heard.actor, heard.source) == (said.json()["feedback_id"], None, "sdk:browser@composer")
    others = ["/v1/chat/completions", "/v1/events", "/api/public/scores"]
    assert {service.client.post(path, json=CHAT, headers=bearer(answer["feedback_token"])).status_code for path in others} == {401}
    assert service.client.get("/v1/observations", headers=bearer(answer["feedback_token"])).status_code == 401


@pytest.mark.parametrize(
    "more",
    [
        {"inference_id": "another"}, {"inference_id": None, "episode_id": "e"}, {"metric_name": "task_success"},
        {"metric_name": "edit_persistence", "value": {}}, {"actor": "somebody"}, {"id": "x"}, {"occurred_at": "2026-11-21T12:00:00Z"},
    ],
)  # fmt: skip
def test_a_token_speaks_of_its_answer_as_a_person_does_and_chooses_neither_rater_nor_time(more: dict[str, Any]) -> None:
    service = Service()
    assert service.say(service.answer()["feedback_token"], **more).status_code == 400
    assert service.heard() == []


def test_a_token_is_one_voice_however_often_it_is_used() -> None:
    service = Service()
    token = service.answer()["feedback_token"]
    for value in (True, True, False, True):
        assert service.say(token, value=value).status_code == 200
    taken_back = {event.id.removesuffix(":retracted") for event in events_of(service.inbox, EventType.RETRACTION)}
    standing = [heard.value for heard in service.heard() if heard.id not in taken_back]
    assert standing == [True]
    name = next(heard.id for heard in service.heard()).partition("#")[0]
    service.clock.advance(1)
    assert service.client.delete(f"/feedback/{name}", headers=bearer(token)).status_code == 200
    taken_back = {event.id.removesuffix(":retracted") for event in events_of(service.inbox, EventType.RETRACTION)}
    assert [heard for heard in service.heard() if heard.id not in taken_back] == []


def test_a_token_takes_back_nothing_that_others_said() -> None:
    service = Service()
    mine, other = service.answer()["feedback_token"], service.answer()
    assert service.client.delete(f"/feedback/ft:{other['id']}:rating", headers=bearer(mine)).status_code == 400
    assert events_of(service.inbox, EventType.RETRACTION) == []


def test_a_token_ends_after_a_week_and_a_changed_one_is_none() -> None:
    service = Service()
    token = service.answer()["feedback_token"]
    body, _, signature = token.partition(".")
    for wrong in (f"{body}x.{signature}", f"{body}.{'0' * 64}", "ft_", "ft_.", token.replace("ft_", "rs_")):
        assert service.say(wrong).status_code == 401
    service.clock.now += timedelta(seconds=FEEDBACK_S - 10)
    assert service.say(token).status_code == 200
    service.clock.now += timedelta(seconds=10)
    assert service.say(token).status_code == 401


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_token_speaks_no_longer_than_the_key_with_which_its_answer_was_asked_for(how: str) -> None:
    """Who took a key has as many tokens as he asked answers: they end with it."""
    service = Service()
    other = service.keys.add(Scope.INGEST, expires_at=service.clock() + timedelta(hours=1))
    asyncio.run(service.app.state.access.reread())
    by = {key: service.client.post("/v1/chat/completions", json=CHAT, headers=bearer(key)).json() for key in (service.key, other)}
    assert [service.say(by[key]["feedback_token"]).status_code for key in by] == [200, 200]
    if how == "revoked":
        service.keys.keys = service.keys.keys[:1]
        asyncio.run(service.app.state.access.reread())
    else:
        service.clock.now += timedelta(hours=2)
    ended = service.say(by[other]["feedback_token"])
    assert (ended.status_code, "has ended" in ended.json()["error"]["message"]) == (401, True)
    assert service.say(by[service.key]["feedback_token"]).status_code == 200


def test_a_session_s_answers_speak_as_long_as_the_key_that_started_it() -> None:
    service = Service()
    session = service.client.post("/rl/start_session", json={"task_id": "t"}, headers=bearer(service.key)).json()
    answer = service.client.post("/v1/chat/completions", json=CHAT, headers=bearer(session["api_key"])).json()
    assert "feedback_token" not in answer, "an agent at work is given none"


def test_feedback_says_what_is_left_of_its_answer_s_rate() -> None:
    service = Service()
    said = service.say(service.answer()["feedback_token"])
    assert (said.headers["ratelimit-limit"], said.headers["ratelimit-remaining"]) == ("10", "9")


def test_an_impatient_thumb_is_heard_ten_times_a_second_about_one_answer() -> None:
    service, now = Service(), [100.0]
    sessions = Sessions(lambda: ("a session secret",))
    access = Access(service.keys, clock=service.clock, sessions=sessions, monotonic=lambda: now[0])
    tokens = [FeedbackTokens(sessions.secrets).issue(name, policy="composer", now=service.clock()) for name in ("a", "b")]

    def heard(token: str) -> int:
        for count in range(99):
            try:
                asyncio.run(access.answered({b"authorization": f"Bearer {token}".encode()}))
            except Overloaded:
                return count
        return 99

    assert [heard(tokens[0]), heard(tokens[0]), heard(tokens[1])] == [10, 0, 10]
    now[0] += 0.5
    assert heard(tokens[0]) == 5


def test_an_open_service_takes_no_wrong_token_either() -> None:
    client = TestClient(create_app(collaborators()), raise_server_exceptions=False)
    said = client.post("/feedback", json={"metric_name": "rating", "value": True, "inference_id": "i"}, headers=bearer("ft_x.y"))
    assert said.status_code == 401


def test_what_is_not_recorded_has_no_token() -> None:
    assert "feedback_token" not in Service().answer(**{"tensorzero::dryrun": True})


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413)])
def test_what_a_browser_says_is_at_most_16_kib(more: int, status: int) -> None:
    service = Service()
    token = service.answer()["feedback_token"]
    body = b'{"metric_name": "rating", "value": true}'
    padded = body + b" " * (16 * 1024 - len(body) + more)
    service.clock.advance(1)
    said = service.client.post("/feedback", content=padded, headers=bearer(token) | {"content-type": "application/json"})
    assert said.status_code == status
    assert len(service.heard()) == (status == 200)
