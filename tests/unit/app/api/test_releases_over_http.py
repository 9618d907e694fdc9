"""Acts on releases and policies over HTTP: what reaches the desk, on what it rests, and what is answered to whom."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from app.api import releases
from app.api.releases import ReleaseRoom
from app.domain.access import Scope
from app.domain.errors import DoneAlready
from app.domain.people import Person, Role
from app.domain.release.by_people import BY_PEOPLE
from app.domain.release.releases import AuditEntry, Pointer, Release, ReleaseState
from app.main import create_app
from app.release.basis import Basis
from tests.fakes.gateway import NOON, MemoryKeys, collaborators, policy_config
from tests.fakes.sights import Canned, canned

ADA = Person(id="p1", name="ada", roles=frozenset({Role.OPERATOR}), policy=None, created_at=NOON, made_by="user:root")
RELEASE = Release(
    id="r1", policy="tab", digest="v2", version_name="tab-v2", state=ReleaseState.READY, generation=4, stage=None, champion_digest="v1",
    champion_generation=1, evidence_digest="e1", reason=None, created_at=NOON, changed_at=NOON, initiator="system:loop",
)  # fmt: skip
POINTER = Pointer(policy="tab", digest="v1", generation=1, previous=None, anchor="v1", holdback=0.0, release_id=None, changed_at=NOON)


class Desk:
    """Writes down what it is told to do, and on what; says of everything that it was done where `again`."""

    def __init__(self, *, again: bool = False) -> None:
        self.again = again
        self.basis: Basis | None = None
        self.did: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {"renew_anchor": POINTER, "unfreeze": False, "lift": True, "pin": None, "unpin": None}

    def on(self, basis: Basis) -> "Desk":
        self.basis = basis
        return self

    def __getattr__(self, act: str) -> Callable[..., Any]:
        def do(*words: Any, **named: Any) -> Any:
            self.did.append((act, words, named))
            if self.again:
                raise DoneAlready("it was done at noon")
            return self.answers.get(act, RELEASE)

        return do


class Service:
    """Asked by somebody with a token, by a program's key, or by nobody in particular."""

    def __init__(self, *, again: bool = False, key: bool = True, person: bool = True, policy: str | None = None) -> None:
        self.desk = Desk(again=again)
        self.books = Canned(list=[RELEASE], find=RELEASE)
        entry = AuditEntry(
            seq=1, occurred_at=NOON, actor="user:ada", action="x", subject="r1", detail={}, previous_hash="", hash="h"
        )  # fmt: skip
        self.views = Canned(
            release={"id": "r1"}, policies=["composer", "tab"], slots=[{"slot": 1}], deployment={"live": "v1"}, audit=[entry],
            verify=SimpleNamespace(problem=None, entries=1),
        )  # fmt: skip
        room = ReleaseRoom(desk=cast("Any", self.desk), releases=cast("Any", self.books), views=cast("Any", self.views))
        keys = MemoryKeys()
        self.headers = {"x-api-key": keys.add(Scope.ADMIN, policy=policy)} if key else {}
        if key and person:
            keys.keys[0] = replace(keys.keys[0], person_id="p1")
        app = create_app(collaborators(
            keys=keys, policies={"tab": policy_config(), "composer": policy_config()}, routers=[releases.router(room)],
            people=canned(ever=key, of_token=ADA if person else None, of_session=None),
        ))  # fmt: skip
        self.client = TestClient(app, raise_server_exceptions=False)

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body, headers=self.headers)

    def get(self, path: str) -> Any:
        return self.client.get(path, headers=self.headers)


WHO = {"actor": "user:ada", "reason": "so"}
ACTS = [
    ("/v1/releases/r1/approve", {"evidence_digest": "e1"}, "approve", ("r1",), {"approver": "user:ada", "evidence": "e1", "reason": "so"}),
    ("/v1/releases/r1/reject", {}, "reject", ("r1",), {"approver": "user:ada", "reason": "so"}),
    ("/v1/releases/r1/abort", {}, "abort", ("r1",), WHO),
    ("/v1/releases/r1/rollback", {"to": "v0"}, "roll_back", ("r1",), WHO | {"to": "v0"}),
    ("/v1/releases/r1/rollback", {}, "roll_back", ("r1",), WHO | {"to": None}),
    ("/v1/policies/tab/anchor", {}, "renew_anchor", ("tab",), WHO),
    ("/v1/policies/tab/unfreeze", {}, "unfreeze", ("tab",), {"actor": "user:ada"}),
    ("/v1/policies/tab/quarantine/v2/lift", {}, "lift", ("tab", "v2"), WHO),
    ("/v1/policies/tab/versions/v2/pin", {}, "pin", ("tab", "v2"), WHO),
    ("/v1/policies/tab/versions/v2/unpin", {}, "unpin", ("tab", "v2"), WHO),
]
SUBJECTS = {"renew_anchor": "tab", "unfreeze": "tab", "lift": "tab", "pin": "v2", "unpin": "v2"}
ANSWERS = {"unfreeze": {"free": False}, "lift": {"lifted": True}, "pin": {"pinned": True}, "unpin": {"pinned": False}}


@pytest.mark.parametrize(("path", "more", "act", "words", "named"), ACTS)
def test_an_act_reaches_the_desk_in_the_name_of_who_asks_and_rests_on_what_was_seen(
    path: str, more: dict[str, Any], act: str, words: tuple[str, ...], named: dict[str, Any]
) -> None:
    service = Service()
    done = service.post(path, reason="so", pointer_generation=7, request_id="q1", **{"evidence_digest": "e1"} | more)
    assert done.status_code == 200, done.text
    assert service.desk.did == [(act, words, named)]
    evidence = "e1" if act in ("reject", "abort", "roll_back") else None
    assert service.desk.basis == Basis(
        actor="user:ada", proven=True, act=act, subject=SUBJECTS.get(act, "r1"), generation=7, evidence=evidence, request_id="q1"
    )
    told = done.json()
    if act == "renew_anchor":
        assert (told["digest"], told["anchor"]) == ("v1", "v1")
    else:
        assert told == ANSWERS[act] if act in ANSWERS else (told["id"], told["state"], "config" in told) == ("r1", "READY", False)


@pytest.mark.parametrize(("path", "more", "act", "words", "named"), ACTS)
def test_what_was_done_already_is_told_with_how_it_is_now(
    path: str, more: dict[str, Any], act: str, words: tuple[str, ...], named: dict[str, Any]
) -> None:
    service = Service(again=True)
    told = service.post(path, reason="so", **{"evidence_digest": "e1"} | more)
    assert (told.status_code, told.json()["already"]) == (200, "it was done at noon")
    assert ("id" in told.json()) is (words == ("r1",))


@pytest.mark.parametrize(("path", "more", "act", "words", "named"), ACTS)
def test_on_an_open_deployment_who_decides_has_a_name_and_nothing_proves_it(
    path: str, more: dict[str, Any], act: str, words: tuple[str, ...], named: dict[str, Any]
) -> None:
    service = Service(key=False)
    body = {"reason": "so", "evidence_digest": "e1"} | more
    nobody = service.post(path, **body)
    if act in ("approve", "reject", "renew_anchor"):
        assert nobody.status_code == 409
        assert "nobody is named" in nobody.text
        assert service.desk.did == []
    else:
        assert (nobody.status_code, service.desk.did[0][2]["actor"]) == (200, "user:anonymous")
    assert service.post(path, **body, approver="bob").status_code == 200
    assert (service.desk.did[-1][2].get("actor") or service.desk.did[-1][2]["approver"]) == "user:bob"
    assert service.desk.basis is not None
    assert service.desk.basis.proven is False


@pytest.mark.parametrize(("path", "more", "act", "words", "named"), ACTS)
def test_a_key_of_another_policy_finds_nothing_to_act_on(
    path: str, more: dict[str, Any], act: str, words: tuple[str, ...], named: dict[str, Any]
) -> None:
    service = Service(person=False, policy="composer")
    refused = service.post(path, reason="so", **{"evidence_digest": "e1"} | more)
    assert refused.status_code in (403, 404)
    assert service.desk.did == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"reason": "r" * 2000}, 200), ({"reason": "r" * 2001}, 400), ({"reason": ""}, 400), ({}, 400),
        ({"reason": "r", "request_id": "q" * 150}, 200), ({"reason": "r", "request_id": "q" * 151}, 400), ({"reason": "r", "x": 1}, 400),
        ({"reason": "r", "pointer_generation": 1}, 200), ({"reason": "r", "pointer_generation": 0}, 400),
    ],
)  # fmt: skip
def test_the_body_of_an_act_has_its_bounds(body: dict[str, Any], status: int) -> None:
    service = Service()
    assert service.post("/v1/releases/r1/abort", **body).status_code == status
    assert len(service.desk.did) == (status == 200)


@pytest.mark.parametrize(
    ("path", "book", "heard"),
    [
        ("/v1/slots", "views", ("slots", (), {"policy": None, "limit": 48})),
        ("/v1/slots?policy=tab&limit=1000", "views", ("slots", (), {"policy": "tab", "limit": 1000})),
        ("/v1/releases", "books", ("list", (), {"policy": None, "states": (), "limit": 50})),
        ("/v1/releases?state=ready&limit=1", "books", ("list", (), {"policy": None, "states": (ReleaseState.READY,), "limit": 1})),
        ("/v1/releases/r1", "views", ("release", ("r1",), {})), ("/v1/policies/tab/deployment", "views", ("deployment", ("tab",), {})),
        ("/v1/audit", "views", ("audit", (), {"subject": None, "policy": None, "newest": 100})),
        ("/v1/audit?subject=r1&limit=7", "views", ("audit", (), {"subject": "r1", "policy": None, "newest": 7})),
        ("/v1/audit/verify", "views", ("verify", (), {})), ("/v1/policies", "views", ("policies", (), {})),
    ],
)  # fmt: skip
def test_lists_are_as_long_and_of_what_was_asked(path: str, book: str, heard: tuple[Any, ...]) -> None:
    service = Service()
    assert service.get(path).status_code == 200
    assert getattr(service, book).heard[-1] == heard


def test_what_is_read_is_told_as_it_is() -> None:
    service = Service()
    assert service.get("/v1/policies").json() == {"data": ["composer", "tab"]}
    assert service.get("/v1/slots").json() == {"data": [{"slot": 1}]}
    (listed,) = service.get("/v1/releases").json()["data"]
    assert (listed["id"], "config" in listed, listed["judged_by"] == BY_PEOPLE) == ("r1", False, False)
    assert service.get("/v1/audit").json()["data"][0]["seq"] == 1
    assert service.get("/v1/audit/verify").json() == {"problem": None, "entries": 1}
    assert service.get("/v1/releases/r1").json() == {"id": "r1"}
    wrong = service.get("/v1/releases?state=done")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "state")
    assert "READY" in wrong.text


def test_a_key_of_one_policy_reads_what_is_about_it() -> None:
    service = Service(person=False, policy="composer")
    assert service.get("/v1/policies").json() == {"data": ["composer"]}
    assert service.get("/v1/releases/r1").status_code == 404
    assert [service.get(path).status_code for path in ("/v1/policies/tab/deployment", "/v1/slots?policy=tab")] == [403, 403]
    service.get("/v1/audit")
    assert service.views.heard[-1][2]["policy"] == "composer"
