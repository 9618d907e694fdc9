"""Identifiers: UUIDv7 (time-ordered, so that unique indexes stay flat) and hashed actors."""

import hashlib
import hmac
import os
import re
import time
import uuid
from datetime import UTC, datetime

from app.domain.errors import BadRequest


def uuid7() -> str:
    """A fresh UUIDv7 (RFC 9562, section 5.7) as its canonical string: 48 bits of Unix milliseconds, 74 random bits."""
    millis = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (millis & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | (random >> 68 & 0xFFF) << 64 | 0b10 << 62 | random & 0x3FFF_FFFF_FFFF_FFFF
    return str(uuid.UUID(int=value))


def hash_actor(actor: str, *, salt: str) -> str:
    """The pseudonym under which a person is stored: 32 hex digits of HMAC-SHA256(salt, actor)."""
    return hmac.new(salt.encode(), actor.encode(), hashlib.sha256).hexdigest()[:32]


def salt_fingerprint(salt: str) -> str:
    """By which a salt is known again without being told: the pseudonym of an id that nobody can have, for no id holds a NUL."""
    return hash_actor("\0the salt itself", salt=salt)


def checked_pseudonym(text: str) -> str:
    """What `hash_actor` could have made. Raises `BadRequest`: a shorter text would be found in everybody's words, and take them along."""
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise BadRequest(
            f"{text[:40]!r} is no pseudonym: it has 32 hex digits; name a person by the product's id as the actor", param="pseudonym"
        )
    return text


def utc_now() -> datetime:
    """Now, timezone-aware, in UTC."""
    return datetime.now(UTC)
