"""The demo's operator says yes bound to what it saw, and its saboteur's version is known for what it is."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from app.domain.errors import Refused
from app.domain.ids import utc_now
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import VersionKind
from pipelines.commands.demonstration.operator import Operator
from pipelines.commands.demonstration.plant import WHY, _version
from tests.fakes.releases import version
from tests.unit.pipelines.commands.test_demonstration import release

READY = replace(release(ReleaseState.READY), evidence_digest="e" * 64)


@contextmanager
def operating(answer: Callable[[httpx.Request], httpx.Response]) -> Iterator[tuple[Operator, list[httpx.Request]]]:
    asked: list[httpx.Request] = []

    def heard(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer(request)

    operator = Operator("http://here")
    operator.close()
    operator._http = httpx.Client(base_url="http://here", transport=httpx.MockTransport(heard))
    yield operator, asked
    assert not operator._http.is_closed
    operator.close()
    assert operator._http.is_closed


def gone(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(("status", "well"), [(200, True), (503, False), (204, False)])
def test_a_service_is_well_where_it_says_so(status: int, well: bool) -> None:
    with operating(lambda _: httpx.Response(status)) as (operator, asked):
        assert operator.is_well() is well
    assert [(request.method, request.url.path) for request in asked] == [("GET", "/health")]


def test_a_service_that_is_away_is_not_well_and_its_operator_says_why() -> None:
    with operating(gone) as (operator, _):
        assert not operator.is_well()
        with pytest.raises(Refused, match="demo-operator could not reach the service: refused"):
            operator.approve(READY)


def test_a_yes_is_bound_to_the_evidence_and_says_so_short() -> None:
    with operating(lambda _: httpx.Response(200, json={})) as (operator, asked):
        assert operator.approve(READY) == f"demo-operator approved tiny-rl-s1 over REST, bound to evidence {'e' * 12}"
        assert operator.approve(replace(READY, evidence_digest=None)).endswith("bound to evidence ")
    assert (asked[0].method, asked[0].url.path) == ("POST", "/v1/releases/r1/approve")
    assert json.loads(asked[0].content) == {
        "evidence_digest": "e" * 64, "approver": "demo-operator", "reason": "looked at the evidence",
    }  # fmt: skip


def test_a_refusal_is_told_with_its_first_four_hundred_characters() -> None:
    with operating(lambda _: httpx.Response(409, text="x" * 401)) as (operator, _), pytest.raises(Refused) as refused:
        operator.approve(READY)
    assert str(refused.value) == f"demo-operator was refused: {'x' * 400}"


def test_a_planted_version_descends_from_the_champion_and_says_that_it_is_known_to_be_bad() -> None:
    champion = replace(version("c"), step=3, run_id="run", optimizer_uri="uri", tags={"code": "x"})
    planted = _version(champion, "d")
    assert (planted.digest, planted.name, planted.kind) == ("d", "tiny-c-planted", VersionKind.PLANTED)
    assert (planted.parent, planted.step, planted.run_id, planted.optimizer_uri) == ("c", 4, None, None)
    assert (planted.tags, planted.policy, planted.licence) == ({"planted": WHY}, champion.policy, champion.licence)
    assert utc_now() - planted.created_at < timedelta(minutes=5)
