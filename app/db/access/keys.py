"""API keys: only hashes are stored; the key itself is shown once, by whoever creates it."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Row, insert, or_, select, update

from app.db.access.people import note_credential
from app.db.engine import expected_to_answer, reading, writing
from app.db.release import audit
from app.db.release.done import begin
from app.db.tables import api_keys
from app.domain.access import USED_EVERY, ApiKey, Order, Scope, hash_secret, key_text, new_secret
from app.domain.errors import NotFound
from app.domain.ids import utc_now, uuid7
from app.domain.people import Person
from app.domain.ports import Clock

SYSTEM = "system:keys"
"""Who acts where nobody says who."""


class SqlKeys:
    """The Keys port, and what `ratchet keys` does."""

    def __init__(self, engine: Engine, *, clock: Clock = utc_now) -> None:
        self._engine = engine
        self._clock = clock

    def all(self) -> list[ApiKey]:
        """Every key that is neither revoked nor expired. Raises `Unavailable`."""
        fresh = or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > self._clock())
        return self._select(select(api_keys).where(api_keys.c.revoked_at.is_(None), fresh))

    def ever(self) -> bool:
        """Whether any key was ever made: a key is revoked or expires, its row stays."""
        return bool(self._select(select(api_keys).limit(1)))

    def history(self) -> list[ApiKey]:
        """Every key there ever was, oldest first."""
        return self._select(select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id))

    def note_used(self, used: Mapping[str, datetime]) -> None:
        """When keys (by id) were used, in one transaction; within `USED_EVERY` of what is noted nothing changes. Raises `Unavailable`."""
        noted = api_keys.c.last_used_at
        with expected_to_answer(), writing(self._engine) as connection:
            for key_id, at in sorted(used.items()):
                due = or_(noted.is_(None), noted <= at - USED_EVERY)
                connection.execute(update(api_keys).where(api_keys.c.id == key_id, due).values(last_used_at=at))

    def create(
        self,
        *,
        name: str,
        scopes: Iterable[Scope],
        policy: str | None = None,
        rate_per_s: float | None = None,
        expires_at: datetime | None = None,
        by: str = SYSTEM,
        of: Person | None = None,
        order: Order | None = None,
    ) -> tuple[ApiKey, str]:
        """Store a new key, and who made it in the audit chain; returns it with its text, which nobody can ask for again.

        Raises `DoneAlready`. With `of` it is that person's token: it speaks for them, and its scopes say nothing.
        """
        prefix, secret = new_secret()
        key_id = uuid7()
        key = ApiKey(
            id=key_id, prefix=prefix, hash=hash_secret(key_id, secret), name=name, scopes=frozenset(scopes), policy=policy,
            rate_per_s=rate_per_s, created_at=self._clock(), expires_at=expires_at, person_id=of.id if of else None, made_by=by,
        )  # fmt: skip
        with writing(self._engine) as connection:
            begin(connection, order, now=key.created_at)
            connection.execute(insert(api_keys).values(_values(key)))
            audit.append(connection, actor=by, action="key.created", subject=prefix, detail=_said(key, of), now=key.created_at)
            if of is not None:
                note_credential(connection, of.actor, "token", by=by, now=key.created_at)
        return key, key_text(prefix, secret)

    def revoke(self, prefix: str, *, by: str = SYSTEM, order: Order | None = None) -> ApiKey:
        """End a key for good; revoking twice changes nothing. Raises `NotFound`, `DoneAlready`."""
        mine, now = api_keys.c.prefix == prefix, self._clock()
        with writing(self._engine) as connection:
            begin(connection, order, now=now)
            ended = connection.execute(update(api_keys).where(mine, api_keys.c.revoked_at.is_(None)).values(revoked_at=now))
            if ended.rowcount:
                audit.append(connection, actor=by, action="key.revoked", subject=prefix, detail={}, now=now)
        found = self._select(select(api_keys).where(mine))
        if not found:
            raise NotFound(f"no key begins with {prefix!r}: see `ratchet keys list`")
        return found[0]

    def _select(self, query: Any) -> list[ApiKey]:  # noqa: ANN401 - a statement over api_keys
        with expected_to_answer(), reading(self._engine) as connection:
            return [_key(row) for row in connection.execute(query)]


def _said(key: ApiKey, of: Person | None) -> dict[str, Any]:
    """What the audit chain keeps of a key: all but what it is checked by."""
    expires = key.expires_at.isoformat() if key.expires_at else None
    said = {"name": key.name, "scopes": sorted(s.value for s in key.scopes), "policy": key.policy, "expires_at": expires}
    return said if of is None else said | {"person": of.name}


def _values(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id, "prefix": key.prefix, "hash": key.hash, "name": key.name, "scopes": sorted(scope.value for scope in key.scopes),
        "policy": key.policy, "rate_per_s": key.rate_per_s, "created_at": key.created_at, "expires_at": key.expires_at,
        "revoked_at": key.revoked_at, "person_id": key.person_id, "made_by": key.made_by, "last_used_at": key.last_used_at,
    }  # fmt: skip


def _key(row: Row[Any]) -> ApiKey:
    values = dict(row._mapping)
    return ApiKey(**values | {"scopes": frozenset(Scope(scope) for scope in values["scopes"]), "hash": bytes(values["hash"])})
