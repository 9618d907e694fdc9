"""Every endpoint fuzzed against its own OpenAPI document, by every role and by nobody: no 5xx, no hang, nothing refused is stored."""

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from app import wiring
from app.api import keys, people, webhooks
from app.api.application import Application
from app.api.data import dead_letters, erasures, rules
from app.api.entry.feedback_tokens import FeedbackTokens
from app.api.entry.sessions import Sessions
from app.api.releases import ReleaseRoom, router
from app.domain.access import Scope
from app.domain.ids import utc_now, uuid7
from app.domain.people import Role
from app.main import create_app
from app.settings import Settings, from_environment
from tests.fakes.gateway import collaborators, policy_config
from tests.fakes.inbox import MemoryInbox
from tests.fakes.people import Town
from tests.fakes.sealed import taken

EXAMPLES = int(os.environ.get("RATCHET_FUZZ_EXAMPLES", "14"))
INBOX = MemoryInbox()
NOBODY = ("", "rk_wrong_0123456789", "ft_wrong", "rs_wrong.0", "sk-wrong")
PROGRAMS = [f"program {scope}" for scope in Scope]
PEOPLE = [f"person {role}" for role in Role]
BOUND = ["program of composer", "program of another", "person of composer"]
NARROW = ["session of an agent", "browser with an answer's token"]
CALLERS = ["program admin"] * 5 + ["person admin"] * 5 + PROGRAMS + PEOPLE + BOUND + NARROW + list(NOBODY)
"""Who asks: whoever may do everything most often, because the others seldom get as far as a body's meaning."""
PUBLIC = frozenset({"/health", "/status", "/info", "/arize_phoenix_version", "/openapi.json"})
EXPECTED = {
    "/v1/chat/completions", "/v1/events", "/feedback", "/feedback/{feedback_id}", "/v1/models", "/health", "/status", "/metrics",
    "/v1/runs", "/v1/versions", "/v1/labels/report", "/api/public/scores", "/v1/span_annotations", "/v1/logs", "/v1/traces",
    "/v1/releases", "/rl/start_session", "/rl/set_reward", "/rl/end_session", "/api/3.0/mlflow/traces/{trace_id}/assessments",
    "/v1/webhooks", "/v1/people", "/v1/tokens", "/v1/me", "/v1/keys", "/v1/keys/{prefix}", "/v1/dead-letters", "/v1/erasures",
    "/v1/policies/{policy}/rules", "/v1/observations", "/v1/audit",
}  # fmt: skip


@pytest.fixture(scope="module")
def where(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A deployment's settings and databases."""
    data = tmp_path_factory.mktemp("fuzz")
    for name in ("ratchet.db", "inbox.db"):
        shutil.copyfile(sqlite_template, data / name)
    (data / "ratchet.toml").write_text('[policies.composer]\nmodel = "m"\nbase_name = "tiny"\nbase_model = "tiny"\n')
    return from_environment({"RATCHET_DATA": str(data), "RATCHET_CONFIG": str(data / "ratchet.toml")})


@pytest.fixture(scope="module")
def keys_of(where: Settings) -> dict[str, str]:
    """What each caller sends as its key."""
    book, town = wiring.key_book(where), Town(wiring.open_state(where), utc_now)
    made = {f"program {scope}": book.create(name=scope, scopes=[scope])[1] for scope in Scope}
    made |= {f"program of {policy}": book.create(name=policy, scopes=[*Scope], policy=policy)[1] for policy in ("composer", "another")}
    made |= {f"person {role}": town.token(town.person(role.value.replace("_", "."), role)) for role in Role}
    made["person of composer"] = town.token(town.person("bound", *Role, policy="composer"))
    return made | {nobody: nobody for nobody in NOBODY}


@pytest.fixture(scope="module")
def key_of(where: Settings, keys_of: dict[str, str]) -> Callable[[str], str]:
    """What a caller sends; keys of sessions and tokens of answers are signed anew each time, because admins rotate what signs them."""
    secrets, parent = wiring.session_secrets(where), keys_of["program ingest"][:11]
    fresh: dict[str, Callable[[], str]] = {
        NARROW[0]: lambda: Sessions(secrets).issue(uuid7(), parent=parent, now=utc_now())[0],
        NARROW[1]: lambda: FeedbackTokens(secrets).issue(uuid7(), policy="composer", now=utc_now(), parent=parent),
    }
    return lambda caller: fresh[caller]() if caller in fresh else keys_of[caller]


@pytest.fixture(scope="module")
def app(where: Settings, keys_of: dict[str, str]) -> Application:
    """Fakes behind the endpoints of products, on SQLite what is behind those of operators."""
    room = ReleaseRoom(desk=wiring.release_desk(where), releases=wiring.release_ledger(where), views=wiring.release_views(where))
    hooks = webhooks.WebhookRoom(webhooks=wiring.webhook_book(where), send_test=taken, policies=("composer",), allow_loopback=True)
    crowd = people.PeopleRoom(
        people=wiring.people_book(where), keys=wiring.key_book(where), desk=wiring.sign_in(where), policies=("composer",), address="http://x"
    )  # fmt: skip
    policies, note = {"composer": policy_config()}, partial(wiring.write_audit, where)
    keyring = keys.router(wiring.key_book(where), rotate=partial(wiring.rotate_session_secret, where), policies=policies)
    letters = dead_letters.LetterRoom(
        letters=wiring.dead_letters(where), store=cache(lambda: wiring.effect_store(where)), note=note, clock=utc_now
    )
    forgetting = erasures.ErasureRoom(
        pseudonym_of=partial(wiring.pseudonym_of, where), forget=partial(wiring.forget, where), left_of=lambda _pseudonym: [],
        sweep=lambda: 0, note=note,
    )  # fmt: skip
    paid = rules.RuleRoom(rules=wiring.rule_book(where, ""), policies=policies, clock=utc_now)
    routers = [
        router(room), webhooks.router(hooks), people.router(crowd), keyring, dead_letters.router(letters), erasures.router(forgetting),
        rules.router(paid),
    ]  # fmt: skip
    with_ = collaborators(
        inbox=INBOX, routers=routers, policies=policies, keys=wiring.key_book(where), people=wiring.people_book(where), clock=utc_now,
        session_secrets=wiring.session_secrets(where),
    )  # fmt: skip
    return create_app(with_)


@pytest.fixture(scope="module")
def document(app: Application) -> Any:
    """The OpenAPI document as schemathesis reads it."""
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@schemathesis.serializer("application/x-protobuf")
def as_bytes(ctx: Any, value: Any) -> bytes:
    """Whatever was generated for a protobuf body, as bytes."""
    return value if isinstance(value, bytes) else str(value).encode()


def test_the_document_names_every_endpoint_and_every_body(app: Application) -> None:
    paths = app.openapi()["paths"]
    assert set(paths) >= EXPECTED
    for path, operations in paths.items():
        for method, operation in operations.items():
            if method in ("post", "patch") and not path.endswith(("/rotate", "/link", "/test", "/sign-out", "/rotate-sessions", "/sweep")):
                assert "requestBody" in operation, f"{method} {path}"


def test_nothing_breaks_and_nothing_refused_is_stored(document: Any, key_of: Callable[[str], str]) -> None:
    tried = 0
    for operation in document.get_all_operations():
        _fuzz(operation.ok(), key_of)
        tried += 1
    assert tried >= len(EXPECTED)


def _fuzz(operation: Any, key_of: Callable[[str], str]) -> None:
    """Ask one endpoint what its document allows, and what it does not."""

    @settings(
        max_examples=EXAMPLES, deadline=10_000, phases=[Phase.generate], derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType] - the enumeration iterates over its members

    )  # fmt: skip
    @given(
        case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        caller=strategies.sampled_from(CALLERS),
    )
    def ask(case: Any, caller: str) -> None:
        key = key_of(caller)
        before = len(INBOX.events)
        case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() not in ("authorization", "x-api-key")}
        response = case.call(headers={"x-api-key": key} if key else {})
        assert key not in NOBODY or response.status_code >= 400 or operation.path in PUBLIC, f"{operation.label} let {key!r} in"
        assert response.status_code < 500, f"{operation.label}: {response.status_code} {response.text} for {case.body!r}"
        if response.status_code >= 400:
            assert len(INBOX.events) == before
            answer = response.json()
            per_event = answer.keys() & {"results", "errors"}  # a batch of which nothing was taken
            assert per_event or set(answer["error"]) == {"message", "type", "param", "code"}, answer

    ask()


def test_every_role_and_every_scope_is_let_in_as_who_it_is(app: Application, keys_of: dict[str, str], key_of: Callable[[str], str]) -> None:
    """The fuzzing above would say as little of a caller whose key was wrong."""
    client = TestClient(app, raise_server_exceptions=False)
    found = {who: client.get("/v1/me", headers={"x-api-key": key}) for who, key in keys_of.items() if who not in NOBODY}
    assert {answer.status_code for answer in found.values()} == {200}
    assert {who: found[who].json()["roles"] for who in PEOPLE} == {f"person {role}": [role] for role in Role}
    assert set(PROGRAMS + PEOPLE + BOUND) == set(found)
    asked = {"/v1/chat/completions": {"model": "composer", "messages": [{"role": "user", "content": "x"}]}}
    asked["/feedback"] = {"metric_name": "rating", "value": True}
    told = [client.post(path, json=asked[path], headers={"x-api-key": key_of(who)}).status_code for path in asked for who in NARROW]
    assert told == [200, 401, 403, 200], "a session samples, a token rates, and neither does the other"
