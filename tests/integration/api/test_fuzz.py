"""Every endpoint fuzzed against its own OpenAPI document, by every role and by nobody: no 5xx, no hang, nothing refused is stored."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import GenerationMode

from app import wiring
from app.api import people, webhooks
from app.api.application import Application
from app.api.releases import ReleaseRoom, router
from app.domain.access import Scope
from app.main import create_app
from app.settings import from_environment
from tests.fakes.gateway import MemoryKeys, collaborators
from tests.fakes.inbox import MemoryInbox

EXAMPLES = int(os.environ.get("RATCHET_FUZZ_EXAMPLES", "14"))
INBOX = MemoryInbox()
KEYS = MemoryKeys()
ADMIN = KEYS.add(Scope.ADMIN)
NOBODY = ("", "rk_wrong_0123456789", "ft_wrong", "sk-wrong")
CALLERS = (
    *[ADMIN] * 6, *[KEYS.add(scope) for scope in Scope if scope is not Scope.ADMIN], KEYS.add(*Scope, policy="composer"),
    KEYS.add(*Scope, policy="another"), *NOBODY,
)  # fmt: skip
"""Who asks: whoever may do everything most often, because the others seldom get as far as a body's meaning."""
PUBLIC = frozenset({"/health", "/status", "/info", "/openapi.json"})
EXPECTED = {
    "/v1/chat/completions", "/v1/events", "/feedback", "/feedback/{feedback_id}", "/v1/models", "/health", "/status", "/metrics",
    "/v1/runs", "/v1/versions", "/v1/labels/report", "/api/public/scores", "/v1/span_annotations", "/v1/logs", "/v1/traces",
    "/v1/releases", "/rl/start_session", "/rl/set_reward", "/rl/end_session", "/api/3.0/mlflow/traces/{trace_id}/assessments",
    "/v1/webhooks", "/v1/people", "/v1/tokens", "/v1/me",
}  # fmt: skip


@pytest.fixture(scope="module")
def app(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Application:
    """Fakes behind the endpoints of products, the real release room on SQLite behind those of operators."""
    data = tmp_path_factory.mktemp("fuzz")
    for name in ("ratchet.db", "inbox.db"):
        shutil.copyfile(sqlite_template, data / name)
    where = from_environment({"RATCHET_DATA": str(data)})
    room = ReleaseRoom(desk=wiring.release_desk(where), releases=wiring.release_ledger(where), views=wiring.release_views(where))
    hooks = webhooks.WebhookRoom(
        webhooks=wiring.webhook_book(where), send_test=lambda _hook: ("204", True), policies=("composer",), allow_loopback=True
    )
    crowd = people.PeopleRoom(
        people=wiring.people_book(where), keys=wiring.key_book(where), desk=wiring.sign_in(where), policies=("composer",), address="http://x"
    )  # fmt: skip
    return create_app(collaborators(inbox=INBOX, routers=[router(room), webhooks.router(hooks), people.router(crowd)], keys=KEYS))


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
            if method in ("post", "patch") and not path.endswith(("/rotate", "/link", "/test", "/sign-out")):
                assert "requestBody" in operation, f"{method} {path}"


@pytest.mark.timeout(600)
def test_nothing_breaks_and_nothing_refused_is_stored(document: Any) -> None:
    tried = 0
    for operation in document.get_all_operations():
        _fuzz(operation.ok())
        tried += 1
    assert tried >= len(EXPECTED)


def _fuzz(operation: Any) -> None:
    """Ask one endpoint what its document allows, and what it does not."""

    @settings(
        max_examples=EXAMPLES, deadline=10_000, phases=[Phase.generate], derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType] - the enumeration iterates over its members

    )  # fmt: skip
    @given(
        case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), key=strategies.sampled_from(CALLERS)
    )
    def ask(case: Any, key: str) -> None:
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
