"""What the gateway's refusals mean to practice: whether it may be said again, or nothing will come of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.domain.errors import NotFound, RatchetError, Refused, Unavailable
from app.domain.learning.rollouts import Closed, Outcome, Rollout
from pipelines.rollouts.permits import Pressure
from pipelines.rollouts.service import Service, Session, client_of

ROLLOUT = Rollout(id="r", policy="p", taskset="t", task="k", task_hash="h", group="g", attempt=0, harness_hash="x")
SOLVED = Closed(outcome=Outcome.SOLVED, reward=1.0, duration_s=1.0, turns=1)


def service(status: int, text: str) -> Service:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    return Service(lambda headers: httpx.Client(transport=transport, base_url="http://gateway"), "p")


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (429, "slower", Unavailable), (500, "oh", Unavailable), (502, "<html>bad gateway</html>", Unavailable), (503, "", Unavailable),
        (504, "", Unavailable), (404, "no such episode", NotFound), (401, "no key", Refused), (400, "<html>no</html>", Refused),
        (400, '{"error": {"code": "unknown_metric"}}', Refused), (400, '["odd"]', Refused),
    ],
)  # fmt: skip
def test_only_what_may_pass_by_itself_is_said_again(status: int, text: str, kind: type[RatchetError]) -> None:
    with pytest.raises(kind) as raised:
        service(status, text).report(ROLLOUT, "e", SOLVED)
    assert type(raised.value) is kind


def test_a_verdict_that_was_given_before_stands() -> None:
    service(400, '{"error": {"code": "conflict"}}').report(ROLLOUT, "e", SOLVED)


Answer = Callable[[httpx.Request], httpx.Response]


class Heard:
    """A gateway that keeps what it was asked, and answers as it is told."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked, self.timeouts = answer, list[tuple[str, str, Any]](), list[float]()
        self.service = Service(self._connect, "p", key="secret")

    def _connect(self, headers: Mapping[str, str]) -> httpx.Client:
        return client_of("http://gateway", headers, transport=httpx.MockTransport(self._heard))

    def _heard(self, request: httpx.Request) -> httpx.Response:
        said = json.loads(request.content) if request.content else dict(request.url.params)
        self.asked.append((request.url.path, request.headers.get("authorization", ""), said))
        self.timeouts.append(request.extensions["timeout"]["read"])
        return self.answer(request)


def test_a_session_of_practice_is_begun_in_the_name_of_task_and_taskset_and_sampled_by_its_own_key() -> None:
    heard = Heard(lambda request: httpx.Response(200, json={"session_id": "e1", "api_key": "k1"}))
    found = heard.service.begin(replace(ROLLOUT, task="x" * 300))
    assert found == Session(episode="e1", key="k1")
    [(path, key, said)] = heard.asked
    assert (path, key, said["rollout"]) == ("/rl/start_session", "Bearer secret", "t")
    assert said["task_id"] == "t/" + "x" * 198, "200 characters at most"
    with heard.service.sampling(found) as client:
        assert (client.headers["authorization"], client.timeout.read) == ("Bearer k1", 5.0)
    assert heard.timeouts == [30.0]


@pytest.mark.parametrize(
    ("outcome", "name", "value", "policy"),
    [
        (Outcome.SOLVED, "task_success", 0.5, "p"),
        (Outcome.TOOL_ABUSE, "task_success", 0.5, "p"),
        (Outcome.BOX_LOST, "environment_fault", "box_lost", None),
        (Outcome.STALE, "environment_fault", "stale", None),
    ],
)
def test_what_came_of_it_is_the_policy_s_success_or_everybody_s_fault(outcome: Outcome, name: str, value: object, policy: object) -> None:
    heard = Heard(lambda request: httpx.Response(200, json={}))
    heard.service.report(ROLLOUT, "e", replace(SOLVED, outcome=outcome, reward=0.5))
    [(path, _, said)] = heard.asked
    assert (path, said["id"], said["episode_id"]) == ("/feedback", "rollout:r", "e")
    assert (said["metric_name"], said["value"], said.get("policy")) == (name, value, policy)


def test_a_component_s_share_is_told_under_an_id_of_its_own() -> None:
    heard = Heard(lambda request: httpx.Response(200, json={}))
    heard.service.report_component(ROLLOUT, "e", "scout", 0.25)
    assert heard.asked[0][2] == {
        "id": "rollout:r:scout", "metric_name": "task_success", "value": 0.25, "episode_id": "e", "policy": "scout",
    }  # fmt: skip


def test_pressure_is_what_the_gateway_says_within_a_second() -> None:
    heard = Heard(lambda request: httpx.Response(200, json={"first_token_p95_s": 0.5, "waiting": 3}))
    assert heard.service.pressure() == Pressure(first_token_p95_s=0.5, waiting=3)
    assert heard.asked == [("/v1/pressure", "Bearer secret", {"policy": "p"})]
    assert heard.timeouts == [1.0]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(201, json={"first_token_p95_s": 0.5, "waiting": 3}),
        httpx.Response(503, json={"first_token_p95_s": 0.5, "waiting": 3}),
        httpx.Response(200, json={"waiting": 3}),
        httpx.Response(200, json=[3]),
        httpx.Response(200, text="busy"),
    ],
    ids=lambda answer: f"{answer.status_code} {answer.text}",
)
def test_pressure_that_is_not_said_is_not_known(answer: httpx.Response) -> None:
    assert Heard(lambda request: answer).service.pressure() is None


def test_a_gateway_that_does_not_answer_is_away_and_its_pressure_not_known() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("away")

    assert Heard(away).service.pressure() is None
    with pytest.raises(Unavailable, match="check that it runs"):
        Heard(away).service.begin(ROLLOUT)


def test_a_refusal_is_told_with_its_first_three_hundred_characters() -> None:
    with pytest.raises(Refused) as raised:
        service(400, "x" * 301).report(ROLLOUT, "e", SOLVED)
    assert str(raised.value) == f"the gateway refused /feedback with 400: {'x' * 300}"
    with pytest.raises(Refused):
        service(400, "no JSON").begin(ROLLOUT)
    service(399, "{}").report(ROLLOUT, "e", SOLVED)


def test_an_open_service_is_asked_without_a_key() -> None:
    heard = Heard(lambda request: httpx.Response(200, json={}))
    heard.service.key = None
    heard.service.report(ROLLOUT, "e", SOLVED)
    assert heard.asked[0][1] == ""
