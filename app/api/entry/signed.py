"""Tokens that are signed and not stored: `<prefix><base64url of JSON>.<HMAC-SHA256 under the deployment's session secret>`.

Each kind has a purpose that is signed with it, so that one is never taken for another, and an end.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

import msgspec


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What every token says."""

    expires: float
    """Unix seconds."""


T = TypeVar("T", bound=Ending)


@dataclass(frozen=True, kw_only=True)
class Signed(Generic[T]):
    """Writes and reads tokens of one kind."""

    prefix: str
    purpose: str
    kind: type[T]
    secrets: Callable[[], Sequence[str]]
    """Newest first: it signs, all of them are honoured."""

    def write(self, content: T) -> str:
        """The token."""
        body = base64.urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")
        return f"{self.prefix}{body}.{self._sign(self.secrets()[0], body)}"

    def read(self, token: str, *, now: datetime) -> T | None:
        """What a token says; None where we did not sign it or its time is over."""
        body, _, signature = token.removeprefix(self.prefix).partition(".")
        given = signature.encode()
        if not any(hmac.compare_digest(self._sign(secret, body).encode(), given) for secret in self.secrets()):
            return None
        try:
            content = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=self.kind)
        except (msgspec.DecodeError, binascii.Error):
            return None
        return content if now.timestamp() < content.expires else None

    def _sign(self, secret: str, body: str) -> str:
        return hmac.new(secret.encode(), f"{self.purpose}:{body}".encode(), hashlib.sha256).hexdigest()
