"""Pinned versions and the bound on a policy's answers: no exposure, no arm of an episode, no place that is lost."""

import asyncio
from dataclasses import replace

import pytest

from app.api.chat.slots import Slots
from app.domain.errors import Overloaded, Unavailable
from tests.fakes.gateway import CANDIDATE, CHAMPION, NOON, FixedRoutes, ScriptedEngines, policy_config
from tests.unit.app.api.test_gateway import ask, exposures, service, turns


def test_a_pinned_version_serves_without_an_exposure_and_is_recorded_as_pinned() -> None:
    routes = FixedRoutes("composer")
    routes.canary("composer", share=0.0)
    client, inbox = service(routes=routes)
    answer = ask(client, model=f"composer@sha256:{CANDIDATE}")
    assert answer.headers["x-ratchet-version"] == CANDIDATE
    (turn,) = turns(inbox)
    assert (turn.version, turn.policy) == (CANDIDATE, "composer")
    assert (turn.assignment.arm, turn.assignment.stage, turn.assignment.release_id) == ("pinned", "pinned", None)
    assert exposures(inbox) == []


def test_a_pinned_turn_does_not_move_its_episode_to_that_version() -> None:
    client, inbox = service()
    for model in ("composer", f"composer@sha256:{CANDIDATE}", "composer"):
        ask(client, model=model, extra={"tensorzero::episode_id": "ep"})
    assert [turn.version for turn in turns(inbox)] == [CHAMPION, CANDIDATE, CHAMPION]
    assert len(exposures(inbox)) == 2


@pytest.mark.parametrize(
    ("model", "status"),
    [("composer@sha256:short", 400), (f"composer@sha256:{'0' * 64}", 404), (f"nobody@sha256:{CANDIDATE}", 404)],
)
def test_what_cannot_be_pinned_is_refused(model: str, status: int) -> None:
    client, inbox = service()
    answer = ask(client, model=model)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert inbox.events == {}


def test_a_version_in_quarantine_serves_nobody() -> None:
    routes = FixedRoutes("composer")
    routes.routes["composer"] = replace(routes.route("composer"), quarantined=frozenset({CANDIDATE}))
    client, inbox = service(routes=routes)
    assert ask(client, model=f"composer@sha256:{CANDIDATE}").status_code == 409
    assert inbox.events == {}


def test_a_policy_has_no_more_answers_under_way_than_it_may() -> None:
    slots = Slots()
    first, second = slots.take("composer", most=2), slots.take("composer", most=2)
    with pytest.raises(Overloaded, match="max_concurrent"):
        slots.take("composer", most=2)
    slots.take("tab", most=2)
    first()
    first()
    third = slots.take("composer", most=2)
    with pytest.raises(Overloaded):
        slots.take("composer", most=2)
    second()
    third()


@pytest.mark.parametrize("fault", [None, Unavailable("no engine"), RuntimeError("a bug")])
def test_an_answers_place_is_free_when_it_is_over_however_it_ended(fault: Exception | None) -> None:
    def fail(_: int) -> None:
        if fault is not None:
            raise fault

    client, _ = service(policies={"composer": policy_config(max_concurrent=1)}, engines=ScriptedEngines(before_token=fail))
    for _ in range(3):
        assert ask(client).status_code == (200 if fault is None else 503 if isinstance(fault, Unavailable) else 500)
        assert ask(client, stream=True).status_code in (200, 500, 503)


def test_the_second_of_two_at_once_is_told_to_wait() -> None:
    import httpx

    from app.main import create_app
    from tests.fakes.gateway import collaborators

    going = asyncio.Event()

    async def inside() -> list[int]:
        engines = ScriptedEngines(before_token=lambda _: going.wait())
        app = create_app(collaborators(policies={"composer": policy_config(max_concurrent=1)}, engines=engines))
        body = {"model": "composer", "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as client:
            first = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
            while not engines.requests:
                await asyncio.sleep(0.001)
            second = await client.post("/v1/chat/completions", json=body)
            going.set()
            assert second.headers["retry-after"] == "1"
            return [(await first).status_code, second.status_code]

    assert asyncio.run(inside()) == [200, 429]


def test_engines_are_listed_with_what_they_hold_and_how_they_do() -> None:
    client, _ = service(clock=lambda: NOON)
    (engine,) = client.get("/v1/engines").json()["data"]
    assert (engine["address"], engine["answers"], engine["queue"], engine["reports"]) == ("http://scripted", True, 0, True)
    (held,) = client.get("/v1/engines?policy=tab").json()["data"][0]["policies"]
    assert (held["policy"], held["lag"]["champions"]) == ("tab", 0)
    assert (held["versions"][0]["digest"], held["versions"][0]["role"]) == (CHAMPION, "champion")
    (region,) = client.get("/v1/engines?policy=tab").json()["regions"]
    assert (engine["region"], region["region"], region["engines"], region["champions"], region["seconds"]) == ("eu", "eu", 1, 0, 2.5)
