"""Keys of sessions: one episode, sampling only, no longer than the key they were made with."""

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.entry.access import Access
from app.api.entry.sessions import SESSION_S, Sessions
from app.domain.access import Scope
from app.domain.errors import Overloaded, RatchetError
from app.main import create_app
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import MemoryKeys, collaborators, policy_config
from tests.fakes.inbox import MemoryInbox

SESSIONS = Sessions(lambda: ("a session secret",))
EVENT = {"id": "e", "inference_id": "i", "name": "undo", "value": True, "occurred_at": "2026-11-21T12:00:00Z"}


def service(keys: MemoryKeys, **changes: Any) -> tuple[TestClient, MemoryInbox]:
    inbox = MemoryInbox()
    app = create_app(collaborators(inbox=inbox, keys=keys, **changes))
    return TestClient(app, raise_server_exceptions=False), inbox


def headers(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


CHAT = {"model": "composer", "messages": [{"role": "user", "content": "x"}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def started(client: TestClient, key: str) -> dict[str, str]:
    answer = client.post("/rl/start_session", json={"task_id": "t"}, headers=bearer(key))
    assert answer.status_code == 200
    return answer.json()


def test_a_session_key_samples_its_episode_and_cannot_reward_itself() -> None:
    keys = MemoryKeys()
    parent = keys.add(Scope.INGEST)
    client, inbox = service(keys)
    session = started(client, parent)
    mine = bearer(session["api_key"])
    answered = client.post("/v1/chat/completions", json=CHAT, headers=mine)
    assert (answered.status_code, answered.json()["episode_id"]) == (200, session["session_id"])
    turn = answered.json()["id"]
    before = len(inbox.events)
    rewards: list[tuple[str, str, Any]] = [
        ("POST", "/v1/events", EVENT | {"inference_id": turn, "name": "rating", "value": 1.0}),
        ("POST", "/feedback", {"metric_name": "rating", "value": 1.0, "inference_id": turn}),
        ("POST", "/rl/set_reward", {"reward": 1.0, "session_id": session["session_id"]}),
        ("POST", "/rl/set_reward", {"reward": 1.0, "interaction_id": turn}),
        ("POST", "/api/public/scores", {"name": "rating", "value": 1.0, "traceId": turn}),
        ("POST", "/v1/span_annotations", {"data": []}),
        ("POST", "/v1/logs", {}),
        ("POST", f"/api/3.0/mlflow/traces/{turn}/assessments", {"assessment": {}}),
        ("POST", "/rl/start_session", {"task_id": "another"}),
        ("DELETE", "/feedback/x", None),
    ]
    refused = [client.request(method, path, json=body, headers=mine).status_code for method, path, body in rewards]
    assert refused == [403] * len(rewards)
    assert len(inbox.events) == before
    paid = {"reward": 0.5, "session_id": session["session_id"]}
    assert client.post("/rl/set_reward", json=paid, headers=bearer(parent)).status_code == 200
    assert len(inbox.events) == before + 1


def test_a_session_ends_with_its_time_and_with_the_key_that_started_it() -> None:
    keys, clock = MemoryKeys(), FrozenClock()
    keys.add(Scope.ADMIN)
    lasting = keys.add(Scope.INGEST)
    ending = keys.add(Scope.INGEST, expires_at=clock() + timedelta(hours=1))
    client, _ = service(keys, clock=clock)
    long, short = started(client, lasting)["api_key"], started(client, ending)["api_key"]

    def codes() -> list[int]:
        return [client.post("/v1/chat/completions", json=CHAT, headers=bearer(key)).status_code for key in (long, short)]

    assert codes() == [200, 200]
    clock.advance(3601)
    assert codes() == [200, 401]
    clock.advance(SESSION_S)
    assert codes() == [401, 401]


def test_a_session_does_not_outlive_a_revoked_key() -> None:
    keys = MemoryKeys()
    keys.add(Scope.ADMIN)
    parent = keys.add(Scope.INGEST)
    access = Access(keys, clock=FrozenClock(), sessions=SESSIONS)
    access.load()
    issuer = asyncio.run(access.caller(headers(parent), Scope.INGEST))
    token, _ = access.session_token("episode", issuer)
    session = asyncio.run(access.caller(headers(token), Scope.SAMPLE))
    assert (session.episode_id, session.policy, session.person) == ("episode", None, None)
    keys.keys = keys.keys[:1]
    access.load()
    with pytest.raises(RatchetError, match="session"):
        asyncio.run(access.caller(headers(token), Scope.SAMPLE))


def test_a_session_has_its_parents_policy_and_shares_its_rate() -> None:
    keys = MemoryKeys()
    parent = keys.add(Scope.INGEST, policy="tab", rate_per_s=2)
    client, _ = service(keys, policies={"composer": policy_config(), "tab": policy_config()})
    mine = bearer(started(client, parent)["api_key"])
    assert client.post("/v1/chat/completions", json=CHAT, headers=mine).status_code == 403
    assert client.post("/v1/chat/completions", json=CHAT, headers=mine).status_code == 429


def test_a_session_of_an_unlimited_key_has_a_rate_of_its_own() -> None:
    keys = MemoryKeys()
    parent = keys.add(Scope.INGEST)
    access = Access(keys, clock=FrozenClock(), sessions=SESSIONS, monotonic=lambda: 100.0)
    access.load()
    token, _ = access.session_token("episode", asyncio.run(access.caller(headers(parent), Scope.INGEST)))
    for _ in range(20):
        asyncio.run(access.caller(headers(token), Scope.SAMPLE))
    with pytest.raises(Overloaded):
        asyncio.run(access.caller(headers(token), Scope.SAMPLE))


@pytest.mark.parametrize(("rate_per_s", "said"), [(None, ("20", "19")), (5.0, ("5", "4"))])
def test_a_session_is_told_of_the_rate_that_ends_first(rate_per_s: float | None, said: tuple[str, str]) -> None:
    """Its own of twenty a second, or what is left of its key's."""
    keys = MemoryKeys()
    parent = keys.add(Scope.INGEST, rate_per_s=rate_per_s)
    client, _ = service(keys)
    mine = bearer(started(client, parent)["api_key"])
    if rate_per_s is not None:
        time.sleep(0.3)  # what starting the session took
    answer = client.post("/v1/chat/completions", json=CHAT, headers=mine)
    assert answer.status_code == 200
    assert (answer.headers["ratelimit-limit"], answer.headers["ratelimit-remaining"]) == said


def test_a_session_signed_with_a_public_or_an_older_secret_is_nothing() -> None:
    secrets = ["newest", "the one before"]
    keys, clock = MemoryKeys(), FrozenClock()
    parent = keys.add(Scope.INGEST)
    access = Access(keys, clock=clock, sessions=Sessions(lambda: secrets))
    access.load()

    def accepted(secret: str) -> bool:
        token, _ = Sessions(lambda: [secret]).issue("episode", parent=parent[:11], now=clock())
        try:
            return asyncio.run(access.caller(headers(token), Scope.SAMPLE)).episode_id == "episode"
        except RatchetError:
            return False

    assert [accepted(secret) for secret in ("newest", "the one before", "the one before that", "ratchet-embedded", "salt")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    hostile = ["rs_", "rs_.", "rs_e30.", "rs_!!!." + "0" * 64, "rs_" + "A" * 5000 + "." + "0" * 64]
    for token in hostile:
        with pytest.raises(RatchetError, match="not issued here"):
            asyncio.run(access.caller(headers(token), Scope.SAMPLE))
