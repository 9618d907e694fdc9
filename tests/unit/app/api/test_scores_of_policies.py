"""What a score means where policies declare their signals differently: what its own policy says."""

from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.domain.access import Scope
from app.domain.policies import Direction, Level, SignalConfig, SignalType
from app.domain.telemetry.events import EventType, Observation
from app.main import create_app
from tests.fakes import gateway
from tests.fakes.inbox import MemoryInbox

STARS = SignalConfig(type=SignalType.FLOAT, low=1.0, high=5.0)
UNIT = SignalConfig(type=SignalType.FLOAT, low=0.0, high=1.0)
PLAIN: dict[str, SignalConfig] = {}
DECLARING = {"rating": STARS, "reward": SignalConfig(type=SignalType.FLOAT), "user_score": UNIT}
Signals = dict[str, SignalConfig]


class Service:
    """Two policies and a key, of one of them or of none."""

    def __init__(self, *, of: str | None, composer: Signals, tab: Signals) -> None:
        self.inbox, keys = MemoryInbox(), gateway.MemoryKeys()
        key = keys.add(Scope.INGEST, policy=of)
        policies = {"composer": gateway.policy_config(signals=composer), "tab": gateway.policy_config(signals=tab)}
        made = create_app(gateway.collaborators(inbox=self.inbox, keys=keys, policies=policies, routes=gateway.FixedRoutes(*policies)))
        self.client = TestClient(made, raise_server_exceptions=False, headers={"authorization": f"Bearer {key}"})

    def langfuse(self, name: str, value: Any) -> int:
        score = {"id": f"{name}-{value}", "name": name, "value": value, "traceId": "t1"}
        one = self.client.post("/api/public/scores", json=score)
        assert self.client.post("/api/public/scores", json=[score]).is_success == one.is_success, "alone or in a batch"
        return one.status_code

    def event(self, **said: Any) -> dict[str, Any]:
        return self.client.post("/v1/events", json={"inference_id": "t1"} | said).json()["results"][0]

    @property
    def said(self) -> list[tuple[str, Any]]:
        events = gateway.events_of(self.inbox, EventType.OBSERVATION)
        return [(one.name, one.value) for one in (msgspec.json.decode(event.data, type=Observation) for event in events)]


def test_a_key_of_one_policy_speaks_in_what_that_policy_declares() -> None:
    plain = Service(of="composer", composer=PLAIN, tab=DECLARING)
    assert [plain.langfuse("thumbs_up", 0), plain.langfuse("rating", 0), plain.langfuse("user_score", 1)] == [200] * 3
    assert (plain.langfuse("user_score", 0.2), plain.event(name="rating", value=5)["status"]) == (400, "rejected")
    assert plain.client.post("/rl/set_reward", json={"reward": 0.5, "interaction_id": "t1"}).status_code == 200
    assert plain.said == [("rating", False), ("rating", False), ("rating", True), ("rating", 0.5)]
    assert [type(value) for _, value in plain.said] == [bool, bool, bool, float]
    declaring = Service(of="tab", composer=PLAIN, tab=DECLARING)
    assert [declaring.langfuse("thumbs_up", 4), declaring.langfuse("user_score", 0.2)] == [200, 200]
    assert declaring.langfuse("rating", 4) == 200
    assert declaring.client.post("/rl/set_reward", json={"reward": 0.5, "interaction_id": "t1"}).status_code == 200
    assert declaring.said == [("rating", 4), ("user_score", 0.2), ("rating", 4), ("reward", 0.5)]


def test_a_key_of_no_policy_is_asked_which_one_it_means_where_that_makes_a_difference() -> None:
    service = Service(of=None, composer={"quality": UNIT}, tab=DECLARING | {"quality": SignalConfig(type=SignalType.TEXT)})
    for name, value in (("rating", 1), ("rating", 0.5), ("quality", 1.0), ("quality", "good")):
        refused = service.event(name=name, value=value)
        assert (refused["status"], refused["param"], refused["code"]) == ("rejected", "policy", "ambiguous")
        assert "name one in `policy`, or use a key of one" in refused["reason"]
    assert [service.langfuse(name, value) for name, value in (("thumbs_up", 0), ("user_score", 1), ("rating", 0.5))] == [400] * 3
    reward = service.client.post("/rl/set_reward", json={"reward": 0.5, "interaction_id": "t1"})
    assert (reward.status_code, reward.json()["error"]["param"]) == (400, "policy")
    assert service.said == []
    for named in ({"policy": "tab", "name": "rating", "value": 5}, {"policy": "composer", "name": "rating", "value": 0.5}):
        assert service.event(**named)["status"] == "accepted"


@pytest.mark.parametrize(
    ("name", "value"), [("rating", True), ("reward", 0.5), ("undo", True), ("comment", "so"), ("task_success", 1), ("user_score", 0.2)]
)
def test_a_key_of_no_policy_is_not_asked_where_it_makes_none(name: str, value: Any) -> None:
    service = Service(of=None, composer=PLAIN, tab=DECLARING)
    assert service.event(name=name, value=value)["status"] == "accepted"


def test_declarations_differ_by_how_a_value_is_read_and_not_by_what_it_is_worth() -> None:
    for changes, accepted in ({"optimize": Direction.DOWN}, True), ({"level": Level.EPISODE}, False), ({"high": 2.0}, False):
        service = Service(of=None, composer={"speed": UNIT}, tab={"speed": msgspec.structs.replace(UNIT, **changes)})
        assert (service.event(name="speed", value=1)["status"] == "accepted") is accepted
        assert (service.langfuse("speed", 1) == 200) is accepted
