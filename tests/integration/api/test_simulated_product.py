"""The simulated product's side of the API: nothing that people did is lost by a service on a bad day, and no more is said than happened."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.domain.errors import Unavailable
from app.domain.telemetry.events import EventType, Observation
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from pipelines.simulation.client import BATCH_EVENTS, Answer, Service, observation
from pipelines.simulation.people import Person
from pipelines.simulation.product import Ask, Editor, Reaction
from pipelines.simulation.traffic import Tally, Traffic, drive
from tests.fakes.gateway import ScriptedEngines, collaborators, events_of, serving
from tests.fakes.inbox import MemoryInbox

ANSWER = Answer(inference_id="i-1", episode_id="e-1", text="return 1", version="v1", received_at=datetime(2026, 1, 1, tzinfo=UTC))


def said(number: int) -> dict[str, Any]:
    return observation(ANSWER, "rating", 1, person="dev-1", suffix=f"-{number}")


@dataclass
class Scripted:
    """A service that answers `POST /v1/events` as the test says, one answer a request, and keeps what it was sent."""

    answers: list[Callable[[list[dict[str, Any]]], Response]]
    got: list[list[str]] = field(default_factory=list[list[str]])

    async def take(self, request: Request) -> Response:
        events = await request.json()
        self.got.append([event["id"] for event in events])
        return self.answers.pop(0)(events)

    @contextmanager
    def running(self) -> Iterator[str]:
        with serving(Starlette(routes=[Route("/v1/events", self.take, methods=["POST"])])) as url:
            yield url


def accepted(events: list[dict[str, Any]]) -> Response:
    return JSONResponse({"results": [{"id": event["id"], "status": "accepted"} for event in events]}, status_code=202)


def later(seconds: str) -> Callable[[list[dict[str, Any]]], Response]:
    return lambda _events: Response("busy", status_code=503, headers={"Retry-After": seconds})


def reported(url: str, *events: dict[str, Any]) -> list[str]:
    """What the product believes to have arrived."""

    async def report() -> list[str]:
        service = Service(url, api_key="none", policy="composer", max_tokens=8)
        sending = asyncio.create_task(service.send())
        try:
            return await service.report(events)
        finally:
            sending.cancel()
            await service.close()

    return asyncio.run(report())


def test_a_service_that_asks_for_a_moment_gets_the_same_events_after_it() -> None:
    scripted = Scripted([later("0.01"), accepted])
    with scripted.running() as url:
        assert reported(url, said(1), said(2)) == ["i-1-rating-1", "i-1-rating-2"]
    assert scripted.got == [["i-1-rating-1", "i-1-rating-2"]] * 2


def test_events_are_given_up_after_a_minute_and_not_believed_to_have_arrived(caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted([later("61")])
    with scripted.running() as url:
        assert reported(url, said(1)) == []
    assert "gave up on 1 events: 503 busy" in caplog.text


def test_what_the_service_refuses_is_told_and_what_it_had_already_counts_as_there(caplog: pytest.LogCaptureFixture) -> None:
    words = iter(["duplicate", "rejected", "accepted"])

    def mixed(events: list[dict[str, Any]]) -> Response:
        return JSONResponse({"results": [{"id": event["id"], "status": next(words)} for event in events]}, status_code=422)

    with Scripted([mixed]).running() as url, caplog.at_level(logging.WARNING):
        assert reported(url, said(1), said(2), said(3)) == ["i-1-rating-1", "i-1-rating-3"]
    assert "the service refused an event: {'id': 'i-1-rating-2', 'status': 'rejected'}" in caplog.text


def test_a_service_that_hangs_up_is_asked_again() -> None:
    def hang_up(_events: list[dict[str, Any]]) -> Response:
        return Response(b"cut", headers={"Content-Length": "100"})  # uvicorn closes the connection of an answer that is too short

    scripted = Scripted([hang_up, accepted])
    with scripted.running() as url:
        assert reported(url, said(1)) == ["i-1-rating-1"]
    assert len(scripted.got) == 2


def test_many_events_go_in_batches_and_each_is_answered_for_itself() -> None:
    scripted = Scripted([accepted, accepted])
    with scripted.running() as url:
        assert len(reported(url, *(said(n) for n in range(BATCH_EVENTS + 1)))) == BATCH_EVENTS + 1
    assert [len(batch) for batch in scripted.got] == [BATCH_EVENTS, 1]


class Furious(Editor):
    """Everybody undoes, asks again and complains."""

    def react(self, person: Person, ask: Ask, answer: str, draw: random.Random) -> Reaction:
        return Reaction(edits=("kept", ""), follow_up="That's wrong.", regenerate=True, undo=True, success=False)


def driven(engines: ScriptedEngines, product: Editor, ledger: Path, **traffic: Any) -> tuple[MemoryInbox, Tally]:
    """Let people use a service; what it was told, and what the product counted."""
    inbox, tally = MemoryInbox(), Tally()
    given: dict[str, Any] = {
        "seed": 1, "people": 20, "held_out": False, "concurrency": 1, "turns": 2, "horizons_s": (0.0, 0.05), "ledger": ledger
    } | traffic  # fmt: skip

    async def drives(url: str) -> None:
        service = Service(url, api_key="none", policy="composer", max_tokens=8)
        sending = asyncio.create_task(service.send())
        await drive(service, product, Traffic(**given), tally)
        sending.cancel()
        await service.close()

    with serving(create_app(collaborators(inbox=inbox, engines=engines))) as url:
        asyncio.run(drives(url))
    return inbox, tally


def test_undo_regenerate_and_words_are_told_once_an_answer_and_after_the_last_look(tmp_path: Path) -> None:
    inbox, tally = driven(ScriptedEngines(), Furious(), tmp_path / "ledger")
    told = [msgspec.json.decode(event.data, type=Observation) for event in events_of(inbox, EventType.OBSERVATION)]
    assert Counter(one.name for one in told) == Counter(
        {"edit_persistence": 4, "task_success": 2, "undo": 2, "regenerate": 2, "follow_up": 2}
    )
    edits = [one.value for one in told if one.name == "edit_persistence"]
    assert {(edit["horizon_s"], edit["after"]) for edit in edits} == {(0.0, "kept"), (0.05, "")}
    assert tally.line() == "answers=2 events=12 events_given_up=0"
    assert len((tmp_path / "ledger").read_text().split()) == 12


def test_a_question_that_is_refused_is_counted_by_its_status_and_the_next_person_comes(tmp_path: Path) -> None:
    def away_at_first(_index: int) -> None:
        if len(engines.requests) == 1:
            raise Unavailable("the engine starts")

    engines = ScriptedEngines(before_token=away_at_first)
    inbox, tally = driven(engines, Editor(), tmp_path / "ledger", turns=1)
    assert (tally.counts["answers"], tally.counts["refused_503"]) == (1, 1)
    served = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert len({turn.actor for turn in served}) == len(served), "nobody comes twice in a round"


def test_everybody_comes_again_in_another_order_when_all_have_been_there(tmp_path: Path) -> None:
    inbox, _ = driven(ScriptedEngines(), Editor(), tmp_path / "ledger", people=3, turns=6)
    came = [msgspec.json.decode(event.data, type=TurnServed).actor for event in events_of(inbox, EventType.TURN)]
    assert set(came[:3]) == set(came[3:6])
    assert len(set(came)) == 3


def test_a_service_that_is_away_raises_what_the_client_raises() -> None:
    async def ask() -> None:
        service = Service("http://127.0.0.1:9", api_key="none", policy="composer", max_tokens=8)
        try:
            await service.complete([{"role": "user", "content": "?"}], user="dev", metadata={}, consent=True)
        finally:
            await service.close()

    with pytest.raises(openai.APIConnectionError):
        asyncio.run(ask())
