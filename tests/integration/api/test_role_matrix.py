"""Every role, and every scope of a program's key, at every action: each cell is asked over HTTP, and is what the one table says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.access import SignIn
from app.api import keys, people, releases, webhooks
from app.api.data import dead_letters, erasures, rules
from app.api.entry.access import Caller, requires
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.db.engine import open_engine
from app.db.ingestion.dead_letters import SqlDeadLetters
from app.db.learning.rule_sets import SqlRules
from app.db.release.release_views import SqlReleaseViews
from app.db.release.webhooks import SqlWebhookBook
from app.domain.access import Scope
from app.domain.people import MAY, OF_SCOPE, PERSONAL, Action, Role, actions_of
from app.domain.telemetry.streams import ErasureReport
from app.main import create_app
from tests.fakes.gateway import collaborators, policy_config
from tests.fakes.people import PASSWORD, Town, quick_passwords
from tests.fakes.releases import POLICY, release_room
from tests.fakes.sealed import SEAL, taken

Callers = dict[str, dict[str, str]]
"""Headers of `person <role>` and `program <scope>`."""
REAL = {
    Action.LOOK: ("GET", "/v1/releases"),
    Action.READ_AUDIT: ("GET", "/v1/audit"),
    Action.SEE_ACCESS: ("GET", "/v1/people"),
    Action.APPROVE: ("POST", "/v1/releases/x/approve"),
    Action.REJECT: ("POST", "/v1/releases/x/reject"),
    Action.ABORT: ("POST", "/v1/releases/x/abort"),
    Action.ROLL_BACK: ("POST", "/v1/releases/x/rollback"),
    Action.RENEW_ANCHOR: ("POST", f"/v1/policies/{POLICY}/anchor"),
    Action.UNFREEZE: ("POST", f"/v1/policies/{POLICY}/unfreeze"),
    Action.LIFT: ("POST", f"/v1/policies/{POLICY}/quarantine/x/lift"),
    Action.PIN: ("POST", f"/v1/policies/{POLICY}/versions/x/pin"),
    Action.NOTIFY: ("GET", "/v1/webhooks"),
    Action.MEND_DATA: ("POST", "/v1/dead-letters/purge"),
    Action.ERASE: ("POST", "/v1/erasures"),
    Action.CHANGE_RULES: ("POST", f"/v1/policies/{POLICY}/rules"),
    Action.MANAGE_KEYS: ("POST", "/v1/keys"),
    Action.MANAGE_PEOPLE: ("POST", "/v1/people"),
}
"""An endpoint of ours that takes the action. Every action is asked at a door of its own besides."""


@pytest.fixture(scope="module")
def town(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    copy = tmp_path_factory.mktemp("roles") / "ratchet.db"
    copy.write_bytes(sqlite_template.read_bytes())
    engine = open_engine(f"sqlite:///{copy}")
    yield Town(engine)
    engine.dispose()


@pytest.fixture(scope="module")
def callers(town: Town) -> Callers:
    book = SqlKeys(town.engine, clock=town.clock)
    people_ = {f"person {role}": town.bearer(role.value.replace("_", "."), role) for role in Role}
    return people_ | {f"program {scope}": {"authorization": f"Bearer {book.create(name=scope, scopes=[scope])[1]}"} for scope in Scope}


@pytest.fixture(scope="module")
def client(town: Town, callers: object) -> TestClient:
    return service(town.engine, town)


def noted(*, actor: str, action: str, subject: str, detail: dict[str, Any]) -> None:
    """Bodies here are empty, so nothing comes of any act."""
    raise AssertionError((actor, action, subject, detail))


def nobody_is_forgotten(pseudonym: str, *, by: str) -> ErasureReport:
    """Nobody is named."""
    raise AssertionError((pseudonym, by))


def nothing_is_applied() -> Any:
    """An empty replay finds no letter to apply."""


def service(engine: Engine, town: Town) -> TestClient:
    doors = APIRouter()
    for action in Action:

        @doors.get(f"/doors/{action}")
        async def door(caller: Caller = Depends(requires(action))) -> str:  # noqa: B008 - as FastAPI wants it
            return caller.actor

    room, book, policies = release_room(engine), SqlKeys(engine, clock=town.clock), {POLICY: policy_config()}
    desk = SignIn(town.people, passwords=quick_passwords(), clock=town.clock)
    crowd = people.PeopleRoom(people=town.people, keys=book, desk=desk, policies=policies, address="http://here", clock=town.clock)
    hooks = webhooks.WebhookRoom(webhooks=SqlWebhookBook(engine, SEAL), send_test=taken, policies=policies, allow_loopback=True)
    forgetting = erasures.ErasureRoom(
        pseudonym_of=lambda **_person: "", forget=nobody_is_forgotten, left_of=lambda _person: [], sweep=lambda: 0, note=noted
    )  # fmt: skip
    letters = dead_letters.LetterRoom(letters=SqlDeadLetters(engine), store=nothing_is_applied, note=noted, clock=town.clock)
    paid = rules.RuleRoom(rules=SqlRules(engine, ""), policies=policies, clock=town.clock)
    mending = [dead_letters.router(letters), erasures.router(forgetting), rules.router(paid)]
    routers = [
        *mending, doors, keys.router(book, rotate=lambda by: None, policies=policies, clock=town.clock), people.router(crowd),
        releases.router(releases.ReleaseRoom(desk=room.desk, releases=room.ledger, views=SqlReleaseViews(engine))),
        webhooks.router(hooks),
    ]  # fmt: skip
    given = collaborators(keys=book, people=SqlPeople(engine, clock=town.clock), clock=town.clock, policies=policies, routers=routers)
    return TestClient(create_app(given), raise_server_exceptions=False)


def ask(client: TestClient, method: str, path: str, headers: dict[str, str]) -> Any:
    """An empty body where one is sent: whoever is let in is told what it lacks."""
    return client.post(path, json={}, headers=headers) if method == "POST" else client.get(path, headers=headers)


@pytest.mark.parametrize("action", Action)
@pytest.mark.parametrize("role", Role)
def test_a_role_may_what_the_table_says(client: TestClient, callers: Callers, role: Role, action: Action) -> None:
    allowed = role in MAY[action]
    asked = [("GET", f"/doors/{action}"), *([REAL[action]] if action in REAL else [])]
    for method, path in asked:
        answer = ask(client, method, path, callers[f"person {role}"])
        assert (answer.status_code != 403) == allowed, (path, answer.text)
        assert answer.status_code not in (401, 500), answer.text
        if not allowed:
            assert "ask an admin" in answer.json()["error"]["message"]


@pytest.mark.parametrize("action", Action)
@pytest.mark.parametrize("scope", Scope)
def test_a_program_may_what_its_scope_says_and_nothing_that_takes_a_person(
    client: TestClient, callers: Callers, scope: Scope, action: Action
) -> None:
    allowed = action in OF_SCOPE[scope]
    assert not (allowed and action in PERSONAL)
    asked = [("GET", f"/doors/{action}"), *([REAL[action]] if action in REAL else [])]
    for method, path in asked:
        answer = ask(client, method, path, callers[f"program {scope}"])
        assert (answer.status_code != 403) == allowed, (path, answer.text)
        assert answer.status_code not in (401, 500), answer.text


def test_the_table_over_http_is_the_table(client: TestClient, callers: Callers) -> None:
    shown = client.get("/v1/roles", headers=callers["person viewer"]).json()
    assert shown == {action.value: sorted(roles) for action, roles in MAY.items()}
    for role in Role:
        me = client.get("/v1/me", headers=callers[f"person {role}"]).json()
        assert (me["roles"], set(me["may"])) == ([role], set(actions_of([role])))


def test_a_change_of_role_counts_at_the_next_request_and_who_is_bound_to_a_policy_manages_nobody(town: Town) -> None:
    grace, bound = town.bearer("grace", Role.OPERATOR), town.bearer("bound", Role.ADMIN, policy=POLICY)
    client = service(town.engine, town)
    assert client.get("/doors/approve", headers=grace).status_code == 200
    town.people.change("grace", by="user:admin", roles=[Role.VIEWER])
    assert client.get("/doors/approve", headers=grace).status_code == 403
    town.people.change("grace", by="user:admin", disabled=True)
    assert client.get("/doors/look", headers=grace).status_code == 401
    assert "of all policies" in client.get("/doors/manage_people", headers=bound).json()["error"]["message"]
    assert client.get("/doors/approve", headers=bound).status_code == 200


def test_people_are_added_changed_and_invited_over_http_and_make_tokens_of_their_own(town: Town) -> None:
    admin, stranger = town.bearer("root", Role.ADMIN), town.bearer("stranger", Role.ADMIN)
    client = service(town.engine, town)
    made = client.post("/v1/people", json={"name": "new", "roles": ["operator"]}, headers=admin)
    assert (made.status_code, made.json()["roles"], made.json()["has_password"]) == (201, ["operator"], False)
    assert made.json()["link"].startswith("http://here/console/welcome?link=")
    again = client.post("/v1/people/new/link", headers=admin).json()["link"]
    assert again != made.json()["link"]
    assert "link" not in client.get("/v1/people", headers=admin).text.replace("links", "")
    changed = client.patch("/v1/people/new", json={"roles": ["viewer"], "policy": POLICY}, headers=admin).json()
    assert (changed["roles"], changed["policy"], changed["made_by"]) == (["viewer"], POLICY, "user:root")
    for body, status in (
        ({"name": "x", "roles": []}, 400),
        ({"name": "x-bot", "roles": ["viewer"]}, 400),
        ({"name": "new", "roles": ["viewer"]}, 409),
    ):
        assert client.post("/v1/people", json=body, headers=admin).status_code == status
    assert client.post("/v1/people", json={"name": "y", "roles": ["viewer"], "policy": "none"}, headers=admin).status_code == 400
    own = client.post("/v1/tokens", json={"name": "laptop", "expires_days": 1}, headers=admin)
    mine = {"authorization": f"Bearer {own.json()['token']}"}
    assert client.get("/v1/me", headers=mine).json()["actor"] == "user:root"
    assert own.json()["token"] not in client.get("/v1/tokens", headers=mine).text
    assert client.delete(f"/v1/tokens/{own.json()['prefix']}", headers=stranger).status_code == 404
    assert client.delete(f"/v1/tokens/{own.json()['prefix']}", headers=mine).json()["usable"] is False
    assert client.get("/v1/me", headers=mine).status_code == 401, "at the next request"


def test_a_terminal_gets_a_token_for_a_password(town: Town) -> None:
    town.person("typist", Role.VIEWER)
    client = service(town.engine, town)
    wrong = client.post("/v1/sign-in", json={"name": "typist", "password": "wrong"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "sign_in_refused")
    made = client.post("/v1/sign-in", json={"name": "typist", "password": PASSWORD})
    assert made.status_code == 201
    assert client.get("/v1/me", headers={"authorization": f"Bearer {made.json()['token']}"}).json()["actor"] == "user:typist"
