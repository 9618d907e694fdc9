"""The only room that speaks `authlib`: signing in with an account at an OpenID Connect provider (authorization code with PKCE).

What is checked (OpenID Connect Core 3.1.3.7, RFC 9700): that the answer belongs to a request of this browser (`state`, and PKCE for the
code), that the issuer named itself where it was asked, and of the ID token the signature by a key that the issuer publishes, with an
asymmetric algorithm, `iss`, `aud`, `azp`, `exp`, `iat`, `nonce` and `at_hash`. Who comes has to have been added: by the account that was
used before, or the first time by an address that the provider says it verified. Nobody is added by signing in.
"""

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote_plus, urlsplit

import httpx
from authlib.common.errors import AuthlibBaseError
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core.claims import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from app.domain.errors import BadConfig, Unavailable
from app.domain.people import Person, SignInRefused

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Never one where our own secret, or nothing, would sign."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
TIMEOUT_S, LEEWAY_S = 10.0, 60
FRESH_S = 3600.0
"""How long what the provider says of itself is good."""
PENDING_S = 600
"""How long somebody may take at the provider."""
NOT_US = "the answer of the provider does not belong to a sign-in of this browser, or came too late: begin again"


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What the provider knows this deployment as."""

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    redirect_uri: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """Who somebody is at the provider."""

    subject: str
    """`<issuer> <sub>`: stays when names and addresses change."""
    email: str | None
    """Where the provider says that it verified it."""


class PeopleBook(Protocol):
    """Whose account it is."""

    def of_account(self, subject: str, email: str | None) -> Person | None: ...
    def enter(self, person: Person, *, how: str, instead_of: str | None = None) -> str: ...


class Oidc:
    """One provider."""

    def __init__(
        self, registration: Registration, book: PeopleBook, *, secrets: Callable[[], Sequence[str]], now: Callable[[], float] = time.time,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._registration = registration
        self._book = book
        self._secrets = secrets
        self._now = now
        self._transport = transport
        self._lock = threading.Lock()
        self._known: tuple[float, dict[str, Any], KeySet] | None = None

    @property
    def name(self) -> str:
        """As the button says it: the issuer's host."""
        return urlsplit(self._registration.issuer).hostname or self._registration.issuer

    def begin(self, next_: str) -> tuple[str, str]:
        """Where to send the browser, and what it keeps meanwhile (signed, in a cookie). Raises `Unavailable`."""
        meta, _ = self._provider()
        nonce, verifier = secrets.token_urlsafe(24), secrets.token_urlsafe(48)
        state = secrets.token_urlsafe(24)
        url = prepare_grant_uri(
            meta["authorization_endpoint"], self._registration.client_id, "code", redirect_uri=self._registration.redirect_uri,
            scope="openid email", state=state, nonce=nonce, code_challenge=create_s256_code_challenge(verifier),
            code_challenge_method="S256",
        )  # fmt: skip
        kept = {"state": state, "nonce": nonce, "verifier": verifier, "next": next_, "until": self._now() + PENDING_S}
        return url, self._signed(kept)

    def finish(self, kept: str | None, answer: Mapping[str, str], *, instead_of: str | None = None) -> tuple[str, str]:
        """The secret of a new session, and where they were going. Raises `SignInRefused`, `Unavailable`."""
        pending = self._opened(kept)
        if pending is None or not hmac.compare_digest(answer.get("state", "").encode(), str(pending["state"]).encode()):
            raise SignInRefused(NOT_US)
        issuer = answer.get("iss")
        if issuer is not None and issuer != self._registration.issuer:  # RFC 9207: an answer of another provider
            raise SignInRefused(NOT_US)
        if "error" in answer or "code" not in answer:
            raise SignInRefused("the provider did not sign you in: begin again, or ask who runs it")
        account = self._account(answer["code"], verifier=str(pending["verifier"]), nonce=str(pending["nonce"]))
        person = self._book.of_account(account.subject, account.email)
        if person is None:
            raise SignInRefused(
                "the provider knows you, and this deployment does not: an admin adds you first, with the address that the provider verified"
            )
        return self._book.enter(person, how=f"provider {self.name}", instead_of=instead_of), str(pending["next"])

    def _account(self, code: str, *, verifier: str, nonce: str) -> Account:
        meta, keys = self._provider()
        try:
            with self._client() as client:
                token = self._token(client, meta["token_endpoint"], code, verifier)
                claims = self._checked(token, keys, nonce=nonce)
                if "email" not in claims and "userinfo_endpoint" in meta:
                    claims |= self._userinfo(client, meta["userinfo_endpoint"], token, claims["sub"])
        except httpx.TransportError as error:
            raise Unavailable(f"{self.name} does not answer ({error}): sign in with a password, or try again") from error
        except (AuthlibBaseError, JoseError, httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise SignInRefused(f"what {self.name} answered cannot be trusted ({type(error).__name__}): begin again") from error
        verified = claims.get("email") if claims.get("email_verified") is True else None
        return Account(subject=f"{claims['iss']} {claims['sub']}", email=None if verified is None else str(verified).lower())

    def _token(self, client: httpx.Client, endpoint: str, code: str, verifier: str) -> dict[str, Any]:
        ours = self._registration
        asked = {"grant_type": "authorization_code", "code": code, "code_verifier": verifier, "redirect_uri": ours.redirect_uri}
        who = httpx.BasicAuth(quote_plus(ours.client_id), quote_plus(ours.client_secret))  # RFC 6749, 2.3.1
        found: dict[str, Any] = client.post(endpoint, data=asked, auth=who).raise_for_status().json()
        return found

    def _userinfo(self, client: httpx.Client, endpoint: str, token: Mapping[str, Any], sub: str) -> dict[str, Any]:
        """The address, where it is said of the same account."""
        answer = client.get(endpoint, headers={"authorization": f"Bearer {token['access_token']}"})
        said: dict[str, Any] = answer.raise_for_status().json()
        return {name: said[name] for name in ("email", "email_verified") if name in said} if said["sub"] == sub else {}

    def _checked(self, token: Mapping[str, Any], keys: KeySet, *, nonce: str) -> dict[str, Any]:
        """The claims of an ID token, each of them checked. Raises what authlib and joserfc raise."""
        text = str(token["id_token"])
        try:
            decoded = jwt.decode(text, keys, algorithms=ALGORITHMS)
        except (JoseError, ValueError):
            decoded = jwt.decode(text, self._provider(afresh=True)[1], algorithms=ALGORITHMS)  # they may have new keys
        ours = self._registration
        claims = CodeIDToken(
            decoded.claims, decoded.header,
            options={"iss": {"essential": True, "value": ours.issuer}, "aud": {"essential": True, "value": ours.client_id}},
            params={"nonce": nonce, "client_id": ours.client_id, "access_token": token.get("access_token")},
        )  # fmt: skip
        claims.validate(now=int(self._now()), leeway=LEEWAY_S)
        return dict(claims)

    def _provider(self, *, afresh: bool = False) -> tuple[dict[str, Any], KeySet]:
        """What the provider says of itself, and its keys. Raises `Unavailable`, `BadConfig`."""
        with self._lock:
            if self._known is not None and not afresh and self._now() - self._known[0] < FRESH_S:
                return self._known[1:]
            issuer = self._registration.issuer
            try:
                with self._client() as client:
                    meta = client.get(f"{issuer.rstrip('/')}/.well-known/openid-configuration").raise_for_status().json()
                    if meta["issuer"] != issuer:
                        raise BadConfig(f"RATCHET_OIDC_ISSUER is {issuer}, and it calls itself {meta['issuer']}: write what it says")
                    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                        require_https(meta[name])
                    require_https(meta.get("userinfo_endpoint", issuer))  # the access token goes there
                    keys = KeySet.import_key_set(client.get(meta["jwks_uri"]).raise_for_status().json())
            except (httpx.HTTPError, JoseError, ValueError, KeyError, TypeError) as error:
                raise Unavailable(f"{self.name} does not answer as a provider ({error}): sign in with a password, or try again") from error
            self._known = (self._now(), meta, keys)
            return meta, keys

    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=TIMEOUT_S, transport=self._transport)

    def _signed(self, kept: Mapping[str, Any]) -> str:
        text = json.dumps(kept).encode().hex()
        return f"{text}.{self._mac(self._secrets()[0], text)}"

    def _opened(self, kept: str | None) -> dict[str, Any] | None:
        text, _, mac = (kept or "").partition(".")
        if not mac.isascii() or not any(hmac.compare_digest(mac, self._mac(secret, text)) for secret in self._secrets()):
            return None
        pending: dict[str, Any] = json.loads(bytes.fromhex(text))
        return pending if self._now() < pending["until"] else None

    def _mac(self, secret: str, text: str) -> str:
        return hmac.new(secret.encode(), f"oidc\n{text}".encode(), "sha256").hexdigest()


def require_https(url: str) -> str:
    """Refuse a provider that would be asked in clear, but for one on this machine. Raises `BadConfig`."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise BadConfig(f"{url} is no address of a provider: it has to begin with https://")
    return url
