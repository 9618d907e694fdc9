"""The only room that speaks `cryptography`: seals secrets that have to be stored where backups and readers of the database can see them.

Fernet (AES-128-CBC and HMAC-SHA256): authenticated, so that a changed one opens as nothing. What a secret is
about is sealed with it: moved to another row it opens as nothing too. Not covered: whoever reads both the database and the key.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cryptography.fernet import Fernet, InvalidToken, MultiFernet


@dataclass(frozen=True, kw_only=True)
class Seal:
    """Seals with the newest key, opens with any of them."""

    keys: Callable[[], Sequence[str]]
    """Long random texts, newest first, as they are now."""

    def seal(self, secret: str, *, about: str) -> str:
        """The secret as it may be stored; each time another text."""
        return self._box().encrypt(f"{about}\n{secret}".encode()).decode()

    def open(self, sealed: str, *, about: str) -> str | None:
        """The secret; None where no key of ours opens it, or it was sealed about something else."""
        try:
            named, _, secret = self._box().decrypt(sealed.encode()).decode().partition("\n")
        except InvalidToken:
            return None
        return secret if named == about else None

    def _box(self) -> MultiFernet:
        return MultiFernet([Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest())) for key in self.keys()])
