"""Shadow traffic: asked of another version beside the answer, counted, and seen by nobody: not people, not gates, not updates."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.domain.errors import BadConfig, Overloaded, RatchetError, Unavailable
from app.domain.policies import ShadowConfig
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.main import create_app
from tests.fakes.gateway import CANDIDATE, CHAMPION, PREVIOUS, FixedRoutes, ScriptedEngines, collaborators, policy_config
from tests.fakes.inbox import MemoryInbox
from tests.unit.app.api.test_gateway import exposures, turns

ASKED = {"model": "composer", "messages": [{"role": "user", "content": "hi"}], "seed": 7}


class TwoVersions(ScriptedEngines):
    """Answers for the champion as scripted; what becomes of another version's answer is `other`."""

    def __init__(self, other: Callable[[], Awaitable[None] | None] = lambda: None) -> None:
        super().__init__()
        self.other = other

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        if request.digest != CHAMPION and (waiting := self.other()) is not None:
            await waiting
        async for chunk in super().generate(request):
            yield chunk

    @property
    def shadows(self) -> list[str]:
        return [request.digest for request in self.requests if request.digest != CHAMPION]


def waiting_for(candidate: str | None = CANDIDATE, *, quarantined: frozenset[str] = frozenset()) -> FixedRoutes:
    routes = FixedRoutes("composer")
    routes.routes["composer"] = replace(routes.routes["composer"], coming=candidate, quarantined=quarantined)
    return routes


def asking(
    shadow: ShadowConfig, *bodies: dict[str, Any], engines: TwoVersions | None = None, routes: FixedRoutes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[TwoVersions, MemoryInbox, dict[str, float], list[httpx.Response]]:  # fmt: skip
    """Send the requests one after the other, let shadows end, and read the counts by outcome."""
    engines, inbox = engines or TwoVersions(), MemoryInbox()

    async def inside() -> tuple[dict[str, float], list[httpx.Response]]:
        parts = collaborators(
            inbox=inbox, engines=engines, routes=routes or waiting_for(), policies={"composer": policy_config(shadow=shadow)}
        )
        app = create_app(parts)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as client:
            answers = [await client.post("/v1/chat/completions", json=ASKED | body, headers=headers) for body in bodies]
            for _ in range(50):
                await asyncio.sleep(0)
            await app.chat.finish(drain_s=0.0, grace_s=1.0)
            counted = (await client.get("/metrics")).text
        outcomes: dict[str, float] = {}
        for line in counted.splitlines():
            if line.startswith("ratchet_api_shadow_total{"):
                outcome = line.partition('outcome="')[2].partition('"')[0]
                outcomes[outcome] = outcomes.get(outcome, 0.0) + float(line.rpartition(" ")[2])
        return outcomes, answers

    outcomes, answers = asyncio.run(inside())
    return engines, inbox, outcomes, answers


ALL = ShadowConfig(share=1.0)


def test_the_other_version_is_asked_the_same_and_only_the_answer_that_is_shown_is_recorded() -> None:
    engines, inbox, outcomes, (answer,) = asking(ALL, {})
    shown, other = engines.requests
    assert (shown.digest, other.digest) == (CHAMPION, CANDIDATE)
    assert (other.messages, other.sampling) == (shown.messages, shown.sampling)
    assert answer.headers["x-ratchet-version"] == CHAMPION
    assert [turn.version for turn in turns(inbox)] == [CHAMPION]
    assert len(exposures(inbox)) == 1
    assert len(inbox.events) == 2
    assert outcomes == {"stop": 1.0}


def test_it_is_off_unless_a_share_is_set() -> None:
    assert policy_config().shadow.share == 0.0
    engines, _, outcomes, _ = asking(ShadowConfig(), {}, {})
    assert (engines.shadows, outcomes) == ([], {})


def test_about_its_share_of_the_answers_is_shadowed() -> None:
    engines, _, _, _ = asking(ShadowConfig(share=0.3), *[{}] * 200)
    assert 35 <= len(engines.shadows) <= 85  # 60 expected, 6.5 the deviation


@pytest.mark.parametrize(
    ("shadow", "routes"),
    [
        (ALL, waiting_for(None)),
        (ALL, waiting_for(quarantined=frozenset({CANDIDATE}))),
        (ShadowConfig(share=1.0, version=CHAMPION), waiting_for()),
        (ShadowConfig(share=1.0, version=PREVIOUS), waiting_for(quarantined=frozenset({PREVIOUS}))),
    ],
)
def test_nothing_is_asked_where_there_is_no_other_version_or_it_was_taken_back(shadow: ShadowConfig, routes: FixedRoutes) -> None:
    engines, _, outcomes, _ = asking(shadow, {}, routes=routes)
    assert ([request.digest for request in engines.requests], outcomes) == ([CHAMPION], {})


def test_a_version_may_be_named_by_its_digest() -> None:
    engines, _, _, _ = asking(ShadowConfig(share=1.0, version=PREVIOUS), {})
    assert engines.shadows == [PREVIOUS]


@pytest.mark.parametrize("body", [{"model": f"composer@sha256:{PREVIOUS}"}, {"tensorzero::dryrun": True}])
def test_pinned_and_dry_requests_cast_none(body: dict[str, Any]) -> None:
    engines, _, outcomes, _ = asking(ALL, body)
    assert (len(engines.requests), outcomes) == (1, {})


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(Unavailable("nobody holds it"), "unavailable"), (Overloaded("full", retry_after_s=1.0), "full"), (RuntimeError("a bug"), "bug")],
)
def test_a_shadow_that_fails_costs_nobody_anything_and_is_counted(fault: Exception, outcome: str) -> None:
    def fail() -> None:
        raise fault

    _, inbox, outcomes, answers = asking(ALL, {}, {}, engines=TwoVersions(fail))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [turn.finish_reason for turn in turns(inbox)] == ["stop", "stop"]
    assert outcomes == {outcome: 2.0}
    assert isinstance(fault, RatchetError) or outcome == "bug"


def test_no_more_than_so_many_are_under_way_and_a_stop_ends_them() -> None:
    never = TwoVersions(lambda: asyncio.Event().wait())  # pyright: ignore[reportArgumentType] - what it gives is not read
    _, inbox, outcomes, answers = asking(ShadowConfig(share=1.0, max_concurrent=2), *[{}] * 5, engines=never)
    assert {answer.status_code for answer in answers} == {200}
    assert len(turns(inbox)) == 5
    assert outcomes == {"skipped": 3.0}
    assert never.shadows == []


def test_one_that_takes_longer_than_an_answer_may_is_given_up() -> None:
    async def inside() -> str:
        parts = collaborators(
            engines=TwoVersions(lambda: asyncio.Event().wait()),  # pyright: ignore[reportArgumentType] - what it gives is not read
            routes=waiting_for(), policies={"composer": policy_config(shadow=ALL, engine_timeout_s=0.2)},
        )  # fmt: skip
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(parts)), base_url="http://testserver") as client:
            await client.post("/v1/chat/completions", json=ASKED)
            await asyncio.sleep(0.4)
            return (await client.get("/metrics")).text

    assert 'outcome="timeout"' in asyncio.run(inside())


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"share": -0.1}, {"version": "newest"}, {"version": "C" * 64}, {"max_concurrent": 0}])
def test_a_wrong_configuration_is_refused_with_what_it_may_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=r"shadow\."):
        ShadowConfig(**wrong)
