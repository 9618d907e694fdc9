"""Releases over HTTP: who may do what, and what the answers say."""

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.db.access.keys import SqlKeys
from app.db.release.release_views import SqlReleaseViews
from app.domain.access import Scope
from app.domain.people import Role
from app.domain.release.alarms import AlarmKind
from app.domain.release.releases import ReleaseState
from tests.fakes.people import Town
from tests.fakes.releases import ADA, BOB, POLICY, ReleaseRoom, release_room
from tests.integration.release.service import release_service


@pytest.fixture
def room(sqlite_engine: Engine) -> ReleaseRoom:
    return release_room(sqlite_engine)


def _client(engine: Engine, room: ReleaseRoom) -> TestClient:
    app = release_service(engine, room, loopback=True)
    app.state.access.load()
    return TestClient(app)


@pytest.fixture
def client(sqlite_engine: Engine, room: ReleaseRoom) -> TestClient:
    return _client(sqlite_engine, room)


def test_a_person_approves_what_they_looked_at(client: TestClient, room: ReleaseRoom) -> None:
    release = room.ready("v2")
    shown = client.get(f"/v1/releases/{release.id}").json()
    assert [step["to_state"] for step in shown["history"]][-1] == "READY"
    assert {gate["gate"] for gate in shown["gates"]} == {"g0_training_health", "g1_offline", "g3_canary"}
    url = f"/v1/releases/{release.id}/approve"
    assert client.post(url, json={"evidence_digest": "f" * 64, "approver": "ada"}).status_code == 409
    answer = client.post(url, json={"evidence_digest": shown["evidence_digest"]}, headers={"X-Ratchet-User": "ada"})
    assert (answer.status_code, answer.json()["state"]) == (200, "APPROVED")
    assert client.get(f"/v1/releases/{release.id}").json()["approvals"][0]["approver"] == "user:ada"


def test_no_approval_stands_of_a_release_that_gave_way_to_a_newer_one(client: TestClient, room: ReleaseRoom) -> None:
    older = room.approved("v2")
    room.ready("v3")
    shown = client.get(f"/v1/releases/{older.id}").json()
    assert (shown["history"][-1]["to_state"], shown["approvals"]) == ("EXPIRED", [])


def test_nobody_in_particular_may_stop_but_not_approve(client: TestClient, room: ReleaseRoom) -> None:
    release = room.ready("v2")
    answer = client.post(f"/v1/releases/{release.id}/approve", json={"evidence_digest": release.evidence_digest})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "refused")
    stopped = client.post(f"/v1/releases/{release.id}/abort", json={"reason": "felt off"})
    assert (stopped.status_code, stopped.json()["state"]) == (200, "ABORTED")


def test_a_form_of_another_page_cannot_approve(client: TestClient, room: ReleaseRoom) -> None:
    release = room.ready("v2")
    body = '{"evidence_digest": "' + str(release.evidence_digest) + '", "approver": "ada"}'
    answer = client.post(f"/v1/releases/{release.id}/approve", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 415


def test_the_approver_is_whose_token_it_is(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    town = Town(sqlite_engine)
    grace, reader = town.token(town.person("grace")), town.token(town.person("reader", Role.VIEWER))
    client, release = _client(sqlite_engine, room), room.ready("v2")
    url, body = f"/v1/releases/{release.id}/approve", {"evidence_digest": release.evidence_digest}
    assert client.post(url, json=body).status_code == 401
    assert client.post(url, json=body, headers={"authorization": f"Bearer {reader}"}).status_code == 403
    mine = {"authorization": f"Bearer {grace}", "X-Ratchet-User": "somebody-else"}
    assert client.post(url, json={**body, "approver": "somebody-else"}, headers=mine).status_code == 403
    assert client.post(url, json=body, headers=mine).json()["reason"].startswith("approved")
    assert client.get(f"/v1/releases/{release.id}", headers=mine).json()["approvals"][0]["approver"] == "user:grace"


def test_a_key_of_a_program_stops_and_rolls_back_and_decides_nothing(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    _, text = SqlKeys(sqlite_engine).create(name="ada", scopes=[Scope.RELEASE, Scope.READ])
    client, release = _client(sqlite_engine, room), room.ready("v2")
    theirs = {"authorization": f"Bearer {text}"}
    url = f"/v1/releases/{release.id}"
    refused = client.post(f"{url}/approve", json={"evidence_digest": release.evidence_digest}, headers=theirs)
    assert refused.status_code == 403
    assert "speaks for nobody" in refused.json()["error"]["message"]
    assert client.post(f"{url}/reject", json={"reason": "x"}, headers=theirs).status_code == 403
    assert client.post(f"{url}/abort", json={"reason": "x"}, headers=theirs).json()["state"] == "ABORTED"
    assert SqlReleaseViews(sqlite_engine).release(release.id)["history"][-1]["actor"] == "service:ada"


def test_a_key_of_one_policy_acts_on_no_other(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    theirs = Town(sqlite_engine).bearer("mallory", policy="another")
    client, release = _client(sqlite_engine, room), room.ready("v2")
    acts: dict[str, dict[str, str]] = {
        "approve": {"evidence_digest": str(release.evidence_digest)}, "reject": {"reason": "x"}, "abort": {"reason": "x"},
        "rollback": {"reason": "x"},
    }  # fmt: skip
    for act, body in acts.items():
        assert client.post(f"/v1/releases/{release.id}/{act}", json=body, headers=theirs).status_code == 404, act
    room.desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="alarms")
    for act in ("anchor", "unfreeze", "quarantine/v2/lift", "versions/v1/pin", "versions/v1/unpin"):
        refused = client.post(f"/v1/policies/{POLICY}/{act}", json={"reason": "x"}, headers=theirs)
        assert (refused.status_code, "v1" in refused.text) == (403, False), act
    assert client.get(f"/v1/policies/{POLICY}/deployment", headers=theirs).status_code == 403
    for path in ("/v1/slots", "/v1/releases"):
        assert client.get(path, params={"policy": POLICY}, headers=theirs).status_code == 403
    assert client.get(f"/v1/releases/{release.id}", headers=theirs).status_code == 404
    assert room.ledger.find(release.id).state is ReleaseState.READY
    assert SqlReleaseViews(sqlite_engine).release(release.id)["approvals"] == []


def test_a_rollback_over_http_moves_the_pointer_at_once(client: TestClient, room: ReleaseRoom) -> None:
    promoted = room.champion("v2")
    answer = client.post(f"/v1/releases/{promoted.id}/rollback", json={"reason": "rude", "approver": "eve"})
    assert answer.json()["state"] == "ROLLED_BACK"
    shown = client.get(f"/v1/policies/{POLICY}/deployment").json()
    assert shown["pointer"]["digest"] == "v1"
    assert [row["digest"] for row in shown["quarantine"]] == ["v2"]
    assert [row["action"] for row in shown["history"]] == ["rollback", "promote", "bootstrap"]


def test_two_people_lift_a_quarantine_over_http_and_alarms_are_shown_with_their_end(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    release = room.champion("v2")
    room.desk.roll_back(release.id, actor="system:watch", reason="harm", alarm=AlarmKind.ANCHOR)
    where, body = f"/v1/policies/{POLICY}/quarantine/v2/lift", {"reason": "the network"}
    for unproven in ({}, {"X-Ratchet-User": "ada"}):
        refused = _client(sqlite_engine, room).post(where, json=body, headers=unproven)
        assert (refused.status_code, "could be two" in refused.json()["error"]["message"]) == (409, True)
    town = Town(sqlite_engine)
    ada, bob = town.bearer("ada"), town.bearer("bob")
    client = _client(sqlite_engine, room)
    answers = [client.post(where, json=body, headers=who).json() for who in (ada, ada, bob)]
    assert answers == [{"lifted": False}, {"lifted": False}, {"lifted": True}]
    for who in (ada, bob):
        client.post(f"/v1/policies/{POLICY}/unfreeze", json={"reason": "seen"}, headers=who)
    shown = client.get(f"/v1/policies/{POLICY}/deployment", headers=ada).json()
    assert (shown["quarantine"], shown["frozen"]) == ([], None)
    [alarm] = client.get(f"/v1/releases/{release.id}", headers=ada).json()["alarms"]
    assert (alarm["kind"], alarm["raised_by"], alarm["ended_by"]) == ("anchor", "system:watch", f"{ADA}, {BOB}")
    assert shown["alarms"] == [alarm]


def test_lists_filter_by_state_and_say_what_states_there_are(client: TestClient, room: ReleaseRoom) -> None:
    room.queued("v2")
    assert [r["digest"] for r in client.get("/v1/releases", params={"state": "queued"}).json()["data"]] == ["v2"]
    answer = client.get("/v1/releases", params={"state": "sleeping"})
    assert answer.status_code == 400
    assert "SUPERSEDED" in answer.json()["error"]["message"]


def test_the_audit_chain_is_readable_and_verifiable(client: TestClient, room: ReleaseRoom) -> None:
    release = room.canary("v2")
    actions = [entry["action"] for entry in client.get("/v1/audit", params={"subject": release.id}).json()["data"]]
    assert actions[0] == "release.canary"
    assert client.get("/v1/audit/verify").json()["problem"] is None


def test_a_webhooks_secret_is_shown_once_and_rotates(client: TestClient) -> None:
    made = client.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/hook"})
    assert made.status_code == 201
    assert made.json()["secret"].startswith("whsec_")
    assert "secret" not in str(client.get("/v1/webhooks").json())
    rotated = client.post(f"/v1/webhooks/{made.json()['id']}/rotate").json()
    assert rotated["secret"] != made.json()["secret"]
    assert client.delete(f"/v1/webhooks/{made.json()['id']}").json()["disabled_at"] is not None
    assert client.post("/v1/webhooks", json={"url": "http://169.254.169.254/latest"}).status_code == 400


def test_a_key_of_one_policy_neither_reads_nor_acts_on_another_s_releases(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    town = Town(sqlite_engine)
    headers = {policy: town.bearer(f"of-{policy}", Role.ADMIN, policy=policy) for policy in (POLICY, "composer")}
    client, release = _client(sqlite_engine, room), room.ready("v2")
    foreign, own = headers["composer"], headers[POLICY]
    yes, why = {"evidence_digest": release.evidence_digest}, {"reason": "mine now"}
    for act, body in (("approve", yes), ("reject", why), ("abort", why), ("rollback", why)):
        assert client.post(f"/v1/releases/{release.id}/{act}", json=body, headers=foreign).status_code == 404, act
    for act in ("anchor", "unfreeze"):
        assert client.post(f"/v1/policies/{POLICY}/{act}", json=why, headers=foreign).status_code == 403, act
    assert client.get(f"/v1/releases/{release.id}", headers=foreign).status_code == 404
    assert client.get("/v1/releases", headers=foreign).json()["data"] == []
    assert client.get("/v1/audit", headers=foreign).json()["data"] == []
    assert client.get("/v1/audit", params={"subject": release.id}, headers=foreign).json()["data"] == []
    subjects = {entry["subject"] for entry in client.get("/v1/audit", headers=own).json()["data"]}
    assert {release.id, POLICY} <= subjects
    assert room.ledger.find(release.id).state == release.state


def test_a_key_of_one_policy_has_webhooks_of_its_own(sqlite_engine: Engine, room: ReleaseRoom) -> None:
    keys = SqlKeys(sqlite_engine)
    _, own = keys.create(name="own", scopes=[Scope.ADMIN], policy=POLICY)
    _, foreign = keys.create(name="foreign", scopes=[Scope.ADMIN], policy="composer")
    client = _client(sqlite_engine, room)
    mine, theirs = {"authorization": f"Bearer {own}"}, {"authorization": f"Bearer {foreign}"}
    made = client.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/hook"}, headers=mine).json()
    assert made["policy"] == POLICY, "what names no policy hears of the key's own"
    assert client.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/hook", "policy": POLICY}, headers=theirs).status_code == 403
    assert client.get("/v1/webhooks", headers=theirs).json()["data"] == []
    for method, path in (("POST", "/rotate"), ("GET", "/deliveries"), ("DELETE", "")):
        assert client.request(method, f"/v1/webhooks/{made['id']}{path}", headers=theirs).status_code == 404, path
    assert [hook["id"] for hook in client.get("/v1/webhooks", headers=mine).json()["data"]] == [made["id"]]
    assert client.delete(f"/v1/webhooks/{made['id']}", headers=mine).status_code == 200
