"""An engine's HTTP side over a worker and a residency that are played: what each door answers, and to whom."""

import asyncio
import json
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from app.contact import Contact, Part
from app.domain.errors import BadRequest, NotFound, Overloaded, RatchetError, Unavailable
from app.domain.ports import EngineState
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.serving.engine import MAX_BODY_BYTES, EngineApplication, create_engine
from app.serving.jobs import Job
from app.serving.probe import Mismatch
from app.serving.residency import Residency
from app.serving.worker import Draining, Worker

ASKED = GenerateRequest(policy="composer", digest="d", messages=[], sampling=SamplingParams())
SCORED = ScoreRequest(policy="composer", digest="d", prompt_tokens=[1], completion_tokens=[2])
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
FIRST = GenerationChunk(text="a", tokens=[1], logprobs=[-0.5])
LAST = GenerationChunk(text="b", tokens=[2], logprobs=[-0.1], finish_reason=FinishReason.STOP, prompt_tokens=[7])


@dataclass
class Played:
    """A worker that does what it is told, and counts who is taken and let go."""

    held: tuple[str, ...] = ("d",)
    draining: bool = False
    load: int = 3
    capacity: int = 80
    sampled_tokens: int = 500
    acceptance: float | None = 0.5
    fault: Exception | None = None
    scores: tuple[float, ...] = (-0.5, -math.inf, math.nan)
    gives: tuple[GenerationChunk | Exception, ...] = (FIRST, LAST)
    taken: int = 0
    cancelled: list[Job] = field(default_factory=list[Job])

    def holds(self, digest: str) -> bool:
        return digest in self.held

    def take(self, request: GenerateRequest) -> None:
        self.taken += 1

    def let_go(self) -> None:
        self.taken -= 1

    def prompt(self, request: GenerateRequest) -> list[int]:
        if self.fault is not None:
            raise self.fault
        return [1, 2, 3]

    def prepare(self, request: GenerateRequest) -> None:
        raise BadRequest("no such form", param="response_format")

    def score(self, request: ScoreRequest) -> "Future[list[float]]":
        answer: Future[list[float]] = Future()
        if self.fault is not None:
            answer.set_exception(self.fault)
        else:
            answer.set_result([*self.scores])
        return answer

    def submit(self, request: GenerateRequest, prompt: list[int]) -> Job:
        job = Job(request=request, loop=asyncio.get_running_loop(), deadline=0.0)
        for update in self.gives:
            job.updates.put_nowait(update)
        return job

    def cancel(self, job: Job) -> None:
        self.cancelled.append(job)


class Resident:
    """A residency as it is asked."""

    precision, last_swap, invariance = "bf16", {"way": "load"}, None

    def __init__(self) -> None:
        self.contact = Contact(region="eu", clock=lambda: NOON)
        self.far: dict[str, Mismatch] = {}

    def states(self) -> dict[str, tuple[EngineState, str | None]]:
        return {"d": (EngineState.READY, None), "e": (EngineState.FAILED, "torn")}

    def mismatches(self) -> dict[str, Mismatch]:
        return self.far

    def drafters(self) -> dict[str, Any]:
        return {"d": {}}


def engine(worker: Played, residency: Resident | None = None, *, key: str | None = None) -> EngineApplication:
    return create_engine(cast("Worker", worker), cast("Residency", residency or Resident()), key=key)


def ask(app: EngineApplication, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async def inside() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8401") as client:
            content = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
            kind = {} if body is None else {"content-type": "application/json"}
            return await client.request(method, path, content=content, headers={**kind, **headers})

    return asyncio.run(inside())


def test_a_prompt_is_counted_and_nobody_stays_in_the_count_who_is_answered() -> None:
    worker = Played()
    answer = ask(engine(worker), "POST", "/count", ASKED)
    assert (answer.status_code, answer.json(), worker.taken) == (200, {"prompt_tokens": 3}, 0)
    worker.fault = BadRequest("too long", param="messages")
    assert ask(engine(worker), "POST", "/count", ASKED).status_code == 400
    assert worker.taken == 0, "nor who is refused"


def test_scores_that_json_cannot_say_are_told_as_nothing() -> None:
    answer = ask(engine(Played()), "POST", "/score", SCORED)
    assert (answer.json(), answer.headers["content-type"]) == ({"logprobs": [-0.5, None, None]}, "application/json")


def test_who_leaves_before_the_scores_are_known_takes_the_question_along() -> None:
    worker, said = Played(), [{"type": "http.request", "body": msgspec.json.encode(SCORED)}, {"type": "http.disconnect"}]
    pending: Future[list[float]] = Future()
    worker.score = lambda request: pending
    told: list[Any] = []

    async def receive() -> Any:
        return said.pop(0) if said else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"host", b"127.0.0.1:8401"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/score", "query_string": b"", "headers": headers}
    asyncio.run(asyncio.wait_for(engine(worker)(scope, receive, send), 30))
    assert (pending.cancelled(), told[0]["status"]) == (True, 499)


def test_an_answer_comes_as_lines_and_what_piled_up_as_one_and_its_row_is_freed() -> None:
    worker = Played(gives=(FIRST, FIRST, LAST))
    answer = ask(engine(worker), "POST", "/generate", ASKED)
    [chunk] = [msgspec.json.decode(line, type=GenerationChunk) for line in answer.content.splitlines()]
    assert (chunk.text, chunk.tokens, chunk.logprobs, chunk.finish_reason) == ("aab", [1, 1, 2], [-0.5, -0.5, -0.1], FinishReason.STOP)
    assert (chunk.prompt_tokens, chunk.likely) == ([7], None)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert (len(worker.cancelled), worker.taken) == (1, 1)
    ended = ask(engine(Played(gives=(LAST, FIRST))), "POST", "/generate", ASKED)
    assert [msgspec.json.decode(line)["text"] for line in ended.content.splitlines()] == ["b"], "nothing comes after the end"


@pytest.mark.parametrize("what", [{"likely": 0}, {"shape": {"presence_penalty": 1.0}}])
def test_what_has_to_be_prepared_is_prepared_first(what: dict[str, Any]) -> None:
    worker = Played()
    wanted = msgspec.to_builtins(ASKED) | what
    answer = ask(engine(worker), "POST", "/generate", wanted)
    assert (answer.status_code, answer.json()["error"]["param"], worker.taken) == (400, "response_format", 0)


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "retry"),
    [
        (BadRequest("m", param="stop", code="c"), 400, "c", "stop", None), (NotFound("m"), 404, "weights_not_held", None, None),
        (Draining("m"), 421, "draining", None, None), (Overloaded("m", retry_after_s=2.6), 429, "overloaded", None, "3"),
        (Overloaded("m", retry_after_s=0.2), 429, "overloaded", None, "1"), (Unavailable("m"), 503, None, None, None),
        (RatchetError("m"), 503, None, None, None),
    ],
)  # fmt: skip
def test_a_refusal_has_its_status_and_says_when_to_come_back(
    error: Exception, status: int, code: str | None, param: str | None, retry: str | None
) -> None:
    for worker, path, asked in ((Played(fault=error), "/count", ASKED), (Played(gives=(error,)), "/generate", ASKED)):
        answer = ask(engine(worker), "POST", path, asked)
        assert (answer.status_code, answer.json()) == (status, {"error": {"message": "m", "param": param, "code": code}})
        assert answer.headers.get("retry-after") == retry


def test_a_body_that_is_too_large_or_no_request_is_refused_in_words() -> None:
    large = ask(engine(Played()), "POST", "/count", b'"' + b"x" * (MAX_BODY_BYTES - 1) + b'"')
    assert (large.status_code, large.json()["error"]["param"]) == (400, "messages")
    assert large.json()["error"]["message"] == "the request has more than 8388608 bytes: shorten the conversation"
    fits = ask(engine(Played()), "POST", "/count", b'"' + b"x" * (MAX_BODY_BYTES - 2) + b'"')
    assert "this is not a GenerateRequest: " in fits.json()["error"]["message"]
    assert "this is not a ScoreRequest: " in ask(engine(Played()), "POST", "/score", b"{}").json()["error"]["message"]


def test_versions_are_told_with_their_state() -> None:
    assert ask(engine(Played()), "GET", "/versions").json() == {
        "d": {"state": "ready", "detail": None}, "e": {"state": "failed", "detail": "torn"},
    }  # fmt: skip


def test_an_engine_says_how_it_is() -> None:
    said = ask(engine(Played()), "GET", "/health").json()
    assert said == {
        "status": "ok", "ready": ["d"], "load": 3, "sampled_tokens": 500, "precision": "bf16", "mismatch": {}, "last_swap": {"way": "load"},
        "acceptance": 0.5, "drafters": {"d": {}}, "batch_invariant": None, "region": "eu", "cut_off": None,
    }  # fmt: skip
    resident = Resident()
    resident.far["d"] = Mismatch(kl=0.25, p99=0.5, tokens=7)
    resident.invariance = cast("Any", SimpleNamespace(holds=False))
    said = ask(engine(Played(draining=True), resident), "GET", "/health").json()
    assert (said["status"], said["mismatch"], said["batch_invariant"]) == ("draining", {"d": {"kl": 0.25, "p99": 0.5, "tokens": 7}}, False)


def test_an_engine_that_is_cut_off_says_since_when_and_what_may_be_old() -> None:
    resident = Resident()
    resident.contact.lost(Part.DATABASE, "no route")
    told = ask(engine(Played(), resident), "GET", "/health").json()["cut_off"]
    assert told == {
        "says": "cut off from the database since 2026-11-21T12:00:00+00:00: what is served is the last that was heard of and may be old",
        "may_be_old": ["d"], "since": {"database": {"at": "2026-11-21T12:00:00+00:00", "why": "no route"}},
    }  # fmt: skip


@pytest.mark.parametrize(("held", "status"), [(("d",), 200), ((), 503), (("elsewhere",), 503)])
def test_an_engine_is_ready_while_it_holds_a_version(held: tuple[str, ...], status: int) -> None:
    answer = ask(engine(Played(held=held)), "GET", "/ready")
    assert (answer.status_code, answer.json()) == (status, {"ready": status == 200})


def test_prometheus_reads_its_own_format() -> None:
    answer = ask(engine(Played()), "GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "ratchet_engine_load 3.0" in answer.text.splitlines()


LET_IN: list[Callable[[], tuple[str, str, Any]]] = [lambda: ("POST", "/count", ASKED), lambda: ("GET", "/versions", None)]


@pytest.mark.parametrize("asked", LET_IN, ids=["count", "versions"])
def test_with_a_key_nobody_gets_in_without_it_but_probes_and_prometheus(asked: Callable[[], tuple[str, str, Any]]) -> None:
    app = engine(Played(), key="secret")
    assert ask(app, *asked(), authorization="Bearer secret").status_code == 200
    for wrong in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}, {"authorization": "Bearer secrets"}):
        refused = ask(app, *asked(), **wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "key")
    assert [ask(app, "GET", path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
    assert ask(engine(Played()), *asked()).status_code == 200, "without one nobody is asked for it"


def test_another_site_s_page_gets_nothing_from_an_engine() -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert ask(engine(Played()), "GET", "/versions", **headers).status_code in (403, 421)
    assert json.loads(ask(engine(Played()), "GET", "/versions", origin="http://127.0.0.1:8401").text)["d"]["state"] == "ready"
    assert [ask(engine(Played()), "GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3
