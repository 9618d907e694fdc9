"""A key that is good for one policy neither speaks about another policy's turns nor reads anything of it."""

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.api.chat.conversations import Conversations
from app.domain.access import Scope
from app.domain.release.assignment import Arm
from app.domain.telemetry.events import EventType, Observation, Retraction
from app.main import create_app
from tests.fakes.gateway import CHAMPION, FixedRoutes, MemoryEpisodes, MemoryKeys, collaborators, events_of, policy_config
from tests.fakes.inbox import MemoryInbox

EVENT = {"id": "e", "inference_id": "i", "name": "undo", "value": True, "occurred_at": "2026-11-21T12:00:00Z"}


class Tenants:
    """A service with the policies composer and tab, and a key for each that may do everything there."""

    def __init__(self) -> None:
        self.inbox, keys = MemoryInbox(), MemoryKeys()
        self.composer, self.tab = (keys.add(*Scope, policy=policy) for policy in ("composer", "tab"))
        policies = {"composer": policy_config(), "tab": policy_config()}
        app = create_app(collaborators(inbox=self.inbox, keys=keys, policies=policies, routes=FixedRoutes("composer", "tab")))
        self.client = TestClient(app, raise_server_exceptions=False)

    def ask(self, method: str, path: str, key: str, **more: Any) -> Any:
        return self.client.request(method, path, headers={"x-api-key": key}, **more)

    def stored(self, kind: EventType, shape: type[Any]) -> list[Any]:
        return [msgspec.json.decode(event.data, type=shape) for event in events_of(self.inbox, kind)]


@pytest.fixture
def tenants() -> Tenants:
    return Tenants()


def test_what_a_key_says_carries_its_policy_to_where_the_turn_is_met(tenants: Tenants) -> None:
    assert tenants.ask("POST", "/v1/events", tenants.tab, json=EVENT).status_code == 202
    feedback = {"metric_name": "undo", "value": True, "inference_id": "i", "id": "f"}
    assert tenants.ask("POST", "/feedback", tenants.tab, json=feedback).status_code == 200
    said = tenants.stored(EventType.OBSERVATION, Observation)
    assert [(o.id, o.policy, o.source) for o in said] == [("e", "tab", "api@tab"), ("f", "tab", "api@tab")]
    assert tenants.ask("POST", "/v1/events", tenants.tab, json=EVENT | {"id": "e2", "policy": "composer"}).status_code == 422


@pytest.mark.parametrize("claimed", ["api@composer", "sdk:vim@composer", "api@"])
def test_no_key_takes_back_or_says_anything_under_another_policy_s_name(tenants: Tenants, claimed: str) -> None:
    assert tenants.ask("POST", "/v1/events", tenants.composer, json=EVENT).status_code == 202
    envelope = {"specversion": "1.0", "id": "r", "source": "api", "type": EventType.RETRACTION}
    retraction = envelope | {"data": {"observation_id": "e", "source": claimed}}
    said = tenants.ask("POST", "/v1/events", tenants.tab, json=[retraction, EVENT | {"id": "x", "source": claimed}])
    stored = tenants.stored(EventType.RETRACTION, Retraction) + tenants.stored(EventType.OBSERVATION, Observation)
    assert said.status_code == 422
    assert [(found.source, getattr(found, "id", "")) for found in stored] == [("api@composer", "e")]
    assert tenants.ask("DELETE", "/feedback/e", tenants.tab).status_code == 200
    assert [found.source for found in tenants.stored(EventType.RETRACTION, Retraction)] == ["api@tab"]


def test_a_key_reads_its_own_policy_in_models_metrics_and_errors(tenants: Tenants) -> None:
    models = tenants.ask("GET", "/v1/models", tenants.tab).json()["data"]
    assert [model["id"] for model in models] == ["tab"]
    chat = {"model": "tab", "messages": [{"role": "user", "content": "x"}]}
    tenants.ask("POST", "/v1/chat/completions", tenants.tab, json=chat)
    tenants.ask("POST", "/v1/chat/completions", tenants.composer, json=chat | {"model": "composer"})
    lines = tenants.ask("GET", "/metrics", tenants.tab).text.splitlines()
    series = [line for line in lines if line and not line.startswith("#")]
    assert series
    assert all('policy="tab"' in line for line in series), "sums over all policies tell about the others too"
    for path in ("/v1/labels/report?policy=composer", "/v1/policies/composer/attribution", "/v1/runs?policy=composer"):
        assert "composer" not in tenants.ask("GET", path, tenants.tab).text.replace("'composer'", "", 1), path
    unknown = tenants.ask("POST", "/v1/chat/completions", tenants.tab, json=chat | {"model": "nobody"})
    assert (unknown.status_code, "composer" in unknown.text) == (403, False)


def test_an_episode_s_conversation_belongs_to_the_policy_that_held_it() -> None:
    async def story() -> None:
        known = Conversations(MemoryEpisodes())
        arm = Arm(digest=CHAMPION, release_id=None, stage="champion", arm="champion", probability=1.0, share=0.0, holdback=0.0)
        known.remember("e", policy="composer", arm=arm, inference_id="1")
        assert await known.find("e", "tab") is None
        known.remember("e", policy="tab", arm=arm, inference_id="2")
        found = await known.find("e", "composer")
        assert found is not None
        assert found.last_inference_id == "1"
        assert await known.last_inference("e", ["composer", "tab"]) == "2"
        assert await known.last_inference("e", ["composer"]) == "1"
        known.forget("e", "tab")
        assert await known.last_inference("e", ["composer", "tab"]) == "1"

    asyncio.run(story())
