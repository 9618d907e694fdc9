"""Who acts, and of which policy somebody may speak."""

import asyncio

import pytest
from starlette.requests import Request

from app.api.asking import NOBODY, declared_policy, read_body, require_every_policy, signer, visible_policy
from app.api.entry.access import ANONYMOUS, Caller
from app.api.errors import HttpError
from app.domain.access import Scope
from app.domain.errors import BadRequest


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw, "query_string": b""})


@pytest.mark.parametrize(
    ("body", "held"),
    [(b'{"a": "x\\u0000"}', True), (b'[{"x\\u0000": 1}]', True), (b'{"a": "x\\\\u0000"}', False), (b'{"a": ["x"]}', False)],
)
def test_a_body_with_a_nul_is_refused_and_one_that_only_writes_of_it_is_not(body: bytes, held: bool) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    asked = Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}, receive)
    if held:
        with pytest.raises(BadRequest, match="NUL character"):
            asyncio.run(read_body(asked, object))
    else:
        assert asyncio.run(read_body(asked, object))


FREE = Caller(name="key:rk_1", scopes=frozenset(Scope), policy=None, actor="user:ada")
BOUND = Caller(name="key:rk_2", scopes=frozenset(Scope), policy="composer", actor="service:editor")


def test_a_caller_acts_under_its_own_name_and_under_no_other() -> None:
    assert signer(request(), FREE) == FREE.actor
    assert signer(request(x_ratchet_user="bob"), FREE) == FREE.actor
    assert signer(request(), FREE, FREE.actor) == FREE.actor
    with pytest.raises(HttpError, match="not bob") as refused:
        signer(request(), FREE, "bob")
    assert (refused.value.status, refused.value.code, refused.value.param) == (403, "wrong_person", "approver")


def test_on_an_open_deployment_whoever_is_named_acts() -> None:
    assert signer(request(), ANONYMOUS) == NOBODY == "user:anonymous"
    assert signer(request(x_ratchet_user=" bob "), ANONYMOUS) == "user:bob"
    assert signer(request(x_ratchet_user="bob"), ANONYMOUS, "user:eve") == "user:eve"
    assert signer(request(x_ratchet_user="x" * 200), ANONYMOUS) == f"user:{'x' * 150}"


@pytest.mark.parametrize(
    ("caller", "asked", "meant"),
    [(FREE, None, None), (FREE, "tab", "tab"), (BOUND, None, "composer"), (BOUND, "composer", "composer")],
)
def test_the_policy_that_is_meant(caller: Caller, asked: str | None, meant: str | None) -> None:
    assert visible_policy(asked, caller) == meant


def test_a_key_of_one_policy_speaks_of_no_other() -> None:
    with pytest.raises(HttpError, match="for the policy 'composer' only") as refused:
        visible_policy("tab", BOUND)
    assert (refused.value.status, refused.value.code, refused.value.param) == (403, "wrong_policy", "policy")
    require_every_policy(FREE, "this is about everything")
    with pytest.raises(HttpError, match="this is about everything, and this is for 'composer' only") as refused:
        require_every_policy(BOUND, "this is about everything")
    assert (refused.value.status, refused.value.code) == (403, "wrong_policy")


def test_a_policy_that_nobody_declared_is_refused_with_those_there_are() -> None:
    assert declared_policy("tab", ["tab", "composer"]) == "tab"
    assert declared_policy(None, ["tab"]) is None
    with pytest.raises(BadRequest, match=r"no policy is named 'tap' \(declared: composer, tab\)") as refused:
        declared_policy("tap", ["tab", "composer"])
    assert (refused.value.code, refused.value.param) == ("unknown_policy", "policy")
