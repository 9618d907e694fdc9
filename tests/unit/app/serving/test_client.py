"""What the gateway's client makes of an engine's words: counts, scores, refusals, what it sees of each engine, and who is asked again."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from app.domain.errors import BadRequest, Overloaded, RatchetError, Unavailable
from app.domain.ports import Holder
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.serving.client import HttpEngines
from app.serving.pieces import PIECE_BYTES
from app.serving.refusals import DRAINING, NOT_CALLED_SO

T = TypeVar("T")
ASKED = GenerateRequest(policy="composer", digest="d" * 64, messages=[], sampling=SamplingParams())
SCORED = ScoreRequest(policy="composer", digest="d" * 64, prompt_tokens=[1], completion_tokens=[2, 3])
LAST = GenerationChunk(text="b", tokens=[2], logprobs=[-0.1], finish_reason=FinishReason.STOP)


class Answers:
    """Engines behind a transport: what each says, what it was asked, and whether its answers were closed."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.asked: list[httpx.Request] = []
        self.closed = 0
        self._answer = answer

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self._answer(request)

    def run(self, act: Callable[[HttpEngines], Awaitable[T]], *urls: str, **more: Any) -> T:
        async def inside() -> T:
            client = httpx.AsyncClient(transport=httpx.MockTransport(self))
            async with HttpEngines(urls or ("http://one/",), client=client, **more) as engines:
                return await act(engines)

        return asyncio.run(inside())


def saying(body: Any, status: int = 200, **headers: str) -> Answers:
    return Answers(lambda _: httpx.Response(status, content=msgspec.json.encode(body), headers=headers))


def test_a_prompt_is_counted_and_an_answer_scored_with_what_json_cannot_say() -> None:
    counted = saying({"prompt_tokens": 7})
    assert counted.run(lambda engines: engines.count_tokens(ASKED)) == 7
    [asked] = counted.asked
    assert (asked.method, str(asked.url), asked.headers["content-type"]) == ("POST", "http://one/count", "application/json")
    assert msgspec.json.decode(asked.content, type=GenerateRequest) == ASKED
    scored = saying({"logprobs": [-0.5, None]})
    assert scored.run(lambda engines: engines.score(SCORED)) == [-0.5, -math.inf]
    assert str(scored.asked[0].url) == "http://one/score"


@pytest.mark.parametrize(("key", "shown"), [("secret", "Bearer secret"), (None, None), ("", None)])
def test_an_engine_is_shown_the_key_where_there_is_one(key: str | None, shown: str | None) -> None:
    answers = saying({"prompt_tokens": 7})
    answers.run(lambda engines: engines.count_tokens(ASKED), key=key)
    assert answers.asked[0].headers.get("authorization") == shown


def refused(status: int, body: Any, **headers: str) -> RatchetError:
    with pytest.raises(RatchetError) as found:
        saying(body, status, **headers).run(lambda engines: engines.count_tokens(ASKED))
    return found.value


def test_a_refusal_keeps_its_words_its_parameter_and_its_code() -> None:
    wrong = refused(400, {"error": {"message": "too long", "param": "messages", "code": "context_length"}})
    assert isinstance(wrong, BadRequest)
    assert (str(wrong), wrong.param, wrong.code) == ("too long", "messages", "context_length")
    bare = refused(400, {"error": {"message": "too long"}})
    assert isinstance(bare, BadRequest)
    assert (bare.param, bare.code) == (None, "invalid_request")
    full = refused(429, {"error": {"message": "full"}}, **{"retry-after": "7"})
    assert isinstance(full, Overloaded)
    assert (str(full), full.retry_after_s) == ("full", 7.0)


@pytest.mark.parametrize("body", ["words", {"error": "words"}, {"other": 1}])
def test_a_refusal_in_another_shape_is_told_by_its_status(body: Any) -> None:
    assert "the engine answered 503" in str(refused(503, body))
    wrong = refused(400, body)
    assert isinstance(wrong, BadRequest)
    assert (str(wrong), wrong.code, wrong.param) == ("the engine answered 400", "invalid_request", None)


def test_where_all_refuse_the_weights_are_named_by_their_first_twelve_digits() -> None:
    said = str(refused(503, {"error": {"message": "starting"}}))
    assert said == f"no engine holds the weights {'d' * 12} (starting)"
    assert str(refused(404, {"error": {"message": "not held"}})).startswith("no engine holds")


def test_a_request_that_is_wrong_is_wrong_everywhere_and_one_that_is_full_is_not() -> None:
    wrong = saying({"error": {"message": "no"}}, 400)
    with pytest.raises(BadRequest):
        wrong.run(lambda engines: engines.count_tokens(ASKED), "http://one", "http://two")
    assert len(wrong.asked) == 1
    full = saying({"error": {"message": "no"}}, 429)
    with pytest.raises(Overloaded):
        full.run(lambda engines: engines.count_tokens(ASKED), "http://one", "http://two")
    assert len(full.asked) == 2


HEALTH = {
    "status": "ok", "load": 3, "sampled_tokens": 9, "acceptance": 0.5, "last_swap": {"kind": "patch"}, "precision": "bf16",
    "mismatch": {"d": {"kl": 0.1}}, "drafters": {"d": {}},
}  # fmt: skip


def test_an_engine_is_seen_as_it_says_it_is() -> None:
    [seen] = saying(HEALTH).run(lambda engines: engines.sights())
    assert (seen.address, seen.answers, seen.ejected, seen.draining, seen.fault) == ("http://one", True, False, False, None)
    assert (seen.queue, seen.sampled_tokens, seen.acceptance, seen.last_swap) == (3, 9, 0.5, {"kind": "patch"})
    assert (seen.precision, seen.mismatch, seen.drafters) == ("bf16", {"d": {"kl": 0.1}}, {"d": {}})
    [leaving] = saying(HEALTH | {"status": "draining", "mismatch": {}, "drafters": {}}).run(lambda engines: engines.sights())
    assert (leaving.draining, leaving.mismatch, leaving.drafters) == (True, None, None)


def test_every_engine_of_the_ledger_and_of_the_list_is_seen_once_and_one_that_is_away_says_why() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "two":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=b"<html>" if request.url.host == "three" else b"{}")

    answers = Answers(answer)
    seen = answers.run(lambda engines: engines.sights(), "http://one", "http://two", everywhere=lambda: ["http://three", "http://one"])
    assert [(one.address, one.answers) for one in seen] == [("http://three", False), ("http://one", True), ("http://two", False)]
    assert [one.fault for one in seen] == [
        "it does not answer (JSONDecodeError): start it with `ratchet engine`", None,
        "it does not answer (ConnectError): start it with `ratchet engine`",
    ]  # fmt: skip


def test_how_an_engine_failed_the_last_time_is_seen_until_it_answers_again() -> None:
    words = iter([503, 200])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, content=b"{}")
        status = next(words)
        body = {"prompt_tokens": 1} if status == 200 else {"error": {"message": "broken"}}
        return httpx.Response(status, content=msgspec.json.encode(body))

    async def act(engines: HttpEngines) -> list[str | None]:
        with pytest.raises(Unavailable):
            await engines.count_tokens(ASKED)
        [before] = await engines.sights()
        await engines.count_tokens(ASKED)
        [after] = await engines.sights()
        return [before.fault, after.fault]

    assert Answers(answer).run(act) == ["broken", None]


@pytest.mark.parametrize(
    ("status", "code", "passed_over", "fault"),
    [
        (DRAINING, "draining", True, "it is going away"), (DRAINING, NOT_CALLED_SO, False, "said"), (500, None, False, "said"),
        (499, None, False, None), (404, None, False, None),
    ],
)  # fmt: skip
def test_what_a_refusal_says_of_the_engine_is_remembered(status: int, code: str | None, passed_over: bool, fault: str | None) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, content=b"{}")
        return httpx.Response(status, content=msgspec.json.encode({"error": {"message": "said", "code": code}}))

    async def act(engines: HttpEngines) -> tuple[bool, str | None]:
        with pytest.raises(Unavailable):
            await engines.count_tokens(ASKED)
        [seen] = await engines.sights()
        return seen.ejected, seen.fault

    assert Answers(answer).run(act) == (passed_over, fault)


def test_an_engine_that_does_not_answer_makes_the_ledger_be_asked_again_and_one_that_refuses_does_not() -> None:
    asked: list[str] = []

    def ledger(digest: str) -> dict[str, Holder]:
        asked.append(digest)
        return {"http://held": Holder()}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/score":
            raise httpx.ConnectError("refused")
        return httpx.Response(429, content=msgspec.json.encode({"error": {"message": "full"}}))

    async def act(engines: HttpEngines) -> None:
        for _ in range(3):
            with pytest.raises(Overloaded):
                await engines.count_tokens(ASKED)
        assert len(asked) == 1
        for _ in range(3):
            with pytest.raises(Unavailable, match="the engine at http://held does not answer"):
                await engines.score(SCORED)
        assert len(asked) == 3, "forgotten after each failure"

    Answers(answer).run(act, holders=ledger, forget_s=1000.0)


def test_an_answer_that_breaks_off_is_asked_of_the_next_engine_and_told_where_there_is_none() -> None:
    class Torn(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b'{"prompt'
            raise httpx.ReadError("gone")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Torn()) if request.url.host == "torn" else httpx.Response(200, content=b'{"prompt_tokens": 4}')

    for _ in range(2):
        assert Answers(answer).run(lambda engines: engines.count_tokens(ASKED), "http://torn", "http://whole") == 4
    with pytest.raises(Unavailable, match=r"the engine at http://torn broke off \(ReadError\): start it with `ratchet engine`"):
        Answers(answer).run(lambda engines: engines.count_tokens(ASKED), "http://torn")


def generated(*lines: bytes) -> list[GenerationChunk]:
    async def act(engines: HttpEngines) -> list[GenerationChunk]:
        return [chunk async for chunk in engines.generate(ASKED)]

    return Answers(lambda _: httpx.Response(200, content=b"".join(line + b"\n" for line in lines))).run(act)


def test_an_engine_that_stops_in_the_middle_ends_the_answer_with_an_error_and_what_comes_after_the_end_is_not_read() -> None:
    begun = msgspec.json.encode(GenerationChunk(text="a", tokens=[1], logprobs=[-0.5]))
    first, last = generated(begun)
    assert (first.text, last.finish_reason, last.message) == ("a", FinishReason.ERROR, "the engine ended its answer too early")
    assert (last.text, list(last.tokens), list(last.logprobs)) == ("", [], [])
    assert [chunk.text for chunk in generated(begun, msgspec.json.encode(LAST), begun)] == ["a", "b"]


@pytest.mark.parametrize("told", [{"text": "x"}, {"tokens": [5]}])
def test_an_engine_that_broke_after_it_sampled_is_heard_and_not_asked_again(told: dict[str, Any]) -> None:
    broken = {"text": "", "tokens": [], "logprobs": [], "finish_reason": FinishReason.ERROR, "message": "torn"} | told
    [chunk] = generated(msgspec.json.encode(GenerationChunk(**broken)))
    assert (chunk.finish_reason, chunk.message) == (FinishReason.ERROR, "torn")


@pytest.mark.parametrize("tokens", [3, PIECE_BYTES])
def test_a_long_prompt_is_read_as_a_short_one_is(tokens: int) -> None:
    prompt = [number % 50_000 for number in range(tokens)]
    [chunk] = generated(msgspec.json.encode(msgspec.structs.replace(LAST, prompt_tokens=prompt)))
    assert list(chunk.prompt_tokens or ()) == prompt
    assert (chunk.text, chunk.finish_reason, list(chunk.logprobs)) == ("b", FinishReason.STOP, [-0.1])


def test_one_that_answers_the_health_question_is_enough_and_none_is_told_with_the_cure() -> None:
    saying({}).run(lambda engines: engines.ping())
    with pytest.raises(Unavailable, match="no engine answers at http://one: start one with `ratchet engine`"):
        saying({}, 503).run(lambda engines: engines.ping())
