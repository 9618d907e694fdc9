"""Who may do what: API keys and their scopes."""

import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

USED_EVERY = timedelta(minutes=1)
"""Of a key's uses within this time of the one that was noted, none is noted: a write a minute and key, however many processes let it in."""


class Scope(StrEnum):
    """What a key may do. `admin` may do all that takes no person, `ingest` includes `sample`, the others are exactly one kind of thing."""

    SAMPLE = "sample"
    """Ask for completions, and nothing else: what an agent at work is given, which must not reward itself."""
    INGEST = "ingest"
    """Ask for completions and report observations."""
    READ = "read"
    RELEASE = "release"
    """Abort and roll back."""
    ADMIN = "admin"

    def is_within(self, scopes: "Collection[Scope]") -> bool:
        """Whether who has these scopes may do this."""
        return self in scopes or Scope.ADMIN in scopes or (self is Scope.SAMPLE and Scope.INGEST in scopes)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What somebody wants done to people or keys: once under its name, and not where what it is about moved on since it was looked at."""

    request_id: str
    actor: str
    act: str
    subject: str
    """A person's name, or the beginning of a key."""
    seen: int | None = None
    """The newest audit entry when it was looked at."""
    moves: str = ""
    """Of what happens to its subject, only acts that begin so are what it rests on."""


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key as it is stored: its secret only as a hash."""

    id: str
    prefix: str
    """First part of the key's text, public: finds the row and appears in logs and the audit trail."""
    hash: bytes
    name: str
    scopes: frozenset[Scope]
    policy: str | None
    """The one policy it is good for; None means all."""
    rate_per_s: float | None
    """Events and requests a second; None is unlimited."""
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    person_id: str | None = None
    """Whom it speaks for: a personal token. None: a program's key, which speaks for nobody."""
    made_by: str | None = None
    last_used_at: datetime | None = None
    """When a request, or an agent of a session it started, was last let in with it; behind by `USED_EVERY` at most."""

    def matches(self, secret: str) -> bool:
        """Constant-time comparison of the secret part."""
        return hmac.compare_digest(self.hash, hash_secret(self.id, secret))

    def usable_at(self, now: datetime) -> bool:
        """Neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def told(self, now: datetime) -> dict[str, Any]:
        """As others see it: all but what it is checked by."""
        return {
            "prefix": self.prefix, "name": self.name, "personal": self.person_id is not None, "made_by": self.made_by,
            "scopes": sorted(self.scopes), "policy": self.policy, "rate_per_s": self.rate_per_s,
            "created_at": self.created_at, "expires_at": self.expires_at, "revoked_at": self.revoked_at, "usable": self.usable_at(now),
            "last_used_at": self.last_used_at,
        }  # fmt: skip


def hash_secret(key_id: str, secret: str) -> bytes:
    """HMAC-SHA256 of the secret under the key's id. The secret has 256 random bits, so no slow hash is needed."""
    return hmac.digest(key_id.encode(), secret.encode(), "sha256")


def new_secret() -> tuple[str, str]:
    """A fresh (prefix, secret): 8 hex digits, and 32 random bytes in URL-safe base64."""
    return f"rk_{secrets.token_hex(4)}", secrets.token_urlsafe(32)


def key_text(prefix: str, secret: str) -> str:
    """What the owner of the key is shown, once."""
    return f"{prefix}_{secret}"


def split_key(text: str) -> tuple[str, str] | None:
    """(prefix, secret) of a key's text; None where it is not one of ours."""
    if not text.startswith("rk_") or len(text) < 13 or text[11] != "_":
        return None
    return text[:11], text[12:]
