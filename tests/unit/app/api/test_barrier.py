"""What another site's page could make a browser send reaches no route, of the API or of an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.domain.errors import BadConfig
from app.listening.barrier import Barrier, reached_as
from app.main import create_app
from app.policy.model import Policy
from app.policy.storage.store import LocalWeights
from app.serving.engine import create_engine
from app.serving.residency import Residency
from app.serving.worker import Limits, Worker
from app.settings import from_environment
from pipelines.commands.running.engine_ports import engine_barrier
from tests.fakes.engines import MemoryEngineLedger
from tests.fakes.gateway import collaborators
from tests.fakes.inbox import MemoryInbox

EVENT = '{"id": "e", "inference_id": "i", "name": "rating", "value": true, "occurred_at": "2026-11-21T12:00:00Z"}'
JSON = {"content-type": "application/json"}
ASKED = '{"policy": "composer", "digest": "d", "messages": [{"role": "user", "content": "x"}], "sampling": {}}'
ROUTES = ("/v1/events", "/v1/chat/completions", "/feedback", "/api/public/scores", "/v1/span_annotations", "/rl/start_session", "/v1/logs")


ALL_ROUTES = [*(("api", path) for path in ROUTES), *(("engine", path) for path in ("/generate", "/count", "/score"))]
LOOKS = {"api": "/v1/models", "engine": "/versions"}
Port = tuple[TestClient, Callable[[], int]]
"""Of a deployment, and how many requests came through to what is behind it."""


class Counting(Worker):
    """A worker that holds nothing and counts who asks it."""

    asked = 0

    def policy(self, digest: str) -> Policy:
        self.asked += 1
        return super().policy(digest)


@pytest.fixture
def port(tmp_path: Path) -> Callable[..., Port]:
    """What answers as `api` or `engine`, behind a barrier."""

    def made(whose: str, barrier: Barrier | None = None) -> Port:
        if whose == "api":
            client, inbox = service(barrier)
            return client, lambda: len(inbox.events)
        worker = Counting(Limits(rows=1))
        engine = create_engine(worker, Residency(worker, MemoryEngineLedger(), LocalWeights(tmp_path)), barrier=barrier)
        return TestClient(engine, base_url="http://127.0.0.1:8401", raise_server_exceptions=False), lambda: worker.asked

    return made


def service(barrier: Barrier | None = None, *, url: str = "http://127.0.0.1:8400") -> tuple[TestClient, MemoryInbox]:
    inbox = MemoryInbox()
    app = create_app(collaborators(inbox=inbox, barrier=barrier or Barrier()))
    return TestClient(app, base_url=url, raise_server_exceptions=False), inbox


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(("whose", "path"), ALL_ROUTES)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None])
def test_a_body_of_a_type_that_browsers_send_without_asking_is_refused(
    port: Callable[..., Port], whose: str, path: str, kind: str | None
) -> None:
    client, came_through = port(whose)
    answer = client.post(path, content=ASKED if whose == "engine" else EVENT, headers={"content-type": kind} if kind else {})
    assert code(answer) == (415, "content_type")
    assert came_through() == 0


@pytest.mark.parametrize(("whose", "path"), ALL_ROUTES)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:3000", "http://127.0.0.1:8400.evil.example", "file://"]
)
def test_another_site_s_page_reaches_no_route_even_with_json(port: Callable[..., Port], whose: str, path: str, origin: str) -> None:
    client, came_through = port(whose)
    body = ASKED if whose == "engine" else EVENT
    assert code(client.post(path, content=body, headers=JSON | {"origin": origin})) == (403, "origin")
    assert code(client.get(LOOKS[whose], headers={"origin": origin})) == (403, "origin")
    assert came_through() == 0


def test_a_gateway_s_own_requests_reach_the_engine(port: Callable[..., Port]) -> None:
    client, came_through = port("engine")
    for path in ("/generate", "/count"):
        assert code(client.post(path, content=ASKED, headers=JSON)) == (404, "weights_not_held")
    assert came_through() == 2


def test_the_service_s_own_pages_and_programs_pass() -> None:
    client, inbox = service()
    assert client.post("/v1/events", content=EVENT, headers=JSON | {"origin": "http://127.0.0.1:8400"}).status_code == 202
    assert client.post("/v1/events", content=EVENT, headers={"content-type": "application/json; charset=utf-8"}).status_code == 202
    assert len(inbox.events) == 1


@pytest.mark.parametrize("whose", ["api", "engine"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8400", "127.0.0.1.evil.example", "10.0.0.7", "localhost.evil.example", ""])
def test_a_foreign_name_that_points_here_is_not_answered(port: Callable[..., Port], whose: str, host: str) -> None:
    client, came_through = port(whose)
    path, body = ("/v1/events", EVENT) if whose == "api" else ("/generate", ASKED)
    assert code(client.post(path, content=body, headers=JSON | {"host": host})) == (421, "host")
    assert code(client.get(LOOKS[whose], headers={"host": host})) == (421, "host")
    assert came_through() == 0


@pytest.mark.parametrize("whose", ["api", "engine"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8400", "localhost:8400", "LOCALHOST", "[::1]:8400", "[::1]"])
def test_this_machine_s_names_are_answered(port: Callable[..., Port], whose: str, host: str) -> None:
    assert port(whose)[0].get(LOOKS[whose], headers={"host": host}).status_code == 200


def test_off_loopback_addresses_and_configured_names_are_answered_and_no_others() -> None:
    client, _ = service(Barrier(hosts=frozenset({"ratchet.example.com"}) | reached_as("0.0.0.0"), loopback=False))
    asked = {
        host: client.get("/status", headers={"host": host}).status_code for host in ("10.1.2.3:8400", "ratchet.example.com", "evil.example")
    }
    assert asked == {"10.1.2.3:8400": 200, "ratchet.example.com": 200, "evil.example": 421}


def test_an_engine_answers_to_what_gateways_are_told_to_call_it(port: Callable[..., Port]) -> None:
    settings = from_environment({"RATCHET_ENGINES": "http://one:8401,http://Two.example:8401", "RATCHET_HOSTS": "three"})
    client, _ = port("engine", engine_barrier(settings, "engine"))
    asked = ("engine:8401", "one:8401", "two.example", "three", "10.1.2.3:8401", "evil.example")
    assert [client.get("/versions", headers={"host": host}).status_code for host in asked] == [200, 200, 200, 200, 200, 421]
    alone, _ = port("engine", engine_barrier(from_environment({}), "127.0.0.1"))
    assert [alone.get("/versions", headers={"host": host}).status_code for host in ("127.0.0.1:8401", "10.1.2.3:8401")] == [200, 421]


def test_nothing_is_shared_with_other_origins_unless_they_are_configured() -> None:
    app_page = "https://app.example.com"
    preflight = {"origin": app_page, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    closed, _ = service()
    refused = closed.options("/v1/events", headers=preflight)
    assert refused.status_code == 403
    assert not [name for name in refused.headers if name.startswith("access-control")]
    opened, inbox = service(Barrier(origins=frozenset({app_page})))
    allowed = opened.options("/v1/events", headers=preflight)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (204, app_page)
    assert "content-type" in allowed.headers["access-control-allow-headers"]
    answer = opened.post("/v1/events", content=EVENT, headers=JSON | {"origin": app_page})
    assert (answer.status_code, answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (202, app_page, "origin")
    assert opened.post("/v1/events", content=EVENT, headers=JSON | {"origin": "https://evil.example"}).status_code == 403
    assert len(inbox.events) == 1


def test_a_link_to_the_console_may_be_followed_and_a_picture_may_not_ask() -> None:
    client, _ = service()
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/status", headers=followed).status_code == 200
    assert client.get("/status", headers=followed | {"sec-fetch-mode": "no-cors"}).status_code == 403
    assert client.post("/v1/events", content=EVENT, headers=JSON | followed).status_code == 403


def test_settings_name_hosts_and_origins_and_refuse_what_is_no_origin() -> None:
    found = from_environment({"RATCHET_HOSTS": "Ratchet.example.com, api", "RATCHET_ORIGINS": "https://app.example.com"})
    assert found.hosts == {"ratchet.example.com", "api"}
    assert found.origins == {"https://app.example.com"}
    for wrong in ("*", "app.example.com", "https://app.example.com/path"):
        with pytest.raises(BadConfig, match="RATCHET_ORIGINS"):
            from_environment({"RATCHET_ORIGINS": wrong})
