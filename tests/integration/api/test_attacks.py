"""What somebody tried from outside against the service as it runs: its own settings, its own database, HTTP."""

import asyncio
import re
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from argon2 import PasswordHasher
from sqlalchemy import Engine

from app.access import Passwords, SignIn
from app.api import people
from app.db.access.keys import SqlKeys
from app.db.engine import open_engine
from app.domain.access import Scope
from app.domain.ids import utc_now
from app.domain.people import Role
from app.domain.telemetry.events import EventType
from app.main import create_app
from app.settings import Settings, from_environment
from tests.fakes.gateway import ScriptedEngines, collaborators, serving
from tests.fakes.people import Town
from tests.fakes.releases import POLICY
from tests.fakes.service import running_service
from tests.integration.console.deployment import deploy

TOML = "".join(f'[policies.{name}]\nmodel = "m"\nbase_name = "tiny"\nbase_model = "tiny"\n' for name in ("composer", POLICY))
SECRETS = {"RATCHET_ACTOR_SALT": "one secret of this deployment", "RATCHET_SESSION_SECRETS": "another secret of this deployment"}
PATIENCE_S = 120.0


@pytest.fixture
def deployed(database_url: str, sqlite_template: Path, tmp_path: Path) -> Settings:
    """A deployment of two policies on either database."""
    (tmp_path / "ratchet.toml").write_text(TOML)
    given = {"RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")} | SECRETS
    if database_url.startswith("sqlite"):
        shutil.copyfile(sqlite_template, tmp_path / "inbox.db")
        return from_environment(given)
    return from_environment(given | {"RATCHET_DATABASE_URL": database_url})


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    opened = open_engine(database_url)
    yield opened
    opened.dispose()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- ids that no column holds ---------------------------------------------------------------------------------------------------

LONG = "x" * 1000
EVENT = {"name": "undo", "value": True, "inference_id": "i"}
ENVELOPE = {"specversion": "1.0", "id": "e", "source": "api", "type": EventType.OBSERVATION}
SCORE = {"name": "rating", "value": 1.0, "traceId": "t"}


def imported(**changes: str) -> dict[str, Any]:
    at = (utc_now() - timedelta(minutes=1)).isoformat()
    turn: dict[str, Any] = {
        "inference_id": "h", "episode_id": "e", "policy": "composer", "version": "v", "started_at": at, "finished_at": at, "messages": [],
        "completion": "x", "prompt_tokens": [], "completion_tokens": [], "logprobs": None, "sampling": {"max_tokens": 0},
        "finish_reason": "stop", "usage": {"prompt_tokens": 0, "completion_tokens": 0}, "source": "import:chats",
    }  # fmt: skip
    return {"specversion": "1.0", "id": "h", "source": "import:chats", "type": EventType.TURN, "data": turn | changes}


FAR_TOO_LONG: list[tuple[str, Any, dict[str, str]]] = [
    ("/v1/events", EVENT, {"idempotency-key": LONG}),
    ("/v1/events", [EVENT, EVENT | {"value": False}], {"idempotency-key": LONG[:198]}),
    ("/v1/events", ENVELOPE | {"subject": LONG, "data": {"name": "undo", "value": True}}, {}),
    ("/api/public/scores", SCORE | {"id": "s", "metadata": {"inference_id": LONG}}, {}),
    ("/api/public/scores", SCORE | {"id": LONG[:180], "dataType": "CORRECTION", "value": "better"}, {}),
    ("/v1/events", imported(inference_id=LONG), {}),
    ("/v1/events", imported(episode_id=LONG[:65]), {}),
    ("/v1/events", imported(version=LONG), {}),
    ("/v1/events", imported(kind="an answer of mine"), {}),
]


def test_no_id_that_somebody_makes_up_is_taken_that_no_column_holds_and_nobody_else_waits_for_it(
    deployed: Settings, engine: Engine
) -> None:
    """On PostgreSQL one text too long fails the whole commit, and everybody's events are in it."""
    _, key = SqlKeys(engine).create(name="product", scopes=[Scope.INGEST])

    async def story() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=url, headers=bearer(key), timeout=PATIENCE_S, trust_env=False) as client:
            answers: list[list[int]] = []
            for number, (path, body, more) in enumerate(FAR_TOO_LONG):
                honest = EVENT | {"id": f"honest-{number}"}
                both = await asyncio.gather(
                    client.post(path, json=body, headers=more), client.post("/v1/events", json=honest)
                )  # fmt: skip
                answers.append([answer.status_code for answer in both])
            return answers

    with running_service(deployed) as url:
        found = asyncio.run(story())
    assert all(hostile in (400, 422) and honest == 202 for hostile, honest in found), found


# --- strangers at the door --------------------------------------------------------------------------------------------------------


class Slow(PasswordHasher):
    """Looks at passwords when it is let."""

    go = threading.Event()

    def verify(self, hash: str | bytes, password: str | bytes) -> Literal[True]:
        assert self.go.wait(PATIENCE_S)
        return super().verify(hash, password)


def test_no_nul_and_no_number_beyond_a_column_is_a_bug_of_ours_wherever_it_stands(deployed: Settings, engine: Engine) -> None:
    deploy(engine)
    _, key = SqlKeys(engine).create(name="admin", scopes=[Scope.ADMIN])
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/keys", {"name": "a\0", "scopes": ["read"]}), ("/v1/dead-letters/replay", {"reason": "a\0"}),
        ("/v1/dead-letters/replay", {"ids": [10**30]}), (f"/v1/policies/{POLICY}/rules", {"toml": "a\0"}),
        (f"/v1/policies/{POLICY}/versions/abc/pin", {"reason": "x", "request_id": "a\0"}),
        (f"/v1/policies/{POLICY}/versions/abc/pin", {"reason": "x", "pointer_generation": 10**30}),
        ("/v1/sign-in", {"name": "a\0", "password": "x"}),
    ]  # fmt: skip
    read = [
        "/v1/releases/a%00", "/v1/releases?policy=%00", "/v1/audit?subject=a%00b", "/v1/dead-letters?reason=%00",
        f"/v1/dead-letters/{10**30}",
        "/console/find?q=%00", "/console/versions/a%00b", "/console/audit?subject=%00",
    ]  # fmt: skip
    with running_service(deployed, engines=ScriptedEngines()) as url, httpx.Client(base_url=url, headers=bearer(key)) as client:
        found = {path: client.get(path).status_code for path in read}
        found |= {f"{path} {body}": client.post(path, json=body).status_code for path, body in bodies}
        form = {"csrf": "", "name": "a\0", "password": "x"}
        found["form"] = client.post("/console/login", data=form).status_code
    assert {what: status for what, status in found.items() if status not in (400, 422)} == {}


def test_a_hundred_strangers_who_try_passwords_keep_nobody_else_waiting(sqlite_engine: Engine) -> None:
    """Each try takes a tenth of a second, and all of them stood on the threads that read keys and tokens for everybody."""
    town = Town(sqlite_engine, utc_now)
    passwords = Passwords(hasher := Slow(time_cost=1, memory_cost=8, parallelism=1))
    desk, book = SignIn(town.people, passwords=passwords, clock=utc_now), SqlKeys(sqlite_engine)
    crowd = people.PeopleRoom(people=town.people, keys=book, desk=desk, policies=("composer",), address="http://here")
    token = town.bearer("ada", Role.VIEWER)
    app = create_app(collaborators(keys=book, people=town.people, routers=[people.router(crowd)], clock=utc_now))

    async def story() -> tuple[int, list[int]]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(), trust_env=False) as client:
            guess = {"name": "ada", "password": "is it this one?"}
            strangers = [asyncio.ensure_future(client.post("/v1/sign-in", json=guess)) for _ in range(100)]
            try:
                turned_away = await asyncio.wait(strangers, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                assert turned_away[0], "all of them wait"
                async with asyncio.timeout(PATIENCE_S / 2):
                    me = await client.get("/v1/me", headers=token)
            finally:
                hasher.go.set()
            return me.status_code, sorted(answer.status_code for answer in await asyncio.gather(*strangers))

    with serving(app) as url:
        status, others = asyncio.run(story())
    assert status == 200
    assert set(others) == {401, 429}
    assert others.count(401) <= 20


# --- another tenant's things --------------------------------------------------------------------------------------------------------

MARK = "zanzibar"
"""In everything that the other policy's people wrote."""
LINK = re.compile(r'(?:href|hx-get|action)="(/(?:console|v1)[^"#]*)')


def crawled(client: httpx.Client, *, most: int = 400) -> list[str]:
    """Every address that pages lead to, cursors, files and forms among them."""
    found, waiting = {"/console": None}, deque(["/console"])
    while waiting and len(found) < most:
        answer = client.get(waiting.popleft())
        if "html" in answer.headers.get("content-type", ""):
            for link in map(unescape, LINK.findall(answer.text)):
                if link not in found and "/static/" not in link and "live" not in link:
                    found[link] = None
                    waiting.append(link)
    return list(found)


def test_somebody_of_one_policy_reads_nothing_of_another_wherever_an_address_leads(deployed: Settings, engine: Engine) -> None:
    """Permalinks, cursors, files, forms and every GET of the API, as somebody of all policies finds them."""
    deploy(engine, name=f"{MARK}-v2", word=MARK)
    town, book = Town(engine, utc_now), SqlKeys(engine)
    everybody = town.bearer("root", *Role)
    town.person("tabitha", Role.VIEWER, policy=POLICY)
    _, theirs = book.create(name=f"{MARK} key", scopes=[Scope.READ], policy=POLICY)
    foreign = {
        "a person": town.bearer("eve", *Role, policy="composer"),
        "a key": bearer(book.create(name="composer's", scopes=[*Scope], policy="composer")[1]),
    }
    with running_service(deployed) as url, httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        client.headers.update(everybody)
        links = crawled(client)
        document = client.get("/openapi.json").json()
        ids = {
            "release_id": ["release-2"], "policy": [POLICY], "name": [POLICY, "tabitha"], "digest": ["v2", "rs", "r2"], "id": ["release-2"],
            "prefix": [theirs[:11]], "evidence": ["x"], "version": ["v2"], "inference_id": ["i3"], "pseudonym": ["p3"],
        }  # fmt: skip
        paths = [path for path, operations in document["paths"].items() if "get" in operations]
        addresses = [*links, *filled(paths, ids)]
        own = {address for address in addresses if MARK in client.get(address).text}
        leaked = [
            (who, address, answer.status_code)
            for who, headers in foreign.items() for address in addresses
            if MARK in (answer := client.get(address, headers=headers)).text.replace(address, "") or answer.status_code == 500
        ]  # fmt: skip
    assert len(links) > 60
    assert len([address for address in own if address.startswith("/console")]) > 15
    assert len([address for address in own if address.startswith("/v1")]) > 3
    assert leaked == []


def filled(paths: list[str], ids: dict[str, list[str]]) -> list[str]:
    """These paths, their parameters filled with what is another's, and asked about it."""
    found: list[str] = []
    for template in paths:
        ways = [template]
        for name in re.findall(r"{(\w+)}", template):
            ways = [way.replace(f"{{{name}}}", value) for way in ways for value in ids.get(name, ["1"])]
        for way in ways:
            found += [way, f"{way}?policy={POLICY}", f"{way}?policy={POLICY}&inference_id=i3", f"{way}?episode_id=e3&run=i3&limit=5"]
    return found


def test_a_token_of_one_policy_is_not_told_which_others_there_are(deployed: Settings, engine: Engine) -> None:
    eve = Town(engine, utc_now).bearer("eve", Role.VIEWER, policy="composer")
    with running_service(deployed) as url:
        for asked in (POLICY, "nobody"):
            answer = httpx.post(f"{url}/v1/tokens", json={"name": "n", "policy": asked}, headers=eve)
            assert answer.status_code == 403
            assert f"'{POLICY}'" not in answer.text
            assert f" {POLICY}" not in answer.text


def test_whoever_is_there_for_one_policy_is_told_who_else_is_and_of_nobody_else(deployed: Settings, engine: Engine) -> None:
    """Names, addresses and users on the machine are an attacker's first list."""
    town, book = Town(engine, utc_now), SqlKeys(engine)
    town.person("tabitha", Role.ADMIN, policy=POLICY)
    eve, root = town.bearer("eve", Role.AUDITOR, policy="composer"), town.bearer("root", Role.ADMIN)
    key = bearer(book.create(name="composer's", scopes=[Scope.ADMIN], policy="composer")[1])
    with running_service(deployed) as url:
        told = [httpx.get(f"{url}/v1/people", headers=who).json()["people"] for who in (eve, key, root)]
    assert [sorted(person["name"] for person in people) for people in told] == [["eve"], ["eve"], ["eve", "root", "tabitha"]]
