"""What probes, operators and clients read: lists as long as was asked, of the policies that a key sees, and health with its reasons."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.api import operations
from app.api.metrics import Metrics
from app.domain.access import Scope
from app.domain.errors import Unavailable
from app.domain.telemetry.events import Heard, Observation
from app.domain.telemetry.serving import EngineSight
from app.main import create_app
from tests.fakes.gateway import CHAMPION, NOON, FixedRoutes, MemoryKeys, ScriptedEngines, collaborators, policy_config
from tests.fakes.sights import Canned

POLICIES = {"tab": policy_config(), "composer": policy_config()}


def asked(path: str, *, policy: str | None = None, scopes: tuple[Scope, ...] = tuple(Scope), **more: Any) -> Any:
    """An answer to a key of one policy, or of all."""
    keys = MemoryKeys()
    key = keys.add(*scopes, policy=policy)
    given = {"policies": POLICIES, "routes": FixedRoutes("composer"), "keys": keys} | more
    return TestClient(create_app(collaborators(**given)), raise_server_exceptions=False).get(path, headers={"x-api-key": key})


@pytest.mark.parametrize("path", ["/v1/models", "/openai/v1/models"])
def test_models_are_the_policies_that_a_key_sees_and_those_of_which_something_is_live_name_it(path: str) -> None:
    told = asked(path).json()
    assert told["object"] == "list"
    composer, tab = told["data"]
    live = int((NOON).timestamp())
    assert composer == {"id": "composer", "object": "model", "created": live, "owned_by": "ratchet", "version": CHAMPION}
    assert (tab["id"], tab["version"]) == ("tab", None)
    assert [one["id"] for one in asked(path, policy="tab").json()["data"]] == ["tab"]
    one = asked(f"{path}/composer")
    assert (one.status_code, one.json()) == (200, composer)
    for name, policy in (("composer", "tab"), ("nobody", None)):
        missing = asked(f"{path}/{name}", policy=policy)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "(declared: tab)" in asked(f"{path}/composer", policy="tab").text


@pytest.mark.parametrize(
    ("query", "policy", "heard"),
    [
        ("", None, (None, 50)), ("?limit=1000&policy=tab", None, ("tab", 1000)), ("?limit=1", "tab", ("tab", 1)),
        ("?policy=tab", "tab", ("tab", 50)), ("?limit=0", None, 422), ("?limit=1001", None, 422), ("?policy=composer", "tab", 404),
        (f"?policy={'p' * 200}", None, ("p" * 200, 50)), (f"?policy={'p' * 201}", None, 422),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/runs", "/v1/versions"])
def test_runs_and_versions_are_listed_fifty_at_a_time_of_the_policies_that_a_key_sees(
    path: str, query: str, policy: str | None, heard: Any
) -> None:
    reads = Canned(runs=[{"id": "r"}], versions=[{"id": "v"}])
    answer = asked(f"{path}{query}", policy=policy, reads=reads)
    if isinstance(heard, int):
        assert (answer.status_code, reads.heard) == (heard, [])
        return
    assert (answer.status_code, len(answer.json()["data"])) == (200, 1)
    assert reads.heard == [(path.removeprefix("/v1/"), heard, {})]


@pytest.mark.parametrize(("policy", "of", "status"), [("tab", None, 200), ("tab", "tab", 200), ("tab", "composer", 404), ("x", None, 404)])
def test_a_report_of_labels_is_of_a_policy_that_a_key_sees(policy: str, of: str | None, status: int) -> None:
    answer = asked(f"/v1/labels/report?policy={policy}", policy=of)
    assert answer.status_code == status
    assert status != 200 or answer.json() == {"policy": policy, "turns": 10}
    assert asked(f"/v1/policies/{policy}/attribution", policy=of).status_code == status


def test_of_a_licence_that_nobody_knows_nothing_is_promised() -> None:
    told = asked("/v1/policies/tab/attribution", policies={"tab": policy_config(licence="Some-1.0")}).json()
    assert told == {"base_model": "tiny", "licence": "Some-1.0", "known": False, "texts": [], "unmet": [], "undecided": []}


class Sights(ScriptedEngines):
    """Two engines that answer the gateway, one of which reports nothing."""

    async def sights(self) -> list[EngineSight]:
        return [EngineSight(address="http://scripted", answers=True, queue=3), EngineSight(address="http://mute", answers=False)]


def entry(address: str, policy: str, **changes: Any) -> dict[str, Any]:
    held = {"digest": CHAMPION, "state": "ready", "seen_at": NOON}
    lag = {"champions": 0, "seconds": 2.5}
    return {"engine": "e", "address": address, "region": "eu", "reports": True, "versions": [held], "lag": lag, "policy": policy} | changes


def test_engines_are_told_by_address_with_what_they_hold_and_how_they_do_now() -> None:
    reads = Canned(
        engines=[
            entry("vllm+http://scripted", "tab", reports=False),
            entry("vllm+http://scripted", "composer"),
            entry("http://gone", "tab"),
        ]
    )
    told = asked("/v1/engines", reads=reads, engines=Sights(), clock=lambda: NOON).json()
    assert [one["address"] for one in told["data"]] == ["http://gone", "http://mute", "http://scripted", "vllm+http://scripted"]
    gone, mute, _, held = told["data"]
    assert (gone["answers"], gone["region"], gone["reports"], len(gone["policies"])) == (None, "eu", True, 1)
    assert (mute["answers"], mute["region"], mute["reports"], mute["policies"]) == (False, None, False, [])
    assert (held["answers"], held["queue"], held["reports"]) == (True, 3, True)
    assert [one["policy"] for one in held["policies"]] == ["tab", "composer"]
    assert held["policies"][0]["versions"][0]["seen_at"] == NOON.isoformat()
    assert {(one["policy"], one["region"], one["engines"]) for one in told["regions"]} == {("composer", "eu", 1), ("tab", "eu", 1)}


@pytest.mark.parametrize(
    ("query", "of", "wanted"), [("", "tab", "tab"), ("?policy=tab", None, "tab"), ("?policy=tab", "tab", "tab"), ("", None, None)]
)
def test_engines_of_one_policy_are_those_that_report_it(query: str, of: str | None, wanted: str | None) -> None:
    reads = Canned(engines=[entry("http://scripted", "tab")])
    told = asked(f"/v1/engines{query}", policy=of, reads=reads, engines=Sights()).json()
    assert reads.heard == [("engines", (wanted,), {})]
    assert [one["address"] for one in told["data"]] == (["http://scripted"] if wanted else ["http://mute", "http://scripted"])
    assert asked("/v1/engines?policy=composer", policy="tab").status_code == 404


SAID = Observation(
    id="o1", policy="tab", inference_id="i1", name="undo", value=True, occurred_at=NOON, source="api", actor="secret", tags={"a": "b"}
)


@pytest.mark.parametrize(
    ("query", "about"),
    [
        ("inference_id=i1", {"inference_ids": ["i1"], "episode_ids": [], "policy": "tab", "most": 100}),
        ("episode_id=e1&limit=1000", {"inference_ids": [], "episode_ids": ["e1"], "policy": "tab", "most": 1000}),
        (f"inference_id={'i' * 64}&limit=1", {"inference_ids": ["i" * 64], "episode_ids": [], "policy": "tab", "most": 1}),
    ],
)  # fmt: skip
def test_what_was_said_of_an_answer_is_read_back_without_who_it_was(query: str, about: dict[str, Any]) -> None:
    ledger = Canned(about=[Heard(observation=SAID, status="joined", retracted=True)])
    (told,) = asked(f"/v1/observations?{query}", policy="tab", ledger=ledger).json()["data"]
    assert "actor" not in told
    assert (told["id"], told["status"], told["retracted"], told["tags"]) == ("o1", "joined", True, {"a": "b"})
    assert ledger.heard == [("about", (), about)]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400), ("inference_id=i&episode_id=e", 400), (f"inference_id={'i' * 65}", 422), ("episode_id=", 422),
        ("inference_id=i&limit=0", 422), ("inference_id=i&limit=1001", 422),
    ],
)  # fmt: skip
def test_one_asks_about_one_answer_or_one_episode(query: str, status: int) -> None:
    ledger = Canned(about=[])
    assert asked(f"/v1/observations?{query}", ledger=ledger).status_code == status
    assert ledger.heard == []


def health(*, notes: bool = True, **checks: Any) -> Any:
    """An answer of probes; `notes` are named `note`."""
    noted = {"note": checks.pop("note")} if "note" in checks else {}
    router = operations.probes(checks=checks, metrics=Metrics(), notes=noted if notes else None)
    app = FastAPI()
    app.include_router(router)
    return TestClient(app).get("/health")


async def well() -> None:
    """Nothing to say."""


async def away() -> None:
    raise Unavailable("the database does not answer")


def test_a_service_is_well_while_every_check_is_and_a_note_makes_nobody_ill() -> None:
    fine = health(database=well, note=away)
    assert (fine.status_code, fine.json()) == (200, {"database": "ok", "note": "the database does not answer"})
    ill = health(database=away, engines=well, note=well)
    assert (ill.status_code, ill.json()) == (503, {"database": "the database does not answer", "engines": "ok", "note": "ok"})
    assert health(notes=False, database=well).json() == {"database": "ok"}


def test_how_long_people_wait_is_told_of_the_policy_that_is_asked_for_or_the_key_s_own() -> None:
    metrics = Metrics()
    waits = {"a": "tab", "b": "tab", "c": "composer"}
    for id_, policy in waits.items():
        metrics.waits.begin(id_, policy)
    assert [metrics.waits.read(policy)["waiting"] for policy in ("tab", "composer", None)] == [2, 1, 3]
    assert asked("/v1/pressure?policy=tab").json() == {"waiting": 0, "first_token_p95_s": None}
    assert asked(f"/v1/pressure?policy={'p' * 201}").status_code == 422
    assert asked("/v1/pressure", scopes=(Scope.READ,)).status_code == 403


def test_events_are_counted_by_what_became_of_them() -> None:
    metrics = Metrics()
    metrics.count_events(["accepted"])
    metrics.count_events(["accepted", "duplicate", "accepted", "conflict", "rejected"])
    told = metrics.text().decode()
    counted = {status: f'ratchet_api_events_total{{status="{status}"}} {count}.0' in told for status, count in (
        ("accepted", 3), ("duplicate", 1), ("conflict", 1), ("rejected", 1),
    )}  # fmt: skip
    assert all(counted.values()), counted


def test_a_key_of_one_policy_reads_the_series_of_that_policy_alone() -> None:
    metrics = Metrics()
    for policy in ("tab", "composer"):
        metrics.first_token_s.labels(policy).observe(1.0)
    mine = metrics.text("tab").decode()
    assert 'policy="tab"' in mine
    assert 'policy="composer"' not in mine
    assert "ratchet_api_events_total{" not in mine, "sums of everybody are nobody's"


def test_a_model_s_age_is_that_of_its_champion() -> None:
    routes = FixedRoutes("composer")
    routes.routes["composer"] = replace(
        routes.routes["composer"], pointer=replace(routes.routes["composer"].pointer, changed_at=NOON - timedelta(days=1))
    )
    assert asked("/v1/models/composer", routes=routes).json()["created"] == int(NOON.timestamp()) - 86_400
