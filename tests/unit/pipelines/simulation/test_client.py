"""The product's side of the public API by hand: what it asks, what it makes of an answer, and how long it keeps what people did."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import httpx
import openai
import pytest

from pipelines.simulation.client import BATCH_EVENTS, Answer, Service, observation
from tests.unit.pipelines.simulation.test_traffic import NOON, Hasty

T = TypeVar("T")
Reply = Callable[[httpx.Request], httpx.Response]
ANSWER = Answer(inference_id="i", episode_id="e", text="x", version="v", received_at=NOON)


def used(answer: Reply, act: Callable[[Service], Awaitable[T]]) -> tuple[T, list[httpx.Request], list[float]]:
    """What the product gets of a service that a test plays, what it sent, and how long it would have waited."""
    asked: list[httpx.Request] = []
    loop = Hasty()

    def heard(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer(request)

    async def inside() -> T:
        service = Service("http://service", api_key="secret", policy="composer", max_tokens=48)
        headers, transport = service._http.headers, httpx.MockTransport(heard)
        await service.close()
        service._http = httpx.AsyncClient(base_url="http://service", headers=headers, transport=transport)
        service._openai = openai.AsyncOpenAI(
            base_url="http://service/v1", api_key="secret", max_retries=0, http_client=cast("Any", httpx.AsyncClient(transport=transport))
        )
        sending = asyncio.create_task(service.send())
        try:
            return await act(service)
        finally:
            sending.cancel()
            await service.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(inside()), asked, loop.waited


def completion(**changes: Any) -> Reply:
    message = {"role": "assistant", "content": "    return 1"}
    said: dict[str, Any] = {
        "id": "turn-1", "object": "chat.completion", "created": 1, "model": "composer", "system_fingerprint": "v2", "episode_id": "e-1",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
    }  # fmt: skip
    return lambda _: httpx.Response(200, json=said | changes)


def asks(service: Service) -> Awaitable[Answer]:
    return service.complete([{"role": "user", "content": "?"}], user="dev", metadata={"tier": "free"}, consent=False)


def test_a_question_says_who_asks_whether_it_may_be_kept_and_draws_from_the_model_as_it_is() -> None:
    answer, [asked], _ = used(completion(), asks)
    assert (answer.inference_id, answer.episode_id, answer.text, answer.version) == ("turn-1", "e-1", "    return 1", "v2")
    assert datetime.now(UTC) - answer.received_at < timedelta(minutes=5)
    assert json.loads(asked.content) == {
        "model": "composer", "messages": [{"role": "user", "content": "?"}], "user": "dev", "metadata": {"tier": "free"}, "store": False,
        "max_tokens": 48, "temperature": 1.0,
    }  # fmt: skip
    assert (asked.url.path, asked.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")


@pytest.mark.parametrize(("content", "text"), [(None, ""), ("a\0b", "ab")])
def test_an_answer_without_words_is_empty_and_no_nought_gets_into_a_file(content: str | None, text: str) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    assert used(completion(choices=[choice]), asks)[0].text == text


def test_a_service_that_is_not_ours_names_neither_version_nor_episode() -> None:
    def other(_: httpx.Request) -> httpx.Response:
        said = json.loads(completion()(_).content)
        del said["episode_id"], said["system_fingerprint"]
        return httpx.Response(200, json=said)

    answer, _, _ = used(other, asks)
    assert (answer.episode_id, answer.version) == ("", None)


def test_a_refusal_is_raised_and_not_asked_again() -> None:
    asked: list[int] = []

    def full(_: httpx.Request) -> httpx.Response:
        asked.append(1)
        return httpx.Response(429, json={})

    with pytest.raises(openai.RateLimitError):
        used(full, asks)
    assert asked == [1]


def events(count: int) -> list[dict[str, Any]]:
    return [observation(ANSWER, "rating", 1, person="p", suffix=f"-{number}") for number in range(count)]


def took(request: httpx.Request) -> httpx.Response:
    return httpx.Response(202, json={"results": [{"id": event["id"], "status": "accepted"} for event in json.loads(request.content)]})


def test_what_several_people_did_goes_together_a_moment_later_and_two_hundred_at_a_time() -> None:
    async def both(service: Service) -> list[list[str]]:
        return [*await asyncio.gather(service.report(events(BATCH_EVENTS)), service.report(events(1)))]

    (first, second), asked, waited = used(took, both)
    assert (len(first), second) == (200, ["i-rating-0"])
    assert [len(json.loads(request.content)) for request in asked] == [200, 1]
    assert [(request.url.path, request.headers["authorization"]) for request in asked] == [("/v1/events", "Bearer secret")] * 2
    assert waited == [0.1]


@pytest.mark.parametrize(
    ("busy", "pause_s", "given_up"),
    [
        (httpx.Response(503), 0.5, False), (httpx.Response(429, headers={"Retry-After": "2.5"}), 2.5, False),
        (httpx.Response(500, headers={"Retry-After": "59"}), 59.0, False), (httpx.Response(503, headers={"Retry-After": "61"}), None, True),
        (None, 0.5, False),
    ],
)  # fmt: skip
def test_events_are_kept_for_a_minute_while_the_service_is_busy_or_away(
    busy: httpx.Response | None, pause_s: float | None, given_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = [busy]

    def answer(request: httpx.Request) -> httpx.Response:
        if not refusals:
            return took(request)
        refusals.pop()
        if busy is None:
            raise httpx.ConnectError("refused")
        return busy

    accepted, asked, waited = used(answer, lambda service: service.report(events(2)))
    assert (accepted, len(asked)) == (([], 1) if given_up else (["i-rating-0", "i-rating-1"], 2))
    assert waited[1:] == ([] if pause_s is None else [pause_s])
    assert ("gave up on 2 events: 503 " in caplog.text) is given_up


@pytest.mark.parametrize(("status", "counts"), [("accepted", True), ("duplicate", True), ("rejected", False), ("conflict", False)])
@pytest.mark.parametrize("code", [202, 422])
def test_an_event_is_there_where_the_service_says_so_of_it(status: str, counts: bool, code: int, caplog: pytest.LogCaptureFixture) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        results = [{"id": "i-rating-0", "status": status}, {"id": "i-rating-1", "status": "accepted"}]
        return httpx.Response(code, json={"results": results})

    with caplog.at_level(logging.WARNING):
        accepted, _, _ = used(answer, lambda service: service.report(events(2)))
    assert accepted == [*(["i-rating-0"] * counts), "i-rating-1"]
    assert ("the service refused an event" in caplog.text) is not counts


def test_an_observation_says_of_which_turn_it_is_and_when_and_whose() -> None:
    made = observation(ANSWER, "undo", True, person="dev-1", suffix="-2")
    moment = datetime.fromisoformat(made.pop("occurred_at"))
    assert made == {"id": "i-undo-2", "inference_id": "i", "name": "undo", "value": True, "actor": "dev-1"}
    assert timedelta(0) <= datetime.now(UTC) - moment < timedelta(minutes=5)
