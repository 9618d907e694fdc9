"""Keys over HTTP on a real database: as on the command line, never wider than the key that makes them."""

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select
from starlette.testclient import TestClient

from app.api import keys
from app.api.application import Application
from app.db.access.keys import SqlKeys
from app.db.engine import reading
from app.db.tables import audit
from app.domain.access import Scope
from app.domain.ids import utc_now
from app.main import create_app
from tests.fakes.gateway import collaborators, policy_config, serving


def service(engine: Engine) -> tuple[TestClient, SqlKeys]:
    book = SqlKeys(engine)
    return TestClient(app_of(book), raise_server_exceptions=False), book


def app_of(book: SqlKeys) -> Application:
    policies = {"composer": policy_config(), "tab": policy_config()}
    return create_app(collaborators(keys=book, policies=policies, routers=[keys.router(book, rotate=lambda by: None, policies=policies)]))


def eventually(claim: Callable[[], bool]) -> None:
    patient_until = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < patient_until
        time.sleep(0.01)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_made_shown_once_listed_used_and_revoked(sqlite_engine: Engine) -> None:
    _, book = service(sqlite_engine)
    _, admin = book.create(name="ops", scopes=[Scope.ADMIN])
    client, _ = service(sqlite_engine)
    asked = {"name": "editor", "scopes": ["ingest"], "policy": "composer", "rate_per_s": 5, "expires_days": 1}
    made = client.post("/v1/keys", json=asked, headers=bearer(admin))
    assert made.status_code == 201
    listed = client.get("/v1/keys", headers=bearer(admin))
    assert made.json()["key"] not in listed.text
    newest = listed.json()["keys"][-1]
    assert (newest["prefix"], newest["name"], newest["scopes"], newest["usable"]) == (made.json()["prefix"], "editor", ["ingest"], True)
    ended = client.delete(f"/v1/keys/{newest['prefix']}", headers=bearer(admin))
    assert (ended.status_code, ended.json()["usable"]) == (200, False)
    with reading(sqlite_engine) as connection:
        said = [(row.actor, row.action) for row in connection.execute(select(audit)) if row.subject == newest["prefix"]]
    assert said == [("service:ops", "key.created"), ("service:ops", "key.revoked")]


def test_a_key_is_rotated_with_an_overlap_in_which_both_are_good(sqlite_engine: Engine) -> None:
    _, book = service(sqlite_engine)
    _, admin = book.create(name="ops", scopes=[Scope.ADMIN])
    client, _ = service(sqlite_engine)
    old, new = (client.post("/v1/keys", json={"name": "editor", "scopes": ["read"]}, headers=bearer(admin)).json() for _ in range(2))

    def statuses() -> list[int]:
        client, _ = service(sqlite_engine)  # which reads the keys as they are
        return [client.get("/v1/runs", headers=bearer(made["key"])).status_code for made in (old, new)]

    assert statuses() == [200, 200]
    client.delete(f"/v1/keys/{old['prefix']}", headers=bearer(admin))
    assert statuses() == [401, 200]


def test_a_key_of_one_policy_makes_sees_and_ends_keys_of_that_policy_alone(sqlite_engine: Engine) -> None:
    _, book = service(sqlite_engine)
    _, tab = book.create(name="tab ops", scopes=[Scope.ADMIN], policy="tab")
    other, _ = book.create(name="composer's", scopes=[Scope.READ], policy="composer")
    client, _ = service(sqlite_engine)
    for policy, status in (("composer", 403), ("tab", 201), (None, 201)):
        body = {"name": "n", "scopes": ["read"]} | ({} if policy is None else {"policy": policy})
        assert client.post("/v1/keys", json=body, headers=bearer(tab)).status_code == status
    assert {key["policy"] for key in client.get("/v1/keys", headers=bearer(tab)).json()["keys"]} == {"tab"}
    assert client.delete(f"/v1/keys/{other.prefix}", headers=bearer(tab)).status_code == 404
    assert [key.prefix for key in book.all() if key.prefix == other.prefix] == [other.prefix]


WRONG = [
    {"name": "n", "scopes": []}, {"name": "n", "scopes": ["root"]}, {"scopes": ["read"]},
    {"name": "n", "scopes": ["read"], "policy": "x"},
]  # fmt: skip


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_key_is_refused_by_name(sqlite_engine: Engine, body: dict[str, object]) -> None:
    _, book = service(sqlite_engine)
    _, admin = book.create(name="ops", scopes=[Scope.ADMIN])
    client, _ = service(sqlite_engine)
    assert client.post("/v1/keys", json=body, headers=bearer(admin)).status_code == 400
    assert len(book.history()) == 1


def test_others_make_no_keys_and_an_open_service_is_not_closed_by_whoever_is_let_in(sqlite_engine: Engine) -> None:
    client, book = service(sqlite_engine)
    assert client.post("/v1/keys", json={"name": "n", "scopes": ["admin"]}).status_code == 403
    assert book.history() == []
    _, ingest = book.create(name="product", scopes=[Scope.INGEST, Scope.READ, Scope.RELEASE])
    client, _ = service(sqlite_engine)
    for ask in (client.get("/v1/keys", headers=bearer(ingest)), client.delete("/v1/keys/rk_x", headers=bearer(ingest))):
        assert ask.status_code == 403


def test_a_key_says_when_it_was_used_and_one_that_never_was_says_so(sqlite_engine: Engine) -> None:
    book = SqlKeys(sqlite_engine)
    _, admin = book.create(name="ops", scopes=[Scope.ADMIN])
    reader, secret = book.create(name="a dashboard", scopes=[Scope.READ])
    idle, _ = book.create(name="forgotten", scopes=[Scope.READ])
    began = utc_now()

    def last_uses() -> dict[str, Any]:
        return {key["prefix"]: key["last_used_at"] for key in ask("/v1/keys", admin)["keys"]}

    with serving(app_of(book)) as url, httpx.Client(base_url=url, trust_env=False) as client:

        def ask(path: str, key: str) -> Any:
            return client.get(path, headers=bearer(key)).raise_for_status().json()

        assert last_uses()[reader.prefix] is None
        ask("/v1/runs", secret)
        eventually(lambda: last_uses()[reader.prefix] is not None)
        found = last_uses()
    assert began <= datetime.fromisoformat(found[reader.prefix]) <= utc_now()
    assert found[idle.prefix] is None
