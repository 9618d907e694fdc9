"""The port over servers of other make with a dialect that a test plays: who is asked for what, who is passed over, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from app.domain.errors import BadRequest, Overloaded, RatchetError, Unavailable
from app.domain.ports import Holder
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.serving.servers.engines import ServerEngines
from app.serving.servers.held import Held, Place
from app.serving.servers.wire import aborted, refused

T = TypeVar("T")
DIGEST = "d" * 64
ASKED = GenerateRequest(policy="composer", digest=DIGEST, messages=[], sampling=SamplingParams())
SCORED = ScoreRequest(policy="composer", digest=DIGEST, prompt_tokens=[1, 2], completion_tokens=[3])
FIRST = GenerationChunk(text="a", tokens=[1], logprobs=[-0.5])
LAST = GenerationChunk(text="b", tokens=[2], logprobs=[-0.1], finish_reason=FinishReason.STOP)


def ended(message: str) -> GenerationChunk:
    return GenerationChunk(text="", tokens=[], logprobs=[], finish_reason=FinishReason.ERROR, message=message)


class Played:
    """A make of servers: every one holds the version, unless it is said to fail; answers are given one after the other."""

    name, scheme = "Toy", "toy+"

    def __init__(self, *answers: Sequence[GenerationChunk | RatchetError]) -> None:
        self.answers = [*answers]
        self.fails: dict[str, RatchetError] = {}
        self.asked_held: list[str] = []
        self.doubts: list[str | None] = []

    async def held(self, client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> Held:
        self.asked_held.append(url)
        if url in self.fails:
            raise self.fails[url]
        return Held(base=DIGEST, version=None, adapters=frozenset())

    def tokenizing(self, place: Place, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        self.doubts.append(place.doubt)
        return "/tokenize", {}

    def generating(self, place: Place, prompt: Sequence[int], request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        return "/generate", {"prompt": prompt}

    async def answer(
        self, response: httpx.Response, place: Place, prompt: Sequence[int], asked: GenerateRequest
    ) -> AsyncIterator[GenerationChunk]:
        for said in self.answers.pop(0):
            if isinstance(said, RatchetError):
                raise said
            yield said

    def scoring(self, place: Place, tokens: Sequence[int]) -> tuple[str, dict[str, Any]]:
        return "/score", {"tokens": list(tokens)}

    def scored(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
        return [-float(token) for token in tokens[1:]]

    def refusal(self, url: str, status: int, content: bytes, headers: Mapping[str, str]) -> RatchetError:
        return refused(status, f"{url} said {status}", retry_after=headers.get("retry-after"))

    def sight(self, url: str, metrics: str) -> EngineSight:
        return EngineSight(address=url, answers=True, queue=len(metrics))


def used(
    dialect: Played, act: Callable[[ServerEngines], Awaitable[T]], *urls: str,
    answer: Callable[[httpx.Request], httpx.Response] | None = None, **options: Any,
) -> tuple[T, list[httpx.Request]]:  # fmt: skip
    asked: list[httpx.Request] = []

    def heard(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"tokens": [1, 2, 3]}) if answer is None else answer(request)

    async def inside() -> T:
        client, given = httpx.AsyncClient(transport=httpx.MockTransport(heard)), dict[str, Any](patience_s=0.0) | options
        async with ServerEngines(dialect, urls or ("http://one/",), client=client, **given) as engines:
            return await act(engines)

    return asyncio.run(inside()), asked


async def generated(engines: ServerEngines) -> list[GenerationChunk]:
    return [chunk async for chunk in engines.generate(ASKED)]


def test_a_prompt_is_tokenised_and_counted_by_the_server_and_the_key_is_shown() -> None:
    count, [asked] = used(Played(), lambda engines: engines.count_tokens(ASKED), api_key="secret")
    assert (count, str(asked.url), asked.headers["authorization"]) == (3, "http://one/tokenize", "Bearer secret")
    assert asked.headers["content-type"] == "application/json"
    _, [bare] = used(Played(), lambda engines: engines.count_tokens(ASKED))
    assert "authorization" not in bare.headers


@pytest.mark.parametrize("said", [b"{}", b'{"tokens": null}', b"<html>"])
def test_a_server_that_sends_no_tokens_is_of_another_version_than_this_was_made_for(said: bytes) -> None:
    with pytest.raises(Unavailable, match="Toy at http://one tokenised a prompt and sent no tokens"):
        used(Played(), lambda engines: engines.count_tokens(ASKED), answer=lambda _: httpx.Response(200, content=said))


def test_an_answer_is_sampled_from_the_tokens_and_nothing_is_asked_after_its_end() -> None:
    chunks, asked = used(Played([FIRST, LAST]), generated)
    assert chunks == [FIRST, LAST]
    assert [request.url.path for request in asked] == ["/tokenize", "/generate"]
    assert json.loads(asked[1].content) == {"prompt": [1, 2, 3]}


@pytest.mark.parametrize("bad", [[ended("torn")], [ended(aborted("Toy"))], [Unavailable("torn")]])
def test_what_ended_before_its_first_token_is_asked_for_again_while_patience_lasts(bad: list[GenerationChunk | RatchetError]) -> None:
    chunks, asked = used(Played(bad, [LAST]), generated, patience_s=20.0)
    assert chunks == [LAST]
    assert [request.url.path for request in asked] == ["/tokenize", "/generate"] * 2
    if isinstance(bad[0], GenerationChunk):
        assert used(Played(bad), generated)[0] == bad, "and told where it is over"
    else:
        with pytest.raises(Unavailable, match="torn"):
            used(Played(bad), generated)


def test_what_broke_after_a_token_is_not_asked_for_again() -> None:
    assert used(Played([FIRST, ended("torn")]), generated, patience_s=20.0)[0] == [FIRST, ended("torn")]
    with pytest.raises(Unavailable, match="torn"):
        used(Played([FIRST, Unavailable("torn")]), generated, patience_s=20.0)


@pytest.mark.parametrize(
    ("message", "fault"), [("torn", "torn"), (aborted("Toy"), None)]
)  # fmt: skip
def test_a_server_that_replaces_its_weights_is_well_and_one_that_breaks_is_not(message: str, fault: str | None) -> None:
    async def act(engines: ServerEngines) -> list[str | None]:
        await generated(engines)
        before = [seen.fault for seen in await engines.sights()]
        await generated(engines)
        return [*before, *(seen.fault for seen in await engines.sights())]

    assert used(Played([ended(message)], [LAST]), act)[0] == [fault, None]


def test_given_tokens_are_scored_at_temperature_one_alone() -> None:
    scores, asked = used(Played(), lambda engines: engines.score(SCORED))
    assert (scores, json.loads(asked[-1].content)) == ([-3.0], {"tokens": [1, 2, 3]})
    other: list[dict[str, Any]] = [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}]
    for changed in other:
        wanted = msgspec.structs.replace(SCORED, **changed)
        with pytest.raises(BadRequest, match="Toy scores given tokens at temperature 1"):
            used(Played(), lambda engines, wanted=wanted: engines.score(wanted))


def refusing(status: int, **headers: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, headers=headers)


@pytest.mark.parametrize(
    ("status", "kind", "fault"),
    [
        (429, Overloaded, None),
        (400, BadRequest, None),
        (503, Unavailable, "http://one said 503"),
        (404, Unavailable, "http://one said 404"),
    ],
)
def test_what_a_refusal_says_of_the_server_is_remembered(status: int, kind: type[RatchetError], fault: str | None) -> None:
    async def act(engines: ServerEngines) -> str | None:
        with pytest.raises(kind):
            await engines.count_tokens(ASKED)
        return engines._replicas.health("http://one").fault

    dialect = Played()
    assert used(dialect, act, answer=refusing(status))[0] == fault
    with pytest.raises(kind):
        used(Played(), lambda engines: engines.count_tokens(ASKED), answer=refusing(status))


def test_a_server_that_refuses_is_asked_anew_what_it_holds_and_one_that_answers_is_not() -> None:
    async def twice(engines: ServerEngines) -> None:
        for _ in range(2):
            await engines.count_tokens(ASKED)

    answering, full = Played(), Played()
    used(answering, twice)
    assert len(answering.asked_held) == 1

    async def refused_twice(engines: ServerEngines) -> None:
        for _ in range(2):
            with pytest.raises(Overloaded):
                await engines.count_tokens(ASKED)

    used(full, refused_twice, answer=refusing(429))
    assert len(full.asked_held) == 2


def test_where_nobody_holds_the_version_it_is_said_with_what_each_one_said() -> None:
    dialect = Played()
    dialect.fails = {"http://one": Unavailable("starting"), "http://two": Unavailable("gone")}
    with pytest.raises(Unavailable, match=rf"no Toy server holds the weights {DIGEST[:12]} \((starting; gone|gone; starting)\)"):
        used(dialect, lambda engines: engines.count_tokens(ASKED), "http://one", "http://two", patience_s=20.0)


def test_servers_of_the_ledger_are_asked_without_their_make_and_its_doubts_are_kept() -> None:
    held = {"toy+http://two/": Holder(doubt="off by 0.2"), "http://elsewhere": Holder()}
    dialect = Played()
    for _ in range(3):
        _, asked = used(dialect, lambda engines: engines.count_tokens(ASKED), "http://one", "http://two", holders=lambda _: held)
        assert [request.url.host for request in asked] == ["two"]
    assert dialect.doubts == ["off by 0.2"] * 3
    _, asked = used(Played(), lambda engines: engines.count_tokens(ASKED), "http://one", holders=lambda _: {})
    assert [request.url.host for request in asked] == ["one"], "where the ledger knows none, each is asked itself"


def test_a_server_is_seen_by_its_metrics_or_is_said_not_to_answer() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="12345") if request.url.host == "one" else httpx.Response(500)

    seen, asked = used(Played(), lambda engines: engines.sights(), "http://one", "http://two", answer=answer, api_key="secret")
    assert [(one.address, one.answers, one.queue, one.ejected) for one in seen] == [
        ("http://one", True, 5, False), ("http://two", False, None, False),
    ]  # fmt: skip
    assert [one.fault for one in seen] == [None, "it does not answer (HTTPStatusError): start it"]
    assert {(request.url.path, request.headers["authorization"]) for request in asked} == {("/metrics", "Bearer secret")}


def test_one_that_is_well_is_enough_for_a_ping() -> None:
    used(Played(), lambda engines: engines.ping(), "http://one")
    with pytest.raises(Unavailable, match="no Toy server answers at http://one: start one, or correct RATCHET_ENGINES"):
        used(Played(), lambda engines: engines.ping(), "http://one", answer=refusing(503))
