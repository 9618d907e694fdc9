"""The only room that speaks `argon2`: passwords as Argon2id hashes (RFC 9106, the second recommended option: 64 MiB, three passes)."""

import threading

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from app.domain.errors import BadRequest

SHORTEST, LONGEST = 12, 256
"""Characters. Length is what counts; rules about kinds of characters make people write passwords down (NIST SP 800-63B)."""
AT_ONCE = 2
"""Hashes being computed in this process; each takes 64 MiB and a tenth of a second of four threads, and anybody can ask for one."""


class Passwords:
    """Makes and checks hashes. `hasher` is for tests, which need no slow one."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()
        self._turn = threading.BoundedSemaphore(AT_ONCE)
        self._nobodys = self._hasher.hash("a password that nobody has")

    def hash(self, password: str, *, of: str) -> str:
        """The hash of a new password of a person of that name. Raises `BadRequest` for one that is no good."""
        if not SHORTEST <= len(password) <= LONGEST:
            raise BadRequest(f"a password has {SHORTEST} to {LONGEST} characters: a sentence is a good one", param="password")
        if of.lower() in password.lower() or len(set(password)) < 5:
            raise BadRequest("this password can be guessed from the name, or repeats itself: choose another", param="password")
        with self._turn:
            return self._hasher.hash(password)

    def fits(self, password: str, stored: str | None) -> bool:
        """Whether this is the password; takes as long where there is none to compare with."""
        with self._turn:
            try:
                good = self._hasher.verify(stored or self._nobodys, password[: LONGEST + 1])
            except (VerificationError, InvalidHashError):
                return False
        return good and stored is not None
