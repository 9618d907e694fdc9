"""What an OpenID Connect provider may answer, and what is refused: each check of an ID token, broken once."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.jwk import KeySet, OctKey, RSAKey

from app.access.oidc import LEEWAY_S, PENDING_S, Oidc, Registration, require_https
from app.domain.errors import BadConfig, RatchetError, Unavailable
from app.domain.people import Person, Role, SignInRefused
from tests.fakes.clock import FrozenClock

ISSUER = "https://id.example"
NOW = 1_800_000_000.0
KEY, OTHER = (RSAKey.generate_key(2048, {"kid": name}, private=True) for name in ("k1", "k2"))
ADA = Person(id="1", name="ada", roles=frozenset({Role.OPERATOR}), policy=None, created_at=FrozenClock().now, made_by="user:root")


class Provider:
    """Answers as a provider does; `spoil` changes the claims, `sign` makes the token."""

    def __init__(self) -> None:
        self.keys: list[Any] = [KEY]
        self.asked: list[httpx.Request] = []
        self.challenge = self.nonce = ""
        self.spoil: Callable[[dict[str, Any]], None] = lambda claims: None
        self.sign: Callable[[dict[str, Any]], str] = lambda claims: jwt.encode({"alg": "RS256", "kid": "k1"}, claims, KEY)
        self.meta = {
            "issuer": ISSUER, "authorization_endpoint": f"{ISSUER}/auth", "token_endpoint": f"{ISSUER}/token",
            "jwks_uri": f"{ISSUER}/keys", "userinfo_endpoint": f"{ISSUER}/me",
        }  # fmt: skip
        self.userinfo: dict[str, Any] = {"sub": "s1", "email": "Ada@example.com", "email_verified": True}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        match request.url.path:
            case "/.well-known/openid-configuration":
                return httpx.Response(200, json=self.meta)
            case "/keys":
                return httpx.Response(200, json=KeySet(self.keys).as_dict(private=False))
            case "/me":
                return httpx.Response(200, json=self.userinfo)
            case _:
                return self.token(parse_qs(request.content.decode()))

    def token(self, form: dict[str, list[str]]) -> httpx.Response:
        if form["code"] != ["good"] or create_s256_code_challenge(form["code_verifier"][0]) != self.challenge:
            return httpx.Response(400, json={"error": "invalid_grant"})
        claims = {"iss": ISSUER, "sub": "s1", "aud": "ratchet", "exp": int(NOW) + 300, "iat": int(NOW), "nonce": self.nonce}
        self.spoil(claims)
        return httpx.Response(200, json={"access_token": "t", "token_type": "Bearer", "id_token": self.sign(claims)})


class Book:
    """One person, whose address is known."""

    def __init__(self) -> None:
        self.bound: dict[str, str] = {"ada@example.com": ""}

    def of_account(self, subject: str, email: str | None) -> Person | None:
        return ADA if email in self.bound else None

    def enter(self, person: Person, *, how: str, instead_of: str | None = None) -> str:
        return f"session of {person.name} by {how} instead of {instead_of}"


class Browser:
    """Goes to the provider and comes back."""

    def __init__(self) -> None:
        self.provider, self.now = Provider(), NOW
        registration = Registration(issuer=ISSUER, client_id="ratchet", client_secret="s3cret", redirect_uri="https://here/console/oidc")
        self.oidc = Oidc(
            registration, Book(), secrets=lambda: ("secret",), now=lambda: self.now, transport=httpx.MockTransport(self.provider)
        )
        url, self.kept = self.oidc.begin("/console/releases/r1")
        self.asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        self.provider.nonce, self.provider.challenge = self.asked["nonce"], self.asked["code_challenge"]

    def back(self, **changes: str) -> tuple[str, str]:
        answer = {"code": "good", "state": self.asked["state"]} | changes
        return self.oidc.finish(self.kept, {name: value for name, value in answer.items() if value != "-"}, instead_of="before")


def test_somebody_signs_in_and_goes_on_where_they_were_going() -> None:
    browser = Browser()
    assert browser.asked["code_challenge_method"] == "S256"
    assert (browser.asked["response_type"], browser.asked["redirect_uri"]) == ("code", "https://here/console/oidc")
    assert browser.back(iss=ISSUER) == ("session of ada by provider id.example instead of before", "/console/releases/r1")
    assert "s3cret" not in repr(browser.oidc._registration)


SPOILED: dict[str, Callable[[dict[str, Any]], None]] = {
    "nonce of another sign-in": lambda claims: claims.update(nonce="x"),
    "no nonce": lambda claims: claims.pop("nonce"),
    "for another client": lambda claims: claims.update(aud="another"),
    "for two, and not said for whom": lambda claims: claims.update(aud=["ratchet", "another"]),
    "for us, issued to another": lambda claims: claims.update(aud=["ratchet", "another"], azp="another"),
    "no audience": lambda claims: claims.pop("aud"),
    "of another issuer": lambda claims: claims.update(iss="https://evil.example"),
    "over": lambda claims: claims.update(exp=int(NOW) - LEEWAY_S - 1),
    "without an end": lambda claims: claims.pop("exp"),
    "from the future": lambda claims: claims.update(iat=int(NOW) + LEEWAY_S + 10),
    "of nobody": lambda claims: claims.pop("sub"),
    "with another access token": lambda claims: claims.update(at_hash="x" * 22),
}


@pytest.mark.parametrize("wrong", SPOILED)
def test_a_token_with_a_wrong_claim_signs_nobody_in(wrong: str) -> None:
    browser = Browser()
    browser.provider.spoil = SPOILED[wrong]
    with pytest.raises(SignInRefused, match="cannot be trusted"):
        browser.back()


SIGNED: dict[str, Callable[[dict[str, Any]], str]] = {
    "with a key that is not published": lambda claims: jwt.encode({"alg": "RS256", "kid": "k1"}, claims, OTHER),
    "with the client's secret": lambda claims: jwt.encode({"alg": "HS256"}, claims, OctKey.import_key("s3cret" * 8), algorithms=["HS256"]),
    "with the public key as a secret": lambda claims: jwt.encode(
        {"alg": "HS256", "kid": "k1"}, claims, OctKey.import_key(KEY.as_pem(private=False)), algorithms=["HS256"]
    ),
    "by nobody": lambda claims: jwt.encode({"alg": "none"}, claims, OctKey.import_key("x" * 32), algorithms=["none"]),
    "not at all": lambda claims: "nonsense",
}


@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
@pytest.mark.parametrize("how", SIGNED)
def test_a_token_that_the_issuer_did_not_sign_signs_nobody_in(how: str) -> None:
    browser = Browser()
    browser.provider.sign = SIGNED[how]
    with pytest.raises(SignInRefused, match="cannot be trusted"):
        browser.back()


def test_a_provider_s_new_key_is_found() -> None:
    browser = Browser()
    browser.provider.keys = [OTHER]
    browser.provider.sign = lambda claims: jwt.encode({"alg": "RS256", "kid": "k2"}, claims, OTHER)
    assert browser.back()[0].startswith("session of ada")


def test_what_a_provider_says_of_itself_is_asked_once_an_hour() -> None:
    browser = Browser()
    browser.back()
    browser.now = NOW + 3599
    browser.oidc.begin("/console")
    asked = [request.url.path for request in browser.provider.asked]
    assert (asked.count("/.well-known/openid-configuration"), asked.count("/keys")) == (1, 1)
    browser.now = NOW + 3600
    browser.provider.meta["authorization_endpoint"] = f"{ISSUER}/moved"
    assert browser.oidc.begin("/console")[0].startswith(f"{ISSUER}/moved?")


@pytest.mark.parametrize(
    "changes", [{"state": "x"}, {"state": "-"}, {"state": "é"}, {"iss": "https://evil.example"}, {"code": "-"}, {"error": "access_denied"}]
)
def test_an_answer_to_another_request_signs_nobody_in(changes: dict[str, str]) -> None:
    browser = Browser()
    with pytest.raises(SignInRefused):
        browser.back(**changes)
    assert not any(request.url.path == "/token" for request in browser.provider.asked)


def test_what_the_browser_keeps_cannot_be_changed_left_out_or_kept_for_long() -> None:
    browser, other = Browser(), Browser()
    kept = browser.kept
    text, _, mac = kept.partition(".")
    changed = json.dumps({**json.loads(bytes.fromhex(text)), "next": "https://evil.example"}).encode().hex()
    for wrong in (None, "", "x", f"{changed}.{mac}", text, other.kept):
        browser.kept = wrong  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(SignInRefused):
            browser.back()
    browser.kept, browser.now = kept, NOW + PENDING_S
    with pytest.raises(SignInRefused):
        browser.back()


def test_a_code_without_the_verifier_it_was_asked_with_is_worth_nothing() -> None:
    browser = Browser()
    browser.provider.challenge = create_s256_code_challenge("another verifier than ours, of another browser")
    with pytest.raises(SignInRefused, match="cannot be trusted"):
        browser.back()


@pytest.mark.parametrize(
    "userinfo",
    [{"sub": "s1"}, {"sub": "s1", "email": "ada@example.com"}, {"sub": "s1", "email": "ada@example.com", "email_verified": "true"},
     {"sub": "s2", "email": "ada@example.com", "email_verified": True}, {"sub": "s1", "email": "eve@example.com", "email_verified": True}],
)  # fmt: skip
def test_an_address_counts_where_the_provider_verified_it_and_it_is_this_account_s(userinfo: dict[str, Any]) -> None:
    browser = Browser()
    browser.provider.userinfo = userinfo
    with pytest.raises(SignInRefused, match="an admin adds you first"):
        browser.back()


def test_a_provider_that_is_wrong_or_away_is_named() -> None:
    in_clear = ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint")
    changes = [{"issuer": "https://other.example"}, *({name: "http://id.example/x"} for name in in_clear)]
    for change, kind in [(change, BadConfig) for change in changes]:
        browser = Browser()
        browser.provider.meta |= change
        browser.now += 3601
        with pytest.raises(kind):
            browser.oidc.begin("/console")
    browser = Browser()
    browser.oidc._transport = httpx.MockTransport(lambda request: httpx.Response(503))
    browser.now += 3601
    with pytest.raises(Unavailable, match="sign in with a password"):
        browser.oidc.begin("/console")
    with pytest.raises(RatchetError):
        require_https("http://id.example")
    assert require_https("http://127.0.0.1:3000")


def test_an_address_in_the_token_is_taken_without_asking_once_more() -> None:
    browser = Browser()
    browser.provider.spoil = lambda claims: claims.update(email="ADA@example.com", email_verified=True)
    assert browser.back()[0].startswith("session of ada")
    assert "/me" not in [request.url.path for request in browser.provider.asked]


def test_where_a_provider_tells_no_address_at_all_nobody_is_found_by_one() -> None:
    browser = Browser()
    del browser.provider.meta["userinfo_endpoint"]
    browser.now += 3600
    browser.oidc.begin("/console")
    browser.now -= 3600
    with pytest.raises(SignInRefused, match="an admin adds you first"):
        browser.back()


def test_a_minute_of_clocks_that_differ_is_no_reason_to_refuse() -> None:
    browser = Browser()
    browser.provider.spoil = lambda claims: claims.update(exp=int(NOW) - LEEWAY_S + 1, iat=int(NOW) + LEEWAY_S)
    assert browser.back()[0].startswith("session of ada")
    assert (LEEWAY_S, PENDING_S) == (60, 600)


def test_somebody_may_take_ten_minutes_at_the_provider() -> None:
    browser = Browser()
    browser.provider.spoil = lambda claims: claims.update(iat=int(NOW) + 599, exp=int(NOW) + 900)
    browser.now = NOW + 599.9
    assert browser.back()[0].startswith("session of ada")


def test_whose_account_it_is_is_said_by_issuer_and_subject_and_what_we_are_by_name_and_secret() -> None:
    seen, browser = list[tuple[str, str | None]](), Browser()

    class Noting(Book):
        def of_account(self, subject: str, email: str | None) -> Person | None:
            seen.append((subject, email))
            return super().of_account(subject, email)

    browser.oidc._book = Noting()
    browser.oidc._registration = replace(browser.oidc._registration, client_secret="s3: cret")
    browser.back()
    assert seen == [(f"{ISSUER} s1", "ada@example.com")]
    (asked,) = [request for request in browser.provider.asked if request.url.path == "/token"]
    assert asked.headers["authorization"] == "Basic " + base64.b64encode(b"ratchet:s3%3A+cret").decode()
    assert parse_qs(asked.content.decode())["redirect_uri"] == ["https://here/console/oidc"]
    assert browser.asked["scope"] == "openid email"


def test_a_provider_that_ends_the_line_is_away_and_is_waited_for_ten_seconds() -> None:
    browser = Browser()

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    browser.oidc._transport = httpx.MockTransport(gone)
    with pytest.raises(Unavailable, match=r"id\.example does not answer"):
        browser.back()
    with browser.oidc._client() as client:
        assert client.timeout == httpx.Timeout(10.0)


def test_a_provider_with_a_stroke_at_its_end_is_asked_at_the_same_place() -> None:
    provider = Provider()
    provider.meta["issuer"] = f"{ISSUER}/"
    registration = Registration(issuer=f"{ISSUER}/", client_id="ratchet", client_secret="s", redirect_uri="https://here")
    oidc = Oidc(registration, Book(), secrets=lambda: ("s",), now=lambda: NOW, transport=httpx.MockTransport(provider))
    oidc.begin("/console")
    assert str(provider.asked[0].url) == f"{ISSUER}/.well-known/openid-configuration"
    assert oidc.name == "id.example"
    assert Oidc(replace(registration, issuer="odd"), Book(), secrets=lambda: ("s",)).name == "odd"


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost", "[::1]"])
def test_a_provider_on_this_machine_may_be_asked_in_clear(host: str) -> None:
    assert require_https(f"http://{host}/x") == f"http://{host}/x"
    with pytest.raises(BadConfig, match="has to begin with https"):
        require_https(f"ftp://{host}/x")
